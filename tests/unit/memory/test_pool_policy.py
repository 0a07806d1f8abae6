"""How a pool grows and what it gives back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import BusyError, UsageError
from orbit.memory.pages import PAGE_BYTES, whole_pages
from orbit.memory.pool_policy import ArenaUse, PoolPolicy, surplus

MIB = 1 << 20
GIB = 1 << 30
DEFAULTS = PoolPolicy(64 * MIB, GIB, 64 * MIB, 1 << 40)


def grown(policy: PoolPolicy, count: int) -> list[int]:
    sizes: list[int] = []
    for _ in range(count):
        sizes.append(next(policy.pooled_sizes(1, max(sizes, default=0))))
    return sizes


def test_arenas_double_from_the_initial_size_to_the_maximum() -> None:
    assert [size // MIB for size in grown(DEFAULTS, 7)] == [64, 128, 256, 512, 1024, 1024, 1024]


def test_a_maximum_that_is_no_power_of_two_is_reached() -> None:
    policy = PoolPolicy(MIB, 3 * MIB, GIB, GIB)
    assert [size // MIB for size in grown(policy, 4)] == [1, 2, 3, 3]


def test_smaller_sizes_follow_for_a_budget_without_room() -> None:
    sizes = list(DEFAULTS.pooled_sizes(1, 512 * MIB))
    assert [size // MIB for size in sizes] == [1024, 512, 256, 128, 64]
    assert list(DEFAULTS.pooled_sizes(1, 0)) == [64 * MIB]


def test_a_piece_that_is_larger_than_the_next_arena_gets_what_it_needs() -> None:
    policy = PoolPolicy(MIB, 2 * MIB, GIB, GIB)
    assert list(policy.pooled_sizes(5 * MIB + 1, 0)) == [5 * MIB + PAGE_BYTES]


def test_no_arena_is_longer_than_a_registration_may_be() -> None:
    policy = PoolPolicy(64 * MIB, GIB, 64 * MIB, 10 * MIB + 5)
    assert grown(policy, 3) == [10 * MIB] * 3
    policy.check(10 * MIB)
    with pytest.raises(BusyError, match=str(10 * MIB + 5)):
        policy.check(10 * MIB + 1)


def test_no_bytes_are_refused() -> None:
    for nbytes in (0, -1):
        with pytest.raises(UsageError):
            DEFAULTS.check(nbytes)


def test_dedicated_from_the_threshold_on() -> None:
    assert not DEFAULTS.dedicated(64 * MIB - 1)
    assert DEFAULTS.dedicated(64 * MIB)


@given(
    st.integers(1, 1 << 30),
    st.integers(0, 1 << 30),
    st.integers(1, 1 << 26),
    st.integers(1, 1 << 30),
    st.integers(1, 1 << 32),
)
def test_every_size_holds_the_piece_within_the_limit(
    piece: int, largest: int, initial: int, maximum: int, limit: int
) -> None:
    maximum = max(initial, maximum)
    policy = PoolPolicy(whole_pages(initial), whole_pages(maximum), 1 << 40, limit)
    try:
        policy.check(piece)
    except BusyError:
        assert whole_pages(piece) > limit // PAGE_BYTES * PAGE_BYTES
        return
    sizes = list(policy.pooled_sizes(piece, whole_pages(largest)))
    assert sizes == sorted(set(sizes), reverse=True)
    for size in sizes:
        assert size % PAGE_BYTES == 0
        assert piece <= size <= max(whole_pages(maximum), whole_pages(piece))
        assert size <= max(limit, PAGE_BYTES)


def test_the_newest_empty_arenas_go_first_and_the_floor_stays() -> None:
    idle = [ArenaUse(64, 0.0), ArenaUse(128, 0.0), ArenaUse(256, 0.0)]
    assert surplus(idle, 64) == [2, 1]
    assert surplus(idle, 65) == [2, 0]
    assert surplus(idle, 0) == [2, 1, 0]
    assert surplus(idle, 448) == []
    assert surplus([], 0) == []


def test_what_is_in_use_counts_for_the_floor_and_stays() -> None:
    arenas = [ArenaUse(64, 1.0), ArenaUse(128, None), ArenaUse(256, 3.0)]
    assert surplus(arenas, 64) == [2, 0]
    assert surplus(arenas, 192) == [2]


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.none() | st.just(0.0)), max_size=12),
    st.integers(0, 5000),
)
def test_what_is_left_is_never_below_the_floor_for_want_of_restraint(
    arenas: list[tuple[int, float | None]], retain: int
) -> None:
    uses = [ArenaUse(*arena) for arena in arenas]
    going = surplus(uses, retain)
    assert len(set(going)) == len(going)
    assert all(uses[index].idle_since is not None for index in going)
    total = sum(arena.nbytes for arena in uses)
    left = total - sum(uses[index].nbytes for index in going)
    assert left >= min(retain, total)
    for index, arena in enumerate(uses):  # and nothing that could go is forgotten
        if index not in going and arena.idle_since is not None:
            assert left - arena.nbytes < retain
