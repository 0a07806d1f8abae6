"""Leases on ranges of a region: who gets in whose way, what a source's room does, what is refused,
and when ranges, room and region are free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from orbit.errors import (
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    OutOfRange,
    PathFailed,
    PathUnavailable,
    PeerRefused,
    RangeBusy,
    UnknownHandle,
    Unquiesced,
    UsageError,
    WrongDirection,
)
from orbit.memory.range_locks import LOCKS
from orbit.model import (
    Deregistered,
    Direction,
    Handle,
    PathName,
    PathReason,
    SlotId,
    WorkerId,
)
from orbit.protocol.messages import AcquireRequest, DetachRequest, RdmaOffer
from orbit.protocol.paths import refusal_of, refused_path
from orbit.runtime import retained
from orbit.runtime.peer_calls import RANGES_MAX
from orbit.runtime.ranged import DirectSource, Hold
from orbit.runtime.transferring import typed_refusal
from orbit.testing.clock import run_virtual
from orbit.transport.interface import Span

from .ranged_rig import READ, REGION_BYTES, WRITE, RangedRig, Room

KIB = 1024


@pytest.fixture(autouse=True)
def no_locks_of_others() -> Iterator[None]:
    LOCKS.forget()
    yield
    LOCKS.forget()


# --- ranges and locks -----------------------------------------------------------------------------


def test_disjoint_ranges_go_on_and_overlapping_ones_are_refused() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        read = await rig.acquire(READ, (0, 100))
        beside = await rig.acquire(READ, (50, 100), session=rig.other)
        write = await rig.acquire(WRITE, (150, 10), session=rig.other)
        for direction, ranges in (
            (WRITE, [(99, 1)]),
            (WRITE, [(500, 10), (149, 2)]),
            (READ, [(159, 1)]),
            (WRITE, [(150, 1)]),
        ):
            with pytest.raises(RangeBusy) as caught:
                await rig.acquire(direction, *ranges)
            assert "0x" not in str(caught.value), "a peer was told an address"
        assert await rig.done(read.lease_id)
        with pytest.raises(RangeBusy):
            await rig.acquire(WRITE, (99, 1))  # the other one still reads there
        assert await rig.done(beside.lease_id, session=rig.other)
        again = await rig.acquire(WRITE, (0, 150))
        for lease, session in ((write, rig.other), (again, rig.session)):
            await rig.done(lease.lease_id, transferred=False, session=session)
        assert LOCKS.held == 0
        await rig.close()

    run_virtual(main())


def test_access_by_the_cpu_and_leases_are_in_each_others_way() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        with_cpu = LOCKS.lock(rig.region.memory.address + 10, 10, False, "CPU access")
        with pytest.raises(RangeBusy, match="CPU access"):
            await rig.acquire(READ, (0, 11))
        lease = await rig.acquire(READ, (0, 10))
        with_cpu.release()
        with pytest.raises(RangeBusy, match="a peer's read"):
            LOCKS.lock(rig.region.memory.address, 1, False, "CPU access")
        await rig.done(lease.lease_id)
        await rig.close()

    run_virtual(main())


def test_what_a_request_for_ranges_may_not_say() -> None:
    async def main() -> None:
        rig = await RangedRig().open([READ])
        refused: list[tuple[type[OrbitError], Any]] = [
            (WrongDirection, rig.acquire(WRITE, (0, 1))),
            (OutOfRange, rig.acquire(READ, (REGION_BYTES - 1, 2))),
            (OutOfRange, rig.acquire(READ, (0, 1), (REGION_BYTES, 1))),
            (PeerRefused, rig.acquire(READ, (0, 0))),
            (PeerRefused, rig.acquire(READ, (0, 1), (5, 1), nbytes=3)),
            (UsageError, rig.ask(AcquireRequest(rig.handle))),
            (PeerRefused, rig.acquire(READ, (0, 10), runs=[(0, 9)])),
            (PeerRefused, rig.acquire(READ, (0, 10), runs=[(0, 10), (1, 0)])),
            (PeerRefused, rig.acquire(READ, (0, 10), runs=[(0, 5), (1, 1 << 60)])),
            (
                PeerRefused,
                rig.ask(AcquireRequest(rig.handle, RdmaOffer(("verbs",)), nbytes=9, ranged=True)),
            ),
        ]
        for kind, asking in refused:
            with pytest.raises(kind) as caught:
                await asking
            assert type(caught.value) is kind
        assert LOCKS.held == 0
        assert rig.owner.statistics().leases_held == 0
        await rig.close()
        with pytest.raises(UnknownHandle):
            await rig.acquire(READ, (0, 1))

    run_virtual(main())


def test_a_lease_has_no_more_ranges_than_can_be_looked_at() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        most = [(2 * n, 1) for n in range(RANGES_MAX)]
        lease = await rig.acquire(WRITE, *most)
        with pytest.raises(RangeBusy):
            await rig.acquire(READ, most[-1])
        between = await rig.acquire(WRITE, (1, 1))
        for held in (lease, between):
            assert await rig.done(held.lease_id)
        with pytest.raises(PeerRefused, match="more than"):
            await rig.acquire(READ, *most, (1, 1))
        await rig.close()

    run_virtual(main())


def test_a_refused_range_is_typed_again_at_its_requester() -> None:
    handle = Handle(WorkerId(1), SlotId(1))
    for error in (RangeBusy("a peer's read", shared=True), UsageError("it cannot be")):
        typed = typed_refusal(PeerRefused(error.code, str(error)), handle)
        assert type(typed) is type(error)
        assert str(typed) == str(error)
    refused = refused_path(PathReason.PORT_DOWN)
    typed = typed_refusal(refused, handle)
    assert isinstance(typed, PathUnavailable)
    assert typed.reason == PathReason.PORT_DOWN


def test_ranges_to_be_written_do_not_overlap_each_other() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        with pytest.raises(UsageError, match="overlap"):
            await rig.acquire(WRITE, (0, 10), (9, 2))
        lease = await rig.acquire(READ, (0, 10), (9, 2))
        assert lease.total_len == 12
        assert await rig.done(lease.lease_id)
        await rig.close()

    run_virtual(main())


def test_small_reads_ride_on_the_answer() -> None:
    async def main() -> None:
        rig = await RangedRig(rdma=False).open()
        rig.buffer[100:104] = b"abcd"
        answer = await rig.acquire(READ, (102, 2), (100, 2), inline_max=100)
        assert answer.inline == b"cdab"
        assert await rig.done(answer.lease_id)
        await rig.close()

    run_virtual(main())


# --- RDMA -----------------------------------------------------------------------------------------


def test_runs_reach_the_rails_over_the_ranges_in_their_order() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        runs = [(3, 30), (0, 70), (3, 20)]
        answer = await rig.acquire(WRITE, (500, 60), (0, 60), runs=runs)
        sizes, asked, direction = rig.rdma.asked[0]
        assert sizes == (60, 60)
        assert [(run.array, run.nbytes) for run in asked] == runs
        assert direction is WRITE
        assert (answer.total_len, len(answer.rest)) == (120, 2)
        assert await rig.done(answer.lease_id)
        await rig.close()

    run_virtual(main())


@pytest.mark.parametrize(("pieces_max", "taken"), [(3, False), (4, True)])
def test_each_cut_of_a_run_counts_as_a_grant(pieces_max: int, taken: bool) -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        # Runs of 30, 30 and 60 bytes over ranges of 60, 40 and 20: the last one is cut in two.
        asking = rig.acquire(
            READ,
            (0, 60),
            (100, 40),
            (200, 20),
            runs=[(0, 30), (1, 30), (0, 60)],
            pieces_max=pieces_max,
        )
        if taken:
            await rig.done((await asking).lease_id)
        else:
            with pytest.raises(PeerRefused) as caught:
                await asking
            assert caught.value.reason == "rdma.no_offer"
        await rig.close()

    run_virtual(main())


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_done_is_confirmed_only_with_every_receipt(direction: Direction) -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        whole = await rig.acquire(direction, (0, 9), runs=[(0, 9)])
        assert await rig.done(whole.lease_id)
        rig.rdma.missing = True
        torn = await rig.acquire(direction, (0, 9), runs=[(0, 9)])
        with pytest.raises(PathFailed, match="receipts"):
            await rig.done(torn.lease_id)
        given_up = await rig.acquire(direction, (0, 9), runs=[(0, 9)])
        assert not await rig.done(given_up.lease_id, transferred=False)
        with pytest.raises(LeaseError):
            await rig.done(whole.lease_id)
        assert LOCKS.held == 0
        await rig.close()

    run_virtual(main())


def test_rdma_that_cannot_be_had_is_refused_with_its_reason_and_never_answered_by_tcp() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        rig.rdma.faults.expose = PathReason.CONNECT_FAILED
        found = []
        with pytest.raises(PeerRefused) as caught:
            await rig.acquire(READ, (0, 9), runs=[(7, 9)])
        found.append(caught.value)
        rig.owner.gate()
        with pytest.raises(PeerRefused) as caught:
            await rig.acquire(READ, (0, 9), runs=[(0, 9)])
        found.append(caught.value)
        await rig.close()
        plain = await RangedRig(rdma=False).open()
        with pytest.raises(PeerRefused) as caught:
            await plain.acquire(READ, (0, 9), runs=[(0, 9)])
        found.append(caught.value)
        lease = await plain.acquire(READ, (0, 9))
        assert lease.transfer_id
        await plain.done(lease.lease_id)
        await plain.close()
        for refused, reason in zip(
            found,
            (PathReason.CONNECT_FAILED, PathReason.DRAINING, PathReason.NO_DEVICE),
            strict=True,
        ):
            typed = refusal_of(refused)
            assert isinstance(typed, PathUnavailable)
            assert typed.reason == reason
        assert LOCKS.held == 0

    run_virtual(main())


# --- ends -----------------------------------------------------------------------------------------


def test_the_end_of_an_epoch_gives_ranges_and_room_back() -> None:
    async def main() -> None:
        room = Room(REGION_BYTES)
        rig = await RangedRig().open(source=DirectSource(room))
        await rig.acquire(WRITE, (0, 100), runs=[(0, 100)])
        kept = await rig.acquire(WRITE, (200, 100), session=rig.other)
        assert room.free == REGION_BYTES - 200
        await rig.owner.end_session(rig.session)
        again = await rig.acquire(WRITE, (0, 200), session=rig.other)
        for lease in (kept, again):
            await rig.done(lease.lease_id, session=rig.other)
        assert room.free == REGION_BYTES
        await rig.close()

    run_virtual(main())


def test_an_end_that_is_not_proven_keeps_range_room_and_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def main() -> None:
        room = Room(REGION_BYTES)
        rig = await RangedRig().open(source=DirectSource(room))
        lease = await rig.acquire(READ, (0, 100), runs=[(0, 100)])
        rig.rdma.unproven = Unquiesced("the grants", 100, "a queue pair did not drain")
        with pytest.raises(Unquiesced):
            await rig.done(lease.lease_id)
        with pytest.raises(RangeBusy):
            await rig.acquire(WRITE, (99, 1))
        other = await rig.acquire(WRITE, (100, 1))
        await rig.done(other.lease_id)
        assert room.free == REGION_BYTES - 100
        rig.registering.retire_region(rig.handle)
        with pytest.raises(Unquiesced):
            await rig.region.unregister()
        assert not rig.free
        assert LOCKS.held == 1

    run_virtual(main())
    assert [entry.nbytes for entry in kept] == [100, REGION_BYTES]  # the range; then the region


@pytest.mark.parametrize("forced", [False, True])
def test_a_retired_region_waits_for_its_leases_or_ends_them_in_time(forced: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rig = await RangedRig().open()
        lease = await rig.acquire(READ, (0, 100), runs=[(0, 100)])
        rig.registering.retire_region(rig.handle)
        rig.registering.retire_region(rig.handle)
        with pytest.raises(UnknownHandle):
            await rig.acquire(READ, (0, 1))
        ending = rig.region.unregister(loop.time() + 1.0 if forced else None)
        await asyncio.sleep(0.5)
        assert not ending.done()
        if forced:
            assert await ending is Deregistered.DRAIN_TIMED_OUT
            assert not await rig.done(lease.lease_id)
        else:
            assert await rig.done(lease.lease_id)
            assert await ending is Deregistered.DRAINED
        assert rig.free
        assert LOCKS.held == 0

    run_virtual(main())


def test_a_region_on_its_way_out_takes_no_lease() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        lease = await rig.acquire(READ, (0, 100))
        ending = rig.region.unregister()
        with pytest.raises(UnknownHandle):
            await rig.acquire(READ, (200, 1))
        rig.registering.retire_region(rig.handle)
        await rig.done(lease.lease_id)
        await ending

    run_virtual(main())


def test_a_confirmed_end_of_a_lease_that_is_ending_waits_for_it() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        gate = asyncio.Event()
        retract = rig.rdma.retract

        async def slow(*args: Any, **named: Any) -> None:
            await gate.wait()
            await retract(*args, **named)

        rig.rdma.retract = slow  # type: ignore[method-assign]
        lease = await rig.acquire(WRITE, (0, 9), runs=[(0, 9)])
        first = asyncio.ensure_future(rig.done(lease.lease_id, transferred=False))
        second = asyncio.ensure_future(rig.done(lease.lease_id, transferred=False))
        await asyncio.sleep(0.1)
        assert not first.done()
        assert not second.done()
        gate.set()
        assert [await first, await second] == [False, False]
        assert not (await rig.ask(DetachRequest(rig.handle, lease.lease_id, False))).in_place
        await rig.close()

    run_virtual(main())


# --- the room of a source -------------------------------------------------------------------------


def test_a_source_without_room_refuses_and_leaves_nothing_locked() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        room = Room(100)
        rig = await RangedRig().open(source=DirectSource(room))
        lease = await rig.acquire(READ, (0, 60), (200, 40))
        assert 0 < room.deadlines[0] - loop.time() <= 5.0
        with pytest.raises(DeadlineExceeded):
            await rig.acquire(READ, (300, 1))
        await rig.done(lease.lease_id)
        lease = await rig.acquire(WRITE, (300, 100))
        await rig.done(lease.lease_id)
        assert room.free == 100
        assert LOCKS.held == 0
        await rig.close()

    run_virtual(main())


def test_room_that_comes_after_the_end_of_its_lease_is_given_back() -> None:
    async def main() -> None:
        room = Room(100)
        rig = RangedRig()
        gate = asyncio.Event()

        class Slow(DirectSource):
            async def admit(self, *args: Any) -> Hold:
                await gate.wait()
                return await super().admit(*args)

        await rig.open(source=Slow(room))
        asking = asyncio.ensure_future(rig.acquire(WRITE, (0, 50)))
        await asyncio.sleep(0.1)
        await rig.owner.end_session(rig.session)
        assert LOCKS.held == 0
        gate.set()
        with pytest.raises(LeaseError):
            await asking
        assert room.free == 100
        await rig.close()

    run_virtual(main())


class Copies:
    """A source whose peers reach a private copy."""

    def __init__(self) -> None:
        self.held = 0
        self.fail = False

    async def admit(self, part: Span, direction: Direction, grants: int, deadline: float) -> Hold:
        self.held += 1
        copy = bytearray(b"".join(piece.view for piece in part.pieces))
        return PrivateCopy(self, part, copy)


class PrivateCopy:
    def __init__(self, source: Copies, part: Span, copy: bytearray) -> None:
        self.source = source
        self.part = part
        self.span = Span(memoryview(copy))
        self.finished = False

    async def finish(self) -> None:
        if self.source.fail:
            raise PathFailed(PathName.TCP, PathReason.GET_FAILED, "the copy failed")
        await asyncio.sleep(0.1)
        self.finished = True

    def give_back(self) -> None:
        self.source.held -= 1
        self.part = Span(memoryview(b""))  # the frames of an error may keep this object
        self.source_finished = self.finished


def test_a_private_copy_is_what_peers_reach_and_done_waits_for_what_follows() -> None:
    async def main() -> None:
        copies = Copies()
        rig = await RangedRig(rdma=False).open(source=copies)
        rig.buffer[5:9] = b"good"
        answer = await rig.acquire(READ, (5, 4), inline_max=10)
        rig.buffer[5:9] = b"late"
        assert answer.inline == b"good"
        await rig.done(answer.lease_id)
        write = await rig.acquire(WRITE, (0, 4))
        ending = asyncio.ensure_future(rig.done(write.lease_id))
        await asyncio.sleep(0.05)
        assert not ending.done()
        with pytest.raises(RangeBusy):
            await rig.acquire(READ, (3, 1))
        assert await ending
        assert copies.held == 0
        write = await rig.acquire(WRITE, (0, 4))
        copies.fail = True
        with pytest.raises(PathFailed, match="the copy failed"):
            await rig.done(write.lease_id)
        assert copies.held == 0
        await rig.close()

    run_virtual(main())


# --- the end of the node --------------------------------------------------------------------------


def test_ranged_memory_is_not_moved_and_goes_with_its_last_lease() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        lease = await rig.acquire(READ, (0, 100), runs=[(0, 100)])
        await rig.owner.demote_all()
        with pytest.raises(UnknownHandle):
            await rig.acquire(READ, (0, 1))
        ending = rig.region.unregister()
        await asyncio.sleep(0.1)
        assert not ending.done()
        assert await rig.done(lease.lease_id)
        assert await ending is Deregistered.DRAINED
        assert rig.free

    run_virtual(main())


def test_the_close_of_an_owner_ends_leases_on_ranges_by_force() -> None:
    async def main() -> None:
        room = Room(1000)
        rig = await RangedRig().open(source=DirectSource(room))
        await rig.acquire(READ, (0, 100), runs=[(0, 100)])
        await rig.acquire(WRITE, (200, 100))
        await rig.owner.close()
        assert LOCKS.held == 0
        assert room.free == 1000
        assert await rig.region.unregister() is Deregistered.DRAINED
        assert rig.free
        assert rig.fabric.exposed_count == 0

    run_virtual(main())


def test_a_silent_lease_is_reaped_with_its_range() -> None:
    async def main() -> None:
        rig = await RangedRig().open()
        await rig.acquire(WRITE, (0, 100), runs=[(0, 100)])
        await asyncio.sleep(16.0)
        assert LOCKS.held == 0
        lease = await rig.acquire(WRITE, (0, 100), runs=[(0, 100)])
        assert await rig.done(lease.lease_id)
        await rig.close()

    run_virtual(main())
