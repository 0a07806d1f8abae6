"""Rails for slices: the rule in its order, exact coverage, fair shares, the same again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import InternalError, PathUnavailable
from orbit.protocol.rail_selection import Candidate, Plan, RailLoad, Selector, tier_of

BLOCK = 65_536
TWO = (Candidate(0, 0, "rxe0"), Candidate(1, 1, "rxe1"))


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Candidate, ...]:
    nics = draw(st.lists(st.integers(0, 63), min_size=1, max_size=8))
    return tuple(
        Candidate(number, nic, f"d{nic}", draw(st.integers(0, 2)), draw(st.booleans()))
        for number, nic in enumerate(nics)
    )


def bytes_on(plan: Plan, number: int) -> int:
    return sum(run.nbytes for run in plan.runs if run.number == number)


# --- one choice -----------------------------------------------------------------------------------


def test_the_best_tier_wins_over_any_load() -> None:
    selector = Selector()
    near, far = Candidate(0, 0, "a", tier=1), Candidate(1, 1, "b", tier=2)
    selector.load.charge(0, 1 << 40)
    assert selector.choose((far, near)) is near


def test_the_mask_comes_before_the_tier() -> None:
    near, far = Candidate(0, 3, "a", tier=0), Candidate(1, 5, "b", tier=2)
    assert Selector().choose((near, far), mask=1 << 5) is far


def test_fewest_bytes_in_flight_wins_over_the_name() -> None:
    selector = Selector()
    same, other = Candidate(0, 0, "a", same_name=True), Candidate(1, 1, "b")
    selector.load.charge(0, 1)
    assert selector.choose((same, other)) is other
    selector.load.repay(0, 1)
    assert [selector.choose((same, other)) for _ in range(3)] == [same] * 3


def test_among_equals_the_nearest_and_never_against_the_load() -> None:
    selector = Selector()
    near, far = Candidate(0, 0, "a", bridges=1), Candidate(1, 1, "b", bridges=3)
    assert [selector.choose((near, far)) for _ in range(3)] == [near] * 3
    selector.load.charge(0, 1)
    assert selector.choose((near, far)) is far
    selector.load.repay(0, 1)
    named = Candidate(1, 1, "b", same_name=True, bridges=3)
    assert selector.choose((near, named)) is named


def test_equals_take_turns_over_all_calls() -> None:
    selector = Selector()
    three = [Candidate(n, nic, f"d{nic}") for n, nic in enumerate((7, 2, 4))]
    assert [selector.choose(three).nic for _ in range(7)] == [2, 4, 7, 2, 4, 7, 2]
    assert selector.choose(three[:2]).nic == 7  # the turn goes on where another has left
    assert selector.choose(three).nic == 2


def test_a_choice_charges_nothing() -> None:
    selector = Selector()
    selector.choose(TWO)
    selector.plan([BLOCK] * 5, TWO)
    assert selector.load.total_bytes == 0


def test_nothing_to_choose_from_is_a_missing_path() -> None:
    with pytest.raises(PathUnavailable) as caught:
        Selector().choose(())
    assert (caught.value.path, caught.value.reason) == ("rdma", "port_down")
    with pytest.raises(PathUnavailable, match="0xc") as caught:
        Selector().plan([1], TWO, mask=0b1100)
    assert caught.value.reason == "no_device"
    assert "device_mask" in caught.value.hint


# --- plans ----------------------------------------------------------------------------------------


def test_slices_of_a_rail_lie_together() -> None:
    plan = Selector().plan([BLOCK] * 4 + [100], TWO)
    assert [tuple(run) for run in plan.runs] == [
        (0, 2 * BLOCK + 100, (BLOCK, BLOCK, 100)),
        (1, 2 * BLOCK, (BLOCK, BLOCK)),
    ]
    assert dict(plan.charges) == {0: 2 * BLOCK + 100, 1: 2 * BLOCK}


def test_a_plan_evens_out_what_was_in_flight() -> None:
    selector = Selector()
    selector.load.charge(0, 3 * BLOCK)
    plan = selector.plan([BLOCK] * 5, TWO)
    assert (bytes_on(plan, 0), bytes_on(plan, 1)) == (BLOCK, 4 * BLOCK)


def test_plans_of_one_slice_take_turns() -> None:
    selector = Selector()
    numbers = [selector.plan([10], TWO).runs[0].number for _ in range(4)]
    assert numbers == [0, 1, 0, 1]


def test_a_rail_has_a_run_for_each_queue_pair() -> None:
    plan = Selector().plan([BLOCK] * 7, TWO, parts=3)
    assert [(run.number, len(run.slices)) for run in plan.runs] == [
        (0, 1),
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 1),
        (1, 1),
    ]
    one = Selector().plan([5], TWO, parts=3)
    assert [tuple(run) for run in one.runs] == [(0, 5, (5,))]


def test_ranges_that_lie_apart_stay_in_their_order() -> None:
    sizes = [300, 100, 50, 100, 500]
    plan = Selector().plan(sizes, TWO, ordered=True)
    assert [tuple(run) for run in plan.runs] == [
        (0, 300, (300,)),
        (1, 750, (100, 50, 100, 500)),
    ]
    even = Selector().plan([10] * 4, TWO, ordered=True)
    assert [run.number for run in even.runs] == [0, 1, 0, 1]
    split = Selector().plan([10] * 5, TWO[:1], parts=2, ordered=True)
    assert [run.slices for run in split.runs] == [(10, 10), (10, 10, 10)]


def test_routes_of_one_nic_share_its_load() -> None:
    pair = (Candidate(0, 0, "a"), Candidate(1, 0, "a"), Candidate(2, 1, "b"))
    plan = Selector().plan([BLOCK] * 4, pair)
    assert bytes_on(plan, 0) + bytes_on(plan, 1) == bytes_on(plan, 2) == 2 * BLOCK
    assert dict(plan.charges) == {0: 2 * BLOCK, 1: 2 * BLOCK}


def test_every_candidate_has_its_reason() -> None:
    selector = Selector()
    selector.load.charge(2, 500)
    rails = (
        Candidate(0, 0, "busy", tier=1),
        Candidate(1, 1, "masked"),
        Candidate(2, 2, "loaded"),
        Candidate(3, 3, "chosen"),
        Candidate(4, 4, "later"),
    )
    plan = selector.plan([100], rails, mask=0b11101)
    texts = dict(zip((c.device for c in rails), plan.reasons, strict=True))
    assert "tier 0" in texts["busy"]
    assert "mask 0x1d" in texts["masked"]
    assert "500 bytes were in flight, 0 on another" in texts["loaded"]
    assert "chosen for 1 slices, 100 bytes" in texts["chosen"]
    assert "its turn" in texts["later"]
    assert all(f"NIC {c.nic}" in texts[c.device] for c in rails)


def test_no_slices_are_an_empty_plan() -> None:
    plan = Selector().plan([], TWO)
    assert plan.runs == plan.charges == ()
    assert len(plan.reasons) == 2


@given(
    candidates(),
    st.lists(st.integers(1, 1 << 20), max_size=64),
    st.none() | st.integers(1, (1 << 64) - 1),
    st.integers(1, 4),
    st.booleans(),
    st.dictionaries(st.integers(0, 63), st.integers(1, 1 << 22)),
)
def test_every_plan(
    rails: tuple[Candidate, ...],
    sizes: list[int],
    mask: int | None,
    parts: int,
    ordered: bool,
    before: dict[int, int],
) -> None:
    selector, twin = Selector(), Selector()
    for nic, nbytes in before.items():
        selector.load.charge(nic, nbytes)
        twin.load.charge(nic, nbytes)
    allowed = [c for c in rails if mask is None or mask & 1 << c.nic]
    if not allowed:
        with pytest.raises(PathUnavailable):
            selector.plan(sizes, rails, mask, parts=parts)
        return
    plan = selector.plan(sizes, rails, mask, parts=parts, ordered=ordered)
    assert plan == twin.plan(
        sizes, rails, mask, parts=parts, ordered=ordered
    )  # the same history, the same plan

    # Every byte and every slice once; runs in the order of the candidates, and few enough.
    slices = [size for run in plan.runs for size in run.slices]
    assert all(run.nbytes == sum(run.slices) > 0 for run in plan.runs)
    numbers = [run.number for run in plan.runs]
    if ordered:
        assert slices == sizes
    else:
        assert sorted(slices) == sorted(sizes)
        assert numbers == sorted(numbers)
        assert all(numbers.count(number) <= parts for number in numbers)

    # Only the best tier that is allowed, and there no NIC is left more than a slice behind.
    best = min(c.tier for c in allowed)
    eligible = [c for c in allowed if c.tier == best]
    assert set(numbers) <= {c.number for c in eligible}
    added = dict(plan.charges)
    assert sum(added.values()) == sum(sizes)
    least = min(before.get(c.nic, 0) + added.get(c.nic, 0) for c in eligible)
    for nic, nbytes in added.items():
        assert before.get(nic, 0) + nbytes - least <= max(sizes)


# --- load and tiers -------------------------------------------------------------------------------


def test_load_is_never_negative() -> None:
    load = RailLoad()
    load.charge(3, 10)
    for nic, nbytes in ((3, 11), (4, 1), (3, -1)):
        with pytest.raises(InternalError):
            load.repay(nic, nbytes)
    with pytest.raises(InternalError):
        load.charge(3, -1)
    assert (load.charged(3), load.charged(4), load.total_bytes) == (10, 0, 10)
    load.repay(3, 4)
    load.repay(3, 6)
    assert load.total_bytes == 0
    assert load.by_nic() == {3: (0, 10)}  # nothing on its way, and what there was


@pytest.mark.parametrize(
    ("node", "preferred", "distances", "tier"),
    [
        (0, None, None, 0),
        (-1, None, None, 0),  # nobody prefers anything: all are equal
        (1, 1, None, 0),
        (0, 1, None, 1),
        (-1, 1, None, 2),
        (0, 0, {0: 10, 1: 20}, 0),
        (1, 0, {0: 10, 1: 20}, 1),
        (-1, 0, {0: 10, 1: 20}, 2),
        (7, 0, {0: 10, 1: 20}, 2),  # a node of which no distance is known
        (1, 0, {0: 10, 1: 12, 2: 20, 3: 20}, 1),
        (2, 0, {0: 10, 1: 12, 2: 20, 3: 20}, 2),
        (3, 0, {0: 10, 1: 12, 2: 20, 3: 20}, 2),
        (-1, 0, {0: 10, 1: 12, 2: 20, 3: 20}, 3),
        (-1, 0, {0: 10}, 2),
    ],
)
def test_tiers(
    node: int, preferred: int | None, distances: dict[int, int] | None, tier: int
) -> None:
    assert tier_of(node, preferred, distances) == tier
