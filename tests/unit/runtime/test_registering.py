"""What the owner's calls stage, where, and what each of them holds and gives back.

ORBIT_SOAK (`make soak`) makes the count of C30 the case's own.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import random
import weakref
from typing import Any

import numpy as np
import pytest

from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import (
    BudgetExceeded,
    ClosedError,
    OrbitError,
    OutOfRange,
    PathUnavailable,
    RegisterOwnedError,
    UnknownHandle,
    UsageError,
)
from orbit.model import Deregistered, Handle, PathName, PathReason
from orbit.runtime.options import RegisterOptions
from orbit.runtime.region import Region
from orbit.runtime.region_guards import RegionGuard
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.sim_memory import Refusals, SimPinnedMemory
from orbit.testing.world import World, WorldNode

KIB = 1024
MIB = 1024 * KIB
ROUNDS = 1000 if os.environ.get("ORBIT_SOAK") == "1" else 100
RETAIN = RegisterOptions(retain=True)
PATHS = "orbit_rendezvous_rdma_path_total"


class Pair:
    """An owner with (simulated) devices and a consumer that knows it."""

    def __init__(
        self, world: World, *, rdma: bool = True, config: NodeConfig | None = None
    ) -> None:
        self.owner = world.add_node(config, rdma=rdma)
        self.consumer = world.add_node(config)
        world.introduce()

    @property
    def calls(self) -> Any:
        return self.owner.rendezvous.owner

    @property
    def regions(self) -> Any:
        return self.owner.rendezvous.regions

    @property
    def memory(self) -> SimPinnedMemory:
        assert self.owner.memory is not None
        return self.owner.memory

    async def get(
        self, handle: Handle, by: PathName | None = None, transport: str | None = None
    ) -> bytes:
        """As the consumer, with a detach."""
        fetch = self.consumer.rendezvous.consumer
        data, lease = await fetch.get(handle, transport=transport, timeout=None)
        found = bytes(data)
        await fetch.detach(handle, lease)
        assert by is None or lease.path is by, lease
        return found


async def ended(node: WorldNode) -> None:
    """Everything in the background has ended."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert node.rendezvous.statistics().tasks == 0


def grows(buffer: bytearray) -> bool:
    """Whether nobody holds its export."""
    try:
        buffer.extend(b"x")
    except BufferError:
        return False
    buffer.pop()
    return True


# --- in a region ----------------------------------------------------------------------------------


def test_a_range_of_a_region_is_served_in_place_on_both_paths() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            data = pattern(300 * KIB)
            guard = await pair.regions.register_owned(bytearray(data))
            for chosen, expected in (
                (None, data),
                (range(len(data)), data),
                (range(5, 200 * KIB), data[5 : 200 * KIB]),
            ):
                handle = await pair.calls.register_data_in_region(guard, chosen, None)
                assert await pair.get(handle, PathName.RDMA) == expected
                assert await pair.get(handle, PathName.TCP, "tcp") == expected
                await pair.calls.withdraw(handle)
            small = await pair.calls.register_data_in_region(guard, range(10, 20), None)
            assert await pair.get(small, PathName.TCP) == data[10:20]
            for empty in (range(0), range(len(data), len(data))):
                handle = await pair.calls.register_data_in_region(guard, empty, None)
                assert await pair.get(handle) == b""
                await pair.calls.withdraw(handle)
            assert pair.memory.statistics().arenas == 0  # nothing was copied
            await pair.calls.withdraw(small)
            assert await guard.unregister() is Deregistered.DRAINED

    run_virtual(main())


def test_a_range_is_relative_to_the_region_and_checked() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            guard = await pair.regions.register_owned(bytearray(100))
            other = await pair.consumer.rendezvous.regions.register_owned(bytearray(100))
            for bad in (range(101), range(-1, 5), range(100, 101), range(101, 101), range(9, 3)):
                with pytest.raises(OutOfRange):
                    await pair.calls.register_data_in_region(guard, bad, None)
            for wrong in (range(0, 10, 2), range(10, 0, -1), slice(0, 10), (0, 10)):
                with pytest.raises(UsageError):
                    await pair.calls.register_data_in_region(guard, wrong, None)
            for stranger in (other, bytearray(10), None):
                with pytest.raises(UsageError):
                    await pair.calls.register_data_in_region(stranger, None, None)
            await guard.unregister()
            with pytest.raises(ClosedError):
                await pair.calls.register_data_in_region(guard, None, None)
            await other.unregister()

    run_virtual(main())


