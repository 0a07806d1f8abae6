"""The consumer's put: proven by the owner's last word, one fallback, never two writers, and a lease
that is given back on every other exit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit.errors import (
    BusyError,
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
    PeerProtocolError,
    TransferFailed,
    Unquiesced,
)
from orbit.model import Direction, LeaseId, PathName, PathReason, Transport
from orbit.protocol.messages import AcquireReply, ReadyAnswer
from orbit.protocol.put import PutMachine, PutPlan
from orbit.protocol.transfer import (
    PIECES_MAX,
    Acquire,
    AcquireAnswered,
    AcquireFailed,
    Begin,
    Cancelled,
    Detach,
    End,
    Ended,
    EndFailed,
    Fail,
    FellBack,
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
    TransferState,
)
from tests.unit.protocol import answers
from tests.unit.protocol.answers import feed, with_lease

AUTO = PutPlan(Transport.AUTO, PathReason.OK, nbytes=100)
DEMAND = replace(AUTO, transport=Transport.RDMA)
TCP = replace(AUTO, transport=Transport.TCP)
BROKEN = PathFailed("rdma", "get_failed")
LOST = PeerLost("peer", "reset")
WRITE = int(Direction.WRITE)
rdma = functools.partial(answers.rdma, direction=WRITE)


def ready(
    total: int = 100,
    lease: int = 8,
    reason: str = "no_offer",
    direction: int = WRITE,
    timeout_ms: int = 0,
) -> AcquireAnswered:
    answer = ReadyAnswer(lease, 3, total, reason, None, timeout_ms, direction)
    return AcquireAnswered(AcquireReply(ready=answer))


def only_failure(effects: list[TransferEffect]) -> OrbitError | None:
    (fail,) = [effect for effect in effects if isinstance(effect, Fail)]
    return fail.error


OFFERED = (Begin(), PathsReady(PathReason.OK))


def test_rdma_from_the_offer_to_the_owners_word() -> None:
    put = PutMachine(AUTO)
    assert feed(put, Begin()) == [Prepare()]
    assert feed(put, PathsReady(PathReason.OK)) == [Acquire(offer=True, skip_threshold=False)]
    renewal, move = feed(put, rdma())
    assert renewal == StartRenewal(LeaseId(7), 30.0)
    assert isinstance(move, Move)
    assert (move.path, move.lease_id, move.total_bytes) == (PathName.RDMA, 7, 100)
    assert feed(put, Moved()) == [StopRenewal(), End(LeaseId(7), transferred=True)]
    assert not put.ended
    assert feed(put, Ended()) == [Finish(LeaseId(7), PathName.RDMA, PathReason.OK, 100)]
    assert feed(put, Cancelled()) == []


def test_a_chunked_lease_is_renewed_while_the_push_runs() -> None:
    put = PutMachine(TCP)
    renewal, move = feed(put, Begin(), ready(timeout_ms=400))
    assert renewal == StartRenewal(LeaseId(8), 0.4)
    assert isinstance(move, Move)
    assert feed(put, Moved()) == [StopRenewal(), End(LeaseId(8), transferred=True)]


@pytest.mark.parametrize("answer", [rdma(direction=1), ready(direction=1)])
def test_an_owner_that_knows_reads_only_is_too_old(answer: AcquireAnswered) -> None:
    put = PutMachine(AUTO)
    effects = feed(put, *OFFERED, answer)
    assert isinstance(effects[0], Detach)
    assert not effects[0].transferred
    error = only_failure(effects)
    assert isinstance(error, PathUnavailable)
    assert error.reason == PathReason.PEER_WITHOUT


@pytest.mark.parametrize("answer", [rdma(total=99), ready(total=101)])
def test_a_grant_of_another_size_is_refused(answer: AcquireAnswered) -> None:
    effects = feed(PutMachine(AUTO), *OFFERED, answer)
    assert isinstance(only_failure(effects), PeerProtocolError)
    assert isinstance(effects[0], Detach)


def test_a_failed_push_gives_the_first_lease_back_before_it_asks_for_a_second() -> None:
    put = PutMachine(AUTO)
    effects = feed(put, *OFFERED, rdma(), MoveFailed(PathReason.POOL_EXHAUSTED, BROKEN))
    assert effects == [
        StopRenewal(),
        FellBack(PathReason.POOL_EXHAUSTED),
        End(LeaseId(7), transferred=False),
    ]
    assert feed(put, Ended()) == [Acquire(offer=False, skip_threshold=False)]
    feed(put, ready(), Moved())
    assert feed(put, Ended()) == [Finish(LeaseId(8), PathName.TCP, PathReason.POOL_EXHAUSTED, 100)]


def test_too_many_pieces_cannot_be_used() -> None:
    fits = PutMachine(AUTO)
    assert isinstance(feed(fits, *OFFERED, rdma(more=PIECES_MAX - 1))[-1], Move)
    effects = feed(PutMachine(AUTO), *OFFERED, rdma(more=PIECES_MAX))
    assert effects == [FellBack(PathReason.DECODE_ERROR), End(LeaseId(7), transferred=False)]


def test_a_push_that_did_not_arrive_whole_falls_back() -> None:
    put = PutMachine(AUTO)
    feed(put, *OFFERED, rdma(), Moved())
    effects = feed(put, EndFailed(BROKEN))
    again = Acquire(offer=False, skip_threshold=False)
    assert effects == [FellBack(PathReason.GET_FAILED), again]


def test_the_fallback_happens_once() -> None:
    put = PutMachine(AUTO)
    feed(put, *OFFERED, rdma(), Moved(), EndFailed(BROKEN), ready())
    tcp_broken = PathFailed("tcp", "get_failed")
    detach, fail = feed(put, MoveFailed(PathReason.GET_FAILED, tcp_broken))
    assert detach == Detach(LeaseId(8), transferred=False)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, TransferFailed)
    assert fail.error.attempts == (BROKEN, tcp_broken)


def test_a_second_descriptor_ends_the_put() -> None:
    put = PutMachine(AUTO)
    feed(put, *OFFERED, rdma(), MoveFailed(PathReason.GET_FAILED, BROKEN), Ended())
    effects = feed(put, rdma(lease=9))
    assert Detach(LeaseId(9), transferred=False) in effects
    assert isinstance(only_failure(effects), PeerProtocolError)


@pytest.mark.parametrize("error", [LOST, Unquiesced("put", 100, "stuck")])
def test_without_the_owners_word_nothing_is_written_twice(error: OrbitError) -> None:
    put = PutMachine(AUTO)
    feed(put, *OFFERED, rdma(), MoveFailed(PathReason.GET_FAILED, BROKEN))
    effects = feed(put, EndFailed(error))
    assert [type(effect) for effect in effects] == [Fail]
    assert put.ended


def test_a_source_that_may_still_be_read_is_not_sent_again() -> None:
    put = PutMachine(AUTO)
    feed(put, *OFFERED, rdma())
    error = Unquiesced("put", 100, "stuck")
    effects = feed(put, MoveFailed(PathReason.GET_FAILED, error))
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(error)]


@pytest.mark.parametrize(
    "error", [LeaseError("it ended"), LOST, DeadlineExceeded("call", 3.0), ClosedError("node")]
)
def test_a_last_word_that_is_missing_is_no_success(error: OrbitError) -> None:
    put = PutMachine(AUTO)
    effects = feed(put, *OFFERED, rdma(), Moved(), EndFailed(error))
    assert effects == [Fail(error)]


def test_a_busy_destination_is_told_to_the_caller() -> None:
    busy = BusyError("another writer")
    assert feed(PutMachine(AUTO), *OFFERED, AcquireFailed(busy)) == [Fail(busy)]


# --- demands and no bytes -------------------------------------------------------------------------


def test_a_demand_skips_the_threshold_and_never_falls_back() -> None:
    put = PutMachine(DEMAND)
    assert feed(put, *OFFERED) == [Acquire(offer=True, skip_threshold=True)]
    feed(put, rdma())
    effects = feed(put, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(BROKEN)]


def test_a_demand_that_the_owner_cannot_meet_returns_the_lease() -> None:
    effects = feed(PutMachine(DEMAND), *OFFERED, ready(reason="not_pinned"))
    assert effects[0] == Detach(LeaseId(8), transferred=False)
    error = only_failure(effects)
    assert isinstance(error, PathUnavailable)
    assert error.reason == PathReason.NOT_PINNED


@pytest.mark.parametrize(
    ("plan", "path", "reason"),
    [
        (AUTO, PathName.TCP, PathReason.BELOW_MIN),
        (TCP, PathName.TCP, PathReason.ASKED),
        (DEMAND, PathName.RDMA, PathReason.OK),
    ],
)
def test_no_bytes_ask_the_owner_and_move_nothing(
    plan: PutPlan, path: PathName, reason: PathReason
) -> None:
    put = PutMachine(replace(plan, nbytes=0))
    assert feed(put, Begin()) == [Acquire(offer=False, skip_threshold=False)]
    assert feed(put, ready(total=0)) == [End(LeaseId(8), transferred=True)]
    assert feed(put, Ended()) == [Finish(LeaseId(8), path, reason, 0)]


# --- giving up ------------------------------------------------------------------------------------


def test_a_cancelled_acquire_gives_back_the_lease_that_comes_later() -> None:
    put = PutMachine(AUTO)
    assert feed(put, *OFFERED, Cancelled()) == [Fail(None)]
    assert not put.ended
    assert feed(put, rdma()) == [Detach(LeaseId(7), transferred=False)]
    assert put.ended


@pytest.mark.parametrize("end", [Moved(), MoveFailed(PathReason.GET_FAILED, BROKEN)])
def test_a_cancelled_push_is_waited_for_and_is_no_success(end: TransferInput) -> None:
    put = PutMachine(AUTO)
    assert feed(put, *OFFERED, rdma(), Cancelled()) == [StopMoving()]
    effects = feed(put, end)
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(None)]


@pytest.mark.parametrize("event", [Cancelled(), Stopped(ClosedError("the region"))])
def test_who_gives_up_during_the_last_call_leaves_at_once(event: TransferInput) -> None:
    put = PutMachine(AUTO)
    feed(put, *OFFERED, rdma(), Moved())
    (fail,) = feed(put, event)
    assert isinstance(fail, Fail)
    assert not put.ended
    assert feed(put, Ended()) == []
    assert put.ended


def test_the_deadline_ends_the_callers_wait_once() -> None:
    put = PutMachine(AUTO, deadline=5.0, timeout_s=5.0)
    feed(put, *OFFERED, rdma(), Moved())
    assert put.on_deadline(4.9) == []
    error = only_failure(put.on_deadline(5.0))
    assert isinstance(error, DeadlineExceeded)
    assert error.operation == "put"
    assert put.deadline is None


def test_a_lost_peer_keeps_the_lease_and_the_error() -> None:
    put = PutMachine(AUTO)
    assert feed(put, *OFFERED, rdma(), PeerGone(LOST)) == [StopMoving()]
    effects = feed(put, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Fail(LOST)]


# --- any order ------------------------------------------------------------------------------------

EVENTS = st.sampled_from(
    [
        PathsReady(PathReason.OK),
        PathsReady(PathReason.CONNECT_FAILED),
        rdma(lease=0),
        rdma(total=99, lease=0),
        rdma(direction=1, lease=0),
        ready(lease=0),
        ready(lease=0, timeout_ms=400),
        ready(total=0, lease=0),
        AcquireFailed(BusyError("writer")),
        Moved(),
        MoveFailed(PathReason.GET_FAILED, BROKEN),
        MoveFailed(PathReason.GET_FAILED, Unquiesced("put", 1, "stuck")),
        Ended(),
        EndFailed(BROKEN),
        EndFailed(LeaseError("it ended")),
        Cancelled(),
        Stopped(ClosedError("the region")),
        PeerGone(LOST),
    ]
)


@dataclass
class Shell:
    """Carries out effects the way the runtime does, and remembers what the owner has given."""

    put: PutMachine
    leases: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)  # the owner said that their bytes are in place
    ending: dict[int, bool] = field(default_factory=dict)
    granted: int = 0
    offers: int = 0
    acquires: int = 0
    waiting: set[str] = field(default_factory=set)
    verdicts: list[TransferEffect] = field(default_factory=list)
    renewing: bool = False
    gone: bool = False

    def feed(self, event: TransferInput) -> None:
        match event:
            case PathsReady():
                self.waiting.discard("prepare")
            case AcquireAnswered(reply):
                self.waiting.discard("acquire")
                self.granted += 1
                self.leases.add(self.granted)
                event = AcquireAnswered(with_lease(reply, self.granted))
            case AcquireFailed():
                self.waiting.discard("acquire")
            case Moved() | MoveFailed():
                self.waiting.discard("move")
            case Ended() | EndFailed():
                self.waiting.discard("end")
                ((lease_id, transferred),) = self.ending.items()
                self.ending.clear()
                self.leases.discard(lease_id)
                if transferred and isinstance(event, Ended):
                    self.proven.add(lease_id)
            case PeerGone():
                self.gone = True
        for effect in self.put.step(event, 0.0):
            self.carry_out(effect)

    def carry_out(self, effect: TransferEffect) -> None:
        match effect:
            case Prepare():
                self.waiting.add("prepare")
            case Acquire(offer, _):
                assert not self.waiting, "one thing after the other"
                assert not self.leases or self.gone, "never two writers"
                self.waiting.add("acquire")
                self.acquires += 1
                self.offers += offer
            case Move():
                self.waiting.add("move")
            case End(lease_id, transferred):
                self.waiting.add("end")
                self.ending[lease_id] = transferred
            case Detach(lease_id, transferred):
                assert not transferred, "nobody would hear whether it is in place"
                self.leases.remove(lease_id)
            case StartRenewal():
                self.renewing = True
            case StopRenewal():
                self.renewing = False
            case Finish() | Fail():
                self.verdicts.append(effect)

    def may_happen(self, event: TransferInput) -> bool:
        match event:
            case PathsReady():
                return "prepare" in self.waiting
            case AcquireAnswered() | AcquireFailed():
                return "acquire" in self.waiting
            case Moved() | MoveFailed():
                return "move" in self.waiting
            case Ended() | EndFailed():
                return "end" in self.waiting
        return True


@settings(max_examples=1000, deadline=None)
@given(
    transport=st.sampled_from(Transport),
    kill_switch=st.booleans(),
    nbytes=st.sampled_from([0, 100]),
    events=st.lists(EVENTS, max_size=14),
)
def test_any_order_of_events_ends_once_and_a_success_is_proven(
    transport: Transport, kill_switch: bool, nbytes: int, events: list[TransferInput]
) -> None:
    shell = Shell(PutMachine(PutPlan(transport, PathReason.OK, kill_switch, nbytes)))
    shell.feed(Begin())
    for event in events:
        if shell.may_happen(event):
            shell.feed(event)
    last_words: list[TransferInput] = [
        PathsReady(PathReason.OK),
        ready(lease=0),
        MoveFailed(PathReason.GET_FAILED, BROKEN),
        Ended(),
    ]
    while shell.waiting:  # whatever is still awaited answers in the end
        shell.feed(next(event for event in last_words if shell.may_happen(event)))
    assert shell.put.ended
    assert len(shell.verdicts) == 1
    assert not shell.renewing
    assert shell.offers <= 1
    assert shell.acquires <= 2
    assert not shell.leases or shell.gone, "a lease was left behind"
    if shell.put.state is TransferState.FINISHED:
        (finish,) = shell.verdicts
        assert isinstance(finish, Finish)
        assert finish.lease_id in shell.proven
        assert finish.total_bytes == nbytes
