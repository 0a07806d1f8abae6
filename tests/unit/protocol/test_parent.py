"""One request of an engine: a demand that never falls back, success by the source's word alone, one
second acquire where nothing was granted, and a lease that is given back on every other exit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import (
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
    PeerProtocolError,
    RangeBusy,
    Unquiesced,
)
from orbit.model import Direction, LeaseId, PathName, PathReason, Transport
from orbit.protocol.messages import AcquireReply, ReadyAnswer
from orbit.protocol.parent import ParentMachine, ParentPlan
from orbit.protocol.transfer import (
    PIECES_MAX,
    Acquire,
    AcquireAnswered,
    AcquireFailed,
    Begin,
    Cancelled,
    Deliver,
    Detach,
    End,
    Ended,
    EndFailed,
    Fail,
    Finish,
    Move,
    Moved,
    MoveFailed,
    PathsReady,
    PeerGone,
    Prepare,
    StartRenewal,
    StopMoving,
    Stopped,
    StopRenewal,
    TransferEffect,
    TransferInput,
)
from tests.unit.protocol.answers import feed, rdma, with_lease

RDMA = ParentPlan(Transport.RDMA, PathReason.OK, direction=Direction.READ, nbytes=100)
WRITE = replace(RDMA, direction=Direction.WRITE)
TCP = replace(RDMA, transport=Transport.TCP)
BROKEN = PathFailed("rdma", "get_failed")
LOST = PeerLost("peer", "reset")
STALE = PathUnavailable("rdma", PathReason.CONNECT_FAILED)
PLANS = [RDMA, WRITE]


def ready(
    total: int = 100, lease: int = 8, direction: int = 1, inline: bytes | None = None
) -> AcquireAnswered:
    answer = ReadyAnswer(lease, 3, total, "asked", inline, 0, direction)
    return AcquireAnswered(AcquireReply(ready=answer))


OFFERED = (Begin(), PathsReady(PathReason.OK))


@pytest.mark.parametrize("plan", PLANS)
def test_from_the_arrays_to_the_sources_word(plan: ParentPlan) -> None:
    parent = ParentMachine(plan)
    assert feed(parent, Begin()) == [Prepare()]
    assert feed(parent, PathsReady(PathReason.OK)) == [Acquire(offer=True, skip_threshold=True)]
    renewal, move = feed(parent, rdma(direction=plan.direction))
    assert renewal == StartRenewal(LeaseId(7), 30.0)
    assert isinstance(move, Move)
    assert (move.path, move.lease_id, move.total_bytes) == (PathName.RDMA, 7, 100)
    assert feed(parent, Moved()) == [StopRenewal(), End(LeaseId(7), transferred=True)]
    assert not parent.ended
    assert feed(parent, Ended()) == [Finish(LeaseId(7), PathName.RDMA, PathReason.OK, 100)]


def test_tcp_prepares_nothing() -> None:
    parent = ParentMachine(TCP)
    assert feed(parent, Begin()) == [Acquire(offer=False, skip_threshold=False)]
    (move,) = feed(parent, ready())
    assert isinstance(move, Move)
    assert feed(parent, Moved()) == [End(LeaseId(8), transferred=True)]


def test_what_came_with_the_answer_is_confirmed_too() -> None:
    parent = ParentMachine(TCP)
    effects = feed(parent, Begin(), ready(inline=bytes(100)))
    assert effects == [Deliver(bytes(100)), End(LeaseId(8), transferred=True)]
    short = feed(ParentMachine(TCP), Begin(), ready(inline=bytes(99)))
    assert isinstance(short[-1], Fail)
    assert isinstance(short[-1].error, PeerProtocolError)


@pytest.mark.parametrize("answer", [rdma(total=99), rdma(direction=2)])
def test_another_grant_than_was_asked_for_is_returned(answer: AcquireAnswered) -> None:
    detach, fail = feed(ParentMachine(RDMA), *OFFERED, answer)
    assert detach == Detach(LeaseId(7), transferred=False)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PeerProtocolError)


def test_more_grants_than_were_offered_cannot_be_used() -> None:
    assert isinstance(feed(ParentMachine(RDMA), *OFFERED, rdma(more=PIECES_MAX - 1))[-1], Move)
    parent = ParentMachine(RDMA)
    assert feed(parent, *OFFERED, rdma(more=PIECES_MAX)) == [End(LeaseId(7), transferred=False)]
    (fail,) = feed(parent, Ended())
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PeerProtocolError)


def test_an_array_that_the_source_lost_is_asked_for_once_more() -> None:
    parent = ParentMachine(RDMA)
    assert feed(parent, *OFFERED, AcquireFailed(STALE)) == [Prepare()]
    assert feed(parent, PathsReady(PathReason.OK)) == [Acquire(offer=True, skip_threshold=True)]
    assert feed(parent, AcquireFailed(STALE)) == [Fail(STALE)]


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        RangeBusy("a peer's write"),
        DeadlineExceeded("call", 3.0),
        PathUnavailable("rdma", PathReason.WINDOWS_BUSY),
    ],
)
def test_nothing_else_is_asked_again(error: OrbitError) -> None:
    assert feed(ParentMachine(RDMA), *OFFERED, AcquireFailed(error)) == [Fail(error)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("error", [BROKEN, Unquiesced("a transfer", 100, "stuck")])
def test_a_failed_move_returns_the_lease_before_it_is_told(
    plan: ParentPlan, error: OrbitError
) -> None:
    for answer in (Ended(), EndFailed(LOST)):
        parent = ParentMachine(plan)
        feed(parent, *OFFERED, rdma(direction=plan.direction))
        effects = feed(parent, MoveFailed(PathReason.GET_FAILED, error))
        assert effects == [StopRenewal(), End(LeaseId(7), transferred=False)]
        assert feed(parent, answer) == [Fail(error)]


@pytest.mark.parametrize(
    "error", [BROKEN, LeaseError("it ended"), LOST, DeadlineExceeded("call", 3.0)]
)
def test_without_the_sources_word_it_has_failed(error: OrbitError) -> None:
    assert feed(ParentMachine(RDMA), *OFFERED, rdma(), Moved(), EndFailed(error)) == [Fail(error)]


@pytest.mark.parametrize("end", [Moved(), MoveFailed(PathReason.GET_FAILED, BROKEN)])
def test_a_cancelled_move_is_waited_for_and_is_no_success(end: TransferInput) -> None:
    parent = ParentMachine(RDMA)
    assert feed(parent, *OFFERED, rdma(), Cancelled()) == [StopMoving()]
    assert feed(parent, end) == [StopRenewal(), End(LeaseId(7), transferred=False)]
    assert feed(parent, Cancelled()) == []
    assert feed(parent, Ended()) == [Fail(None)]


def test_the_deadline_passes_before_the_sources_word() -> None:
    parent = ParentMachine(WRITE, deadline=5.0, timeout_s=5.0)
    feed(parent, *OFFERED, rdma(direction=2), Moved())
    (fail,) = parent.on_deadline(5.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, DeadlineExceeded)
    assert fail.error.operation == "write"
    assert not parent.ended  # its end is not proven yet
    assert feed(parent, Ended()) == []
    assert parent.ended


def test_a_grant_that_comes_too_late_is_returned() -> None:
    parent = ParentMachine(RDMA)
    assert feed(parent, *OFFERED, Cancelled()) == [Fail(None)]
    assert feed(parent, rdma()) == [Detach(LeaseId(7), transferred=False)]
    assert parent.ended


def test_a_lost_peer_keeps_the_lease_and_the_error() -> None:
    parent = ParentMachine(RDMA)
    assert feed(parent, *OFFERED, rdma(), PeerGone(LOST)) == [StopMoving()]
    effects = feed(parent, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Fail(LOST)]
    returning = ParentMachine(RDMA)
    feed(returning, *OFFERED, rdma(), MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert feed(returning, PeerGone(LOST)) == [Fail(BROKEN)]


# --- any order ------------------------------------------------------------------------------------

EVENTS = st.sampled_from(
    [
        PathsReady(PathReason.OK),
        PathsReady(PathReason.CONNECT_FAILED),
        rdma(lease=0),
        rdma(total=99, lease=0),
        rdma(lease=0, more=PIECES_MAX),
        ready(lease=0),
        ready(lease=0, inline=bytes(100)),
        AcquireFailed(STALE),
        AcquireFailed(LOST),
        Moved(),
        MoveFailed(PathReason.GET_FAILED, BROKEN),
        MoveFailed(PathReason.GET_FAILED, Unquiesced("a read", 1, "stuck")),
        Ended(),
        EndFailed(BROKEN),
        Cancelled(),
        Stopped(ClosedError("the region")),
        PeerGone(LOST),
    ]
)


@dataclass
class Shell:
    """Feeds only what has a cause, and knows what the machine must not do."""

    parent: ParentMachine
    due: set[type] = field(default_factory=set)
    leases: set[LeaseId] = field(default_factory=set)
    given: int = 0
    ends: int = 0
    prepares: int = 0
    moves: int = 0
    gone: bool = False

    def step(self, event: TransferInput) -> None:
        if isinstance(event, PathsReady | AcquireAnswered | AcquireFailed | Moved | MoveFailed):
            if not self.take(event):
                return
        elif isinstance(event, Ended | EndFailed) and not self.take(event):
            return
        if isinstance(event, AcquireAnswered):
            self.given += 1
            event = AcquireAnswered(with_lease(event.reply, self.given))
            if not self.gone:
                self.leases.add(LeaseId(self.given))
        if isinstance(event, PeerGone):
            self.gone = True
            self.leases.clear()
        for effect in feed(self.parent, event):
            self.carry_out(effect)

    def take(self, event: TransferInput) -> bool:
        for pair in (
            {PathsReady},
            {AcquireAnswered, AcquireFailed},
            {Moved, MoveFailed},
            {Ended, EndFailed},
        ):
            if type(event) in pair:
                due = bool(pair & self.due)
                self.due -= pair
                return due
        return True

    def carry_out(self, effect: TransferEffect) -> None:
        match effect:
            case Prepare():
                self.prepares += 1
                assert self.prepares <= 2
                self.due.add(PathsReady)
            case Acquire():
                self.due.add(AcquireAnswered)
            case Move():
                self.moves += 1
                assert self.moves == 1  # nothing is replayed
                self.due.add(Moved)
            case Detach(lease_id, transferred):
                assert not transferred
                self.leases.remove(lease_id)
            case End(lease_id):
                self.leases.remove(lease_id)
                self.due.add(Ended)
            case Finish() | Fail():
                self.ends += 1


@given(st.sampled_from([RDMA, TCP]), st.lists(EVENTS, max_size=25))
def test_any_order_ends_once_with_every_lease_given_back(
    plan: ParentPlan, events: list[TransferInput]
) -> None:
    shell = Shell(ParentMachine(plan))
    shell.step(Begin())
    for event in events:
        shell.step(event)
    shell.step(Cancelled())
    for event in (PathsReady(PathReason.OK), rdma(lease=0), MoveFailed(PathReason.OK, BROKEN)):
        shell.step(event)
        shell.step(Ended())
    assert shell.parent.ended
    assert shell.ends == 1
    assert not shell.leases
