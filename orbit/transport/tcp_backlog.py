"""What a control link has accepted and the kernel has not taken yet, in order, with its limit.

It knows pieces of bytes, not frames; whoever holds it watches the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from ..errors import BusyError
from ..protocol.framing import pack_length
from .tcp_wire import Wire

# Up to here one more copy costs less than one more piece in the system call.
_JOIN_BYTES_MAX = 16 << 10
_PIECES_PER_CALL = 64  # the kernel refuses more than 1,024


class Backlog:
    """`nbytes` wait now."""

    __slots__ = ("_bytes_max", "_pieces", "_wire", "nbytes")

    def __init__(self, wire: Wire, bytes_max: int) -> None:
        self._wire = wire
        self._bytes_max = bytes_max
        self._pieces: deque[memoryview] = deque()
        self.nbytes = 0

    def add(self, pieces: Sequence[memoryview]) -> int:
        """All or none; how many bytes it was. Raises BusyError, never for what would be the first
        to wait.
        """
        nbytes = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if self.nbytes and self.nbytes + nbytes > self._bytes_max:
            raise BusyError(
                f"{self._wire.endpoint}: {self.nbytes} bytes wait to be sent",
                hint="the peer does not keep up",
            )
        self._pieces += pieces
        self.nbytes += nbytes
        return nbytes

    def drain(self) -> None:
        """Hand the kernel what it takes. Raises OSError as the wire does."""
        pieces = self._pieces
        while pieces:
            if len(pieces) == 1:
                sent = self._wire.send(pieces[0])
            else:
                sent = self._wire.send_vector(tuple(islice(pieces, _PIECES_PER_CALL)))
            if not sent:
                return
            self.nbytes -= sent
            if not self.nbytes:
                pieces.clear()
                return
            while sent:
                head = pieces[0]
                if sent < len(head):
                    pieces[0] = head[sent:]
                    break
                sent -= len(head)
                pieces.popleft()

    def clear(self) -> None:
        self._pieces.clear()
        self.nbytes = 0


def gather(frames: Sequence[tuple[bytes, memoryview]]) -> list[memoryview]:
    """Frames that lie in two pieces each, as they follow each other on the stream; short pieces are
    joined, long second ones are not copied. Raises UsageError for a frame over the limit.
    """
    pieces: list[memoryview] = []
    short: list[bytes | memoryview] = []
    for head, body in frames:
        nbytes = len(body)
        short += (pack_length(len(head) + nbytes), head)
        if nbytes > _JOIN_BYTES_MAX:
            pieces += (memoryview(b"".join(short)), body)
            short.clear()
        else:
            short.append(body)
    if short:
        pieces.append(memoryview(b"".join(short)))
    return pieces
