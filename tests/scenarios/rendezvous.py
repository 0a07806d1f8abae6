"""What a user of rendezvous may rely on, as scenarios over two nodes, path and reason asserted.

Each takes a `Rig` and leaves it without slots. `SHARED` ones run one after another on one pair of
nodes; the others name what their nodes need.
"""

from __future__ import annotations

import asyncio
import mmap
from dataclasses import dataclass
from typing import Any

import pytest

import orbit
from orbit.model import PathName
from orbit.protocol.messages import AcquireReply, AcquireRequest, DetachRequest, EmptyReply
from tests.scenarios.rig import (
    KIB,
    MIB,
    Knobs,
    Rig,
    Scenario,
    leases,
    payload_of,
    slots,
    until,
)

RETAIN = orbit.RegisterOptions(retain=True)


@dataclass(frozen=True)
class Needs:
    """Nodes of its own for one scenario."""

    run: Scenario
    owner: Knobs
    consumer: Knobs
    rdma_only: bool = False  # there is nothing to see without a device


def expected(rig: Rig, reason: str = "not_configured") -> tuple[PathName, str]:
    """How a pinned payload above the minimum moves here."""
    return (rig.path, "ok" if rig.rdma else reason)


# --- on one pair of nodes -------------------------------------------------------------------------


async def pinned_payloads_take_the_path(rig: Rig) -> None:
    for nbytes in (64 * KIB, MIB, 300 * KIB + 7):
        rig.mark()
        payload = payload_of(nbytes, nbytes)
        handle = await rig.owner.register_data_pinned(payload)
        data, lease = await rig.consumer.get(handle)
        assert data == payload
        assert (lease.path, lease.reason) == expected(rig)
        await rig.consumer.release(handle, lease)
        await rig.settled()
        assert rig.decided(rig.consumer) == {expected(rig): 1}
    await until(lambda: slots(rig.owner) == 0)


async def heap_slot_is_read_in_chunks(rig: Rig) -> None:
    payload = payload_of(MIB + 11)
    handle = await rig.owner.register_data(payload)
    lease = await rig.fetched(handle, payload)
    assert (lease.path, lease.reason) == ("tcp", "not_pinned" if rig.rdma else "not_configured")
    await rig.owner.withdraw(handle)


async def below_the_minimum_is_read_in_chunks(rig: Rig) -> None:
    for nbytes in (1, 4 * KIB, 64 * KIB - 1):
        payload = payload_of(nbytes)
        handle = await rig.owner.register_data_pinned(payload)
        lease = await rig.fetched(handle, payload)
        assert (lease.path, lease.reason) == ("tcp", "below_min" if rig.rdma else "not_configured")
        await rig.owner.withdraw(handle)


async def empty_payload(rig: Rig) -> None:
    for register in (rig.owner.register_data, rig.owner.register_data_pinned):
        handle = await register(b"")
        assert (await rig.consumer.metadata(handle)).total_bytes == 0
        lease = await rig.fetched(handle, b"")
        assert lease.nbytes == 0
        lease = await rig.consumer.get_into(handle, bytearray(3))
        await rig.consumer.detach(handle, lease)
        await rig.owner.withdraw(handle)


async def metadata_takes_no_lock(rig: Rig) -> None:
    handle = await rig.owner.register_data_pinned(payload_of(100_000))
    found = await rig.consumer.metadata(handle)
    assert (found.total_bytes, found.refcount, found.pinned) == (100_000, 1, rig.rdma)
    assert leases(rig.owner) == 0
    await rig.owner.withdraw(handle)


async def get_into_fills_the_front(rig: Rig) -> None:
    payload = payload_of(200_001)
    handle = await rig.owner.register_data_pinned(payload)
    for dest in (bytearray(200_001), bytearray(b"\xee" * 300_000), mmap.mmap(-1, 200_001)):
        lease = await rig.consumer.get_into(handle, dest)
        assert lease.path is rig.path
        assert memoryview(dest)[:200_001] == payload
        assert bytes(memoryview(dest)[200_001:]) in (b"", b"\xee" * 99_999)
        await rig.consumer.detach(handle, lease)
    with pytest.raises(orbit.UsageError):
        await rig.consumer.get_into(handle, bytearray(200_000))
    await rig.owner.withdraw(handle)


