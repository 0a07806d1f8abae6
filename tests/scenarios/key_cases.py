"""Keys that open nothing, as scenarios over two nodes: C38 keys that are wrong, given back, expired
or of the other direction, and C30 keys of memory that was mapped again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

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
from tests.scenarios.rig import HANG_S, KIB, MIB, Rig, Scenario, leases, payload_of, until

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED_NOREPLACE = 0x100000


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
    # A lease that is reaped takes a reference along.
    kept = orbit.RegisterOptions(retain=True)
    handle = await rig.owner.register_data_pinned(wanted, kept)
    first: list[Exposure] = []
    with _granting(rig, _noting(first)):
        await fetched_by_rdma(rig, handle, wanted)
    old = GrantRecord.decode(first[0].grant)
    wrong = {
        "the next key": _shifted(key=1),
        "an address of nothing": _shifted(address=1 << 40),
        "a longer grant": _shifted(length=1),
        "a key that was given back": _with_key(old),
        "an ended lease": _expired(rig),
    }
    if _rdma_path(rig.owner).hints[0].range_enforced:
        wrong["one byte further"] = _shifted(address=1)
    async with _streaming(rig, "wrong keys") as progress:
        for name, see in wrong.items():
            dest = bytearray(b"\xee" * len(wanted))
            with _granting(rig, see), pytest.raises(orbit.OrbitError) as caught:
                await rig.consumer.get_into(handle, dest, transport="rdma")
            assert isinstance(caught.value, orbit.PathFailed | orbit.LeaseError), name
            assert dest.count(0xEE) == len(dest), name
            await progress()
            assert (await fetched_by_rdma(rig, handle, wanted)).path is PathName.RDMA, name
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
        assert (await fetched_by_rdma(rig, handle, wanted)).path is PathName.RDMA
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
        block = await RegisteredBlock.open(member.domain, 4096, records.ACCESS_LOCAL_WRITE)
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
        await asyncio.sleep(0)  # from here on in a task, as a wait with a bound wants it
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


async def fetched_by_rdma(rig: Rig, handle: orbit.Handle, wanted: bytes) -> orbit.Lease:
    """As `rig.fetched`, again and again: where a queue pair was lost, its array takes a moment."""
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


# --- C30: an address that is mapped again ---------------------------------------------------------


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
            lease = await fetched_by_rdma(rig, handle, wanted)
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


KEY_CASES: tuple[Scenario, ...] = (
    wrong_keys_are_errors_of_that_get,
    a_grant_has_one_direction,
    remapped_memory_has_a_new_key,
)
