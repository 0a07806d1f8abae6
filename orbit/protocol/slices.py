"""Where a transfer is cut into slices: block size, count and the last slice, from its size alone.

Never an empty slice, never more than allowed, and the last is shorter than 1.25 blocks: a tail
below a quarter of a block is not worth a grant and joins its neighbour. It knows no rail and no
memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UsageError
from ..model import Direction

BLOCK_BYTES = 64 * 1024
READ_SLICES_MAX = 64
WRITE_SLICES_MAX = 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """`count` slices, in order: all of `block_bytes` but the last. No bytes are no slices."""

    block_bytes: int
    count: int
    last_bytes: int

    @property
    def nbytes(self) -> int:
        return self.block_bytes * (self.count - 1) + self.last_bytes if self.count else 0

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each slice."""
        if not self.count:
            return ()
        return (self.block_bytes,) * (self.count - 1) + (self.last_bytes,)


def cut(nbytes: int, *, block_bytes: int = BLOCK_BYTES, count_max: int) -> Geometry:
    """At most `count_max` slices of `nbytes`: of `block_bytes` each, or of the smallest multiple of
    it with which that many are enough. Raises UsageError for negative bytes and for no room at all.
    """
    if nbytes < 0 or block_bytes < 1 or count_max < 1:
        raise UsageError(
            f"{nbytes} bytes cannot be cut into at most {count_max} slices of {block_bytes}"
        )
    if not nbytes:
        return Geometry(block_bytes, 0, 0)
    block = block_bytes
    if _ceil(nbytes, block) > count_max:
        block = _ceil(_ceil(nbytes, count_max), block_bytes) * block_bytes
    count = _ceil(nbytes, block)
    last = nbytes - (count - 1) * block
    if count > 1 and 4 * last < block:
        count -= 1
        last += block
    return Geometry(block, count, last)


def slices_max(
    direction: Direction,
    *,
    grants_max: int,
    read_max: int = READ_SLICES_MAX,
    write_max: int = WRITE_SLICES_MAX,
    peer: Iterable[int] = (),
) -> int:
    """How many slices one transfer may have: this side's limit for `direction`, and no more than
    `grants_max`. `peer`: what the other side allows of either; 0 there means that it does not say.
    """
    own = read_max if direction is Direction.READ else write_max
    return max(1, min(own, grants_max, *(limit for limit in peer if limit > 0)))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