async def large_get_into(rig: Rig) -> None:
    payload = payload_of(9 * MIB + 5)
    handle = await rig.owner.register_data_pinned(payload)
    dest, seen = bytearray(len(payload)), []
    lease = await rig.consumer.get_into(handle, dest, progress=seen.append)
    assert lease.path is rig.path
    assert dest == payload
    assert seen == sorted(seen)
    assert seen[-1] == len(payload)
    await rig.consumer.release(handle, lease)
    await until(lambda: slots(rig.owner) == 0)


async def detach_and_get_again(rig: Rig) -> None:
    payload = payload_of(70_000)
    handle = await rig.owner.register_data_pinned(payload)
    for _ in range(3):
        lease = await rig.fetched(handle, payload)
        with pytest.raises(orbit.LeaseError):
            await rig.consumer.detach(handle, lease)
    lease = (await rig.consumer.get(handle))[1]
    await rig.consumer.release(handle, lease)
    with pytest.raises(orbit.UnknownHandle):
        await rig.consumer.get(handle)


async def references_and_locks_both_must_be_zero(rig: Rig) -> None:
    payload = payload_of(66_000)
    handle = await rig.owner.register_data_pinned(payload)
    await rig.consumer.ref_handle(handle)
    first, second, third = [(await rig.consumer.get(handle))[1] for _ in range(3)]
    await rig.consumer.release(handle, first)
    await rig.consumer.release(handle, second)
    assert slots(rig.owner) == 1  # the third still reads
    with pytest.raises(orbit.UnknownHandle):
        await rig.consumer.ref_handle(handle)  # without references it does not come back
    await rig.consumer.detach(handle, third)
    await until(lambda: slots(rig.owner) == 0)


async def concurrent_releases_free_once(rig: Rig) -> None:
    payload = payload_of(66_000)
    handle = await rig.owner.register_data_pinned(payload)
    taken = [(await rig.consumer.get(handle))[1] for _ in range(2)]
    await asyncio.gather(*(rig.consumer.release(handle, lease) for lease in taken))
    await until(lambda: slots(rig.owner) == 0)


async def own_handle_is_copied(rig: Rig) -> None:
    payload = payload_of(100_000)
    handle = await rig.owner.register_data_pinned(payload)
    data, lease = await rig.owner.get(handle)
    assert (data == payload, lease.path) == (True, PathName.LOCAL)
    await rig.owner.release(handle, lease)
    await until(lambda: slots(rig.owner) == 0)


async def region_serves_both_paths(rig: Rig) -> None:
    memory = bytearray(payload_of(2 * MIB))
    async with await rig.owner.register_owned(memory) as guard:
        assert guard.registered is rig.rdma
        handle = await rig.owner.register_data_in_region(guard, range(4099, 4099 + MIB))
        part = bytes(memory[4099 : 4099 + MIB])
        lease = await rig.fetched(handle, part)
        assert (lease.path, lease.reason) == expected(rig)
        lease = await rig.fetched(handle, part, transport="tcp")
        assert (lease.path, lease.reason) == ("tcp", "asked")
        await rig.owner.withdraw(handle)
    memory.extend(b"free again")


async def region_range_is_checked(rig: Rig) -> None:
    memory = bytearray(10_000)
    async with await rig.owner.register_owned(memory) as guard:
        register = rig.owner.register_data_in_region
        for wrong in (range(10_001), range(9_999, 10_001), range(10_001, 10_001)):
            with pytest.raises(orbit.OutOfRange):
                await register(guard, wrong)
        for wrong in (range(0, 10, 2), range(-1, 5)):
            with pytest.raises(orbit.UsageError):
                await register(guard, wrong)
        for fine in (range(10_000), range(9_999, 10_000), range(10_000, 10_000)):
            await rig.owner.withdraw(await register(guard, fine))
    assert slots(rig.owner) == 0


