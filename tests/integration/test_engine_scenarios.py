"""The engine's scenarios on this host: over TCP, and over RDMA on two scripted rails a side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.scenarios.engine import OWN, SHARED
from tests.scenarios.engine_rig import Devices, EngineScenario, open_engines
from tests.scenarios.scripted_rails import scripted_rails

TCP = Devices()
SCRIPTED = Devices(("fake_a1", "fake_a2"), ("fake_b1", "fake_b2"))
KINDS = pytest.mark.parametrize(
    "devices", [pytest.param(TCP, id="tcp"), pytest.param(SCRIPTED, id="scripted")]
)


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    """A whitelist of fake devices opens scripted ones, on a fabric of this test."""
    names = (*SCRIPTED.source, *SCRIPTED.requester)
    with scripted_rails(names, lambda config: config.whitelist):
        yield


@KINDS
@pytest.mark.parametrize("scenario", SHARED, ids=lambda scenario: scenario.__name__)
def test_shared(scenario: EngineScenario, devices: Devices) -> None:
    async def main() -> None:
        async with open_engines(devices) as rig:
            await scenario(rig)

    asyncio.run(main())


@KINDS
@pytest.mark.parametrize("name", OWN)
def test_own(name: str, devices: Devices) -> None:
    needs = OWN[name]
    if needs.rdma_only and not devices.source:
        pytest.skip("there is nothing to see without a device")

    async def main() -> None:
        async with open_engines(devices, needs.source, needs.requester) as rig:
            await needs.run(rig)

    asyncio.run(main())
