"""Many byte ranges of one transfer as three arrays: checked, merged and cut into groups at the
speed of numpy, without a step of Python per range.

The only place that imports numpy, and only when ranges are given. It knows two sizes and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import OutOfRange, UsageError
from ..model import Direction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RangeGroup:
    """Some of a table's ranges, in order: what one request moves."""

    local: Integers
    remote: Integers
    lengths: Integers

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def remote_bytes(self) -> bytes:
        """The other side's ranges as an acquire carries them (`protocol/range_list.py`)."""
        pairs = _numpy().stack((self.remote, self.lengths), axis=1)
        written: bytes = pairs.astype("<u8").tobytes()
        return written

    def remote_pairs(self) -> list[tuple[int, int]]:
        """(offset, nbytes) in the remote region."""
        return list(zip(self.remote.tolist(), self.lengths.tolist(), strict=True))

    def local_pairs(self) -> list[tuple[int, int]]:
        """(offset, nbytes) in the local region."""
        return list(zip(self.local.tolist(), self.lengths.tolist(), strict=True))


class RangeTable:
    """Pairs of a local and a remote range of the same length, in the order they were given; what
    was adjacent to the one before on both sides is part of it, and empty ranges are left out.

    The arrays are copies: what the caller does to its own afterwards changes nothing.
    """

    __slots__ = ("given", "lengths", "local", "remote")

    def __init__(
        self,
        direction: Direction,
        local_offsets: object,
        remote_offsets: object,
        lengths: object,
        *,
        local_bytes: int,
        remote_bytes: int,
    ) -> None:
        """Offsets and lengths are whatever numpy takes as one dimension of integers; `local_bytes`
        and `remote_bytes` are the sizes of the two regions.

        Raises OutOfRange, with the place of the first pair that does not lie within its region, and
        UsageError: no integers, not as many of each, two ranges that overlap on the side that is
        written, or no numpy.
        """
        local = _integers("local_offsets", local_offsets)
        remote = _integers("remote_offsets", remote_offsets)
        sizes = _integers("lengths", lengths)
        self.given = len(sizes)
        if not len(local) == len(remote) == self.given:
            raise UsageError(
                f"{len(local)} local offsets, {len(remote)} remote offsets and {self.given} lengths"
            )
        _check_bounds("local", local, sizes, local_bytes)
        _check_bounds("remote", remote, sizes, remote_bytes)
        if direction is Direction.READ:
            _check_overlap("local", local, sizes)
        else:
            _check_overlap("remote", remote, sizes)
        self.local, self.remote, self.lengths = _merged(local, remote, sizes)

    @property
    def count(self) -> int:
        """Ranges that are left."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def groups(self, max_ranges: int, max_bytes: int) -> Iterator[RangeGroup]:
        """All of it in order, each group of at most `max_ranges` ranges and `max_bytes` bytes and
        otherwise as large as can be. A range of more than `max_bytes` is cut.
        """
        if max_ranges < 1 or max_bytes < 1:
            raise UsageError(f"groups of at most {max_ranges} ranges and {max_bytes} bytes")
        np = _numpy()
        max_bytes = min(max_bytes, max(self.nbytes, 1))
        local, remote, lengths = _cut(self.local, self.remote, self.lengths, max_bytes)
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + max_bytes, side="right"))
            last = min(last, first + max_ranges)
            yield RangeGroup(local[first:last], remote[first:last], lengths[first:last])
            first = last


def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise UsageError(
            "ranges as arrays need numpy, which cannot be imported", hint="install numpy"
        ) from error
    return np


def _integers(name: str, values: object) -> Integers:
    """A copy. Raises UsageError."""
    np = _numpy()
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{name} cannot be read as integers: {error}") from error
    if array.ndim != 1:
        raise UsageError(f"{name} has {array.ndim} dimensions; one is needed")
    if not array.size and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise UsageError(f"{name} holds {array.dtype}; integers of at most 64 bits are needed")
    if array.dtype.kind == "u":
        # Above it an offset would turn negative; below it a bound check says what is wrong.
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    integers: Integers = array.astype(np.int64)
    return integers


def _check_bounds(side: str, offsets: Integers, lengths: Integers, region_bytes: int) -> None:
    # Written so that nothing can overflow: an offset is compared only with what is left of a region
    # after a length that is known to fit into it.
    wrong = (offsets < 0) | (lengths < 0) | (lengths > region_bytes)
    wrong |= offsets > region_bytes - _numpy().where(wrong, 0, lengths)
    if not wrong.any():
        return
    index = int(wrong.argmax())
    raise OutOfRange(
        f"range {index}: {int(lengths[index])} bytes at {int(offsets[index])} do not lie within "
        f"the {side} region of {region_bytes}"
    )


def _check_overlap(side: str, offsets: Integers, lengths: Integers) -> None:
    """In order of their offsets, ranges overlap somewhere if and only if two neighbours do."""
    np = _numpy()
    (filled,) = np.nonzero(lengths)
    order = filled[np.argsort(offsets[filled], kind="stable")]
    ends = offsets[order] + lengths[order]
    overlapping = ends[:-1] > offsets[order][1:]
    if not overlapping.any():
        return
    place = int(overlapping.argmax())
    one, other = sorted((int(order[place]), int(order[place + 1])))
    raise UsageError(f"ranges {one} and {other} overlap in the {side} region, which is written")


def _merged(
    local: Integers, remote: Integers, lengths: Integers
) -> tuple[Integers, Integers, Integers]:
    np = _numpy()
    (filled,) = np.nonzero(lengths)
    local, remote, lengths = local[filled], remote[filled], lengths[filled]
    if len(lengths) < 2:
        return local, remote, lengths
    goes_on = (local[1:] == local[:-1] + lengths[:-1]) & (remote[1:] == remote[:-1] + lengths[:-1])
    (heads,) = np.nonzero(np.concatenate(([True], ~goes_on)))
    return local[heads], remote[heads], np.add.reduceat(lengths, heads)


def _cut(
    local: Integers, remote: Integers, lengths: Integers, max_bytes: int
) -> tuple[Integers, Integers, Integers]:
    """Every range in pieces of `max_bytes` and what is left."""
    np = _numpy()
    if not len(lengths) or int(lengths.max()) <= max_bytes:
        return local, remote, lengths
    pieces = -(-lengths // max_bytes)
    heads = np.cumsum(pieces) - pieces
    step = (np.arange(int(pieces.sum())) - np.repeat(heads, pieces)) * max_bytes
    rest = np.repeat(lengths, pieces) - step
    cut_lengths = np.minimum(rest, max_bytes)
    return np.repeat(local, pieces) + step, np.repeat(remote, pieces) + step, cut_lengths
