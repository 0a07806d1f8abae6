"""The engine's scenarios on this host: over TCP, and over RDMA on two scripted rails a side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from orbit.protocol.messages import RailHint
from orbit.verbs import opening
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig
from tests.scenarios.engine import OWN, SHARED
from tests.scenarios.engine_rig import Devices, EngineScenario, open_engines

TCP = Devices()
SCRIPTED = Devices(("fake_a1", "fake_a2"), ("fake_b1", "fake_b2"))
KINDS = pytest.mark.parametrize(
    "devices", [pytest.param(TCP, id="tcp"), pytest.param(SCRIPTED, id="scripted")]
)
QUICK = {
    "connect_backoff_s": 0.05,
    "receipt_timeout_s": 0.5,
    "bind_timeout_s": 0.5,
    "drain_timeout_s": 0.5,
}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A whitelist of fake devices opens scripted ones, on a fabric of this test."""
    fabric = ScriptedFabric()
    names = (*SCRIPTED.source, *SCRIPTED.requester)
    devices = {name: fabric.add_device(name) for name in names}
    real = opening.open_rdma_path

    async def open_scripted(provider: Any, config: RdmaPathConfig, **_: Any) -> Any:
        rails = [RailHint(name, 1, devices[name].gids[1], 1, 4096) for name in config.whitelist]
        quick = replace(config, **QUICK)
        return await real(ScriptedProvider(fabric, config.whitelist), quick, rails=rails)

    monkeypatch.setattr(opening, "open_rdma_path", open_scripted)
    yield
    for device in devices.values():
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters


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
