"""Trouble that others have met with registered memory, each as its recipe, as scenarios over two
nodes. The counts are CI's; ORBIT_SOAK (`make soak`) makes them the cases' own.

C07 buffers that Python drops, C18 nothing to transfer, C19 memory registered twice, C30 an address
that comes back, C37 read-only memory, C42 registrations in parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import random
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import orbit
from tests.scenarios.rendezvous import expected
from tests.scenarios.rig import HANG_S, KIB, MIB, Rig, Scenario, leases, payload_of, until
from tests.soak import IN_LAB, SOAK

REUSES = 1000 if SOAK else 10
SEAM_RANGES = 2000 if SOAK else 60 if IN_LAB else 200


class Droppable(bytearray):
    """A buffer that can be seen to die."""


# --- C07: a buffer is dropped by Python while something is on its way -----------------------------


async def dropped_buffers_live_until_the_transfer_ends(rig: Rig) -> None:
    nbytes = 8 * MIB
    landed = bytearray(nbytes)
    to = await rig.owner.register_destination(landed)
    source = Droppable(b"\7" * nbytes)
    seen = weakref.ref(source)
    putting = asyncio.ensure_future(rig.consumer.put(to, source))
    del source
    _overwrite_free_memory()
    assert (await putting).path is rig.path
    del putting
    gc.collect()
    assert seen() is None
    await rig.owner.withdraw(to)
    assert landed.count(7) == nbytes

    handle = await rig.owner.register_data_pinned(landed)
    dest = Droppable(nbytes)
    seen = weakref.ref(dest)
    getting = asyncio.ensure_future(rig.consumer.get_into(handle, dest))
    del dest
    _overwrite_free_memory()
    lease = await getting
    assert lease.path is rig.path
    del getting
    gc.collect()
    assert seen() is None
    await rig.consumer.detach(handle, lease)
    await rig.owner.withdraw(handle)


async def registered_buffers_cannot_be_resized(rig: Rig) -> None:
    memory = Droppable(MIB)
    seen = weakref.ref(memory)
    guard = await rig.owner.register_owned(memory)
    with pytest.raises(BufferError):
        memory.extend(b"x")
    await guard.unregister()
    memory.extend(b"x")
    guard = await rig.owner.register_owned(memory)
    del memory
    gc.collect()
    assert seen() is not None
    await guard.unregister()
    gc.collect()
    assert seen() is None


def _overwrite_free_memory() -> None:
    gc.collect()
    for _ in range(16):
        bytearray(b"\x09" * MIB)


# --- C18: nothing to transfer ---------------------------------------------------------------------


async def nothing_is_a_payload(rig: Rig) -> None:
    empty: tuple[Any, ...] = (b"", bytearray(), np.empty((0, 4)), memoryview(b"abc")[3:])
    for buffer in empty:
        for transport in ("auto", "tcp", *(("rdma",) if rig.rdma else ())):
            handle = await rig.owner.register_data_pinned(buffer)
            assert (await rig.fetched(handle, b"", transport=transport)).nbytes == 0
            lease = await rig.consumer.get_into(handle, bytearray(), transport=transport)
            await rig.consumer.release(handle, lease)
            with pytest.raises(orbit.UnknownHandle):
                await rig.consumer.get(handle, transport=transport)
    for node in (rig.owner, rig.consumer):
        with pytest.raises(orbit.UsageError):
            await node.register_owned(bytearray())
    handles = [await rig.owner.register_data_pinned(bytes(n)) for n in (4 * KIB, 0, 4 * KIB)]
    results = await rig.consumer.get_many(handles)
    assert [lease.nbytes for _, lease in results] == [4 * KIB, 0, 4 * KIB]
    for handle, (_, lease) in zip(handles, results, strict=True):
        await rig.consumer.release(handle, lease)
    rig.owner.handler("nothing")(lambda message: message.payload)
    peer = rig.consumer.add_peer(rig.owner.address)
    assert await rig.consumer.unary(peer, "nothing", b"", timeout=HANG_S) == b""


async def nothing_still_has_a_place(rig: Rig) -> None:
    """A range without bytes may stand at the end of memory, and not behind it."""
    nbytes = 100 * KIB
    async with await rig.owner.register_owned(bytearray(nbytes)) as guard:
        for at in (0, 5, nbytes):
            handle = await rig.owner.register_data_in_region(guard, range(at, at))
            await rig.fetched(handle, b"")
            await rig.owner.withdraw(handle)
        with pytest.raises(orbit.OutOfRange):
            await rig.owner.register_data_in_region(guard, range(nbytes + 1, nbytes + 1))
        with pytest.raises(orbit.OutOfRange):
            guard.slice(nbytes + 1, 0)
    to = await rig.owner.register_destination(bytearray(nbytes))
    for transport in ("auto", "tcp", *(("rdma",) if rig.rdma else ())):
        for at in (0, nbytes):
            put = await rig.consumer.put(to, b"", offset=at, transport=transport)
            assert (put.nbytes, put.offset) == (0, at)
            heard = await rig.owner.wait_put(to, timeout=HANG_S)
            assert (heard.nbytes, heard.offset) == (0, at)
        with pytest.raises(orbit.OutOfRange):
            await rig.consumer.put(to, b"", offset=nbytes + 1, transport=transport)
    await rig.owner.withdraw(to)


# --- C19: the same memory, or a part of it, twice -------------------------------------------------


async def memory_registered_twice_is_shared(rig: Rig) -> None:
    before = rig.owner.statistics().registered_bytes
    wanted = payload_of(MIB)
    memory = bytearray(wanted)
    view = memoryview(memory)
    first = await rig.owner.register_owned(memory)
    shared = rig.owner.statistics().registered_bytes
    second = await rig.owner.register_owned(memory)
    assert rig.owner.statistics().registered_bytes == shared
    halves = [await rig.owner.register_owned(part) for part in (view[: MIB // 2], view[100:])]
    if rig.rdma:
        assert rig.owner.statistics().registered_bytes > shared
    handle = await rig.owner.register_data_in_region(second)
    assert (await rig.fetched(handle, wanted)).path is rig.path
    for guard in (first, *halves):  # the key of the last holder stays
        assert await guard.unregister() is orbit.Deregistered.DRAINED
        assert (await rig.fetched(handle, wanted)).path is rig.path
    assert await first.unregister() is orbit.Deregistered.DRAINED  # it joins the first
    with pytest.raises(orbit.ClosedError):
        await rig.owner.register_data_in_region(first)
    await rig.owner.withdraw(handle)
    await second.unregister()
    assert rig.owner.statistics().registered_bytes == before
    view.release()
    memory.extend(b"free")


async def neighbours_in_one_page_are_two_regions(rig: Rig) -> None:
    before = rig.owner.statistics().registered_bytes
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page[:200] = payload_of(200)
    left, right = [
        await rig.owner.register_owned(memoryview(page)[at : at + 100]) for at in (0, 100)
    ]
    transport = "rdma" if rig.rdma else "auto"
    handle = await rig.owner.register_data_in_region(right)
    await left.unregister()
    await rig.fetched(handle, payload_of(200)[100:], transport=transport)
    await rig.owner.withdraw(handle)
    await right.unregister()
    gc.collect()
    page.close()
    assert rig.owner.statistics().registered_bytes == before


async def unregister_waits_for_the_transfer(rig: Rig) -> None:
    wanted = payload_of(2 * MIB)
    guard = await rig.owner.register_owned(bytearray(wanted))
    handle = await rig.owner.register_data_in_region(guard)
    hooks = rig.hooks["rdma" if rig.rdma else "tcp"]
    hooks.pull_delay_s = 0.2
    getting = asyncio.ensure_future(rig.consumer.get(handle))
    await until(lambda: leases(rig.owner) == 1)
    unregistering = guard.unregister()
    data, lease = await getting
    hooks.pull_delay_s = 0.0
    assert data == wanted
    assert not unregistering.done()  # the slot holds it, and the lease holds the slot
    await rig.consumer.release(handle, lease)
    assert await unregistering is orbit.Deregistered.DRAINED


# --- C30: a freed address comes back --------------------------------------------------------------


async def freed_memory_comes_back_as_new_memory(rig: Rig) -> None:
    """The allocator gives the same addresses again and again, to other sizes and contents."""
    if not rig.rdma:
        return
    before = rig.owner.statistics().registered_bytes
    rng = random.Random(30)
    for turn in range(REUSES):
        nbytes, fill = rng.randint(1, 64 * KIB), turn % 251
        handle = await rig.owner.register_data_in_place(bytearray([fill]) * nbytes)
        data, lease = await rig.consumer.get(handle, transport="rdma")
        assert (len(data), bytes(data).count(fill)) == (nbytes, nbytes)
        if turn % 2:
            await rig.consumer.release(handle, lease)
            await until(lambda: not rig.owner.statistics().memory.regions)
        else:
            await rig.consumer.detach(handle, lease)
            await rig.owner.withdraw(handle)
        with pytest.raises(orbit.UnknownHandle):
            await rig.consumer.get(handle)
        assert rig.owner.statistics().registered_bytes == before


# --- C37: read-only memory ------------------------------------------------------------------------


@contextlib.contextmanager
def _read_only(payload: bytes) -> Iterator[Sequence[Any]]:
    frozen = np.frombuffer(bytearray(payload), np.uint8)
    frozen.setflags(write=False)
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield payload, memoryview(bytearray(payload)).toreadonly(), frozen, mapped


async def read_only_memory_is_a_source(rig: Rig) -> None:
    payload = payload_of(MIB + 5)
    landed = bytearray(len(payload))
    to = await rig.owner.register_destination(landed)
    with _read_only(payload) as sources:
        for source in sources:
            copied = _copied_pieces(rig)
            handle = await rig.owner.register_data_pinned(source)
            lease = await rig.fetched(handle, payload)
            assert (lease.path, lease.reason) == expected(rig)
            await rig.owner.withdraw(handle)
            handle = await rig.owner.register_data(source)
            lease = await rig.fetched(handle, payload)
            assert lease.reason == ("not_pinned" if rig.rdma else "not_configured")
            await rig.owner.withdraw(handle)
            landed[:] = bytes(len(payload))
            assert (await rig.consumer.put(to, source)).path is rig.path
            await rig.owner.wait_put(to, timeout=HANG_S)
            assert landed == payload
            assert _copied_pieces(rig) == copied + (1 if rig.rdma else 0)
    await rig.owner.withdraw(to)


async def read_only_memory_is_no_destination(rig: Rig) -> None:
    payload = payload_of(100 * KIB)
    handle = await rig.owner.register_data_pinned(payload)
    pulls = {name: hooks.pulls for name, hooks in rig.hooks.items()}
    with _read_only(payload) as wrong:
        for buffer in wrong:
            for refused in (
                rig.consumer.get_into(handle, buffer),
                rig.owner.register_owned(buffer),
                rig.owner.register_destination(buffer),
                *((rig.owner.register_data_in_place(buffer),) if rig.rdma else ()),
            ):
                with pytest.raises(orbit.UsageError):
                    await refused
    assert {name: hooks.pulls for name, hooks in rig.hooks.items()} == pulls
    assert leases(rig.owner) == 0
    await rig.owner.withdraw(handle)


def _copied_pieces(rig: Rig) -> int:
    found = rig.consumer.statistics().rdma
    return 0 if found is None else found.counts["targets_copied"]


# --- C42: a region in several registrations -------------------------------------------------------


async def ranges_across_the_seams(rig: Rig) -> None:
    """Registrations of at most 1 MiB at both sides, out of phase: every range is as a memcpy."""
    total, phase = 5 * MIB + 123, 300_000
    wanted = payload_of(total, 42)
    rng = random.Random(42)
    ranges = [(MIB - 1, 2), (0, total), (phase, MIB), (total - 1, 1), (2 * MIB, MIB), (0, 1)]
    for _ in range(SEAM_RANGES):
        begin = rng.randrange(total)
        nbytes = rng.choice((rng.randint(1, 100), rng.randint(1, 64 * KIB), rng.randint(1, MIB)))
        ranges.append((begin, min(nbytes, total - begin)))
    dest = bytearray(total + phase)
    async with (
        await rig.owner.register_owned(bytearray(wanted)) as source,
        await rig.consumer.register_owned(dest) as target,
    ):
        for begin, nbytes in ranges:
            at = rng.randrange(len(dest) - nbytes + 1)
            handle = await rig.owner.register_data_in_region(source, range(begin, begin + nbytes))
            lease = await rig.consumer.get_into(
                handle, target.slice(at, nbytes), transport="rdma" if rig.rdma else "auto"
            )
            assert lease.nbytes == nbytes
            assert memoryview(dest)[at : at + nbytes] == wanted[begin : begin + nbytes], begin
            await rig.consumer.release(handle, lease)


async def unregister_by_force_across_the_seams(rig: Rig) -> None:
    if not rig.rdma:
        return
    guard = await rig.owner.register_owned(bytearray(5 * MIB + 123))
    handle = await rig.owner.register_data_in_region(guard)
    rig.hooks["rdma"].pull_delay_s = 0.3
    getting = asyncio.ensure_future(rig.consumer.get(handle))
    await until(lambda: leases(rig.owner) == 1)
    how = await guard.unregister(0.01)
    assert how is orbit.Deregistered.DRAIN_TIMED_OUT
    with pytest.raises(orbit.OrbitError):
        await getting
    rig.hooks["rdma"].pull_delay_s = 0.0
    assert rig.owner.statistics().memory.regions == 0


CASES: tuple[Scenario, ...] = (
    dropped_buffers_live_until_the_transfer_ends,
    registered_buffers_cannot_be_resized,
    nothing_is_a_payload,
    nothing_still_has_a_place,
    memory_registered_twice_is_shared,
    neighbours_in_one_page_are_two_regions,
    unregister_waits_for_the_transfer,
    freed_memory_comes_back_as_new_memory,
    read_only_memory_is_a_source,
    read_only_memory_is_no_destination,
)
IN_PARTS: tuple[Scenario, ...] = (ranges_across_the_seams, unregister_by_force_across_the_seams)
"""With registrations of at most 1 MiB."""
