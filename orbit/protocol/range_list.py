"""A list of byte ranges as it travels in an acquire: a little-endian u64 pair, offset and size, of
each range, in the order of the bytes that move.

Both directions without numpy: an owner needs none. `memory/range_table.py` writes the same bytes
for many ranges at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ..errors import OutOfRange, UsageError

_PAIR = struct.Struct("<QQ")
PAIR_BYTES = _PAIR.size


def pack(ranges: Iterable[tuple[int, int]]) -> bytes:
    """(offset, nbytes) pairs as bytes. Raises UsageError for a number that is no u64."""
    try:
        return b"".join(_PAIR.pack(offset, nbytes) for offset, nbytes in ranges)
    except struct.error as error:
        raise UsageError(f"a range cannot be written down: {error}") from error


def unpack(ranges: bytes, total_bytes: int) -> list[tuple[int, int]]:
    """The (offset, nbytes) pairs, each of at least one byte and within memory of `total_bytes`.

    They may overlap; whether that is allowed depends on the direction, and is the locks' to say.
    Raises UsageError (not whole pairs, an empty range), OutOfRange.
    """
    if len(ranges) % PAIR_BYTES:
        raise UsageError(f"a list of ranges of {len(ranges)} bytes is not whole pairs")
    pairs = list(_PAIR.iter_unpack(ranges))
    for index, (offset, nbytes) in enumerate(pairs):
        if not nbytes:
            raise UsageError(f"range {index} is empty")
        if offset + nbytes > total_bytes:
            raise OutOfRange(
                f"range {index}: {nbytes} bytes at {offset} do not lie within {total_bytes}"
            )
    return pairs
