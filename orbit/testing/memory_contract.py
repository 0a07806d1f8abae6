"""The contract of PinnedMemory as a suite that every implementation passes.

An implementation gives a factory that opens memory with given limits. Each case is one coroutine
function. What is asserted is what the budget, the statistics and the handed out buffers show.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..errors import BudgetExceeded, BusyError, ClosedError, DeviceError, InternalError, UsageError
from ..memory.budget import Budget
from ..memory.buffer import address_of
from ..memory.pages import PAGE_BYTES, whole_pages
from ..model import PathReason
from ..transport.interface import MemoryStatistics, PinnedBuffer, PinnedMemory, RegisteredRange
from .leftovers import nothing_left

KIB, MIB = 1 << 10, 1 << 20
TAKEN = (BudgetExceeded, BusyError, DeviceError)  # what a refusal may be


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Small enough that growth shows. The budget is for each device."""

    initial_bytes: int = 256 * KIB
    max_bytes: int = MIB
    dedicated_min_bytes: int = 2 * MIB
    budget_bytes: int = 8 * MIB
    limit_bytes: int = 6 * MIB  # of one registration
    reclaim_after_s: float | None = None
    retain_bytes: int = 256 * KIB


class MemoryRig(Protocol):
    """Open memory and the strings of its devices."""

    @property
    def memory(self) -> ClosableMemory: ...

    @property
    def devices(self) -> int:
        """How often the budget pays for a page."""

    def refuse(self, *, registrations: int = 0, deregistrations: int = 0) -> None:
        """As many of the next calls of one device fail."""


class ClosableMemory(PinnedMemory, Protocol):
    """What the composition root has of PinnedMemory."""

    budget: Budget

    async def close(self) -> None: ...


OpenMemory = Callable[[PoolSettings], AbstractAsyncContextManager[MemoryRig]]
MemoryCase = Callable[[OpenMemory], Awaitable[None]]


