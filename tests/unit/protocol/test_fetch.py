"""The consumer's get: paths and reasons, one fallback, demands, and a lease that is always given
back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit.errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
    PeerProtocolError,
    TransferFailed,
    UnknownHandle,
    Unquiesced,
    UsageError,
)
from orbit.model import LeaseId, PathName, PathReason, Transport
from orbit.protocol.fetch import Fetch, FetchPlan
from orbit.protocol.messages import AcquireReply, GrantPiece, RdmaAnswer, ReadyAnswer
from orbit.protocol.transfer import (
    PIECES_MAX,
    Acquire,
    AcquireAnswered,
    AcquireFailed,
    Begin,
    Cancelled,
    Deliver,
    Detach,
    Fail,
    FellBack,
    Finish,
    Move,
    Moved,
    MoveFailed,
    PathsReady,
    PeerGone,
    Prepare,
    Release,
    StartRenewal,
    StopMoving,
    Stopped,
    StopRenewal,
    TransferEffect,
    TransferInput,
    TransferState,
)
from tests.unit.protocol.answers import feed, with_lease

AUTO = FetchPlan(Transport.AUTO, PathReason.OK)
DEMAND = FetchPlan(Transport.RDMA, PathReason.OK)
TCP = FetchPlan(Transport.TCP, PathReason.OK)
BROKEN = PathFailed("rdma", "get_failed")
LOST = PeerLost("peer", "reset")
UNKNOWN = UnknownHandle("9-1")


def rdma(total: int = 100, lease: int = 7, timeout_ms: int = 30_000) -> AcquireAnswered:
    answer = RdmaAnswer(lease, b"descriptor", b"grant", timeout_ms, total_len=total)
    return AcquireAnswered(AcquireReply(rdma=answer))


def ready(
    total: int = 100, lease: int = 8, reason: str = "no_offer", inline: bytes | None = None
) -> AcquireAnswered:
    return AcquireAnswered(AcquireReply(ready=ReadyAnswer(lease, 3, total, reason, inline)))


def only_failure(effects: list[TransferEffect]) -> OrbitError | None:
    (fail,) = [effect for effect in effects if isinstance(effect, Fail)]
    return fail.error


def test_rdma_from_the_offer_to_the_lease() -> None:
    fetch = Fetch(AUTO)
    assert feed(fetch, Begin()) == [Prepare()]
    assert feed(fetch, PathsReady(PathReason.OK)) == [Acquire(offer=True, skip_threshold=False)]
    renewal, pull = feed(fetch, rdma())
    assert renewal == StartRenewal(LeaseId(7), 30.0)
    assert isinstance(pull, Move)
    assert (pull.path, pull.lease_id, pull.total_bytes) == (PathName.RDMA, 7, 100)
    assert feed(fetch, Moved()) == [
        StopRenewal(),
        Finish(LeaseId(7), PathName.RDMA, PathReason.OK, 100),
    ]


def test_a_lease_without_a_deadline_is_not_renewed() -> None:
    effects = feed(Fetch(AUTO), Begin(), PathsReady(PathReason.OK), rdma(timeout_ms=0))
    assert [type(effect) for effect in effects] == [Move]


def test_a_chunked_lease_is_renewed_while_the_pull_runs() -> None:
    answer = ReadyAnswer(8, 3, 100, lease_timeout_ms=250)
    fetch = Fetch(TCP)
    renewal, pull = feed(fetch, Begin(), AcquireAnswered(AcquireReply(ready=answer)))
    assert renewal == StartRenewal(LeaseId(8), 0.25)
    assert isinstance(pull, Move)
    assert feed(fetch, Moved()) == [
        StopRenewal(),
        Finish(LeaseId(8), PathName.TCP, PathReason.ASKED, 100),
    ]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (TCP, PathReason.ASKED),
        (replace(AUTO, kill_switch=True), PathReason.KILL_SWITCH),
        (replace(AUTO, rdma=PathReason.PEER_WITHOUT), PathReason.PEER_WITHOUT),
    ],
)
def test_without_an_offer_tcp_is_taken_with_the_consumers_reason(
    plan: FetchPlan, reason: PathReason
) -> None:
    fetch = Fetch(plan)
    assert feed(fetch, Begin()) == [Acquire(offer=False, skip_threshold=False)]
    feed(fetch, ready(reason="no_offer"))
    assert feed(fetch, Moved()) == [Finish(LeaseId(8), PathName.TCP, reason, 100)]


def test_an_offer_that_the_owner_declines_has_the_owners_reason() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), ready(reason="below_min"))
    (finish,) = feed(fetch, Moved())
    assert finish == Finish(LeaseId(8), PathName.TCP, PathReason.BELOW_MIN, 100)


def test_a_path_that_cannot_be_prepared_is_not_offered() -> None:
    fetch = Fetch(AUTO)
    effects = feed(fetch, Begin(), PathsReady(PathReason.CONNECT_FAILED))
    assert effects == [Acquire(offer=False, skip_threshold=False)]
    feed(fetch, ready())
    (finish,) = feed(fetch, Moved())
    assert isinstance(finish, Finish)
    assert finish.reason is PathReason.CONNECT_FAILED


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        (PathReason.DECODE_ERROR, PathReason.DECODE_ERROR),
        (PathReason.POOL_EXHAUSTED, PathReason.POOL_EXHAUSTED),
        (PathReason.GET_FAILED, PathReason.GET_FAILED),
        (PathReason.CONNECT_FAILED, PathReason.GET_FAILED),
    ],
)
def test_a_failed_pull_takes_its_one_fallback(reason: PathReason, label: PathReason) -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    assert feed(fetch, MoveFailed(reason, BROKEN)) == [
        StopRenewal(),
        Detach(LeaseId(7), transferred=False),
        FellBack(label),
        Acquire(offer=False, skip_threshold=False),
    ]
    feed(fetch, ready())
    assert feed(fetch, Moved()) == [Finish(LeaseId(8), PathName.TCP, label, 100)]


def test_the_fallback_happens_once() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN), ready())
    tcp_broken = PathFailed("tcp", "get_failed")
    detach, fail = feed(fetch, MoveFailed(PathReason.GET_FAILED, tcp_broken))
    assert detach == Detach(LeaseId(8), transferred=False)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, TransferFailed)
    assert fail.error.attempts == (BROKEN, tcp_broken)


@pytest.mark.parametrize("offered_before", [False, True])
def test_a_descriptor_without_an_offer_ends_the_fetch(offered_before: bool) -> None:
    if offered_before:  # a second descriptor, after the fallback
        fetch = Fetch(AUTO)
        feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
        feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    else:
        fetch = Fetch(TCP)
        feed(fetch, Begin())
    effects = feed(fetch, rdma(lease=9))
    assert Detach(LeaseId(9), transferred=False) in effects
    assert isinstance(only_failure(effects), PeerProtocolError)


def test_an_unproven_end_of_writing_forbids_the_fallback() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    error = Unquiesced("get", 100, "stuck")
    effects = feed(fetch, MoveFailed(PathReason.GET_FAILED, error))
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(error)]


# --- demands --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [PathReason.NO_DEVICE, PathReason.NOT_CONFIGURED])
def test_a_demand_without_a_device_fails_before_anything_is_sent(reason: PathReason) -> None:
    (fail,) = feed(Fetch(replace(DEMAND, rdma=reason)), Begin())
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PathUnavailable)
    assert fail.error.reason == reason


def test_a_demand_skips_the_threshold() -> None:
    effects = feed(Fetch(DEMAND), Begin(), PathsReady(PathReason.OK))
    assert effects == [Acquire(offer=True, skip_threshold=True)]


def test_a_demand_that_the_owner_cannot_meet_returns_the_lease() -> None:
    fetch = Fetch(DEMAND)
    effects = feed(fetch, Begin(), PathsReady(PathReason.OK), ready(reason="not_pinned"))
    assert effects[0] == Detach(LeaseId(8), transferred=False)
    error = only_failure(effects)
    assert isinstance(error, PathUnavailable)
    assert error.reason == PathReason.NOT_PINNED


def test_a_demand_has_no_fallback() -> None:
    fetch = Fetch(DEMAND)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    effects = feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(BROKEN)]


def test_a_demand_for_no_bytes_is_met() -> None:
    effects = feed(Fetch(DEMAND), Begin(), PathsReady(PathReason.OK), ready(total=0))
    assert effects == [Finish(LeaseId(8), PathName.RDMA, PathReason.OK, 0)]


# --- sizes ----------------------------------------------------------------------------------------


def test_no_bytes_need_no_pull() -> None:
    effects = feed(Fetch(TCP), Begin(), ready(total=0))
    assert effects == [Finish(LeaseId(8), PathName.TCP, PathReason.ASKED, 0)]


def test_an_inline_answer_needs_no_pull() -> None:
    effects = feed(Fetch(TCP), Begin(), ready(total=3, inline=b"abc"))
    assert effects[0] == Deliver(b"abc")
    assert isinstance(effects[1], Finish)


def test_an_inline_answer_of_the_wrong_length_is_refused() -> None:
    effects = feed(Fetch(TCP), Begin(), ready(total=4, inline=b"abc"))
    assert effects[0] == Detach(LeaseId(8), transferred=False)
    assert isinstance(only_failure(effects), PeerProtocolError)


@pytest.mark.parametrize("answer", [rdma(total=101), ready(total=101)])
@pytest.mark.parametrize(
    ("limit", "kind"),
    [({"capacity_bytes": 100}, UsageError), ({"payload_bytes_max": 100}, BudgetExceeded)],
)
def test_a_payload_over_a_limit_is_refused_before_the_pull(
    answer: AcquireAnswered, limit: dict[str, int], kind: type[OrbitError]
) -> None:
    fetch = Fetch(replace(AUTO, **limit))  # type: ignore[arg-type]
    effects = feed(fetch, Begin(), PathsReady(PathReason.OK), answer)
    assert [type(effect) for effect in effects] == [Detach, Fail]
    assert isinstance(only_failure(effects), kind)
    exact = Fetch(replace(AUTO, **limit))  # type: ignore[arg-type]
    feed(exact, Begin(), PathsReady(PathReason.OK), ready(total=100))
    assert exact.state is TransferState.MOVING


@pytest.mark.parametrize("answer", [rdma(total=101, lease=8), ready(total=101)])
def test_a_staged_payload_over_its_limit_is_released(answer: AcquireAnswered) -> None:
    plan = replace(AUTO, staged_payload_max=100)
    effects = feed(Fetch(plan), Begin(), PathsReady(PathReason.OK), answer)
    assert effects[0] == Release(LeaseId(8))
    error = only_failure(effects)
    assert isinstance(error, BudgetExceeded)
    assert (error.requested, error.limit) == (101, 100)
    assert error.knob == "rendezvous.staged_payload_max"
    fits = Fetch(plan)
    feed(fits, Begin(), PathsReady(PathReason.OK), ready(total=100))
    assert fits.state is TransferState.MOVING


def test_a_staged_payload_over_its_limit_that_nobody_waits_for_is_detached() -> None:
    """The budget of its message is over, and so the message is; it may be asked for again."""
    fetch = Fetch(replace(AUTO, staged_payload_max=100))
    feed(fetch, Begin(), PathsReady(PathReason.OK), Cancelled())
    assert feed(fetch, ready(total=101)) == [Detach(LeaseId(8), transferred=False)]


def test_a_grant_of_the_other_direction_is_refused() -> None:
    write = replace(rdma().reply.rdma, direction=2)  # type: ignore[type-var]
    answer = AcquireAnswered(AcquireReply(rdma=write))
    effects = feed(Fetch(AUTO), Begin(), PathsReady(PathReason.OK), answer)
    assert effects[0] == Detach(LeaseId(7), transferred=False)
    assert isinstance(only_failure(effects), PeerProtocolError)


def test_more_pieces_than_were_offered_fall_back() -> None:
    piece = GrantPiece(b"descriptor", b"grant")
    for count, kind in ((PIECES_MAX, Acquire), (PIECES_MAX - 1, Move)):
        answer = RdmaAnswer(7, b"d", b"g", 0, 100, (piece,) * count)
        effects = feed(
            Fetch(AUTO),
            Begin(),
            PathsReady(PathReason.OK),
            AcquireAnswered(AcquireReply(rdma=answer)),
        )
        assert isinstance(effects[-1], kind)
        assert (FellBack(PathReason.DECODE_ERROR) in effects) == (kind is Acquire)


def test_a_payload_that_changes_its_size_is_refused() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma(total=100))
    feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    effects = feed(fetch, ready(total=200))
    assert isinstance(only_failure(effects), PeerProtocolError)


def test_a_descriptor_for_no_bytes_falls_back() -> None:
    effects = feed(Fetch(AUTO), Begin(), PathsReady(PathReason.OK), rdma(total=0))
    assert FellBack(PathReason.DECODE_ERROR) in effects
    assert effects[-1] == Acquire(offer=False, skip_threshold=False)


# --- giving up ------------------------------------------------------------------------------------


def test_a_cancelled_acquire_gives_back_the_lease_that_comes_later() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK))
    assert feed(fetch, Cancelled()) == [Fail(None)]
    assert not fetch.ended
    assert feed(fetch, rdma()) == [Detach(LeaseId(7), transferred=False)]
    assert fetch.ended


def test_a_cancelled_pull_is_waited_for() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    assert feed(fetch, Cancelled()) == [StopMoving()]
    effects = feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(None)]


def test_memory_that_is_wanted_back_stops_the_pull() -> None:
    gone = ClosedError("the region")
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    assert feed(fetch, Stopped(gone)) == [StopMoving()]
    effects = feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Detach(LeaseId(7), transferred=False), Fail(gone)]


def test_memory_that_is_wanted_back_too_late_changes_nothing() -> None:
    fetch = Fetch(TCP)
    feed(fetch, Begin(), ready(), Moved())
    assert feed(fetch, Stopped(ClosedError("the region"))) == []
    assert fetch.state is TransferState.FINISHED


def test_a_pull_that_finishes_after_the_cancel_still_returns_its_lease() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma(), Cancelled())
    assert Detach(LeaseId(7), transferred=True) in feed(fetch, Moved())


def test_a_result_that_cannot_be_delivered_returns_its_lease() -> None:
    fetch = Fetch(TCP)
    feed(fetch, Begin(), ready(), Moved())
    assert feed(fetch, Cancelled()) == [Detach(LeaseId(8), transferred=True)]
    assert feed(fetch, Cancelled()) == []


def test_the_deadline_ends_the_callers_wait_once() -> None:
    fetch = Fetch(AUTO, deadline=5.0, timeout_s=5.0)
    feed(fetch, Begin(), PathsReady(PathReason.OK))
    assert fetch.on_deadline(4.9) == []
    assert isinstance(only_failure(fetch.on_deadline(5.0)), DeadlineExceeded)
    assert fetch.on_deadline(6.0) == []
    assert fetch.deadline is None


def test_a_lost_peer_keeps_the_lease_and_the_error() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    assert feed(fetch, PeerGone(LOST)) == [StopMoving()]
    effects = feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    assert effects == [StopRenewal(), Fail(LOST)]


def test_a_refused_second_acquire_names_both_attempts() -> None:
    fetch = Fetch(AUTO)
    feed(fetch, Begin(), PathsReady(PathReason.OK), rdma())
    feed(fetch, MoveFailed(PathReason.GET_FAILED, BROKEN))
    error = only_failure(feed(fetch, AcquireFailed(UNKNOWN)))
    assert isinstance(error, TransferFailed)
    assert error.attempts == (BROKEN, UNKNOWN)


# --- any order ------------------------------------------------------------------------------------

EVENTS = st.sampled_from(
    [
        PathsReady(PathReason.OK),
        PathsReady(PathReason.CONNECT_FAILED),
        rdma(lease=0),
        rdma(total=0, lease=0),
        ready(lease=0),
        ready(total=0, lease=0),
        ready(total=3, lease=0, inline=b"abc"),
        AcquireFailed(UNKNOWN),
        Moved(),
        MoveFailed(PathReason.GET_FAILED, BROKEN),
        MoveFailed(PathReason.GET_FAILED, Unquiesced("get", 1, "stuck")),
        Cancelled(),
        Stopped(ClosedError("the region")),
        PeerGone(LOST),
    ]
)


@dataclass
class Shell:
    """Carries out effects the way the runtime does, and remembers what the owner has given."""

    fetch: Fetch
    leases: set[int] = field(default_factory=set)
    granted: int = 0
    acquires: int = 0
    offers: int = 0
    fallbacks: int = 0
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
                self.waiting.discard("pull")
            case PeerGone():
                self.gone = True
        for effect in self.fetch.step(event, 0.0):
            self.carry_out(effect)

    def carry_out(self, effect: TransferEffect) -> None:
        match effect:
            case Prepare():
                self.waiting.add("prepare")
            case Acquire(offer, _):
                assert not self.waiting, "one thing after the other"
                self.waiting.add("acquire")
                self.acquires += 1
                self.offers += offer
            case Move():
                self.waiting.add("pull")
            case Detach(lease_id, _):
                self.leases.remove(lease_id)
            case FellBack():
                self.fallbacks += 1
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
                return "pull" in self.waiting
        return True


@settings(max_examples=1000, deadline=None)
@given(
    transport=st.sampled_from(Transport),
    kill_switch=st.booleans(),
    capacity=st.sampled_from([None, 50, 100]),
    events=st.lists(EVENTS, max_size=14),
)
def test_any_order_of_events_ends_once_and_leaves_no_lease_behind(
    transport: Transport, kill_switch: bool, capacity: int | None, events: list[TransferInput]
) -> None:
    plan = FetchPlan(transport, PathReason.OK, kill_switch, capacity_bytes=capacity)
    shell = Shell(Fetch(plan))
    shell.feed(Begin())
    for event in events:
        if shell.may_happen(event):
            shell.feed(event)
    last_words: list[TransferInput] = [
        PathsReady(PathReason.OK),
        ready(lease=0),
        MoveFailed(PathReason.GET_FAILED, BROKEN),
    ]
    while shell.waiting:  # whatever is still awaited answers in the end
        shell.feed(next(event for event in last_words if shell.may_happen(event)))
    assert shell.fetch.ended
    assert len(shell.verdicts) == 1
    assert not shell.renewing
    assert shell.fallbacks <= (transport is Transport.AUTO)
    assert shell.offers <= 1
    assert shell.acquires <= 2
    if shell.fetch.state is TransferState.FINISHED:
        (finish,) = shell.verdicts
        assert isinstance(finish, Finish)
        assert shell.leases - {finish.lease_id} == set() or shell.gone
        shell.feed(Cancelled())
    assert not shell.leases or shell.gone, "a lease was left behind"
