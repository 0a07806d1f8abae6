"""The two grant machines and the round planner, by the rules that a device depends on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import InternalError, UsageError
from orbit.protocol.grants import (
    Bind,
    BindCompleted,
    Cancel,
    Complete,
    Done,
    Drained,
    DrainUnproven,
    Fail,
    FreeWindow,
    GrantRequester,
    GrantSource,
    GrantTimeouts,
    KillQueuePair,
    Piece,
    PieceFailed,
    PiecesCompleted,
    Post,
    PostFailed,
    QueuePairFailed,
    Receipt,
    ReceiptCompleted,
    ReceivePosted,
    RecycleWindow,
    ReleaseMemory,
    ReleaseTarget,
    Retain,
    RoundPlanner,
    SessionClosed,
    SourceState,
    Start,
    WindowFreed,
    WindowFreeFailed,
)

TIMEOUTS = GrantTimeouts(bind_s=1, receipt_s=2, progress_s=3, cancel_s=4, drain_s=5)


def published(now: float = 0.0) -> GrantSource:
    grant = GrantSource(TIMEOUTS)
    for event in (Bind(), BindCompleted(), ReceivePosted()):
        grant.step(event, now)
    return grant


def requester(total: int = 4, slots: int = 4, inflight: int = 4) -> GrantRequester:
    planner = RoundPlanner(total, piece_bytes=1, inflight_bytes_max=inflight, send_slots=slots)
    return GrantRequester(planner, TIMEOUTS)


# --- source ---------------------------------------------------------------------------------------


def test_receipt_then_done_releases_memory_without_touching_the_queue_pair() -> None:
    grant = published()
    assert grant.holds_window
    assert grant.step(Receipt(matches=True), 0) == [RecycleWindow()]
    assert not grant.holds_window
    assert not grant.ended
    assert grant.step(Done(transferred=True), 0) == [ReleaseMemory()]
    assert grant.ended


def test_done_then_receipt_releases_memory_too() -> None:
    grant = published()
    assert grant.step(Done(transferred=True), 10) == []
    assert grant.deadline == 12
    assert grant.step(Receipt(matches=True), 11) == [RecycleWindow(), ReleaseMemory()]
    assert grant.deadline is None


@pytest.mark.parametrize("end", [Done(transferred=False), SessionClosed()])
def test_a_lease_that_ends_after_its_receipt_touches_no_queue_pair(end: object) -> None:
    grant = published()
    grant.step(Receipt(matches=True), 0)
    assert grant.step(end, 0) == [ReleaseMemory()]  # type: ignore[arg-type]


def test_the_receipt_alone_counts_as_the_receipt() -> None:
    """Of a WRITE it is what proves that the bytes are in place."""
    grant = published()
    grant.step(Done(transferred=True), 0)
    assert not grant.receipted
    grant.step(Receipt(matches=True), 0)
    assert grant.receipted
    foreign = published()
    foreign.step(Receipt(matches=False), 0)
    assert not foreign.receipted
    late = published()
    late.step(QueuePairFailed("gone"), 0)
    late.step(Receipt(matches=True), 0)  # flushed, or from before: it proves nothing any more
    assert not late.receipted


def test_done_without_receipt_kills_the_queue_pair_at_the_deadline() -> None:
    grant = published()
    grant.step(Done(transferred=True), 0)
    assert grant.on_deadline(1.9) == []
    (kill,) = grant.on_deadline(2.0)
    assert isinstance(kill, KillQueuePair)
    assert grant.step(QueuePairFailed(kill.cause), 2.0) == []
    assert grant.step(Drained(), 2.1) == [FreeWindow()]
    assert grant.step(WindowFreed(), 2.2) == [ReleaseMemory()]


@pytest.mark.parametrize(
    "event", [Done(transferred=False), SessionClosed(), Receipt(matches=False)]
)
def test_without_a_receipt_nothing_is_freed_before_the_drain(event: object) -> None:
    grant = published()
    effects = grant.step(event, 0)  # type: ignore[arg-type]
    assert [type(effect) for effect in effects] == [KillQueuePair]
    for late in (Receipt(matches=True), Done(transferred=True), SessionClosed()):
        assert grant.step(late, 0) == []
    assert grant.state is SourceState.ABORTING


def test_a_siblings_abort_is_not_answered_with_another_kill() -> None:
    grant = published()
    assert grant.step(QueuePairFailed("sibling"), 0) == []
    assert grant.state is SourceState.ABORTING


@pytest.mark.parametrize("proof", ["drain", "free", "deadline"])
def test_what_cannot_be_proven_is_retained_until_the_proof_comes(proof: str) -> None:
    grant = published()
    grant.step(QueuePairFailed("gone"), 0)
    if proof == "drain":
        assert grant.step(DrainUnproven("stuck"), 1) == [Retain("stuck")]
    elif proof == "free":
        grant.step(Drained(), 1)
        assert grant.step(WindowFreeFailed("busy"), 1) == [Retain("busy")]
    else:
        assert [type(effect) for effect in grant.on_deadline(5)] == [Retain]
    assert not grant.ended
    assert grant.step(Drained(), 9) == [FreeWindow()]
    assert grant.step(WindowFreed(), 9) == [ReleaseMemory()]
    assert grant.ended


# --- requester ------------------------------------------------------------------------------------


def test_the_receipt_rides_with_the_last_read() -> None:
    pull = requester(total=3, slots=3)
    assert pull.step(Start(), 0) == [Post((Piece(0, 1), Piece(1, 1)), receipt=False)]
    assert pull.step(PiecesCompleted(1), 0) == [Post((Piece(2, 1),), receipt=True)]
    assert pull.step(PiecesCompleted(2), 0) == [Complete()]
    assert pull.step(ReceiptCompleted(), 0) == []
    assert pull.ended


def test_progress_moves_the_deadline_and_only_progress_does() -> None:
    pull = requester(slots=2)
    pull.step(Start(), 0)
    assert pull.deadline == 3
    pull.step(PiecesCompleted(1), 2)
    assert pull.deadline == 5
    (kill,) = pull.on_deadline(5)
    assert kill == KillQueuePair("no progress within the deadline")


def test_cancel_hands_the_grant_back_and_spares_the_queue_pair() -> None:
    pull = requester(slots=2)
    pull.step(Start(), 0)
    assert pull.step(Cancel("why"), 0) == []
    assert pull.step(PiecesCompleted(1), 0) == [Post((), receipt=True)]
    assert pull.step(ReceiptCompleted(), 0) == [Fail("why", returned=True)]


def test_cancel_before_the_start_returns_the_grant_unused() -> None:
    pull = requester()
    assert pull.step(Cancel("no room"), 0) == [Post((), receipt=True)]
    assert pull.step(ReceiptCompleted(), 0) == [Fail("no room", returned=True)]


def test_cancel_that_does_not_end_in_time_kills_the_queue_pair() -> None:
    pull = requester(slots=5)
    pull.step(Start(), 0)
    pull.step(Cancel("why"), 0)  # everything was posted: it ends by itself
    assert pull.step(PiecesCompleted(4), 0) == [Complete()]
    slow = requester(slots=2)
    slow.step(Start(), 0)
    slow.step(Cancel("why"), 0)
    assert [type(effect) for effect in slow.on_deadline(4)] == [KillQueuePair]
    assert slow.step(Drained(), 4) == [Fail("why", returned=False)]


def test_a_failed_read_raises_only_after_the_drain() -> None:
    pull = requester()
    pull.step(Start(), 0)
    assert pull.step(PieceFailed("access"), 0) == [KillQueuePair("access")]
    assert pull.step(QueuePairFailed("access"), 0) == []
    assert pull.step(Drained(), 0) == [Fail("access", returned=False)]


def test_a_flushed_sibling_fails_with_the_queue_pairs_cause() -> None:
    pull = requester()
    pull.step(Start(), 0)
    pull.step(QueuePairFailed("access error of another get"), 0)
    pull.step(PieceFailed("flushed"), 0)
    assert pull.step(Drained(), 0) == [Fail("access error of another get", returned=False)]


def test_a_target_without_the_proof_is_retained_then_released() -> None:
    pull = requester()
    pull.step(Start(), 0)
    pull.step(PostFailed("full"), 0)
    assert pull.step(DrainUnproven("stuck"), 0) == [Retain("stuck")]
    assert pull.step(Drained(), 1) == [ReleaseTarget()]


def test_more_completions_than_reads_is_a_bug_that_changes_nothing() -> None:
    pull = requester(slots=2)
    pull.step(Start(), 0)
    with pytest.raises(InternalError):
        pull.step(PiecesCompleted(2), 0)
    assert pull.planner.pieces_in_flight == 1


# --- rounds ---------------------------------------------------------------------------------------


@given(
    total=st.integers(1, 800),
    piece=st.integers(1, 300),
    inflight=st.integers(1, 900),
    slots=st.integers(2, 9),
    borders=st.sets(st.integers(1, 900)),
    data=st.data(),
)
def test_rounds_cover_the_range_exactly_within_their_bounds(
    total: int, piece: int, inflight: int, slots: int, borders: set[int], data: st.DataObject
) -> None:
    planner = RoundPlanner(
        total,
        piece_bytes=piece,
        inflight_bytes_max=inflight,
        send_slots=slots,
        borders=sorted(borders),
    )
    covered = 0
    while not planner.finished:
        for part in planner.next_round():
            assert part.offset == covered
            assert 0 < part.nbytes <= piece
            assert not any(covered < border < covered + part.nbytes for border in borders)
            covered += part.nbytes
        assert planner.inflight_bytes <= inflight
        assert 0 < planner.pieces_in_flight <= slots - 1
        planner.complete(data.draw(st.integers(1, planner.pieces_in_flight)))
    assert covered == total
    assert planner.all_posted
    assert planner.next_round() == ()


@pytest.mark.parametrize(
    ("total", "piece", "inflight", "slots"),
    [(0, 1, 1, 2), (1, 0, 1, 2), (1, 1, 0, 2), (1, 1, 1, 1)],
)
def test_a_plan_that_could_never_move_is_refused(
    total: int, piece: int, inflight: int, slots: int
) -> None:
    with pytest.raises(UsageError):
        RoundPlanner(total, piece_bytes=piece, inflight_bytes_max=inflight, send_slots=slots)