async def reads_are_refused_once_the_region_is_gone(rig: Rig) -> None:
    guard = await rig.owner.register_owned(bytearray(payload_of(MIB)))
    handle = await rig.owner.register_data_in_region(guard)
    assert await guard.unregister(0.01) is orbit.Deregistered.DRAIN_TIMED_OUT
    assert await guard.deregistered() is orbit.Deregistered.DRAIN_TIMED_OUT
    with pytest.raises(orbit.UnknownHandle):
        await rig.consumer.get(handle)
    with pytest.raises(orbit.ClosedError):
        await rig.owner.register_data_in_region(guard)


async def in_place_until_the_slot_goes(rig: Rig) -> None:
    memory = bytearray(payload_of(3 * MIB))
    wanted = bytes(memory)
    if not rig.rdma:
        with pytest.raises(orbit.RegisterOwnedError) as refused:
            await rig.owner.register_data_in_place(memory)
        assert refused.value.buffer is memory
        return
    handle = await rig.owner.register_data_in_place(memory)
    with pytest.raises(BufferError):
        memory.extend(b"x")
    data, lease = await rig.consumer.get(handle)
    assert (data == wanted, lease.path) == (True, PathName.RDMA)
    await rig.consumer.release(handle, lease)
    await until(lambda: slots(rig.owner) == 0 and _resizable(memory))
    assert _regions(rig.owner) == 0


async def scattered_ranges_are_one_payload(rig: Rig) -> None:
    one, two = bytearray(payload_of(MIB, 1)), bytearray(payload_of(MIB, 2))
    async with (
        await rig.owner.register_owned(one) as first,
        await rig.owner.register_owned(two) as second,
    ):
        pieces = [first.slice(10, 100_000), second.slice(5, 7), first.slice(500_000, 123_457)]
        wanted = bytes(one[10:100_010] + two[5:12] + one[500_000:623_457])
        handle = await rig.owner.register_data(pieces)
        lease = await rig.fetched(handle, wanted)
        assert (lease.path, lease.reason) == expected(rig)
        left, right = bytearray(65_537), bytearray(len(wanted) - 65_537)
        lease = await rig.consumer.get_into(handle, [left, right])
        assert bytes(left + right) == wanted
        await rig.consumer.detach(handle, lease)
        lease = await rig.fetched(handle, wanted, transport="tcp")
        await rig.owner.withdraw(handle)


async def pinned_writer_is_filled_without_a_copy(rig: Rig) -> None:
    payload = payload_of(300_007)
    handle = await rig.owner.register_data_pinned(payload)
    if not rig.rdma:
        with pytest.raises(orbit.PathUnavailable):
            await rig.consumer.alloc_pinned_writer(len(payload))
        await rig.owner.withdraw(handle)
        return
    with await rig.consumer.alloc_pinned_writer(len(payload)) as writer:
        lease = await rig.consumer.get_into(handle, writer)
        assert (lease.path, writer.view == payload) == (PathName.RDMA, True)
        assert "copy" not in lease.phases
        await rig.consumer.detach(handle, lease)
        lease = await rig.consumer.get_into(handle, writer, transport="tcp")
        assert (lease.path, writer.view == payload) == (PathName.TCP, True)
        await rig.consumer.detach(handle, lease)
    await rig.owner.withdraw(handle)


async def get_pinned_on_both_paths(rig: Rig) -> None:
    payload = payload_of(300_007)
    handle = await rig.owner.register_data_pinned(payload)
    for transport in ("rdma", "tcp") if rig.rdma else ("auto",):
        if not rig.rdma:
            with pytest.raises(orbit.PathUnavailable):
                await rig.consumer.get_pinned(handle, transport=transport)
            continue
        pinned, lease = await rig.consumer.get_pinned(handle, transport=transport)
        with pinned:
            assert (pinned.view == payload, lease.path) == (True, transport)
        await rig.consumer.detach(handle, lease)
    await rig.owner.withdraw(handle)


async def dropped_pinned_memory_returns_its_space(rig: Rig) -> None:
    if not rig.rdma:
        return  # there is none
    used = _arena_used(rig.consumer)
    handle = await rig.owner.register_data_pinned(payload_of(300_007))
    for _ in range(50):
        pinned, lease = await rig.consumer.get_pinned(handle)
        pinned.free()
        await rig.consumer.detach(handle, lease)
    assert _arena_used(rig.consumer) == used
    await rig.owner.withdraw(handle)