@pytest.mark.parametrize("rdma", [True, False])
def test_the_kill_switch_and_a_node_without_devices_serve_regions_in_chunks(rdma: bool) -> None:
    async def main() -> None:
        async with World() as world:
            off = NodeConfig(rendezvous=RendezvousConfig(enabled=False)) if rdma else None
            pair = Pair(world, rdma=rdma, config=off)
            data = pattern(200 * KIB)
            guard = await pair.regions.register_owned(bytearray(data))
            assert guard.registered is rdma
            handle = await pair.calls.register_data_in_region(guard, None, None)
            assert await pair.get(handle, PathName.TCP) == data
            await pair.calls.withdraw(handle)
            await guard.unregister()

    run_virtual(main())


def test_unregister_waits_for_its_slots_and_a_new_lease_is_not_pinned() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            data = pattern(200 * KIB)
            guard = await pair.regions.register_owned(bytearray(data))
            handle = await pair.calls.register_data_in_region(guard, None, RETAIN)
            ending = guard.unregister()
            await asyncio.sleep(60)
            assert not ending.done()
            assert await pair.get(handle, PathName.TCP) == data
            assert pair.owner.count(PATHS, side="owner", path="tcp", reason="not_pinned") == 1
            await pair.calls.withdraw(handle)
            assert await ending is Deregistered.DRAINED

    run_virtual(main())


def test_reads_refuse_once_the_region_is_gone() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            buffer = bytearray(pattern(200 * KIB))
            guard = await pair.regions.register_owned(buffer)
            handles = [
                await pair.calls.register_data_in_region(guard, part, RETAIN)
                for part in (None, range(100 * KIB))
            ]
            assert await pair.get(handles[0], PathName.RDMA) == bytes(buffer)
            held = await pair.consumer.rendezvous.consumer.get(
                handles[0], transport=None, timeout=None
            )
            assert await guard.unregister(timeout=1.0) is Deregistered.DRAIN_TIMED_OUT
            assert bytes(held[0]) == bytes(buffer)
            for handle in handles:
                with pytest.raises(UnknownHandle):
                    await pair.get(handle)
            assert grows(buffer)
            await ended(pair.owner)

    run_virtual(main())


def test_a_dropped_guard_does_not_take_its_slots_along_at_once() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            data = pattern(100 * KIB)
            guards: list[RegionGuard] = [await pair.regions.register_owned(bytearray(data))]
            watch = guards[0].watch()
            handle = await pair.calls.register_data_in_region(guards[0], None, RETAIN)
            with pytest.warns(ResourceWarning, match="test_registering.py"):
                guards.clear()
            await asyncio.sleep(29)
            assert await pair.get(handle, PathName.TCP) == data
            assert await watch.deregistered() is Deregistered.DRAIN_TIMED_OUT
            with pytest.raises(UnknownHandle):
                await pair.get(handle)

    run_virtual(main())


# --- scatter-gather -------------------------------------------------------------------------------


def test_pieces_under_one_handle_are_pinned_when_all_of_them_are() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            data = pattern(400 * KIB)
            one = await pair.regions.register_owned(bytearray(data))
            two = await pair.regions.register_owned(bytearray(data))
            writer = await pair.calls.alloc_pinned_writer(1000)
            writer.view[:] = data[:1000]
            pinned = [one.slice(7, 100 * KIB), writer, two.slice(0, 0), two.slice(0, 3)]
            expected = data[7:][: 100 * KIB] + data[:1000] + data[:3]
            handle = await pair.calls.register_data(pinned)
            assert await pair.get(handle, PathName.RDMA) == expected
            mixed = await pair.calls.register_data((*pinned, b"tail"))
            assert await pair.get(mixed, PathName.TCP) == expected + b"tail"
            copied = await pair.calls.register_data_pinned([*pinned, b"tail"])
            assert await pair.get(copied, PathName.RDMA) == expected + b"tail"
            nothing = await pair.calls.register_data([b"", bytearray(), one.slice(5, 0)])
            assert await pair.get(nothing) == b""
            writer.free()  # takes effect when nothing serves it any more
            assert await pair.get(handle) == expected
            assert pair.memory.allocated_count == 2
            for each in (handle, mixed, copied, nothing):
                await pair.calls.withdraw(each)
            assert pair.memory.allocated_count == 0
            await asyncio.gather(one.unregister(), two.unregister())

    run_virtual(main())


