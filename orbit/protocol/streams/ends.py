"""How a stream ends, and what its credit counts. Both ends compute both alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

from ...errors import StreamError
from .frames import NoteKind

ITEMS_DEFAULT: Final = 256
WINDOW_BYTES_DEFAULT: Final = 1 << 20
WINDOW_BYTES_MIN: Final = 32 << 10
PEER_BYTES_MAX: Final = 8 << 20  # of the windows of all streams that one peer feeds
MISSED_MAX: Final = 3  # heartbeats


class EndKind(StrEnum):
    """`str` of all but FINALIZED is the kind of the StreamError."""

    FINALIZED = "finalized"
    FAILED = "failed"  # the producer, or an item that could not be had
    DROPPED = "dropped"  # the producer went away without a word
    CANCELLED = "cancelled"  # by the receiver
    LOST = "lost"  # the link, or the peer: outcome unknown
    PROTOCOL = "protocol"  # the peer broke the rules


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The one end of a stream, as one side sees it."""

    kind: EndKind
    text: str = ""

    def error(self) -> StreamError | None:
        """A fresh error for whoever meets the end; None for the good end."""
        return None if self.kind is EndKind.FINALIZED else StreamError(self.kind.value, self.text)


END_OF_NOTE: Final = {
    NoteKind.FINALIZED: EndKind.FINALIZED,
    NoteKind.FAILED: EndKind.FAILED,
    NoteKind.DROPPED: EndKind.DROPPED,
}


@dataclass(frozen=True, slots=True)
class StreamWindow:
    """What a receiver holds ready for one stream: places, and bytes."""

    items: int = ITEMS_DEFAULT
    nbytes: int = WINDOW_BYTES_DEFAULT

    def charge(self, nbytes: int) -> int:
        """What an item takes of `nbytes`. None takes more than half, so a window that has been
        emptied always has room for the next; what a longer item has beyond that is not in the
        window: it is staged, and of such items at most two are on their way.
        """
        return min(nbytes, self.nbytes // 2)

    def due(self, items: int, nbytes: int) -> bool:
        """Whether that much unannounced room is worth a credit. A quarter: a sender that waits for
        half a window has it announced at the latest when the buffer is empty.
        """
        return items >= ceil(self.items / 4) or nbytes >= self.nbytes // 4


class WindowBudget:
    """Windows of all streams that one peer feeds, together under one bound."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int = PEER_BYTES_MAX) -> None:
        self._limit = limit
        self._left = limit

    @property
    def promised_bytes(self) -> int:
        return self._limit - self._left

    def promise(self, wanted: int) -> int:
        """The window that can be had; 0: none. Half of the bound goes out as wanted; of the rest
        each stream gets a 64th, so that a hundred streams more find a window, if a small one.
        """
        share = wanted if self._left > self._limit // 2 else self._left // 64
        granted = min(wanted, self._left, max(share, WINDOW_BYTES_MIN))
        if granted < min(wanted, WINDOW_BYTES_MIN):
            return 0
        self._left -= granted
        return granted

    def take_back(self, granted: int) -> None:
        self._left += granted
        assert self._left <= self._limit
