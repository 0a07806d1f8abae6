"""What is asked of PinnedMemory's registrations of memory that others own."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from ..errors import BusyError, DeviceError, UsageError
from ..memory.buffer import address_of
from ..memory.pages import PAGE_BYTES, whole_pages
from .memory_rig import KIB, MIB, MemoryCase, OpenMemory, PoolSettings, failed, figures


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


async def two_views_of_a_range_are_two_registrations(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        view = memoryview(bytearray(100_000))
        local = await rig.memory.register(view, remote=False)
        parent = await rig.memory.register(view)
        assert figures(rig).regions == 2
        assert figures(rig).registered_bytes == 2 * local.page_bytes * rig.devices
        assert local.parts[0].arena is not parent.parts[0].arena
        again = await rig.memory.register(view, remote=False)
        assert again.parts[0].arena is local.parts[0].arena
        assert figures(rig).regions == 2
        await rig.memory.deregister(local)
        await rig.memory.deregister(parent)
        assert figures(rig).regions == 1  # `again` holds its own
        await rig.memory.deregister(again)
        assert rig.memory.budget.charged_bytes == 0


async def a_view_that_is_refused_leaves_the_other(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        view = memoryview(bytearray(100_000))
        for remote in (False, True):
            held = await rig.memory.register(view, remote=not remote)
            charged = rig.memory.budget.charged_bytes
            rig.refuse(registrations=1)
            await failed(rig.memory.register(view, remote=remote), DeviceError)
            assert rig.memory.budget.charged_bytes == charged
            assert figures(rig).regions == 1
            other = await rig.memory.register(view, remote=remote)
            rig.refuse(deregistrations=1)
            await failed(rig.memory.deregister(other), DeviceError)
            assert rig.memory.budget.charged_bytes > charged  # what was refused stays charged
            await rig.memory.deregister(held)
            assert figures(rig).regions == 1
            await rig.memory.deregister(other)
            assert rig.memory.budget.charged_bytes == 0


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


REGISTRATION_CASES: Final[tuple[MemoryCase, ...]] = (
    whole_pages_are_charged_and_given_back,
    the_same_bytes_share_one_registration,
    two_views_of_a_range_are_two_registrations,
    a_view_that_is_refused_leaves_the_other,
    overlapping_ranges_are_separate,
    a_refused_deregistration_can_be_tried_again,
    a_long_range_is_cut_into_parts,
    a_cancelled_registration_is_rolled_back,
)