@pytest.mark.parametrize("bad", [[], [1, 2, 3], [b"fine", "text"], [b"fine", None], [[b"nested"]]])
def test_what_is_no_list_of_buffers_is_refused_and_nothing_held(bad: list[object]) -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            first = bytearray(10)
            guard = await pair.regions.register_owned(bytearray(10))
            pieces = [first, guard.slice(), *bad] if bad else []
            for call in (pair.calls.register_data, pair.calls.register_data_pinned):
                with pytest.raises(UsageError):
                    await call(pieces)
            with pytest.raises(UsageError):
                await pair.calls.register_destination(pieces, None)
            assert grows(first)
            assert await guard.unregister(timeout=0) is Deregistered.DRAINED

    run_virtual(main())


def test_a_pinned_writer_is_taken_over_without_a_copy() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            writer = await pair.calls.alloc_pinned_writer(100 * KIB)
            writer.view[:] = pattern(100 * KIB)
            used = pair.memory.statistics().arena_bytes_used
            handle = await pair.calls.register_data_pinned(writer)
            assert pair.memory.statistics().arena_bytes_used == used
            with pytest.raises(ClosedError):
                _ = writer.view
            assert await pair.get(handle, PathName.RDMA) == pattern(100 * KIB)
            writer.free()
            assert pair.memory.allocated_count == 1
            await pair.calls.withdraw(handle)
            for bad in (0, -1, 1.5, None):
                with pytest.raises(UsageError):
                    await pair.calls.alloc_pinned_writer(bad)
            stranger = await pair.consumer.rendezvous.owner.alloc_pinned_writer(100 * KIB)
            stranger.view[:] = pattern(100 * KIB)
            handle = await pair.calls.register_data(stranger)
            assert await pair.get(handle, PathName.TCP) == pattern(100 * KIB)
            await pair.calls.withdraw(handle)
            stranger.free()

    run_virtual(main())


def test_without_devices_there_is_no_pinned_writer() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world, rdma=False)
            with pytest.raises(PathUnavailable):
                await pair.calls.alloc_pinned_writer(10)

    run_virtual(main())


# --- in place -------------------------------------------------------------------------------------


def test_in_place_costs_no_copy_and_ends_with_its_slot() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            buffer = bytearray(pattern(500 * KIB))
            handle = await pair.calls.register_data_in_place(buffer, None)
            assert pair.memory.statistics().regions == 1
            assert pair.memory.statistics().arenas == 0
            assert not grows(buffer)
            assert await pair.get(handle, PathName.RDMA) == bytes(buffer)
            await pair.calls.withdraw(handle)
            assert grows(buffer)  # when withdraw returns, devices have let go
            assert pair.memory.registered_bytes == 0
            handle = await pair.calls.register_data_in_place(buffer, None)
            fetch = pair.consumer.rendezvous.consumer
            _, lease = await fetch.get(handle, transport="rdma", timeout=None)
            await fetch.release(handle, lease)  # the last reference
            await ended(pair.owner)
            assert grows(buffer)
            assert pair.memory.registered_bytes == 0

    run_virtual(main())


