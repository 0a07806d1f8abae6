"""How a pool of arenas grows and shrinks: the size of the next arena, which pieces get one of their
own, and which empty arenas are given back.

Numbers in, numbers out. It maps nothing and has no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import BusyError, UsageError
from .pages import PAGE_BYTES, whole_pages


class ArenaUse(NamedTuple):
    """A pooled arena as reclamation sees it."""

    nbytes: int
    idle_since: float | None  # None: something lies in it


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """All sizes are bytes. `limit_bytes`: the longest registration that every device takes."""

    initial_bytes: int
    max_bytes: int
    dedicated_min_bytes: int
    limit_bytes: int

    def check(self, piece_bytes: int) -> None:
        """Raises UsageError (no bytes), BusyError (no arena of these devices can ever hold it)."""
        if piece_bytes < 1:
            raise UsageError("a piece of registered memory has at least one byte")
        if whole_pages(piece_bytes) > self._limit:
            raise BusyError(
                f"{piece_bytes} bytes are more than one registration of a device takes "
                f"({self.limit_bytes})"
            )

    def dedicated(self, piece_bytes: int) -> bool:
        """Whether the piece gets an arena of its own, which goes with it. In a pooled one it would
        leave a hole that only its like can fill.
        """
        return piece_bytes >= self.dedicated_min_bytes

    def pooled_sizes(self, piece_bytes: int, largest_bytes: int) -> Iterator[int]:
        """Sizes of the next pooled arena, best first: twice the largest there is (0: none yet), up
        to the maximum, but room for the piece in any case. The smaller ones, down to the initial
        size, are for a budget that has no room for the best.
        """
        wanted = min(2 * largest_bytes, self.max_bytes) if largest_bytes else self.initial_bytes
        floor = min(whole_pages(max(piece_bytes, self.initial_bytes)), self._limit)
        size = min(whole_pages(max(wanted, piece_bytes)), self._limit)
        while size > floor:
            yield size
            size = whole_pages(size // 2)
        yield floor

    @property
    def _limit(self) -> int:
        return max(self.limit_bytes // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)


def surplus(arenas: Sequence[ArenaUse], retain_bytes: int) -> list[int]:
    """Which of the pooled arenas (given oldest first) may go once they were empty long enough, as
    indexes: the newest first, as long as `retain_bytes` stay mapped. The small first arena is so
    what survives.
    """
    mapped_bytes = sum(arena.nbytes for arena in arenas)
    found = []
    for index in reversed(range(len(arenas))):
        arena = arenas[index]
        if arena.idle_since is not None and mapped_bytes - arena.nbytes >= retain_bytes:
            mapped_bytes -= arena.nbytes
            found.append(index)
    return found
