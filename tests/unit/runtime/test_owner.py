"""What an owner answers: paths, pieces, deadlines, directions, and peers from before a field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit.config import RendezvousConfig
from orbit.errors import (
    BusyError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    OutOfRange,
    PathFailed,
    UnknownHandle,
    WrongDirection,
)
from orbit.events import Recorder
from orbit.model import Address, Direction, Handle, PathName, PathReason, WorkerId
from orbit.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    EndReply,
    LeaseRenewRequest,
    RdmaOffer,
    ReleaseRequest,
)
from orbit.runtime.options import RegisterOptions
from orbit.runtime.owner import Owner
from orbit.runtime.paths import Paths
from orbit.runtime.runner import TaskRunner
from orbit.runtime.staging import Staged
from orbit.testing.clock import run_virtual
from orbit.testing.fabric import SimFabric, SimPath
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.transport.interface import Exposure, PinnedBuffer, Span

PAYLOAD = pattern(200_000)
KEEP = RegisterOptions(retain=True)
OFFER = RdmaOffer(("verbs",), 0, 64)


class PiecesPath(SimPath):
    """Answers one descriptor for each piece, as devices do."""

    async def expose(self, session: Any, span: Span, *args: Any, **named: Any) -> Exposure:
        first = await super().expose(session, span, *args, **named)
        rest = tuple((b"d%d" % n, b"g%d" % n) for n in range(1, len(span.pieces)))
        return Exposure(descriptor=first.descriptor, grant=b"g0", rest=rest)


class Bench:
    """One owner and two peers of it. `freed` counts what was given back."""

    def __init__(self, lease_timeout: float = 10.0, *, rdma: bool = True) -> None:
        fabric = SimFabric()
        self.tcp = SimPath(fabric, PathName.TCP)
        self.rdma = PiecesPath(fabric, PathName.RDMA)
        paths = Paths(self.tcp, self.rdma if rdma else None, PathReason.NO_DEVICE)
        self.recorder = Recorder()
        config = RendezvousConfig(lease_timeout=lease_timeout)
        self.owner = Owner(WorkerId(1), paths, config, self.recorder, TaskRunner())
        self.session: Any = StubSession(1, dialer=False)
        self.other: Any = StubSession(2, dialer=False)
        self.freed = 0

    def register(
        self,
        *pieces: bytes,
        pinned: bool = True,
        direction: Direction = Direction.READ,
        options: RegisterOptions = KEEP,
    ) -> Handle:
        bench = self

        class Counted(Staged):
            def free(self) -> None:
                bench.freed += 1

        spans = []
        for piece in pieces or (PAYLOAD,):
            view = memoryview(bytearray(piece))
            buffer = PinnedBuffer(view, Address(1), None, None) if pinned else None
            spans.append(Span(view, buffer))
        span = Span(spans[0].view, spans[0].pinned, tuple(spans[1:]))
        return self.owner.register(Counted(span), options, direction=direction)

    async def ask(self, request: Any, session: Any = None, **absent: None) -> Any:
        body = request.to_wire()
        for field in absent:
            del body[field]
        handler = self.owner.handlers()[request.METHOD]
        return await handler(session or self.session, body)

    async def acquire(self, handle: Handle, **named: Any) -> Any:
        reply = await self.ask(AcquireRequest(handle, **named))
        assert isinstance(reply, AcquireReply)
        return reply.rdma or reply.ready

    async def write(self, handle: Handle, offset: int, nbytes: int, **named: Any) -> Any:
        return await self.acquire(
            handle, direction=int(Direction.WRITE), offset=offset, nbytes=nbytes, **named
        )

    def decided(self, reason: PathReason) -> int:
        return self.recorder.counters.value(
            "orbit_rendezvous_rdma_path_total", side="owner", reason=reason.value
        )


# --- pieces ---------------------------------------------------------------------------------------


def test_a_payload_of_several_pieces_is_answered_with_a_descriptor_for_each() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(PAYLOAD, b"x" * 10, PAYLOAD)
        answer = await bench.acquire(handle, rdma=OFFER)
        assert answer.total_len == 2 * len(PAYLOAD) + 10
        assert [(p.descriptor, p.grant) for p in answer.rest] == [(b"d1", b"g1"), (b"d2", b"g2")]
        assert answer.grant == b"g0"

    run_virtual(main())


@pytest.mark.parametrize(("pieces_max", "taken"), [(2, False), (3, True)])
def test_more_pieces_than_the_peer_can_take_go_over_tcp(pieces_max: int, taken: bool) -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(PAYLOAD, b"x" * 10, PAYLOAD)
        answer = await bench.acquire(handle, rdma=RdmaOffer(("verbs",), 0, pieces_max))
        assert hasattr(answer, "descriptor") is taken
        assert bench.decided(PathReason.OK if taken else PathReason.NO_OFFER) == 1

    run_virtual(main())


def test_a_peer_from_before_pieces_gets_several_over_tcp_and_inline() -> None:
    async def main() -> None:
        bench = Bench()
        request = AcquireRequest(bench.register(PAYLOAD, PAYLOAD), OFFER)
        body = request.to_wire()
        del body["rdma"]["pieces_max"]
        reply = await bench.owner.handlers()[request.METHOD](bench.session, body)
        assert isinstance(reply, AcquireReply)
        assert reply.ready is not None
        assert reply.ready.reason == "no_offer"
        small = await bench.acquire(bench.register(b"abc", b"", b"de"), inline_max=5)
        assert small.inline == b"abcde"

    run_virtual(main())


def test_one_piece_that_is_not_pinned_makes_the_payload_not_pinned() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(PAYLOAD, pinned=False)
        answer = await bench.acquire(handle, rdma=OFFER)
        assert answer.reason == "not_pinned"

    run_virtual(main())


def test_a_registration_that_is_gone_under_its_slot_is_served_by_tcp() -> None:
    async def main() -> None:
        bench = Bench()
        bench.rdma.faults.expose = PathReason.NOT_PINNED
        answer = await bench.acquire(bench.register(), rdma=OFFER)
        assert (answer.reason, answer.transfer_id > 0) == ("not_pinned", True)
        assert bench.decided(PathReason.NOT_PINNED) == 1
        assert bench.decided(PathReason.OK) == 0

    run_virtual(main())


# --- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked_ms", "granted_ms"), [(0, 0), (300, 300), (99_000, 10_000)])
def test_a_lease_over_tcp_gets_the_deadline_that_was_asked_for_and_no_longer_one(
    asked_ms: int, granted_ms: int
) -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(pinned=False)
        answer = await bench.acquire(handle, lease_ms=asked_ms)
        assert answer.lease_timeout_ms == granted_ms
        await asyncio.sleep(20)
        assert bench.owner.statistics().leases_held == (not granted_ms)

    run_virtual(main())


def test_a_renewed_lease_over_tcp_lives_and_a_silent_one_takes_its_reference_along() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(pinned=False, options=RegisterOptions())
        answer = await bench.acquire(handle, lease_ms=400)
        for _ in range(10):
            await asyncio.sleep(0.2)
            await bench.ask(LeaseRenewRequest(handle, answer.lease_id))
        assert bench.owner.statistics().leases_held == 1
        await asyncio.sleep(0.6)
        assert bench.freed == 1
        with pytest.raises(UnknownHandle):
            bench.owner.metadata(handle)
        late = await bench.ask(ReleaseRequest(handle, answer.lease_id))
        assert late == EndReply()
        assert bench.owner.statistics().leases_reaped == 1

    run_virtual(main())


def test_a_request_from_before_deadlines_and_directions_is_answered_as_then() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(pinned=False)
        request = AcquireRequest(handle)
        absent = dict.fromkeys(("lease_ms", "direction", "offset", "nbytes"))
        reply = await bench.ask(request, **absent)
        assert reply.ready is not None
        assert (reply.ready.lease_timeout_ms, reply.ready.direction) == (0, 1)
        await asyncio.sleep(1000)
        assert bench.owner.statistics().leases_held == 1
        await bench.ask(DetachRequest(handle, reply.ready.lease_id), transferred=None)
        assert bench.owner.statistics().leases_held == 0

    run_virtual(main())


def test_an_rdma_lease_lives_as_long_as_this_owner_says() -> None:
    async def main() -> None:
        bench = Bench()
        answer = await bench.acquire(bench.register(), rdma=OFFER, lease_ms=1)
        assert answer.lease_timeout_ms == 10_000

    run_virtual(main())


def test_a_time_to_live_ends_a_slot_that_nobody_fetched_and_one_that_is_being_read() -> None:
    async def main() -> None:
        bench = Bench()
        mortal = RegisterOptions(retain=True, ttl=1.0)
        bench.register(options=mortal)
        read = bench.register(options=mortal)
        await bench.acquire(read, rdma=OFFER)
        assert bench.owner.statistics().ttl_armed == 2
        await asyncio.sleep(1.2)
        assert bench.freed == 2
        found = bench.owner.statistics()
        assert (found.slots, found.staged_bytes, found.leased_bytes) == (0, 0, 0)

    run_virtual(main())


# --- destinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offered", [OFFER, None])
def test_a_write_is_granted_for_its_range_and_done_when_its_bytes_are_in_place(
    offered: RdmaOffer | None,
) -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(bytes(100_000), bytes(100_000), direction=Direction.WRITE)
        answer = await bench.write(handle, 50_000, 100_000, rdma=offered, inline_max=1 << 20)
        assert (answer.total_len, answer.direction) == (100_000, 2)
        assert answer.lease_timeout_ms == 10_000
        path = bench.tcp if offered is None else bench.rdma
        exposure = (
            Exposure(answer.transfer_id)
            if offered is None
            else Exposure(descriptor=answer.descriptor)
        )
        data = pattern(100_000)
        await path.push(bench.session, exposure, answer.lease_id, Span(memoryview(data)))
        waiting = asyncio.ensure_future(bench.owner.wait_put(handle, 1.0))
        reply = await bench.ask(DetachRequest(handle, answer.lease_id))
        assert reply == EndReply(in_place=True)
        put = await waiting
        assert (put.offset, put.nbytes, put.peer) == (50_000, 100_000, bench.session.peer.worker_id)
        reason = PathReason.OK if offered else PathReason.NO_OFFER
        assert (put.path, put.reason) == (path.name, reason)

    run_virtual(main())


def test_a_write_that_did_not_arrive_whole_is_an_error_and_the_next_writer_is_let_in() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(bytes(100_000), direction=Direction.WRITE)
        answer = await bench.write(handle, 0, 100_000)
        with pytest.raises(BusyError):
            await bench.write(handle, 0, 1)
        with pytest.raises(PathFailed):
            await bench.ask(DetachRequest(handle, answer.lease_id))
        answer = await bench.write(handle, 0, 1)
        assert await bench.ask(DetachRequest(handle, answer.lease_id, False)) == EndReply()
        with pytest.raises(DeadlineExceeded):
            await bench.owner.wait_put(handle, 0.1)

    run_virtual(main())


def test_a_write_whose_lease_had_expired_is_no_success() -> None:
    async def main() -> None:
        bench = Bench(lease_timeout=0.3)
        handle = bench.register(bytes(10), direction=Direction.WRITE)
        answer = await bench.write(handle, 0, 10)
        await asyncio.sleep(1)
        with pytest.raises(LeaseError):
            await bench.ask(DetachRequest(handle, answer.lease_id))
        gone = bench.register(bytes(10), direction=Direction.WRITE)
        answer = await bench.write(gone, 0, 10)
        await bench.owner.withdraw(gone)
        assert await bench.ask(DetachRequest(gone, answer.lease_id)) == EndReply(in_place=False)

    run_virtual(main())


@pytest.mark.parametrize(
    ("offset", "nbytes", "error"),
    [(0, 11, OutOfRange), (11, 0, OutOfRange), ((1 << 64) - 1, 2, OutOfRange), (10, 0, None)],
)
def test_the_range_of_a_write_is_checked_before_anything_is_exposed(
    offset: int, nbytes: int, error: type[OrbitError] | None
) -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(bytes(10), direction=Direction.WRITE)
        if error is None:
            answer = await bench.write(handle, offset, nbytes, rdma=OFFER)
            assert (answer.transfer_id, answer.inline, answer.total_len) == (0, None, 0)
            reply = await bench.ask(DetachRequest(handle, answer.lease_id))
            assert reply == EndReply(in_place=True)
        else:
            with pytest.raises(error):
                await bench.write(handle, offset, nbytes)
        assert bench.owner.statistics().leases_held == 0

    run_virtual(main())


def test_a_wrong_direction_is_refused_both_ways_and_holds_nothing() -> None:
    async def main() -> None:
        bench = Bench()
        payload, destination = bench.register(), bench.register(direction=Direction.WRITE)
        with pytest.raises(WrongDirection):
            await bench.acquire(destination)
        with pytest.raises(WrongDirection):
            await bench.write(payload, 0, 1)
        with pytest.raises(WrongDirection):
            await bench.acquire(payload, direction=3)  # of a later version
        with pytest.raises(WrongDirection):
            bench.owner.acquire_local(destination)
        with pytest.raises(WrongDirection):
            bench.owner.acquire_local_put(payload, 0, 1)
        assert bench.owner.statistics().leases_held == 0

    run_virtual(main())


def test_a_local_put_is_reported_like_any_other() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register(bytes(10), direction=Direction.WRITE)
        with pytest.raises(OutOfRange):
            bench.owner.acquire_local_put(handle, 5, 6)
        lease_id, span = bench.owner.acquire_local_put(handle, 5, 3)
        with pytest.raises(BusyError):
            bench.owner.acquire_local_put(handle, 0, 1)
        span.view[:] = b"abc"
        bench.owner.finish_local_put(handle, lease_id, transferred=True)
        put = await bench.owner.wait_put(handle, 1.0)
        assert (put.path, put.offset, put.nbytes) == (PathName.LOCAL, 5, 3)
        lease_id, span = bench.owner.acquire_local_put(handle, 0, 1)
        bench.owner.finish_local_put(handle, lease_id, transferred=False)
        lease_id, span = bench.owner.acquire_local_put(handle, 0, 1)
        withdrawing = asyncio.ensure_future(bench.owner.withdraw(handle))
        await asyncio.sleep(1)
        assert bench.freed == 0
        with pytest.raises(LeaseError):
            bench.owner.finish_local_put(handle, lease_id, transferred=True)
        await withdrawing
        assert bench.freed == 1

    run_virtual(main())


# --- a closing owner ------------------------------------------------------------------------------


def test_a_draining_owner_serves_copies_over_tcp_and_says_why() -> None:
    async def main() -> None:
        bench = Bench()
        handle = bench.register()
        reader = await bench.acquire(handle, rdma=OFFER)
        bench.owner.gate()
        assert (await bench.acquire(handle, rdma=OFFER)).reason == "draining"
        await bench.owner.demote_all()
        assert (await bench.acquire(handle, rdma=OFFER)).reason == "not_pinned"
        assert bench.freed == 0
        await bench.ask(DetachRequest(handle, reader.lease_id))
        await bench.owner.wait_unexposed(PathName.RDMA)
        await asyncio.sleep(0)
        held = bench.owner.statistics().leases_held
        assert (bench.freed, held) == (0, 2)  # the one over TCP from before the copy reads on

    run_virtual(main())