def test_in_place_gives_a_refused_buffer_back() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            bare = world.add_node(rdma=False).rendezvous.owner
            buffer = bytearray(100 * KIB)
            pair.memory.over_budget = True
            with pytest.raises(RegisterOwnedError) as refused:
                await pair.calls.register_data_in_place(buffer, None)
            assert isinstance(refused.value.cause, BudgetExceeded)
            assert refused.value.buffer is buffer
            pair.memory.over_budget = False
            pair.memory.refusals = Refusals(registrations=1)
            with pytest.raises(RegisterOwnedError):
                await pair.calls.register_data_in_place(buffer, None)
            with pytest.raises(RegisterOwnedError) as refused:
                await bare.register_data_in_place(buffer, None)
            assert isinstance(refused.value.cause, PathUnavailable)
            assert grows(buffer)
            for calls in (pair.calls, bare):
                for bad in (b"read-only", bytearray(), memoryview(buffer)[::2], [buffer]):
                    with pytest.raises(UsageError):
                        await calls.register_data_in_place(bad, None)

    run_virtual(main())


def test_a_node_that_closes_meanwhile_holds_nothing() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            buffer = bytearray(100 * KIB)
            calls: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(pair.calls.register_data_in_place(buffer, None)),
                asyncio.ensure_future(pair.calls.register_destination(buffer, None)),
                asyncio.ensure_future(pair.calls.register_data_pinned(buffer)),
                asyncio.ensure_future(pair.calls.alloc_pinned_writer(100)),
            ]
            await asyncio.sleep(0)
            await pair.owner.rendezvous.close()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, OrbitError), outcome
            del outcome
            calls.clear()
            gc.collect()  # the frames of their tracebacks
            assert grows(buffer)
            assert pair.memory.statistics().regions == 0
            assert pair.memory.allocated_count == 0

    run_virtual(main())


def test_the_close_of_a_node_ends_its_regions_and_says_so() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            buffers = [bytearray(100 * KIB) for _ in range(3)]
            idle = await pair.regions.register_owned(buffers[0])
            used = await pair.regions.register_owned(buffers[1])
            await pair.calls.register_data_in_region(used, None, None)
            await pair.calls.register_data_in_place(buffers[2], None)
            latches = [asyncio.ensure_future(guard.deregistered()) for guard in (idle, used)]
            await asyncio.sleep(0.1)
            await pair.owner.rendezvous.close()
            assert all(isinstance(how, Deregistered) for how in await asyncio.gather(*latches))
            assert all(map(grows, buffers))
            assert pair.memory.statistics().regions == 0

    run_virtual(main())


# --- destinations ---------------------------------------------------------------------------------


def exposed(pair: Pair, handle: Handle) -> Any:
    """What the slot holds."""
    slot = pair.owner.rendezvous._owner._shelf._slots[handle.slot_id]
    return slot.memory.staged


def test_a_destination_is_registered_where_that_is_worth_it() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            large, small = bytearray(100 * KIB), bytearray(10)
            guard = await pair.regions.register_owned(bytearray(100))
            writer = await pair.calls.alloc_pinned_writer(100)
            for where, pinned, regions in (
                (large, True, 1),
                (small, False, 0),
                ([small, large, bytearray()], True, 2),
                ([small, guard.slice()], False, 0),
                ([writer, guard.slice(3)], True, 0),
                (bytearray(), False, 0),
            ):
                handle = await pair.calls.register_destination(where, None)
                staged = exposed(pair, handle)
                assert staged.pinned is pinned, where
                assert not any(piece.view.readonly for piece in staged.span.pieces if staged.nbytes)
                assert pair.memory.statistics().regions == 1 + regions
                await pair.calls.withdraw(handle)
                assert pair.memory.statistics().regions == 1
            assert grows(large)
            assert grows(small)
            with pytest.raises(UsageError):
                await pair.calls.register_destination(bytes(100 * KIB), None)
            writer.free()
            await guard.unregister()

    run_virtual(main())


