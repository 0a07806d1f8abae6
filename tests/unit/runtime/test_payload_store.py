"""Where payloads of messages and items of streams are staged, and how they are fetched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from orbit import events
from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import BudgetExceeded, ClosedError, UnknownHandle, UsageError
from orbit.model import Handle, Lease, PathName
from orbit.runtime import payload_store
from orbit.runtime.payload_store import PayloadStore
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.sim_memory import SimPinnedMemory
from orbit.testing.world import World, WorldNode

BIG = 300_000


@dataclass(eq=False)
class Pair:
    """`sender` stages, `receiver` fetches."""

    sender: WorldNode
    receiver: WorldNode

    @property
    def store(self) -> PayloadStore:
        return self.sender.rendezvous.payloads

    @property
    def memory(self) -> SimPinnedMemory:
        assert self.sender.memory is not None
        return self.sender.memory

    @property
    def slots(self) -> int:
        return self.sender.rendezvous.statistics().slots.slots

    async def map_arena(self) -> None:
        """By the one kind of call that may."""
        owner = self.sender.rendezvous.owner
        await owner.withdraw(await owner.register_data_pinned(b"x"))

    async def fetch(self, handle: Handle) -> tuple[bytes, Lease]:
        """And give it back, as who reads a message does."""
        view, lease = await self.receiver.rendezvous.payloads.fetch(handle, 10.0)
        data = bytes(view)
        await self.receiver.rendezvous.payloads.release(handle, lease)
        return data, lease

    def fetched_by_rdma(self) -> int:
        labels = {"path": "rdma", "reason": "ok", "side": "consumer"}
        return self.receiver.count(events.PATH_TOTAL, **labels)


@contextlib.asynccontextmanager
async def pair(arena_bytes: int = 4 << 20, **rendezvous: object) -> AsyncIterator[Pair]:
    """Nothing may be left at the end: no slot, no lease, no piece of an arena."""
    config = NodeConfig(rendezvous=RendezvousConfig(**rendezvous))  # type: ignore[arg-type]
    async with World() as world:
        nodes = [world.add_node(config, arena_bytes=arena_bytes) for _ in range(2)]
        world.introduce()
        yield Pair(*nodes)


def test_a_process_that_stages_by_sends_alone_never_maps_an_arena() -> None:
    async def main() -> None:
        async with pair() as p:
            for _ in range(3):
                data, lease = await p.fetch(p.store.stage(pattern(BIG)))
                assert (data, lease.path) == (pattern(BIG), PathName.TCP)
                data, lease = await p.fetch(await p.store.stage_copy(bytearray(pattern(BIG))))
                assert (data, lease.path) == (pattern(BIG), PathName.TCP)
            assert p.memory.registered_bytes == 0
            assert p.fetched_by_rdma() == 0
            assert p.sender.count(events.PATH_TOTAL, side="owner", reason="not_pinned") == 6
            assert p.slots == 0

    run_virtual(main())


def test_after_one_explicit_call_it_goes_by_rdma() -> None:
    async def main() -> None:
        async with pair() as p:
            await p.map_arena()
            mapped = p.memory.registered_bytes
            data, lease = await p.fetch(p.store.stage(pattern(BIG)))
            assert (data, lease.path) == (pattern(BIG), PathName.RDMA)
            data, lease = await p.fetch(await p.store.stage_copy(pattern(BIG)))
            assert (data, lease.path) == (pattern(BIG), PathName.RDMA)
            assert p.fetched_by_rdma() == 2
            assert p.memory.registered_bytes == mapped, "no send maps more"
            assert p.memory.allocated_count == 0
            assert p.slots == 0

    run_virtual(main())


def test_the_kill_switch_keeps_payloads_out_of_the_arena() -> None:
    async def main() -> None:
        async with pair(enabled=False) as p:
            assert await p.memory.ensure() == "ok"
            for handle in (p.store.stage(pattern(BIG)), await p.store.stage_copy(pattern(BIG))):
                assert p.memory.allocated_count == 0
                data, lease = await p.fetch(handle)
                assert (data, lease.path) == (pattern(BIG), PathName.TCP)

    run_virtual(main())


@pytest.mark.parametrize("why", ["small", "long", "full", "budget"])
def test_what_does_not_go_to_the_arena_is_served_where_it_lies(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_store, "SEND_COPY_MAX_BYTES", 1 << 20)
    nbytes = {"small": 65_535, "long": (1 << 20) + 1, "full": 1 << 20, "budget": BIG}[why]

    async def main() -> None:
        async with pair(1 << 20 if why == "full" else 4 << 20) as p:
            await p.map_arena()
            taken = p.memory.allocate_nowait(1 << 19) if why == "full" else None
            p.memory.over_budget = why == "budget"
            source = bytearray(pattern(nbytes))
            handle = p.store.stage(source)
            assert p.memory.allocated_count == (why == "full")
            with pytest.raises(BufferError):
                source.extend(b"x")
            data, lease = await p.fetch(handle)
            assert (data, lease.path) == (bytes(source), PathName.TCP)
            source.extend(b"the caller's again")
            if taken is not None:
                p.memory.free(taken)

    run_virtual(main())


def test_the_bounds_themselves_go_to_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_store, "SEND_COPY_MAX_BYTES", 1 << 20)

    async def main() -> None:
        async with pair() as p:
            await p.map_arena()
            for nbytes in (65_536, 1 << 20):
                handle = p.store.stage(pattern(nbytes))
                assert p.memory.allocated_count == 1
                data, lease = await p.fetch(handle)
                assert (data, lease.path) == (pattern(nbytes), PathName.RDMA)
            assert p.memory.allocated_count == 0

    run_virtual(main())


@pytest.mark.parametrize("mapped", [False, True])
def test_an_item_is_the_callers_again_at_once(mapped: bool) -> None:
    async def main() -> None:
        async with pair() as p:
            if mapped:
                await p.map_arena()
            source = bytearray(pattern(BIG))
            handle = await p.store.stage_copy(memoryview(source))
            source[:] = bytes(BIG)
            source.extend(b"more")
            data, lease = await p.fetch(handle)
            assert data == pattern(BIG)
            assert lease.path is (PathName.RDMA if mapped else PathName.TCP)

    run_virtual(main())


def test_a_payload_over_the_limit_is_refused_and_freed() -> None:
    async def main() -> None:
        async with pair(staged_payload_max=BIG) as p:
            data, _ = await p.fetch(p.store.stage(pattern(BIG)))
            assert data == pattern(BIG)
            for mapped in (False, True):
                if mapped:
                    await p.map_arena()
                handle = p.store.stage(pattern(BIG + 1))
                with pytest.raises(BudgetExceeded, match=rf"{BIG + 1} .*{BIG} ") as caught:
                    await p.fetch(handle)
                assert caught.value.knob == "rendezvous.staged_payload_max"
                await _a_moment(1.0)  # the release is a notification
                assert (p.slots, p.memory.allocated_count) == (0, 0)
            # What callers fetch themselves has a limit of its own.
            handle = await p.sender.rendezvous.owner.register_data(pattern(BIG + 1))
            get = p.receiver.rendezvous.consumer.get
            view, lease = await get(handle, transport=None, timeout=None)
            assert view == pattern(BIG + 1)
            await p.receiver.rendezvous.consumer.release(handle, lease)

    run_virtual(main())


def test_the_time_to_live_ends_what_nobody_fetches() -> None:
    async def main() -> None:
        async with pair() as p:
            await p.map_arena()
            kept = p.store.stage(pattern(BIG))
            handles = [p.store.stage(pattern(BIG), ttl_s=1.0) for _ in range(5)]
            assert (p.slots, p.memory.allocated_count) == (6, 6)
            await _a_moment(1.25)
            assert (p.slots, p.memory.allocated_count) == (1, 1)
            with pytest.raises(UnknownHandle):
                await p.fetch(handles[0])
            await p.store.withdraw(kept)

    run_virtual(main())


def test_nothing_is_staged_by_a_node_that_closes() -> None:
    async def main() -> None:
        async with pair() as p:
            await p.map_arena()
            await p.sender.rendezvous.close()
            source = bytearray(BIG)
            with pytest.raises(ClosedError):
                p.store.stage(source)
            with pytest.raises(ClosedError):
                await p.store.stage_copy(source)
            source.extend(b"free")

    run_virtual(main())


@pytest.mark.parametrize("how", ["closed", "cancelled"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_copy_that_comes_to_nothing_leaves_nothing(how: str, mapped: bool) -> None:
    async def main() -> None:
        async with pair(32 << 20) as p:
            if mapped:
                await p.map_arena()
            source = bytearray(24 << 20)
            copying = asyncio.ensure_future(p.store.stage_copy(source))
            await asyncio.sleep(0)
            assert p.memory.allocated_count == mapped
            with pytest.raises(BufferError):
                source.extend(b"x")
            if how == "closed":
                closing = asyncio.ensure_future(p.sender.rendezvous.close())
                with pytest.raises(ClosedError):
                    await copying
                await closing
            else:
                copying.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await copying
            assert (p.slots, p.memory.allocated_count) == (0, 0)
            source.extend(b"free")

    run_virtual(main())


def test_what_is_no_buffer_is_refused() -> None:
    async def main() -> None:
        async with pair() as p:
            with pytest.raises(UsageError):
                p.store.stage("text")
            with pytest.raises(UsageError):
                await p.store.stage_copy("text")
            assert p.slots == 0

    run_virtual(main())


async def _a_moment(seconds: float) -> None:
    await asyncio.sleep(seconds)