async def put_fills_a_destination(rig: Rig) -> None:
    for nbytes in (1, 70_000, 2 * MIB + 3):
        memory = bytearray(nbytes + 10)
        handle = await rig.owner.register_destination(memory)
        payload = payload_of(nbytes, 3)
        put = await rig.consumer.put(handle, payload, offset=4)
        assert (put.nbytes, put.offset) == (nbytes, 4)
        small = nbytes < 64 * KIB
        assert put.path is (PathName.TCP if small else rig.path), put
        heard = await rig.owner.wait_put(handle, timeout=60)
        assert (heard.offset, heard.nbytes, heard.path) == (4, nbytes, put.path)
        with pytest.raises(orbit.WrongDirection):
            await rig.consumer.get(handle)
        await rig.owner.withdraw(handle)
        assert bytes(memory) == bytes(4) + payload + bytes(6)


async def put_by_either_transport_on_demand(rig: Rig) -> None:
    memory = bytearray(MIB)
    handle = await rig.owner.register_destination(memory)
    for transport in ("tcp", "rdma") if rig.rdma else ("tcp",):
        put = await rig.consumer.put(handle, [b"\1" * 300_001, b"\2" * 7], transport=transport)
        assert (put.path, put.nbytes) == (transport, 300_008)
        await rig.owner.wait_put(handle, timeout=60)
    with pytest.raises(orbit.OutOfRange):
        await rig.consumer.put(handle, b"xx", offset=MIB - 1)
    payload = await rig.owner.register_data(b"data")
    with pytest.raises(orbit.WrongDirection):
        await rig.consumer.put(payload, b"data")
    await rig.owner.withdraw(payload)
    await rig.owner.withdraw(handle)
    assert memory[:300_008] == b"\1" * 300_001 + b"\2" * 7


async def get_many_is_all_or_nothing(rig: Rig) -> None:
    payloads = [payload_of(1_000 + 40_000 * n, n) for n in range(6)]
    handles = [await rig.owner.register_data_pinned(payload) for payload in payloads]
    results = await rig.consumer.get_many(handles)
    assert [bytes(data or b"") for data, _ in results] == payloads
    for handle, (_, lease) in zip(handles, results, strict=True):
        await rig.consumer.detach(handle, lease)
    dests = [bytearray(len(payload)) for payload in payloads]
    results = await rig.consumer.get_many(handles, into=dests)
    assert dests == payloads
    for handle, (_, lease) in zip(handles, results, strict=True):
        await rig.consumer.release(handle, lease)
    with pytest.raises(orbit.UnknownHandle):
        await rig.consumer.get_many([handles[0], await rig.owner.register_data(b"there")])
    await rig.settled()
    rest = slots(rig.owner)
    assert rest == 1


async def ttl_frees_what_nobody_fetched(rig: Rig) -> None:
    before = slots(rig.owner)
    options = orbit.RegisterOptions(ttl=1.5)
    handles = [await rig.owner.register_data_pinned(payload_of(70_000), options) for _ in range(5)]
    lease = (await rig.consumer.get(handles[0]))[1]
    await until(lambda: slots(rig.owner) == before)
    with pytest.raises(orbit.UnknownHandle):
        await rig.consumer.get(handles[1])
    await rig.consumer.release(handles[0], lease)  # late: no effect


async def consumer_without_the_offer_field(rig: Rig) -> None:
    """An older consumer: no offer, no deadline."""
    payload = payload_of(100_000)
    handle = await rig.owner.register_data_pinned(payload)
    session = await rig.consumer._rendezvous.session_to(handle.worker_id)  # type: ignore[union-attr]
    reply = await session.call(AcquireRequest(handle), AcquireReply)
    assert reply.ready is not None
    assert (reply.ready.reason, reply.ready.lease_timeout_ms) == ("no_offer", 0)
    await session.call(DetachRequest(handle, reply.ready.lease_id), EmptyReply)
    await rig.owner.withdraw(handle)


