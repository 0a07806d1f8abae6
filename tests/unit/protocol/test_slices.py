"""Slices: they cover the transfer exactly, none is empty, and tails are folded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import UsageError
from orbit.model import Direction
from orbit.protocol.slices import BLOCK_BYTES, Geometry, cut, slices_max

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "block", "count_max", "sizes"),
    [
        (1, 64, 4, [1]),
        (64, 64, 4, [64]),
        (79, 64, 4, [79]),  # a tail of 15, below a quarter
        (80, 64, 4, [64, 16]),  # exactly a quarter is a slice
        (192, 64, 4, [64, 64, 64]),
        (256, 64, 4, [64] * 4),
        (257, 64, 4, [128, 129]),  # over the cap the block grows in whole blocks, then folds
        (300, 64, 4, [128, 128, 44]),
        (512, 64, 4, [128] * 4),
        (1000, 64, 1, [1000]),
        (2_097_192, MIB, 64, [1_048_576, 1_048_616]),
        (131_073, BLOCK_BYTES, 64, [65_536, 65_537]),
        (196_609, BLOCK_BYTES, 64, [65_536, 65_536, 65_537]),
    ],
)
def test_known_cuts(nbytes: int, block: int, count_max: int, sizes: list[int]) -> None:
    assert list(cut(nbytes, block_bytes=block, count_max=count_max).sizes()) == sizes


def test_one_block_over_the_cap_has_no_empty_slices() -> None:
    geometry = cut(65 * BLOCK_BYTES, count_max=64)
    assert geometry == Geometry(2 * BLOCK_BYTES, 33, BLOCK_BYTES)


def test_no_bytes_are_no_slices() -> None:
    geometry = cut(0, count_max=64)
    assert geometry.count == geometry.nbytes == 0
    assert geometry.sizes() == ()


@pytest.mark.parametrize(("nbytes", "block", "count_max"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_what_cannot_be_cut(nbytes: int, block: int, count_max: int) -> None:
    with pytest.raises(UsageError):
        cut(nbytes, block_bytes=block, count_max=count_max)


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 17), st.integers(1, 64))
def test_every_cut_covers_exactly(nbytes: int, block: int, count_max: int) -> None:
    geometry = cut(nbytes, block_bytes=block, count_max=count_max)
    sizes = geometry.sizes()
    assert sum(sizes) == nbytes == geometry.nbytes
    assert len(sizes) == geometry.count <= count_max
    assert geometry.block_bytes % block == 0
    assert set(sizes[:-1]) <= {geometry.block_bytes}
    assert sizes[-1] > 0
    assert 4 * sizes[-1] < 5 * geometry.block_bytes
    if len(sizes) > 1:
        assert 4 * sizes[-1] >= geometry.block_bytes


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 17), st.integers(1, 64))
def test_blocks_grow_no_more_than_they_must(nbytes: int, block: int, count_max: int) -> None:
    used = cut(nbytes, block_bytes=block, count_max=count_max).block_bytes
    assert used * count_max >= nbytes or used == block
    if used > block:
        assert (used - block) * count_max < nbytes


@pytest.mark.parametrize(
    ("direction", "limits", "expected"),
    [
        (Direction.READ, {"grants_max": 64}, 64),
        (Direction.WRITE, {"grants_max": 64}, 32),
        (Direction.READ, {"grants_max": 8}, 8),
        (Direction.READ, {"grants_max": 64, "read_max": 5}, 5),
        (Direction.WRITE, {"grants_max": 64, "write_max": 6, "read_max": 5}, 6),
        (Direction.READ, {"grants_max": 64, "peer": (0, 0)}, 64),  # it says nothing
        (Direction.READ, {"grants_max": 64, "peer": (16, 0)}, 16),
        (Direction.READ, {"grants_max": 64, "peer": (100, 3)}, 3),
    ],
)
def test_the_smallest_limit_holds(
    direction: Direction, limits: dict[str, int], expected: int
) -> None:
    assert slices_max(direction, **limits) == expected  # type: ignore[arg-type]
