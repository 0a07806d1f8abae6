"""Owner and consumer decisions, in their order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbit.errors import PathUnavailable, PeerProtocolError, PeerRefused
from orbit.model import Handle, PathReason, SlotId, Transport, WorkerId
from orbit.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    RdmaAnswer,
    RdmaOffer,
    ReadyAnswer,
    SliceRun,
)
from orbit.protocol.paths import (
    RDMA_BYTES_MIN_DEFAULT,
    SPREAD_BYTES_MIN,
    OwnerFacts,
    check_answer,
    count_grants,
    decide_offer,
    decide_owner,
    fallback_reason,
    peer_reason,
    refusal_of,
    refused_path,
    spread_runs,
)
from orbit.protocol.slices import BLOCK_BYTES

REQUEST = AcquireRequest(Handle(WorkerId(1), SlotId(1)), RdmaOffer(("verbs",)))
FACTS = OwnerFacts(
    rdma=PathReason.OK,
    kill_switch=False,
    pinned=True,
    total_bytes=RDMA_BYTES_MIN_DEFAULT,
    draining=False,
)

# Each row breaks one check; with every later one broken too, the earlier reason still wins.
REFUSALS = [
    (PathReason.NO_OFFER, {"rdma": None}, {}),
    (PathReason.NO_WINDOWS, {}, {"rdma": PathReason.NO_WINDOWS}),
    (PathReason.KILL_SWITCH, {}, {"kill_switch": True}),
    (PathReason.NOT_PINNED, {}, {"pinned": False}),
    (PathReason.BELOW_MIN, {}, {"total_bytes": RDMA_BYTES_MIN_DEFAULT - 1}),
    (PathReason.NO_OFFER, {"rdma": RdmaOffer(("ucx",))}, {}),
    (PathReason.NO_OFFER, {}, {"pieces": 2}),
    (PathReason.DRAINING, {}, {"draining": True}),
]


def test_all_checks_pass() -> None:
    assert decide_owner(REQUEST, FACTS) is PathReason.OK


@pytest.mark.parametrize(("reason", "request_change", "facts_change"), REFUSALS)
def test_each_check_alone(
    reason: PathReason, request_change: dict[str, object], facts_change: dict[str, object]
) -> None:
    request = replace(REQUEST, **request_change)  # type: ignore[arg-type]
    assert decide_owner(request, replace(FACTS, **facts_change)) is reason  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(len(REFUSALS)))
def test_the_earliest_failing_check_names_the_reason(first: int) -> None:
    request, facts = REQUEST, FACTS
    for _, request_change, facts_change in reversed(REFUSALS[first:]):
        request = replace(request, **request_change)  # type: ignore[arg-type]
        facts = replace(facts, **facts_change)  # type: ignore[arg-type]
    assert decide_owner(request, facts) is REFUSALS[first][0]


@pytest.mark.parametrize("field", ["skip_threshold", "ranged"])
def test_a_demand_skips_the_threshold_and_nothing_else(field: str) -> None:
    demand = replace(REQUEST, **{field: True})  # type: ignore[arg-type]
    assert decide_owner(demand, replace(FACTS, total_bytes=1)) is PathReason.OK
    assert decide_owner(demand, replace(FACTS, total_bytes=0)) is PathReason.NOT_PINNED
    assert decide_owner(demand, replace(FACTS, pinned=False)) is PathReason.NOT_PINNED
    assert decide_owner(demand, replace(FACTS, draining=True)) is PathReason.DRAINING


@pytest.mark.parametrize(
    ("transport", "kill_switch", "rdma", "reason"),
    [
        (Transport.AUTO, False, PathReason.OK, PathReason.OK),
        (Transport.RDMA, False, PathReason.OK, PathReason.OK),
        (Transport.TCP, False, PathReason.OK, PathReason.ASKED),
        (Transport.TCP, True, PathReason.NO_DEVICE, PathReason.ASKED),
        (Transport.AUTO, True, PathReason.OK, PathReason.KILL_SWITCH),
        (Transport.AUTO, True, PathReason.NOT_CONFIGURED, PathReason.NOT_CONFIGURED),
        (Transport.AUTO, False, PathReason.PEER_WITHOUT, PathReason.PEER_WITHOUT),
    ],
)
def test_what_the_consumer_offers(
    transport: Transport, kill_switch: bool, rdma: PathReason, reason: PathReason
) -> None:
    assert decide_offer(transport, kill_switch=kill_switch, rdma=rdma) is reason


def test_a_failed_pull_has_one_of_three_labels() -> None:
    labels = {fallback_reason(reason) for reason in PathReason}
    assert labels == {PathReason.DECODE_ERROR, PathReason.POOL_EXHAUSTED, PathReason.GET_FAILED}


def test_a_reason_of_a_newer_peer_is_understood_as_no_offer() -> None:
    assert peer_reason("below_min") is PathReason.BELOW_MIN
    assert peer_reason("invented_in_2031") is PathReason.NO_OFFER


def test_a_descriptor_without_an_offer_is_a_broken_owner() -> None:
    descriptor = AcquireReply(rdma=RdmaAnswer(1, b"", b""))
    check_answer(descriptor, offered=True)
    check_answer(AcquireReply(ready=ReadyAnswer(1, 1, 1)), offered=False)
    with pytest.raises(PeerProtocolError):
        check_answer(descriptor, offered=False)


# --- a demanded path ------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", PathReason)
def test_a_refused_path_keeps_its_reason_on_the_way(reason: PathReason) -> None:
    refused = refused_path(reason)
    assert len(refused.reason) <= 32, "a code is cut there"
    typed = refusal_of(PeerRefused(refused.reason, str(refused)))
    assert isinstance(typed, PathUnavailable)
    assert (typed.path, typed.reason) == ("rdma", reason)


def test_other_refusals_are_none_of_a_path() -> None:
    assert refusal_of(PeerRefused("busy")) is None
    later = refusal_of(PeerRefused("rdma.not_known_here"))
    assert later is not None
    assert later.reason == PathReason.NO_OFFER


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "runs", "grants"),
    [
        ([5], [], 1),
        ([5, 0, 5], [], 2),
        ([10], [10], 1),
        ([10], [4, 6], 2),
        ([4, 6], [10], 2),
        ([4, 6], [4, 6], 2),
        ([4, 6], [5, 5], 3),
        ([4, 0, 6], [3, 3, 4], 4),
    ],
)
def test_grants_are_runs_cut_where_pieces_end(
    pieces: list[int], runs: list[int], grants: int
) -> None:
    assert count_grants(pieces, [SliceRun(0, nbytes) for nbytes in runs]) == grants


@pytest.mark.parametrize("runs", [[9], [11], [10, 0], [0, 10], [5, 1 << 64, 5]])
def test_runs_that_do_not_cover_are_refused(runs: list[int]) -> None:
    with pytest.raises(PeerRefused) as caught:
        count_grants([4, 6], [SliceRun(0, nbytes) for nbytes in runs])
    assert caught.value.reason == "bad_request"


@pytest.mark.parametrize("nbytes", [SPREAD_BYTES_MIN, SPREAD_BYTES_MIN + 1, 100 * BLOCK_BYTES * 77])
@pytest.mark.parametrize("arrays", [(0, 2), (5, 0, 9), tuple(range(7))])
def test_a_payload_is_spread_in_shares_of_whole_blocks(
    nbytes: int, arrays: tuple[int, ...]
) -> None:
    runs = spread_runs(nbytes, arrays)
    assert tuple(run.array for run in runs) == arrays
    assert sum(run.nbytes for run in runs) == nbytes
    assert all(run.nbytes % BLOCK_BYTES == 0 for run in runs[:-1])
    sizes = [run.nbytes for run in runs]
    assert max(sizes) - min(sizes) <= BLOCK_BYTES


def test_what_one_array_does_as_well_is_not_spread() -> None:
    assert spread_runs(SPREAD_BYTES_MIN - 1, (0, 2)) == ()
    assert spread_runs(1 << 30, (0,)) == ()
    assert spread_runs(1 << 30, (3, 3)) == ()
    assert spread_runs(1 << 30, ()) == ()