async def failed_read_falls_back_once(rig: Rig) -> None:
    if not rig.rdma:
        return  # there is nothing to fall back to
    payload = payload_of(200_003)
    handle = await rig.owner.register_data_pinned(payload)
    rig.mark()
    rig.hooks["rdma"].fail_pulls = 1
    lease = await rig.fetched(handle, payload)
    assert (lease.path, lease.reason) == ("tcp", "get_failed")
    assert rig.decided(rig.consumer) == {("tcp", "get_failed"): 1}
    rig.hooks["rdma"].fail_pulls = 1
    with pytest.raises(orbit.PathFailed):
        await rig.consumer.get(handle, transport="rdma")
    await rig.settled()
    await rig.owner.withdraw(handle)


async def both_paths_failing_leaves_no_lease(rig: Rig) -> None:
    payload = payload_of(200_003)
    handle = await rig.owner.register_data_pinned(payload)
    for hooks in rig.hooks.values():
        hooks.fail_pulls = 1
    with pytest.raises(orbit.TransferFailed if rig.rdma else orbit.PathFailed):
        await rig.consumer.get(handle)
    await rig.settled()
    lease = await rig.fetched(handle, payload)
    assert lease.path is rig.path
    await rig.owner.withdraw(handle)


async def malformed_descriptors_fall_back(rig: Rig) -> None:
    if not rig.rdma:
        return  # no descriptor ever travels
    payload = payload_of(100_003)
    handle = await rig.owner.register_data_pinned(payload)
    for name, garble in (
        ("unknown backend", lambda d: b"\x63" + d[1:]),
        ("truncated", lambda d: d[:-1]),
        ("trailing byte", lambda d: d + b"\0"),
        ("lying key length", lambda d: d[:27] + b"\xff\x0f" + d[29:]),
        ("unknown flags", lambda d: d[:2] + b"\1" + d[3:]),
        ("no bytes", lambda d: d[:19] + bytes(8) + d[27:]),
    ):
        rig.mark()
        rig.hooks["rdma"].garble = garble
        lease = await rig.fetched(handle, payload)
        assert (lease.path, lease.reason) == ("tcp", "decode_error"), name
        assert rig.decided(rig.consumer) == {("tcp", "decode_error"): 1}, name
        await rig.settled()
    await rig.owner.withdraw(handle)


async def dropped_get_returns_its_lease(rig: Rig) -> None:
    handle = await rig.owner.register_data_pinned(payload_of(8 * MIB))
    for delay in (0, 1, 3, 8, 20):
        task = asyncio.ensure_future(rig.consumer.get(handle))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await rig.settled()
    await rig.owner.withdraw(handle)


async def reader_of_a_withdrawn_payload_gets_an_error(rig: Rig) -> None:
    handle = await rig.owner.register_data_pinned(payload_of(8 * MIB))
    hooks = rig.hooks["rdma" if rig.rdma else "tcp"]
    hooks.pull_delay_s = 0.3
    task = asyncio.ensure_future(rig.consumer.get(handle))
    await until(lambda: leases(rig.owner) == 1)
    await rig.owner.withdraw(handle)
    hooks.pull_delay_s = 0.0
    with pytest.raises(orbit.OrbitError):
        await task
    await rig.settled()


async def large_calls_travel_both_ways(rig: Rig) -> None:
    payload = payload_of(MIB + 9)
    rig.owner.handler("mirror")(_mirror)
    peer = rig.consumer.add_peer(rig.owner.address)
    reply = await rig.consumer.unary(peer, "mirror", payload, timeout=120)
    assert reply == payload[::-1]
    small = await rig.consumer.unary(peer, "mirror", b"abc", timeout=120)
    assert small == b"cba"
    await until(lambda: slots(rig.owner) == slots(rig.consumer) == 0)


def _mirror(message: Any) -> bytes:
    return bytes(message.payload)[::-1]


def _resizable(memory: bytearray) -> bool:
    """Whether nobody holds an export of it any more."""
    try:
        memory.append(0)
    except BufferError:
        return False
    return True


def _regions(node: orbit.Node) -> int:
    return node.statistics().memory.regions


def _arena_used(node: orbit.Node) -> int:
    return node.statistics().memory.arena_bytes_used


