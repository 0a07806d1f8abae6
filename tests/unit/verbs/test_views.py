"""The two views of registered memory on scripted devices: this side's own, and the one that windows
are bound in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from orbit.errors import BudgetExceeded, DeviceError, OrbitError
from orbit.model import Address
from orbit.testing.memory_rig import PoolSettings, failed
from orbit.transport.interface import RegisteredRange
from orbit.verbs import records
from orbit.verbs.provider import NativeRegion
from orbit.verbs.queue_pair import BulkQueuePair, Posting, QueuePairState, RemoteEnd
from orbit.verbs.records import Completion
from orbit.verbs.registration import KeyHolder
from orbit.verbs.scripted import ScriptedDomain, ScriptedRegion
from orbit.verbs.status import MW_BIND_ERR
from tests.contract.pinned_memory_rigs import PoolRig, open_pool

EBUSY, ENOMEM = 16, 12
CAUSE = OrbitError("the test ended it")

Scenario = Callable[[PoolRig], Awaitable[None]]


def run(scenario: Scenario, settings: PoolSettings | None = None, count: int = 2) -> None:
    async def main() -> None:
        async with open_pool(settings or PoolSettings(), count) as rig:
            await scenario(rig)

    asyncio.run(main())


def region_of(rig: PoolRig, held: RegisteredRange, number: int = 0) -> NativeRegion:
    holder = held.parts[0].arena
    assert isinstance(holder, KeyHolder)
    region = holder.region(rig.contexts[number].domain)
    assert region is not None
    return region


async def connected(rig: PoolRig) -> BulkQueuePair:
    """A queue pair that is connected to itself."""
    device = rig.contexts[0]
    queue_pair = device.create_queue_pair(lambda cause: None)
    remote = RemoteEnd(device.rail.gid, 0, queue_pair.qp_num, 7, device.rail.mtu, 1)
    await queue_pair.connect(device.local_end(7, remote_read=True), remote, 1.0)
    return queue_pair


@pytest.mark.parametrize("remote", [True, False])
def test_windows_are_bound_in_the_parent_alone(remote: bool) -> None:
    async def scenario(rig: PoolRig) -> None:
        held = await rig.memory.register(memoryview(bytearray(8192)), remote=remote)
        queue_pair = await connected(rig)
        windows = rig.contexts[0].domain.windows.pool()
        fresh = windows.take()
        bound: list[Completion] = []

        def pack(wr_id: int) -> bytes:
            native = region_of(rig, held).native
            address = Address(int(held.parts[0].address))
            window = fresh.window.native
            access = records.WINDOW_READ
            return records.pack_bind(wr_id, window, native, address, 4096, fresh.key, access)

        queue_pair.post_send([Posting("bind", pack, bound.append)])
        queue_pair.lane.poll()
        assert [done.status for done in bound] == [0 if remote else MW_BIND_ERR]
        assert (queue_pair.state is QueuePairState.READY) is remote
        await queue_pair.drain(CAUSE)
        windows.close()
        await rig.contexts[0].destroy_queue_pair(queue_pair)
        rig.contexts[0].lanes.close()
        await rig.memory.deregister(held)

    run(scenario)


def test_the_views_have_keys_of_their_own() -> None:
    async def scenario(rig: PoolRig) -> None:
        view = memoryview(bytearray(8192))
        live = rig.live_objects
        views = [await rig.memory.register(view, remote=remote) for remote in (False, True)]
        assert rig.live_objects == live + 4  # on two devices
        for number in (0, 1):
            local, parent = (region_of(rig, held, number) for held in views)
            assert local.lkey != parent.lkey
        parent = region_of(rig, views[1])
        await rig.memory.deregister(views[0])
        assert region_of(rig, views[1]) is parent
        await rig.memory.deregister(views[1])
        assert rig.live_objects == live

    run(scenario)


@pytest.mark.parametrize("remote", [True, False])
def test_a_view_that_a_device_keeps_stays_with_its_memory_and_charge(remote: bool) -> None:
    async def scenario(rig: PoolRig) -> None:
        buffer = bytearray(8192)
        live = rig.live_objects
        held = await rig.memory.register(memoryview(buffer), remote=remote)
        charged = rig.memory.budget.charged_bytes
        rig.refuse(deregistrations=1)
        await failed(rig.memory.deregister(held), DeviceError)
        assert rig.live_objects == live + 1  # the other device was asked all the same
        assert rig.memory.budget.charged_bytes == charged
        with pytest.raises(BufferError):
            buffer.append(0)
        await rig.memory.deregister(held)
        assert rig.live_objects == live
        assert rig.memory.budget.charged_bytes == 0
        del held
        buffer.append(0)

    run(scenario)


@pytest.mark.parametrize("remote", [True, False])
def test_a_view_whose_rollback_is_refused_leaves_the_other(remote: bool) -> None:
    async def scenario(rig: PoolRig) -> None:
        view = memoryview(bytearray(8192))
        other = await rig.memory.register(view, remote=not remote)
        charged = rig.memory.budget.charged_bytes
        rig.scripted[1].fail_verb("reg_mr", ENOMEM)
        rig.scripted[0].fail_verb("dereg_mr", EBUSY)
        await failed(rig.memory.register(view, remote=remote), DeviceError)
        (item,) = rig.retained.items()
        assert item.what == "registered memory"
        assert rig.memory.budget.charged_bytes == 2 * charged
        assert region_of(rig, other).native
        await rig.memory.deregister(other)
        assert rig.memory.budget.charged_bytes == charged
        await rig.memory.close()
        assert not rig.retained.items()

    run(scenario)


def test_two_views_need_twice_the_budget() -> None:
    async def scenario(rig: PoolRig) -> None:
        view = memoryview(bytearray(8192))
        local = await rig.memory.register(view, remote=False)
        await failed(rig.memory.register(view), BudgetExceeded)
        assert rig.memory.statistics().regions == 1
        await rig.memory.deregister(local)
        await rig.memory.deregister(await rig.memory.register(view))

    run(scenario, PoolSettings(budget_bytes=5 * 4096))


def test_all_devices_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits for the other device's: one after the other, neither would end."""
    register, close = ScriptedDomain.register, ScriptedRegion.close
    meeting = threading.Barrier(2, timeout=20)

    def meet_and_register(*arguments: int) -> ScriptedRegion:
        meeting.wait()
        return register(*arguments)  # type: ignore[arg-type]

    def meet_and_close(region: ScriptedRegion) -> None:
        meeting.wait()
        close(region)

    async def scenario(rig: PoolRig) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ScriptedDomain, "register", meet_and_register)
            patch.setattr(ScriptedRegion, "close", meet_and_close)
            held = await rig.memory.register(memoryview(bytearray(8192)))
            await rig.memory.deregister(held)

    run(scenario)


def test_memory_is_registered_on_a_device_whose_port_is_down() -> None:
    async def scenario(rig: PoolRig) -> None:
        for device in rig.scripted:
            device.set_port(active=False)
        view = memoryview(bytearray(8192))
        views = [await rig.memory.register(view, remote=remote) for remote in (False, True)]
        assert len({region_of(rig, held, 1).lkey for held in views}) == 2
        for held in views:
            await rig.memory.deregister(held)

    run(scenario)