@pytest.mark.parametrize("reason", ["budget", "pool_exhausted", "kill_switch", "no_device"])
def test_a_destination_that_cannot_be_registered_is_offered_all_the_same(reason: str) -> None:
    async def main() -> None:
        async with World() as world:
            off = NodeConfig(rendezvous=RendezvousConfig(enabled=False))
            config = off if reason == "kill_switch" else None
            pair = Pair(world, rdma=reason != "no_device", config=config)
            if reason == "budget":
                pair.memory.over_budget = True
            elif reason == "pool_exhausted":
                pair.memory.refusals = Refusals(registrations=1)
            buffers = [bytearray(100 * KIB), bytearray(100 * KIB)]
            handle = await pair.calls.register_destination(buffers, None)
            assert not exposed(pair, handle).pinned
            assert pair.owner.count(PATHS, side="owner", path="tcp", reason=reason) == 1
            await ended(pair.owner)
            if reason != "no_device":
                assert pair.memory.statistics().regions == 0
            await pair.calls.withdraw(handle)
            assert all(map(grows, buffers))

    run_virtual(main())


# --- pinned copies --------------------------------------------------------------------------------


def test_the_pool_grows_and_its_refusals_are_counted_by_reason() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handles = [await pair.calls.register_data_pinned(pattern(700 * KIB)) for _ in range(4)]
            assert pair.memory.statistics().arenas > 1
            for handle in handles:
                assert await pair.get(handle, PathName.RDMA) == pattern(700 * KIB)
            pair.memory.over_budget = True
            handles.append(await pair.calls.register_data_pinned(pattern(100 * KIB)))
            pair.memory.over_budget = False
            pair.memory.ensure_reason = PathReason.POOL_EXHAUSTED
            handles.append(await pair.calls.register_data_pinned(pattern(16 * MIB)))
            assert await pair.get(handles[-1], PathName.TCP) == pattern(16 * MIB)
            for reason in ("budget", "pool_exhausted"):
                assert pair.owner.count(PATHS, side="owner", path="tcp", reason=reason) == 1
            for handle in handles:
                await pair.calls.withdraw(handle)

    run_virtual(main())


# --- cases ----------------------------------------------------------------------------------------


def test_an_address_that_comes_back_is_another_registration() -> None:
    """C30: each handle shows its own bytes, old handles fail typed, nothing stays charged."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            chance = random.Random(7)
            alive: list[weakref.ref[Any]] = []
            for number in range(ROUNDS):
                size = chance.randint(1, 65_536)
                array = np.full(size, number % 251, "u1")
                if number % 2:
                    guard = await pair.regions.register_owned(array)
                    handle = await pair.calls.register_data_in_region(guard, None, None)
                else:
                    handle = await pair.calls.register_data_in_place(array, None)
                alive.append(weakref.ref(array))
                del array
                assert await pair.get(handle) == bytes([number % 251]) * size
                await pair.calls.withdraw(handle)
                if number % 2:
                    await guard.unregister()
                with pytest.raises(UnknownHandle):
                    await pair.get(handle)
                assert sum(one() is not None for one in alive) <= 1
            gc.collect()
            assert not any(one() for one in alive)
            assert pair.memory.registered_bytes == 0

    run_virtual(main())


def test_read_only_memory_is_a_source_and_no_destination() -> None:
    """C37: served as it is or copied; what would have to be written is refused at once."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            frozen = np.frombuffer(pattern(100 * KIB), "u1")
            pages = mmap.mmap(-1, 100 * KIB, prot=mmap.PROT_READ)
            for source in (pattern(100 * KIB), frozen, memoryview(pages)):
                held = await pair.calls.register_data(source)
                assert await pair.get(held, PathName.TCP) == bytes(source)
                copied = await pair.calls.register_data_pinned(source)
                assert await pair.get(copied, PathName.RDMA) == bytes(source)
                await pair.calls.withdraw(held)
                await pair.calls.withdraw(copied)
                for call in (
                    pair.calls.register_data_in_place(source, None),
                    pair.calls.register_destination(source, None),
                    pair.regions.register_owned(source),
                ):
                    with pytest.raises(UsageError):
                        await call
            del source

    run_virtual(main())


def test_a_region_without_a_guard_is_ended_by_whoever_opened_it() -> None:
    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            region: Region = await pair.regions.open(bytearray(10))
            assert await region.unregister() is Deregistered.DRAINED
            assert len(pair.regions) == 0

    run_virtual(main())