SHARED: tuple[Scenario, ...] = (
    pinned_payloads_take_the_path,
    heap_slot_is_read_in_chunks,
    below_the_minimum_is_read_in_chunks,
    empty_payload,
    metadata_takes_no_lock,
    get_into_fills_the_front,
    large_get_into,
    detach_and_get_again,
    references_and_locks_both_must_be_zero,
    concurrent_releases_free_once,
    own_handle_is_copied,
    region_serves_both_paths,
    region_range_is_checked,
    reads_are_refused_once_the_region_is_gone,
    in_place_until_the_slot_goes,
    scattered_ranges_are_one_payload,
    pinned_writer_is_filled_without_a_copy,
    get_pinned_on_both_paths,
    dropped_pinned_memory_returns_its_space,
    put_fills_a_destination,
    put_by_either_transport_on_demand,
    ttl_frees_what_nobody_fetched,
    consumer_without_the_offer_field,
    failed_read_falls_back_once,
    both_paths_failing_leaves_no_lease,
    malformed_descriptors_fall_back,
    dropped_get_returns_its_lease,
    reader_of_a_withdrawn_payload_gets_an_error,
    large_calls_travel_both_ways,
    get_many_is_all_or_nothing,
)


# --- on nodes of their own ------------------------------------------------------------------------


async def kill_switch_at_one_side(rig: Rig) -> None:
    payload = payload_of(MIB)
    handle = await rig.owner.register_data_pinned(payload)
    lease = await rig.fetched(handle, payload)
    assert (lease.path, lease.reason) == ("tcp", "kill_switch" if rig.rdma else "not_configured")
    if rig.rdma:
        with pytest.raises(orbit.PathUnavailable) as caught:
            await rig.consumer.get(handle, transport="rdma")
        assert caught.value.reason == "kill_switch"
    await rig.owner.withdraw(handle)


async def spent_budget_stages_in_plain_memory(rig: Rig) -> None:
    payload = payload_of(MIB)
    rig.mark()
    handle = await rig.owner.register_data_pinned(payload)
    assert rig.decided(rig.owner) == {("tcp", "budget"): 1}
    lease = await rig.fetched(handle, payload)
    assert (lease.path, lease.reason) == ("tcp", "not_pinned")
    buffer = bytearray(MIB)
    with pytest.raises(orbit.RegisterOwnedError) as caught:
        await rig.owner.register_owned(buffer)
    assert caught.value.buffer is buffer
    assert isinstance(caught.value.cause, orbit.BudgetExceeded)
    await rig.owner.withdraw(handle)


async def abandoned_leases_are_reaped(rig: Rig) -> None:
    """`lease_timeout` 0.3 s: lock and one reference go, on either path."""
    payload = payload_of(100_000)
    before = rig.owner.statistics().slots.leases_reaped
    handles = []
    for transport in ("auto", "tcp"):
        handle = await rig.owner.register_data_pinned(payload)
        _, lease = await rig.consumer.get(handle, transport=transport)
        handles.append((handle, lease))
    await until(lambda: slots(rig.owner) == 0)
    assert rig.owner.statistics().slots.leases_reaped - before == 2
    for handle, lease in handles:
        await rig.consumer.release(handle, lease)  # late: no effect
        with pytest.raises(orbit.UnknownHandle):
            await rig.consumer.metadata(handle)


async def renewal_carries_a_slow_get(rig: Rig) -> None:
    """`lease_timeout` 0.4 s, and the pull takes 1.4 s more than it needs, on either path."""
    payload = payload_of(200_000)
    handle = await rig.owner.register_data_pinned(payload)
    for hooks in rig.hooks.values():
        hooks.pull_delay_s = 1.4
    for transport in ("auto", "tcp"):
        data, lease = await rig.consumer.get(handle, transport=transport)
        assert data == payload
        assert lease.path is (rig.path if transport == "auto" else PathName.TCP)
        await rig.consumer.detach(handle, lease)
    assert rig.owner.statistics().slots.leases_reaped == 0
    await rig.owner.withdraw(handle)


async def sub_millisecond_timeout_is_clamped(rig: Rig) -> None:
    handle = await rig.owner.register_data_pinned(payload_of(100_000))
    session = await rig.consumer._rendezvous.session_to(handle.worker_id)  # type: ignore[union-attr]
    reply = await session.call(AcquireRequest(handle, lease_ms=1), AcquireReply)
    assert reply.ready is not None
    assert reply.ready.lease_timeout_ms == 1
    await until(lambda: slots(rig.owner) == 0)  # it ends: the deadline is armed on both sides


