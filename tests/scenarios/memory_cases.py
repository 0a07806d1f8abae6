"""Trouble that others have met with registered memory, each as its recipe, as scenarios over two
nodes. The counts are CI's; ORBIT_SOAK (`make soak`) makes them the cases' own.

C07 buffers that Python drops, C18 nothing to transfer, C19 memory registered twice, C30 an address
that comes back, C37 read-only memory, C38 keys that open nothing, C42 registrations in parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import random
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.model import Direction, LeaseId, PathName
from orbit.protocol.binding import GrantRecord
from orbit.transport.interface import Exposure, Session
from orbit.verbs import records, status
from orbit.verbs.queue_pair import Posting
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.records import Completion
from orbit.verbs.registration import RegisteredBlock
from tests.contract.rdma_pairs import forge
from tests.scenarios.rendezvous import expected
from tests.scenarios.rig import HANG_S, KIB, MIB, Rig, Scenario, leases, payload_of, until

SOAK = os.environ.get("ORBIT_SOAK") == "1"
REUSES = 1000 if SOAK else 20
SEAM_RANGES = 2000 if SOAK else 200

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED_NOREPLACE = 0x100000


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
    first, second = [await rig.owner.register_owned(memory) for _ in range(2)]
    shared = rig.owner.statistics().registered_bytes
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


async def remapped_memory_has_a_new_key(rig: Rig) -> None:
    """The same address, unmapped and mapped again: the old handle and the old key open nothing."""
    if not rig.rdma:
        return
    nbytes = MIB
    address = _mapped(nbytes)
    old, old_grant = None, None
    for life in range(3):
        wanted = payload_of(nbytes, life)
        ctypes.memmove(address, wanted, nbytes)
        guard = await rig.owner.register_external_memory(address, nbytes)
        handle = await rig.owner.register_data_in_region(guard)
        if old is not None and old_grant is not None:
            with pytest.raises(orbit.UnknownHandle):
                await rig.consumer.get(old)
            dest = bytearray(b"\xee" * nbytes)
            with _granting(rig, _with_key(old_grant)), pytest.raises(orbit.PathFailed):
                await rig.consumer.get_into(handle, dest, transport="rdma")
            assert dest.count(0xEE) == nbytes
        grants: list[Exposure] = []
        with _granting(rig, _noting(grants)):
            lease = await _fetched_again(rig, handle, wanted)
        assert lease.path is PathName.RDMA
        old, old_grant = handle, GrantRecord.decode(grants[-1].grant)
        await rig.owner.withdraw(handle)
        await guard.unregister()
        assert _libc.munmap(address, nbytes) == 0
        assert _mapped(nbytes, address) == address
    _libc.munmap(address, nbytes)


def _mapped(nbytes: int, address: int | None = None) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_FIXED_NOREPLACE if address else 0)
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


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


# --- C38: keys that open nothing ------------------------------------------------------------------

Granted = Callable[[Session, Exposure, LeaseId], Awaitable[Exposure]]


@contextlib.contextmanager
def _granting(rig: Rig, see: Granted) -> Iterator[None]:
    """`see` gets what the owner granted, and gives what the consumer then uses."""
    hooks = rig.hooks["rdma"]
    path = hooks._inner

    async def pull(session: Session, exposure: Exposure, lease_id: LeaseId, *rest: Any) -> Any:
        return await path.pull(session, await see(session, exposure, lease_id), lease_id, *rest)

    async def push(session: Session, exposure: Exposure, lease_id: LeaseId, *rest: Any) -> Any:
        return await path.push(session, await see(session, exposure, lease_id), lease_id, *rest)

    hooks.__dict__.update(pull=pull, push=push)
    try:
        yield
    finally:
        del hooks.__dict__["pull"], hooks.__dict__["push"]


def _noting(grants: list[Exposure]) -> Granted:
    async def see(session: Session, exposure: Exposure, lease_id: LeaseId) -> Exposure:
        grants.append(exposure)
        return exposure

    return see


def _with_key(old: GrantRecord) -> Granted:
    async def see(session: Session, exposure: Exposure, lease_id: LeaseId) -> Exposure:
        return forge(exposure, key=old.key)

    return see


def _shifted(**by: int) -> Granted:
    async def see(session: Session, exposure: Exposure, lease_id: LeaseId) -> Exposure:
        record = GrantRecord.decode(exposure.grant)
        return forge(exposure, **{name: getattr(record, name) + n for name, n in by.items()})

    return see


async def wrong_keys_are_errors_of_that_get(rig: Rig) -> None:
    """Messages of the same peer do not notice, and the next get works."""
    if not rig.rdma:
        return
    wanted = payload_of(200 * KIB)
    handle = await rig.owner.register_data_pinned(wanted)
    first: list[Exposure] = []
    with _granting(rig, _noting(first)):
        await _fetched_again(rig, handle, wanted)
    old = GrantRecord.decode(first[0].grant)
    wrong = {
        "the next key": _shifted(key=1),
        "an address of nothing": _shifted(address=1 << 40),
        "a longer grant": _shifted(length=1),
        "a key that was given back": _with_key(old),
        "an ended lease": _expired(rig),
    }
    if _rdma_path(rig.owner).rails[0].range_enforced:
        wrong["one byte further"] = _shifted(address=1)
    async with _streaming(rig, "wrong keys") as progress:
        for name, see in wrong.items():
            dest = bytearray(b"\xee" * len(wanted))
            with _granting(rig, see), pytest.raises(orbit.OrbitError) as caught:
                await rig.consumer.get_into(handle, dest, transport="rdma")
            assert isinstance(caught.value, orbit.PathFailed | orbit.LeaseError), name
            assert dest.count(0xEE) == len(dest), name
            await progress()
            assert (await _fetched_again(rig, handle, wanted)).path is PathName.RDMA, name
    await rig.settled()
    await rig.owner.withdraw(handle)


async def a_grant_has_one_direction(rig: Rig) -> None:
    """A READ with a key for writing, and a WRITE with a key for reading."""
    if not rig.rdma:
        return
    wanted = payload_of(200 * KIB)
    memory = bytearray(wanted)
    handle = await rig.owner.register_data_in_place(memory)
    landed = bytearray(len(wanted))
    to = await rig.owner.register_destination(landed)
    async with _streaming(rig, "directions") as progress:
        with _granting(rig, _misusing(rig, Direction.READ)), pytest.raises(orbit.PathFailed):
            await rig.consumer.get(handle, transport="rdma")
        await progress()
        with _granting(rig, _misusing(rig, Direction.WRITE)), pytest.raises(orbit.PathFailed):
            await rig.consumer.put(to, wanted, transport="rdma")
        await progress()
        assert memory == wanted
        assert not any(landed)
        assert (await _fetched_again(rig, handle, wanted)).path is PathName.RDMA
        await until(lambda: leases(rig.owner) == 0)
        assert (await _put_again(rig, to, wanted)).path is PathName.RDMA
    await rig.owner.withdraw(handle)
    await rig.owner.withdraw(to)
    assert landed == wanted


def _misusing(rig: Rig, granted: Direction) -> Granted:
    """The other operation with the same key, on the same queue pair."""

    async def see(session: Session, exposure: Exposure, lease_id: LeaseId) -> Exposure:
        record = GrantRecord.decode(exposure.grant)
        member = _rdma_path(rig.consumer)._requests.array(session, granted).member(record.index)
        assert member is not None
        block = await RegisteredBlock.open(member.device, 4096, records.ACCESS_LOCAL_WRITE)
        pack = records.pack_write if granted is Direction.READ else records.pack_read
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def request(wr_id: int) -> bytes:
            return pack(wr_id, block.address, block.lkey, 64, record.address, record.key)

        member.queue_pair.post_send([Posting("test", request, done.set_result)])
        completion = await asyncio.wait_for(done, HANG_S)
        assert completion.status in (status.REM_ACCESS_ERR, status.REM_INV_REQ_ERR)
        assert not any(block.view)
        await block.close()
        return exposure

    return see


def _expired(rig: Rig) -> Granted:
    async def see(session: Session, exposure: Exposure, lease_id: LeaseId) -> Exposure:
        shelf = rig.owner._rendezvous._owner._shelf  # type: ignore[union-attr]
        shelf.arm(lease_id, PathName.RDMA, 0.01)
        await until(lambda: leases(rig.owner) == 0)
        return exposure

    return see


def _rdma_path(node: orbit.Node) -> RdmaPath:
    path = node._rendezvous._paths.rdma  # type: ignore[union-attr]
    inner = getattr(path, "_inner", path)
    assert isinstance(inner, RdmaPath)
    return inner


@contextlib.asynccontextmanager
async def _streaming(rig: Rig, name: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Messages from the consumer to the owner, one after another, none lost, all by RDMA. What it
    yields waits until some more have come.
    """
    heard: list[int] = []
    sent = 0

    @rig.owner.handler(name, mode=orbit.Dispatch.ordered())
    def take(message: orbit.Message) -> bytes:
        heard.append(int.from_bytes(message.payload[:4], "big"))
        return bytes(message.payload)

    peer = rig.consumer.add_peer(rig.owner.address)

    async def send() -> None:
        nonlocal sent
        while True:
            payload = sent.to_bytes(4, "big") + bytes(1000)
            result = rig.consumer.unary(peer, name, payload, timeout=HANG_S)
            assert await result == payload
            assert result.route is not None
            assert result.route.transport is PathName.RDMA
            sent += 1

    async def progress() -> None:
        start = sent
        await until(lambda: sent > start + 3 or sending.done())

    sending = asyncio.ensure_future(send())
    try:
        await progress()
        yield progress
        assert not sending.done()
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
    assert heard == list(range(len(heard)))
    assert len(heard) >= sent


