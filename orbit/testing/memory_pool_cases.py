"""What is asked of PinnedMemory's pool of arenas."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from ..errors import BudgetExceeded, BusyError, DeviceError, InternalError, UsageError
from ..memory.buffer import address_of
from ..memory.pages import PAGE_BYTES, whole_pages
from ..model import PathReason
from ..transport.interface import PinnedBuffer
from .memory_rig import (
    KIB,
    MIB,
    MemoryCase,
    OpenMemory,
    PoolSettings,
    failed,
    figures,
    raised,
)
from .waiting import until


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


POOL_CASES: Final[tuple[MemoryCase, ...]] = (
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
)