async def transparent_staging_takes_rdma_once_warm(rig: Rig) -> None:
    payload = payload_of(MIB)
    rig.owner.handler("take")(lambda message: bytes(message.payload[:3]))
    peer = rig.consumer.add_peer(rig.owner.address)

    async def decisions() -> set[tuple[str, str]]:
        rig.mark()
        staged = slots(rig.consumer)
        assert await rig.consumer.unary(peer, "take", payload, timeout=120) == payload[:3]
        await until(lambda: slots(rig.consumer) == staged)
        return set(rig.decided(rig.owner)) | set(rig.decided(rig.consumer))

    cold = await decisions()
    assert not any(path == "rdma" for path, _ in cold)
    assert rig.consumer.statistics().memory.arenas == 0  # the stager never maps
    warming = await rig.consumer.register_data_pinned(b"x" * 70_000)
    warm = await decisions()
    assert (("rdma", "ok") in warm) is rig.rdma
    await rig.consumer.withdraw(warming)


async def shutdown_demotes_and_finishes_what_was_admitted(rig: Rig) -> None:
    """A TCP pull that was admitted before the shutdown ends with the right bytes; then the regions'
    latches resolve and the pool is gone.
    """
    payload = payload_of(6 * MIB)
    handle = await rig.owner.register_data_pinned(payload)
    guard = await rig.owner.register_owned(bytearray(MIB))
    watch = guard.watch()
    rig.hooks["tcp"].pull_delay_s = 0.5
    task = asyncio.ensure_future(rig.consumer.get(handle, transport="tcp"))
    await until(lambda: leases(rig.owner) == 1)
    ending = asyncio.ensure_future(rig.owner.graceful_shutdown(orbit.ShutdownPolicy.timeout(60.0)))
    data, lease = await task
    assert data == payload
    await rig.consumer.release(handle, lease)
    await ending
    assert await asyncio.wait_for(watch.deregistered(), 60) in orbit.Deregistered
    assert rig.owner.statistics().registered_bytes == 0
    with pytest.raises(orbit.ClosedError):
        await rig.owner.register_data(b"late")


async def shutdown_is_shared_and_bounded(rig: Rig) -> None:
    """A lease that nobody gives back does not hold it longer than it may take."""
    handle = await rig.owner.register_data_pinned(payload_of(MIB))
    _, lease = await rig.consumer.get(handle)
    policy = orbit.ShutdownPolicy.timeout(0.5)
    await asyncio.gather(*(rig.owner.graceful_shutdown(policy) for _ in range(3)))
    assert leases(rig.owner) == 0
    await rig.consumer.release(handle, lease)


OFF: Knobs = {"rendezvous": {"enabled": False}}
SHORT_LEASE: Knobs = {"rendezvous": {"lease_timeout": 0.3}}
OWN: dict[str, Needs] = {
    "owner_kill_switch": Needs(kill_switch_at_one_side, OFF, {}),
    "consumer_kill_switch": Needs(kill_switch_at_one_side, {}, OFF),
    "spent_budget": Needs(
        spent_budget_stages_in_plain_memory,
        {"pool": {"registered_bytes_budget": 4096}},
        {},
        rdma_only=True,
    ),
    "reaper": Needs(abandoned_leases_are_reaped, SHORT_LEASE, SHORT_LEASE),
    "renewal": Needs(
        renewal_carries_a_slow_get,
        {"rendezvous": {"lease_timeout": 0.4}},
        {"rendezvous": {"lease_timeout": 0.4}},
    ),
    "clamp": Needs(
        sub_millisecond_timeout_is_clamped, {"rendezvous": {"lease_timeout": 0.00001}}, {}
    ),
    "transparent": Needs(transparent_staging_takes_rdma_once_warm, {}, {}),
    "shutdown": Needs(shutdown_demotes_and_finishes_what_was_admitted, {}, {}),
    "shutdown_bounded": Needs(shutdown_is_shared_and_bounded, {}, {}),
}