async def check_pinned_memory(case: str, open_memory: OpenMemory) -> None:
    """Run one of MEMORY_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left():
        await MEMORY_CASES[case](open_memory)


def raised(call: Callable[[], object], *kinds: type[BaseException]) -> BaseException:
    """The error that `call` raises, of one of `kinds`."""
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"nothing was raised, {kinds} was expected")


async def failed(work: Awaitable[object], *kinds: type[BaseException]) -> BaseException:
    """As `raised`, of what is awaited."""
    try:
        await work
    except kinds as error:
        return error.with_traceback(None)  # whose frames hold what was to be registered
    raise AssertionError(f"nothing was raised, {kinds} was expected")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in the background."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (it is told to nobody)
            await asyncio.sleep(0.002)


def figures(rig: MemoryRig) -> MemoryStatistics:
    found = rig.memory.statistics()
    assert found.registered_bytes == rig.memory.registered_bytes <= found.budget_bytes
    assert found.arena_bytes_used <= found.arena_bytes
    return found


# --- the pool ---


async def nothing_is_mapped_unasked(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        assert figures(rig).arenas == 0
        raised(lambda: rig.memory.allocate_nowait(1), BusyError)
        assert await rig.memory.ensure() is PathReason.OK
        assert await rig.memory.ensure() is PathReason.OK
        found = figures(rig)
        assert (found.arenas, found.arena_bytes) == (1, 256 * KIB)
        assert found.registered_bytes == 256 * KIB * rig.devices
        assert found.registrations["arena"] == 1


async def pieces_are_exact_and_whole_granules(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        pieces = [await rig.memory.allocate(n) for n in (1, 4095, 4096, 4097)]
        assert [piece.view.nbytes for piece in pieces] == [1, 4095, 4096, 4097]
        assert figures(rig).arena_bytes_used == 5 * PAGE_BYTES
        for number, piece in enumerate(pieces):
            assert not piece.view.readonly
            assert piece.address == address_of(piece.view)
            piece.view[:] = bytes([number]) * piece.view.nbytes
        for number, piece in enumerate(pieces):
            assert piece.view == bytes([number]) * piece.view.nbytes
            rig.memory.free(piece)
        assert figures(rig).arena_bytes_used == 0


async def no_bytes_are_refused(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        await rig.memory.ensure()
        for nbytes in (0, -1):
            raised(partial(rig.memory.allocate_nowait, nbytes), UsageError)
            await failed(rig.memory.allocate(nbytes), UsageError)
        await failed(rig.memory.register(memoryview(bytearray())), UsageError)
        await failed(rig.memory.register(memoryview(b"read-only")), UsageError)


async def only_the_token_frees_and_once(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig, open_memory(PoolSettings()) as other:
        piece, stranger = await rig.memory.allocate(100), await other.memory.allocate(100)
        forged = PinnedBuffer(piece.view, piece.address, piece.arena, stranger.token)
        raised(lambda: rig.memory.free(forged), UsageError, InternalError)
        rig.memory.free(piece)
        raised(lambda: rig.memory.free(piece), UsageError, InternalError)
        other.memory.free(stranger)


async def arenas_double_up_to_the_maximum(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        sizes: list[int] = []
        pieces: list[PinnedBuffer] = []
        while len(sizes) < 5:
            before = figures(rig)
            pieces.append(await rig.memory.allocate(256 * KIB))
            after = figures(rig)
            if after.arenas > before.arenas:
                sizes.append((after.arena_bytes - before.arena_bytes) // KIB)
        assert sizes == [256, 512, 1024, 1024, 1024]
        for piece in pieces:
            rig.memory.free(piece)
        assert figures(rig).arenas == 5  # pooled ones stay for the next


async def a_piece_larger_than_the_next_arena_gets_one_that_holds_it(
    open_memory: OpenMemory,
) -> None:
    async with open_memory(PoolSettings()) as rig:
        piece = await rig.memory.allocate(600 * KIB + 1)
        assert figures(rig).arena_bytes == whole_pages(600 * KIB + 1)
        rig.memory.free(piece)


async def space_is_used_again(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        for _ in range(50):
            pieces = [await rig.memory.allocate(100 * KIB) for _ in range(2)]
            for piece in pieces:
                rig.memory.free(piece)
        assert figures(rig).arenas == 1


async def a_dedicated_arena_goes_with_its_piece(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        await rig.memory.ensure()
        for _ in range(10):  # each would fill a third of the budget
            piece = await rig.memory.allocate(2 * MIB + 1)
            found = figures(rig)
            assert (found.arenas, found.arena_bytes) == (2, 256 * KIB + 2 * MIB + PAGE_BYTES)
            rig.memory.free(piece)
            await until(lambda: figures(rig).arenas == 1)
            await until(lambda: figures(rig).registered_bytes == 256 * KIB * rig.devices)


async def what_is_on_its_way_out_is_waited_for(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings(budget_bytes=4 * MIB)) as rig:
        piece = await rig.memory.allocate(3 * MIB)
        for _ in range(5):
            rig.memory.free(piece)
            piece = await rig.memory.allocate(3 * MIB)  # the budget has room for one of them
        rig.memory.free(piece)
        held = await rig.memory.register(memoryview(bytearray(3 * MIB)))
        await rig.memory.deregister(held)
        piece = await rig.memory.allocate(3 * MIB)
        rig.refuse(deregistrations=1)
        rig.memory.free(piece)
        await failed(rig.memory.allocate(3 * MIB), BudgetExceeded)


async def a_budget_that_is_spent_is_said_so(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings(budget_bytes=MIB)) as rig:
        pieces = [await rig.memory.allocate(256 * KIB) for _ in range(4)]  # 256, 512, 256 KiB
        assert figures(rig).registered_bytes == MIB * rig.devices
        error = await failed(rig.memory.allocate(1), BudgetExceeded)
        assert "registered_bytes_budget" in getattr(error, "hint", "")
        raised(lambda: rig.memory.allocate_nowait(1), BusyError)
        await failed(rig.memory.allocate(3 * MIB), BudgetExceeded)
        await failed(rig.memory.register(memoryview(bytearray(1))), BudgetExceeded)
        rig.memory.free(pieces.pop())
        rig.memory.free(await rig.memory.allocate(1))
        for piece in pieces:
            rig.memory.free(piece)
    async with open_memory(PoolSettings(budget_bytes=0)) as rig:
        assert await rig.memory.ensure() is PathReason.BUDGET


async def concurrent_callers_share_one_mapping(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        pieces = await asyncio.gather(*(rig.memory.allocate(PAGE_BYTES) for _ in range(50)))
        assert figures(rig).registrations["arena"] == 1
        starts = {piece.address for piece in pieces}
        assert len(starts) == 50
        for piece in pieces:
            rig.memory.free(piece)


async def a_device_that_refuses_leaves_nothing(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        rig.refuse(registrations=1)
        assert await rig.memory.ensure() is PathReason.POOL_EXHAUSTED
        rig.refuse(registrations=1)
        await failed(rig.memory.allocate(5), BusyError)
        rig.refuse(registrations=1)
        await failed(rig.memory.allocate(3 * MIB), BusyError)
        rig.refuse(registrations=1)
        await failed(rig.memory.register(memoryview(bytearray(5))), DeviceError)
        await until(lambda: figures(rig).registered_bytes == 0)
        assert rig.memory.budget.charged_bytes == 0
        rig.memory.free(await rig.memory.allocate(5))


async def a_cancelled_mapping_gives_its_budget_back(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        for nbytes in (1, 3 * MIB):
            task = asyncio.ensure_future(rig.memory.allocate(nbytes))
            await asyncio.sleep(0)
            assert rig.memory.budget.charged_bytes > 0  # before anything is registered
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await rig.memory.drain()
            assert rig.memory.budget.charged_bytes == figures(rig).arenas == 0
        rig.memory.free(await rig.memory.allocate(1))


async def what_cannot_be_deregistered_is_kept_and_charged(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        piece = await rig.memory.allocate(2 * MIB)
        rig.refuse(deregistrations=1)
        rig.memory.free(piece)
        await rig.memory.drain()
        assert figures(rig).arenas == 0
        charged = rig.memory.budget.charged_bytes
        assert charged == 2 * MIB * rig.devices
        again = await rig.memory.allocate(2 * MIB)
        rig.memory.free(again)
        await rig.memory.drain()
        assert rig.memory.budget.charged_bytes == charged  # only `close` tries again


async def an_empty_arena_goes_after_its_time(open_memory: OpenMemory) -> None:
    settings = PoolSettings(reclaim_after_s=0.05)
    async with open_memory(settings) as rig:
        pieces = [await rig.memory.allocate(256 * KIB) for _ in range(3)]
        assert figures(rig).arenas == 2
        await asyncio.sleep(0.15)
        assert figures(rig).arenas == 2  # not while something lies in it
        for piece in pieces:
            rig.memory.free(piece)
        assert figures(rig).arenas == 2  # not at once
        await until(lambda: figures(rig).registered_bytes == 256 * KIB * rig.devices)
        await asyncio.sleep(0.15)
        assert figures(rig).arena_bytes == 256 * KIB  # the floor stays
        rig.memory.free(await rig.memory.allocate(256 * KIB))


# --- memory of others ---


async def whole_pages_are_charged_and_given_back(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        buffer = memoryview(bytearray(64 * KIB))
        for begin, end in ((0, 1), (4095, 4097), (100, 40_000), (0, 64 * KIB)):
            view = buffer[begin:end]
            registered = await rig.memory.register(view)
            address = address_of(view)
            first = address // PAGE_BYTES * PAGE_BYTES
            assert registered.first_page == first
            assert registered.page_bytes == whole_pages(address + view.nbytes - first)
            assert figures(rig).registered_bytes == registered.page_bytes * rig.devices
            assert figures(rig).regions == 1
            joined = b"".join(part.view for part in registered.parts)
            assert joined == bytes(view)
            await rig.memory.deregister(registered)
            assert figures(rig).registered_bytes == figures(rig).regions == 0
        assert figures(rig).registrations["external"] == 4


async def the_same_bytes_share_one_registration(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        view = memoryview(bytearray(MIB))
        holders = await asyncio.gather(*(rig.memory.register(view) for _ in range(16)))
        assert figures(rig).regions == 1
        assert figures(rig).registrations["external"] == 1
        arenas = {id(holder.parts[0].arena) for holder in holders}
        assert len(arenas) == 1
        for holder in holders[:-1]:
            await rig.memory.deregister(holder)
            await failed(rig.memory.deregister(holder), UsageError)
        assert figures(rig).regions == 1  # the last one's stays valid
        await rig.memory.deregister(holders[-1])
        assert figures(rig).registered_bytes == 0
        renewed = await rig.memory.register(view)
        assert renewed.parts[0].arena is not holders[0].parts[0].arena  # new keys
        await rig.memory.deregister(renewed)


async def overlapping_ranges_are_separate(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        view = memoryview(bytearray(8 * PAGE_BYTES))
        ranges = [view, view[: view.nbytes // 2], view[view.nbytes // 2 :], view[:100]]
        ranges.append(view[100:200])  # in the page of its neighbour
        registered = [await rig.memory.register(part) for part in ranges]
        assert figures(rig).regions == len(ranges)
        for number, held in enumerate(registered, 1):
            await rig.memory.deregister(held)
            assert figures(rig).regions == len(ranges) - number
        assert figures(rig).registered_bytes == 0


async def a_refused_deregistration_can_be_tried_again(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        view = memoryview(bytearray(10_000))
        held = await rig.memory.register(view)
        charged = rig.memory.budget.charged_bytes
        rig.refuse(deregistrations=1)
        await failed(rig.memory.deregister(held), DeviceError)
        assert 0 < rig.memory.budget.charged_bytes <= charged
        assert figures(rig).regions == 1
        other = await rig.memory.register(view)  # never joined to what is half gone
        assert other.parts[0].arena is not held.parts[0].arena
        await rig.memory.deregister(other)
        await rig.memory.deregister(held)
        await failed(rig.memory.deregister(held), UsageError)
        assert rig.memory.budget.charged_bytes == 0


async def a_long_range_is_cut_into_parts(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings(limit_bytes=MIB)) as rig:
        buffer = bytearray(random.Random(42).randbytes(5 * MIB + 123))
        held = await rig.memory.register(memoryview(buffer))
        assert len(held.parts) >= 6
        assert b"".join(part.view for part in held.parts) == buffer
        end = address_of(memoryview(buffer))
        for part in held.parts:
            assert part.address == end == address_of(part.view)
            assert part.view.nbytes <= MIB
            end = type(end)(end + part.view.nbytes)
        assert len({id(part.arena) for part in held.parts}) == len(held.parts)
        assert figures(rig).registered_bytes == held.page_bytes * rig.devices
        assert figures(rig).regions == 1
        await rig.memory.deregister(held)
        assert figures(rig).registered_bytes == 0
        error = await failed(rig.memory.allocate(2 * MIB), BusyError)  # an arena is never cut
        assert str(MIB) in str(error)


async def a_cancelled_registration_is_rolled_back(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        view = memoryview(bytearray(MIB))
        task = asyncio.ensure_future(rig.memory.register(view))
        await asyncio.sleep(0)
        assert rig.memory.budget.charged_bytes > 0
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert rig.memory.budget.charged_bytes == 0  # by then, not some time later
        joined = [asyncio.ensure_future(rig.memory.register(view)) for _ in range(3)]
        await asyncio.sleep(0)
        joined[0].cancel()
        joined[1].cancel()
        await asyncio.wait(joined)
        assert [task.cancelled() for task in joined] == [True, True, False]
        assert figures(rig).regions == 1
        await rig.memory.deregister(joined[2].result())
        assert rig.memory.budget.charged_bytes == 0


# --- the end ---


async def a_gate_refuses_and_drain_waits(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        piece = await rig.memory.allocate(100)
        view = memoryview(bytearray(MIB))
        begun = [
            asyncio.ensure_future(rig.memory.register(view)),
            asyncio.ensure_future(rig.memory.allocate(3 * MIB)),
        ]
        charged = rig.memory.budget.charged_bytes
        await until(lambda: rig.memory.budget.charged_bytes >= charged + 4 * MIB * rig.devices)
        rig.memory.gate()
        rig.memory.gate()
        raised(lambda: rig.memory.allocate_nowait(1), BusyError)
        await failed(rig.memory.allocate(1), BusyError)
        await failed(rig.memory.allocate(3 * MIB), BusyError)
        await failed(rig.memory.register(memoryview(bytearray(1))), ClosedError)
        assert await rig.memory.ensure() is PathReason.DRAINING
        await rig.memory.drain()
        await asyncio.wait(begun)  # what had begun is not missed: here, or failed
        found = figures(rig)
        assert found.regions == (1 if begun[0].exception() is None else 0)
        rig.memory.free(piece)
        await rig.memory.close()
        assert rig.memory.budget.charged_bytes == 0


async def close_takes_what_is_left_and_goes_on_where_it_failed(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        piece = await rig.memory.allocate(100)
        held = await rig.memory.register(memoryview(bytearray(10_000)))
        rig.refuse(deregistrations=1)
        await failed(rig.memory.close(), DeviceError)
        assert rig.memory.budget.charged_bytes > 0
        await rig.memory.close()
        await rig.memory.close()
        assert rig.memory.budget.charged_bytes == 0
        await rig.memory.deregister(held)  # nothing is left to do
        rig.memory.free(piece)
        assert await rig.memory.ensure() is PathReason.DRAINING


async def the_budget_is_never_overshot(open_memory: OpenMemory) -> None:
    """200 tasks that allocate, free, register, are refused and are cancelled at any moment."""
    rng = random.Random(4)
    async with open_memory(PoolSettings(budget_bytes=4 * MIB)) as rig:
        budget = rig.memory.budget
        worst = 0

        def look() -> None:
            nonlocal worst
            worst = max(worst, budget.charged_bytes)
            assert figures(rig).registered_bytes <= budget.charged_bytes <= budget.limit_bytes

        async def use(nbytes: int, turns: int) -> None:
            piece = await rig.memory.allocate(nbytes)
            look()
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                rig.memory.free(piece)

        async def register(buffer: bytearray, turns: int) -> None:
            held: RegisteredRange = await rig.memory.register(memoryview(buffer))
            look()
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                await asyncio.shield(rig.memory.deregister(held))

        shared = [bytearray(rng.randint(1, 600 * KIB)) for _ in range(4)]
        tasks: list[asyncio.Task[None]] = []
        for number in range(200):
            turns = rng.randint(0, 20)
            if number % 2:
                work = use(rng.choice([1, 5000, 300 * KIB, 2 * MIB + 5]), turns)
            else:
                work = register(rng.choice([*shared, bytearray(rng.randint(1, MIB))]), turns)
            tasks.append(asyncio.ensure_future(work))
            if rng.random() < 0.1:
                rig.refuse(registrations=1)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            look()
        rig.refuse()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, (*TAKEN, asyncio.CancelledError)), result
        assert worst > MIB
        await rig.memory.drain()
        await until(lambda: figures(rig).regions == 0)  # whose holders have not waited for it
        found = figures(rig)
        assert found.arena_bytes_used == 0
        assert budget.charged_bytes == found.arena_bytes * rig.devices


_CASES: tuple[MemoryCase, ...] = (
    nothing_is_mapped_unasked,
    pieces_are_exact_and_whole_granules,
    no_bytes_are_refused,
    only_the_token_frees_and_once,
    arenas_double_up_to_the_maximum,
    a_piece_larger_than_the_next_arena_gets_one_that_holds_it,
    space_is_used_again,
    a_dedicated_arena_goes_with_its_piece,
    what_is_on_its_way_out_is_waited_for,
    a_budget_that_is_spent_is_said_so,
    concurrent_callers_share_one_mapping,
    a_device_that_refuses_leaves_nothing,
    a_cancelled_mapping_gives_its_budget_back,
    what_cannot_be_deregistered_is_kept_and_charged,
    an_empty_arena_goes_after_its_time,
    whole_pages_are_charged_and_given_back,
    the_same_bytes_share_one_registration,
    overlapping_ranges_are_separate,
    a_refused_deregistration_can_be_tried_again,
    a_long_range_is_cut_into_parts,
    a_cancelled_registration_is_rolled_back,
    a_gate_refuses_and_drain_waits,
    close_takes_what_is_left_and_goes_on_where_it_failed,
    the_budget_is_never_overshot,
)
MEMORY_CASES: dict[str, MemoryCase] = {case.__name__: case for case in _CASES}
