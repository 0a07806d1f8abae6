"""Page arithmetic: what is pinned for a range, and where a long one is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import UsageError
from orbit.memory.pages import PAGE_BYTES, cut, page_range, whole_pages

addresses = st.integers(0, (1 << 48) - 1)
lengths = st.integers(1, 1 << 24)


@pytest.mark.parametrize(
    ("address", "nbytes", "first", "pinned"),
    [
        (4096, 4096, 4096, 4096),
        (4095, 1, 0, 4096),
        (4095, 2, 0, 8192),
        (0, 1, 0, 4096),
        ((1 << 64) - 1, 1, (1 << 64) - 4096, 4096),
    ],
)
def test_every_page_that_is_touched_is_pinned(
    address: int, nbytes: int, first: int, pinned: int
) -> None:
    assert page_range(address, nbytes) == (first, pinned)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 0), (0, -1), (-1, 5), ((1 << 64) - 1, 2)])
def test_what_is_no_range_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(UsageError):
        page_range(address, nbytes)


@given(lengths)
def test_rounding_goes_up_by_less_than_a_page(nbytes: int) -> None:
    assert 0 <= whole_pages(nbytes) - nbytes < PAGE_BYTES
    assert whole_pages(nbytes) % PAGE_BYTES == 0


@given(addresses, lengths, st.integers(0, 1 << 22))
def test_parts_cover_the_range_and_share_no_page(address: int, nbytes: int, limit: int) -> None:
    parts = cut(address, nbytes, limit)
    assert parts[0][0] == address
    assert sum(length for _, length in parts) == nbytes
    pinned = [page_range(*part) for part in parts]
    for (start, length), (following, _) in pairwise(parts):
        assert start + length == following
        assert following % PAGE_BYTES == 0
    assert all(length <= max(limit, PAGE_BYTES) for _, length in parts)
    assert sum(pages for _, pages in pinned) == page_range(address, nbytes)[1]
