"""The rendezvous scenarios between two devices of the lab, over RDMA and over TCP.

Both nodes live in this process, host A's device and host B's: starting another Python costs seconds
on an emulated processor. What needs processes of its own is in test_node and test_rendezvous_cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.scenarios.rendezvous import OWN, SHARED
from tests.scenarios.rig import Devices, Knobs, Rig, Scenario, open_rig
from tests.soak import SOAK

RDMA = Devices("rxa1", "rxb1")
TCP = Devices()
# An emulated processor may stand still for a while; these bounds are for hangs alone.
PATIENT: Knobs = {"rdma": {"device_timeout_s": 20.0}}


class Shared:
    """One pair of nodes and its loop, for all scenarios that can share one."""

    def __init__(self, devices: Devices) -> None:
        self._runner = asyncio.Runner()
        self._opened = open_rig(devices, _patient(devices, {}), _patient(devices, {}))
        self.rig: Rig = self._runner.run(self._opened.__aenter__())

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            self.rig.mark()
            await scenario(self.rig)
            for node in (self.rig.owner, self.rig.consumer):
                assert node.statistics().leases_held == 0

        self._runner.run(main())

    def close(self) -> None:
        self._runner.run(self._opened.__aexit__(None, None, None))
        self._runner.close()


# TCP is the same on the host, where it takes a tenth of the time; `make soak` has it here, too.
KINDS = [pytest.param(RDMA, id="rdma"), *([pytest.param(TCP, id="tcp")] if SOAK else [])]


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    pair = Shared(request.param)
    yield pair
    pair.close()


@pytest.mark.parametrize("scenario", SHARED, ids=lambda scenario: scenario.__name__)
def test_shared(scenario: Scenario, shared: Shared) -> None:
    shared.run(scenario)


# test_node has the kill switches, between processes.
@pytest.mark.parametrize("name", [name for name in OWN if "kill_switch" not in name])
def test_own(name: str) -> None:
    needs = OWN[name]

    async def main() -> None:
        owner, consumer = _patient(RDMA, needs.owner), _patient(RDMA, needs.consumer)
        async with open_rig(RDMA, owner, consumer) as rig:
            await needs.run(rig)

    asyncio.run(main())


def _patient(devices: Devices, knobs: Knobs) -> Knobs:
    return {**PATIENT, **knobs} if devices.owner else knobs