async def _fetched_again(rig: Rig, handle: orbit.Handle, wanted: bytes) -> orbit.Lease:
    """After a queue pair was lost: its array takes a moment."""
    async with asyncio.timeout(HANG_S):
        while True:
            lease = await rig.fetched(handle, wanted)
            if lease.path is PathName.RDMA:
                return lease
            await asyncio.sleep(0.05)


async def _put_again(rig: Rig, to: orbit.Handle, payload: bytes) -> orbit.Put:
    async with asyncio.timeout(HANG_S):
        while True:
            put = await rig.consumer.put(to, payload)
            if put.path is PathName.RDMA:
                return put
            await asyncio.sleep(0.05)


# --- C42: a region in several registrations -------------------------------------------------------


async def ranges_across_the_seams(rig: Rig) -> None:
    """Registrations of at most 1 MiB at both sides, out of phase: every range is as a memcpy."""
    total, phase = 5 * MIB + 123, 300_000
    wanted = payload_of(total, 42)
    rng = random.Random(42)
    ranges = [(MIB - 1, 2), (0, total), (phase, MIB), (total - 1, 1), (2 * MIB, MIB), (0, 1)]
    for _ in range(SEAM_RANGES):
        begin = rng.randrange(total)
        nbytes = rng.choice((rng.randint(1, 100), rng.randint(1, 2 * MIB)))
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
    remapped_memory_has_a_new_key,
    read_only_memory_is_a_source,
    read_only_memory_is_no_destination,
    wrong_keys_are_errors_of_that_get,
    a_grant_has_one_direction,
)
IN_PARTS: tuple[Scenario, ...] = (ranges_across_the_seams, unregister_by_force_across_the_seams)
"""With registrations of at most 1 MiB."""
