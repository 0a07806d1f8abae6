"""How far a bulk transfer has come in the pieces of memory that it fills or sends.

The pieces go to the kernel as they lie, several in one call where that is possible; nothing is
joined, and nothing is kept for each call. What a step found decides when there is another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum, auto
from itertools import islice

from ..config import DEFAULT_CHUNK_SIZE
from .tcp_bulk import CALLBACK_BYTES
from .tcp_wire import Wire

# Waking for every segment costs more CPU than the copy does. The kernel makes the receive buffer at
# least twice this, so that one half fills while the other is read.
LOW_WATER_BYTES = DEFAULT_CHUNK_SIZE

_PIECES_PER_CALL = 64  # the kernel refuses more than 1,024


class Pace(Enum):
    """What ended a step: every byte has moved, the socket has no more to do now, or this callback
    has done its share.
    """

    DONE = auto()
    WAIT = auto()
    AGAIN = auto()


class Cursor:
    """`nbytes` bytes from `offset` of what `pieces` are, taken together, behind a `head`. It holds
    exports of its own until `release`. `position` counts the bytes that have moved.
    """

    __slots__ = ("_index", "_offset", "_pieces", "nbytes", "position")

    def __init__(
        self,
        pieces: Sequence[memoryview],
        offset: int = 0,
        nbytes: int | None = None,
        head: bytes = b"",
    ) -> None:
        self._pieces = _cut(pieces, offset, nbytes)
        if head:
            self._pieces.insert(0, memoryview(head))
        self.nbytes = sum(map(len, self._pieces))
        self.position = 0
        self._index = 0
        self._offset = 0

    @property
    def left(self) -> int:
        """How many bytes have not moved yet."""
        return self.nbytes - self.position

    def receive(self, wire: Wire) -> Pace:
        """Fill as far as one callback goes. Raises OSError, at the end of the stream as well."""
        budget, call_bytes = CALLBACK_BYTES, wire.call_bytes
        while self.position < self.nbytes:
            if budget <= 0:
                return Pace.AGAIN
            window = self._window(min(budget, call_bytes))
            try:
                count = wire.recv_vector(window)
            finally:
                _let_go(window)
            if count is None:
                # Never more than what is still to come: the last piece would not wake us.
                wire.set_receive_low_water(min(self.left, LOW_WATER_BYTES))
                return Pace.WAIT
            if count == 0:
                raise ConnectionResetError("closed by the peer")
            budget -= self._advance(count)
        return Pace.DONE

    def send(self, wire: Wire) -> Pace:
        """Hand the kernel as much as one callback may. Raises OSError."""
        budget, call_bytes = CALLBACK_BYTES, wire.call_bytes
        while self.position < self.nbytes:
            if budget <= 0:
                return Pace.AGAIN
            window = self._window(min(budget, call_bytes))
            offered = sum(map(len, window))
            try:
                count = wire.send_vector(window)
            finally:
                _let_go(window)
            if count is None:
                return Pace.WAIT
            budget -= self._advance(count)
            if count < offered and not wire.tls:
                return Pace.WAIT if self.left else Pace.DONE  # full: save the call that says so
        return Pace.DONE

    def release(self) -> None:
        """Let go of the memory: its owner may want to close what lies under it."""
        _let_go(self._pieces)
        self._pieces = []

    def _window(self, nbytes_max: int) -> list[memoryview]:
        """What comes next, as far as one call takes it."""
        pieces, index = self._pieces, self._index
        part = pieces[index][self._offset : self._offset + nbytes_max]
        window, left = [part], nbytes_max - len(part)
        if index + 1 == len(pieces):
            return window
        for piece in islice(pieces, index + 1, index + _PIECES_PER_CALL):
            if not left:
                break
            part = piece[:left]
            window.append(part)
            left -= len(part)
        return window

    def _advance(self, count: int) -> int:
        self.position += count
        pieces, offset = self._pieces, self._offset + count
        while self._index < len(pieces) and offset >= len(pieces[self._index]):
            offset -= len(pieces[self._index])
            self._index += 1
        self._offset = offset
        return count


def _cut(pieces: Sequence[memoryview], offset: int, nbytes: int | None) -> list[memoryview]:
    """The parts of them that hold bytes of the range."""
    end = sys.maxsize if nbytes is None else offset + nbytes
    if len(pieces) == 1:
        part = pieces[0][offset:end]
        return [part] if part else []
    parts, start = [], 0
    for piece in pieces:
        low, high = max(offset - start, 0), min(end - start, len(piece))
        if low < high:
            parts.append(piece[low:high])
        start += len(piece)
    return parts


def _let_go(views: Sequence[memoryview]) -> None:
    # Not left to the reference counts: the traceback of an error would keep them.
    for view in views:
        view.release()
