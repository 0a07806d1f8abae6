"""Lists of ranges on the wire: as written, and what an owner does not take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import OutOfRange, UsageError
from orbit.protocol.range_list import PAIR_BYTES, pack, unpack

TOTAL = 1 << 20
RANGES = st.integers(0, TOTAL - 1).flatmap(
    lambda offset: st.tuples(st.just(offset), st.integers(1, TOTAL - offset))
)


def test_the_bytes() -> None:
    assert pack([(1, 2), (1 << 63, 0x0102)]).hex() == (
        "01000000000000000200000000000000" + "00000000000000800201000000000000"
    )
    assert pack([]) == b""
    assert unpack(b"", TOTAL) == []


@given(st.lists(RANGES, max_size=50))
def test_there_and_back(ranges: list[tuple[int, int]]) -> None:
    written = pack(ranges)
    assert len(written) == PAIR_BYTES * len(ranges)
    assert unpack(written, TOTAL) == ranges


@pytest.mark.parametrize("cut", range(1, PAIR_BYTES))
def test_half_a_pair_is_refused(cut: int) -> None:
    with pytest.raises(UsageError, match="whole pairs"):
        unpack(pack([(0, 1), (1, 1)])[:-cut], TOTAL)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (TOTAL, 1),
        (0, TOTAL + 1),
        (TOTAL - 1, 2),
        (1, (1 << 64) - 1),  # a sum that wraps in 64 bits
        ((1 << 64) - 1, (1 << 64) - 1),
    ],
)
def test_bytes_outside_are_refused_by_place(offset: int, nbytes: int) -> None:
    with pytest.raises(OutOfRange, match="range 1:"):
        unpack(pack([(0, TOTAL), (offset, nbytes)]), TOTAL)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(UsageError, match="range 1 is empty"):
        unpack(pack([(0, 1), (4, 0)]), TOTAL)


@pytest.mark.parametrize("pair", [(-1, 1), (0, 1 << 64), (0, -1)])
def test_what_is_no_u64_is_not_written(pair: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        pack([pair])
