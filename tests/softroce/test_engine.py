"""The engine's scenarios between the two hosts' rails of the lab.

Both nodes live in this process: host A's two devices are the source's rails, host B's the
requester's.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator

import pytest

import orbit
from orbit.verbs import opening
from tests.scenarios.engine import OWN, SHARED
from tests.scenarios.engine_rig import Devices, EngineRig, EngineScenario, open_engines

RAILS = Devices(("rxa1", "rxa2"), ("rxb1", "rxb2"))
# An emulated processor may stand still for a while; these bounds are for hangs alone.
PATIENT = orbit.NodeConfig(rdma=orbit.RdmaConfig(device_timeout_s=20.0))


@pytest.fixture(scope="module", autouse=True)
def rails_are_looked_for_once() -> Iterator[None]:
    """A thousand GID rows cost seconds on an emulated processor, and do not change here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "discover", functools.cache(opening.discover))
        yield


class Shared:
    """One pair of engines and its loop, for all scenarios that can share one."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._opened = open_engines(RAILS, node=PATIENT)
        self.rig: EngineRig = self._runner.run(self._opened.__aenter__())

    def run(self, scenario: EngineScenario) -> None:
        self._runner.run(scenario(self.rig))

    def close(self) -> None:
        self._runner.run(self._opened.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    pair = Shared()
    yield pair
    pair.close()


@pytest.mark.parametrize("scenario", SHARED, ids=lambda scenario: scenario.__name__)
def test_shared(scenario: EngineScenario, shared: Shared) -> None:
    shared.run(scenario)


@pytest.mark.parametrize("name", OWN)
def test_own(name: str) -> None:
    needs = OWN[name]

    async def main() -> None:
        async with open_engines(RAILS, needs.source, needs.requester, node=PATIENT) as rig:
            await needs.run(rig)

    asyncio.run(main())
