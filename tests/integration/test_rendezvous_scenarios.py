"""The rendezvous scenarios on this host: over TCP, and over RDMA on scripted devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scenarios.rendezvous import OWN, SHARED, Needs
from tests.scenarios.rig import KIB, Devices, Rig, Scenario, open_rig, payload_of
from tests.scenarios.scripted_rails import scripted_rails

TCP = Devices()
SCRIPTED = Devices("fake_a", "fake_b")
KINDS = pytest.mark.parametrize(
    "devices", [pytest.param(TCP, id="tcp"), pytest.param(SCRIPTED, id="scripted")]
)


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    """`device="fake_a"` opens a scripted device on a fabric of this test."""
    with scripted_rails((SCRIPTED.owner, SCRIPTED.consumer), lambda config: (config.device,)):
        yield


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


@KINDS
def test_a_warm_short_get_makes_one_task(devices: Devices) -> None:
    """The call to the owner, which must outlive its caller. Everything else begins where it is
    caused, on both sides, and ends there.
    """
    made: list[object] = []

    def make(loop: Any, work: Any, **options: Any) -> Any:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async def main() -> None:
        async with open_rig(devices) as rig:
            handle = await rig.owner.register_data_pinned(payload_of(64 * KIB))
            dest = bytearray(64 * KIB)
            for _ in range(3):
                made.clear()
                asyncio.get_running_loop().set_task_factory(make)
                lease = await rig.consumer.get_into(handle, dest)
                await rig.consumer.detach(handle, lease)
                asyncio.get_running_loop().set_task_factory(None)
                assert lease.path is rig.path
            assert dest == payload_of(64 * KIB)
            await rig.owner.withdraw(handle)

    asyncio.run(main())
    assert len(made) == 1


async def _run(needs: Needs, devices: Devices) -> None:
    async with open_rig(devices, needs.owner, needs.consumer) as rig:
        await needs.run(rig)


async def _emptied(rig: Rig) -> None:
    for node in (rig.owner, rig.consumer):
        assert node.statistics().leases_held == 0
