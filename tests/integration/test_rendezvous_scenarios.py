"""The rendezvous scenarios on this host: over TCP, and over RDMA on scripted devices."""

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
from tests.scenarios.rendezvous import OWN, SHARED, Needs
from tests.scenarios.rig import Devices, Rig, Scenario, open_rig

TCP = Devices()
SCRIPTED = Devices("fake_a", "fake_b")
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
    """`device="fake_a"` opens a scripted device on a fabric of this test."""
    fabric = ScriptedFabric()
    devices = {name: fabric.add_device(name) for name in (SCRIPTED.owner, SCRIPTED.consumer)}
    real = opening.open_rdma_path

    async def open_scripted(provider: Any, config: RdmaPathConfig, **_: Any) -> Any:
        name = config.device
        rail = RailHint(name, 1, devices[name].gids[1], 1, 4096)
        quick = replace(config, **QUICK)
        return await real(ScriptedProvider(fabric, [name]), quick, rails=[rail])

    monkeypatch.setattr(opening, "open_rdma_path", open_scripted)
    yield
    for device in devices.values():
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters


@KINDS
@pytest.mark.parametrize("scenario", SHARED, ids=lambda scenario: scenario.__name__)
def test_shared(scenario: Scenario, devices: Devices) -> None:
    async def main() -> None:
        async with open_rig(devices) as rig:
            await scenario(rig)
            await _emptied(rig)

    asyncio.run(main())


@KINDS
@pytest.mark.parametrize("name", OWN)
def test_own(name: str, devices: Devices) -> None:
    needs = OWN[name]
    if needs.rdma_only and not devices.owner:
        pytest.skip("there is nothing to see without a device")
    asyncio.run(_run(needs, devices))


async def _run(needs: Needs, devices: Devices) -> None:
    async with open_rig(devices, needs.owner, needs.consumer) as rig:
        await needs.run(rig)


async def _emptied(rig: Rig) -> None:
    for node in (rig.owner, rig.consumer):
        assert node.statistics().leases_held == 0
