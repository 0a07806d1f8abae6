"""Ranges as arrays: what is refused and by which place, merging, groups; against plain lists."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import OutOfRange, UsageError
from orbit.memory.range_table import RangeTable
from orbit.model import Direction
from orbit.protocol.range_list import unpack

READ, WRITE = Direction.READ, Direction.WRITE
SIZE = 1 << 20


def table(
    local: Any,
    remote: Any,
    lengths: Any,
    direction: Direction = READ,
    *,
    local_bytes: int = SIZE,
    remote_bytes: int = SIZE,
) -> RangeTable:
    return RangeTable(
        direction, local, remote, lengths, local_bytes=local_bytes, remote_bytes=remote_bytes
    )


def triples(found: RangeTable) -> list[tuple[int, int, int]]:
    return list(
        zip(found.local.tolist(), found.remote.tolist(), found.lengths.tolist(), strict=True)
    )


# --- what is taken as integers --------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [list, tuple, *(np.dtype(code).newbyteorder(order) for code in "hHiIqQ" for order in "<>")],
    ids=str,
)
def test_all_kinds_of_integers(kind: Any) -> None:
    values = [[0, 100, 200], [300, 0, 500], [10, 20, 30]]
    given = [np.array(v, kind) if isinstance(kind, np.dtype) else kind(v) for v in values]
    assert triples(table(*given)) == [(0, 300, 10), (100, 0, 20), (200, 500, 30)]


def test_strided_and_reversed_views() -> None:
    grid = np.arange(0, 8000, 100).reshape(20, 4)
    found = table(grid[::2, 1], grid[::-2, 0], np.full(40, 7)[::4])
    assert triples(found) == [(200 * 4 * i + 100, 7600 - 800 * i, 7) for i in range(10)]


def test_the_arrays_are_copies() -> None:
    local, remote, lengths = (np.array([v], np.int64) for v in (1, 2, 3))
    found = table(local, remote, lengths)
    for array in (local, remote, lengths):
        array[0] = SIZE * 2
    assert triples(found) == [(1, 2, 3)]


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        np.array([1.0]),
        np.array([], float),
        [True],
        ["1"],
        [None],
        [1 << 64],
        [[1]],
        1,
        None,
        [[1], [2, 3]],
        np.array([1], "M8[s]"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", range(3))
def test_what_is_no_list_of_integers(wrong: object, place: int) -> None:
    given: list[object] = [[1], [1], [1]]
    given[place] = wrong
    with pytest.raises(UsageError, match=("local_offsets", "remote_offsets", "lengths")[place]):
        table(*given)


@pytest.mark.parametrize("counts", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (0, 0, 1)])
def test_as_many_of_each(counts: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match=r"local offsets.*remote offsets.*lengths"):
        table(*([0] * count for count in counts))


def test_without_numpy_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError) as caught:
        table([0], [0], [1])
    assert "numpy" in str(caught.value)
    assert "install numpy" in caught.value.hint


# --- bounds ---------------------------------------------------------------------------------------

I64 = np.iinfo(np.int64)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (-1, 1),
        (SIZE, 1),
        (SIZE + 1, 0),
        (SIZE - 1, 2),
        (0, SIZE + 1),
        (0, -1),
        (5, -5),
        (I64.max, 1),
        (I64.max, I64.max),  # a sum that wraps in 64 bits
        (1, I64.max),
        (I64.min, 1),
        (0, I64.min),
        (I64.min, I64.min),
    ],
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_the_first_that_lies_outside_is_named(side: str, offset: int, length: int) -> None:
    good = [0, 0, 0, 0]
    bad = [SIZE, 0, offset, -7]
    lengths = [0, 1, length, 0]
    sizes = {"local_bytes": I64.max, "remote_bytes": I64.max}
    if length >= 0:
        sizes[f"{side}_bytes"] = SIZE
        match = f"range 2: .* {side} region"
    else:  # wrong on both sides, and found on the first
        sizes = {}
        match = "range 2: .* local region"
    local, remote = (bad, good) if side == "local" else (good, bad)
    if length < 0:
        local = good
    with pytest.raises(OutOfRange, match=match):
        table(local, remote, lengths, **sizes)


def test_unsigned_numbers_beyond_the_signed_ones_are_outside() -> None:
    huge = np.array([0, (1 << 64) - 1, 1 << 63], np.uint64)
    # The number in the text is the nearest that is known, never a negative one.
    with pytest.raises(OutOfRange, match=f"range 1: 1 bytes at {I64.max} "):
        table(huge, [0] * 3, [1] * 3)
    with pytest.raises(OutOfRange, match=f"range 1: {I64.max} bytes at 0 "):
        table([0] * 3, [0] * 3, huge)


def test_whole_regions_and_empty_ranges_at_the_end_lie_within() -> None:
    found = table([0, SIZE], [0, 10], [SIZE, 0], remote_bytes=SIZE)
    assert triples(found) == [(0, 0, SIZE)]
    assert found.given == 2


# --- overlap --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_only_what_is_written_may_not_overlap(direction: Direction) -> None:
    apart, together = [0, 100, 50, 200], [10, 300, 400, 19]
    lengths = [10] * 4
    written = (together, apart) if direction is READ else (apart, together)
    side = "local" if direction is READ else "remote"
    with pytest.raises(UsageError, match=rf"ranges 0 and 3 overlap in the {side} region"):
        table(*written, lengths, direction)
    table(*reversed(written), lengths, direction)


def test_touching_and_empty_ranges_do_not_overlap() -> None:
    table([10, 0, 5, 20], [0, 100, 200, 300], [10, 10, 0, 1])
    with pytest.raises(UsageError, match="ranges 0 and 1"):
        table([0, 0], [0, 100], [1, 1])
    with pytest.raises(UsageError, match="ranges 0 and 2"):
        table([0, 90, 40], [0, 100, 200], [80, 1, 2])


# --- merging --------------------------------------------------------------------------------------


def test_neighbours_on_both_sides_are_one() -> None:
    local = [0, 10, 20, 30, 40]
    remote = [100, 110, 500, 510, 600]
    assert triples(table(local, remote, [10, 10, 10, 10, 5])) == [
        (0, 100, 20),
        (20, 500, 20),
        (40, 600, 5),
    ]


def test_an_empty_range_between_does_not_part_them() -> None:
    assert triples(table([0, 77, 10], [5, 0, 15], [10, 0, 10])) == [(0, 5, 20)]


def test_only_in_their_order() -> None:
    assert len(triples(table([10, 0], [10, 0], [10, 10]))) == 2


def test_nothing_is_nothing() -> None:
    for empty in (table([], [], []), table([1, 2], [3, 4], [0, 0])):
        assert (empty.count, empty.nbytes) == (0, 0)
        assert list(empty.groups(1, 1)) == []


# --- groups ---------------------------------------------------------------------------------------


def test_groups_hold_both_limits() -> None:
    found = table(range(0, 1000, 100), range(0, 1000, 100), [10] * 10)
    by_count = list(found.groups(4, SIZE))
    assert [group.count for group in by_count] == [4, 4, 2]
    by_bytes = list(found.groups(64, 35))
    assert [group.nbytes for group in by_bytes] == [30, 30, 30, 10]
    assert by_bytes[1].local_pairs() == [(300, 10), (400, 10), (500, 10)]


def test_a_range_that_is_too_long_is_cut() -> None:
    (first, second, third) = table([0, 5000], [100, 9000], [2500, 5]).groups(8, 1000)
    assert first.local_pairs() == [(0, 1000)]
    assert second.remote_pairs() == [(1100, 1000)]
    assert third.local_pairs() == [(2000, 500), (5000, 5)]


def test_the_bytes_of_a_group_are_those_of_the_wire() -> None:
    local, remote = [0, 100], [1 << 33, 7]
    (group,) = table(local, remote, [10, 20], remote_bytes=1 << 40).groups(9, SIZE)
    assert group.remote_bytes().hex() == (
        "00000000020000000a00000000000000" + "07000000000000001400000000000000"
    )
    assert unpack(group.remote_bytes(), 1 << 40) == group.remote_pairs() == [(1 << 33, 10), (7, 20)]


def test_limits_without_room_are_refused() -> None:
    found = table([0], [0], [1])
    for limits in ((0, 1), (1, 0)):
        with pytest.raises(UsageError):
            list(found.groups(*limits))
    assert len(list(found.groups(1 << 70, 1 << 70))) == 1


def test_thousands_of_ranges() -> None:
    count = 4096
    order = np.random.default_rng(7).permutation(count)
    found = table(order * 200, np.arange(count) * 100, np.full(count, 100), WRITE)
    assert found.nbytes == count * 100
    groups = list(found.groups(32, SIZE))
    assert len(groups) == -(-found.count // 32)
    moved = [pair for group in groups for pair in group.local_pairs()]
    expected = [(int(place) * 200, 100) for place in order]
    assert moved == expected
    one = table(np.arange(count) * 100, np.arange(count) * 100, np.full(count, 100))
    assert one.count == 1


REGION = 200
OFFSETS = st.integers(-3, REGION + 3)
PAIRS = st.lists(st.tuples(OFFSETS, OFFSETS, st.integers(-1, 40)), max_size=8)
# Enough room between them that most of these are allowed.
APART = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 5]), st.integers(0, 9)), max_size=12
)


@given(PAIRS, st.sampled_from([READ, WRITE]))
def test_refusals_are_those_of_a_plain_check(
    pairs: list[tuple[int, int, int]], direction: Direction
) -> None:
    local, remote, lengths = ([p[i] for p in pairs] for i in range(3))
    outside = any(n < 0 or a < 0 or a + n > REGION for x, y, n in pairs for a in (x, y))
    written = sorted((p[0 if direction is READ else 1], p[2]) for p in pairs if p[2])
    overlapping = any(a + n > b for (a, n), (b, _) in pairwise(written))
    try:
        table(local, remote, lengths, direction, local_bytes=REGION, remote_bytes=REGION)
    except OutOfRange:
        assert outside
    except UsageError:
        assert not outside
        assert overlapping
    else:
        assert not outside
        assert not overlapping


@given(APART, st.integers(1, 5), st.integers(1, 30))
def test_every_byte_moves_once_and_in_order(
    steps: list[tuple[int, int, int]], max_ranges: int, max_bytes: int
) -> None:
    local, remote, lengths = [], [], []
    at = to = 0
    for local_gap, remote_gap, length in steps:
        at, to = at + local_gap, to + remote_gap
        local.append(at)
        remote.append(to)
        lengths.append(length)
        at, to = at + length, to + length
    expected = [
        (a + i, b + i) for a, b, n in zip(local, remote, lengths, strict=True) for i in range(n)
    ]
    found = table(local, remote, lengths)
    groups = list(found.groups(max_ranges, max_bytes))
    moved = [
        (a + i, b + i)
        for group in groups
        for (a, n), (b, _) in zip(group.local_pairs(), group.remote_pairs(), strict=True)
        for i in range(n)
    ]
    assert moved == expected
    assert found.nbytes == sum(group.nbytes for group in groups) == len(expected)
    assert all(0 < group.count <= max_ranges and 0 < group.nbytes <= max_bytes for group in groups)
    for (a, b, n), (c, d, _) in pairwise(triples(found)):
        assert (a + n, b + n) != (c, d)  # nothing is left to merge
    for one, other in pairwise(groups):  # and no group could have taken more
        next_bytes = other.local_pairs()[0][1]
        assert one.count == max_ranges or one.nbytes + next_bytes > max_bytes
