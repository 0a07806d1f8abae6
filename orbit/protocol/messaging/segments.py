"""Frames cut into packets, and put together again (D5). Pure; it copies each payload byte once.

The packets of one frame leave in order, and those of one window never mix, so the receiving end
needs one open frame per window. A reply may pass between the segments of a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...errors import InternalError, PeerProtocolError, UsageError
from .packets import (
    FIXED_BYTES,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    WINDOW_OF,
    Packet,
    PacketFlags,
    Returned,
    Window,
    pack_head,
)

_MORE = int(PacketFlags.MORE)
_CONTINUED = int(PacketFlags.CONTINUED)
_FIRST_BYTES = FIXED_BYTES + LENGTH_BYTES
_IN_PLACE_BYTES_MIN: Final = 16 << 10  # below, a copy is cheaper than holding the packet


def packet_count(header_bytes: int, payload_bytes: int, slab_bytes: int) -> int:
    """How many packets, and credits, a frame takes. Raises UsageError when its header is over the
    limit.
    """
    if header_bytes > HEADER_BYTES_MAX:
        raise UsageError(f"a header of {header_bytes} bytes; limit {HEADER_BYTES_MAX}")
    nbytes = header_bytes + payload_bytes
    if FIXED_BYTES + nbytes <= slab_bytes:
        return 1
    return 1 + -(-(nbytes - (slab_bytes - _FIRST_BYTES)) // (slab_bytes - FIXED_BYTES))


class Cutter:
    """One frame on its way out: gives the packets one by one, since credit may run out between
    them. Raises UsageError as `packet_count` does.
    """

    __slots__ = ("_header", "_kind", "_offset", "_payload", "_remaining", "_slab_bytes")

    def __init__(self, kind: int, header: bytes, payload: memoryview, slab_bytes: int) -> None:
        self._kind = kind
        self._header = header
        self._payload = payload  # of bytes; nothing is copied here
        self._slab_bytes = slab_bytes
        self._offset = -1  # nothing has left
        self._remaining = packet_count(len(header), len(payload), slab_bytes)

    @property
    def finished(self) -> bool:
        return not self._remaining

    @property
    def remaining(self) -> int:
        """Packets that have not left."""
        return self._remaining

    @property
    def begun(self) -> bool:
        return self._offset >= 0

    def next(self, returned: Returned) -> tuple[bytes, memoryview]:
        """(fixed part and header bytes, payload piece) of the next packet."""
        if not self._remaining:
            raise InternalError("a packet after the last one")
        self._remaining -= 1
        header, payload, begin = self._header, self._payload, self._offset
        more = _MORE if self._remaining else 0
        if begin >= 0:
            end = begin + self._slab_bytes - FIXED_BYTES
            head = pack_head(self._kind, _CONTINUED | more, returned, 0)
        elif more:
            begin, end = 0, self._slab_bytes - _FIRST_BYTES
            head = pack_head(self._kind, more, returned, len(header), len(payload))
        else:
            self._offset = len(header) + len(payload)
            return pack_head(self._kind, 0, returned, len(header)) + header, payload
        self._offset = end
        split = len(header)
        if begin < split:
            head += header[begin:end]
        return head, payload[max(begin - split, 0) : max(end - split, 0)]


class _OpenFrame:
    """What has arrived of a segmented frame."""

    __slots__ = ("filled", "header", "header_bytes", "kind", "payload")

    def __init__(self, kind: int, header_bytes: int, total: int) -> None:
        self.kind = kind
        self.header = b""
        self.header_bytes = header_bytes
        self.payload = bytearray(total)
        self.filled = 0

    def fill(self, piece: memoryview, more: int) -> None:
        missing = self.header_bytes - len(self.header)
        if missing:  # a header that is longer than a slab goes on in the next segment
            self.header += piece[:missing]
            piece = piece[missing:]
            if more and len(self.header) < self.header_bytes:
                return
        end = self.filled + len(piece)
        # Only the last segment completes a frame, so an honest frame is never one byte off.
        if end > len(self.payload) or (end == len(self.payload)) == bool(more):
            raise PeerProtocolError(
                f"segments of {end} bytes{' and more' if more else ''}; announced were "
                f"{len(self.payload)}"
            )
        if len(self.header) < self.header_bytes:
            raise PeerProtocolError("the last segment ends inside the header")
        self.payload[self.filled : end] = piece
        self.filled = end


class Assembler:
    """The open frames of one link's receiving end, at most one per window. `payload_bytes_max` is
    the ceiling. `in_place`: the memory of packets stays, so that long whole frames are handed on
    as they lie there, unless they would hold more than twice their bytes.
    """

    __slots__ = ("_in_place_bytes_min", "_open", "_payload_bytes_max")

    def __init__(self, payload_bytes_max: int, *, in_place: bool = False) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._in_place_bytes_min = _IN_PLACE_BYTES_MIN if in_place else payload_bytes_max + 1
        self._open: dict[Window, _OpenFrame] = {}

    def add(self, packet: Packet) -> tuple[int, bytes, memoryview] | None:
        """(kind, header, payload) when a frame is complete; both are the caller's own bytes. Raises
        PeerProtocolError: over the limit (before anything is allocated for it), a continuation
        without a beginning, a beginning inside an open frame, too many or too few bytes.
        """
        kind, flags, _, header_bytes, total, body = packet
        if flags & _CONTINUED:
            return self._continue(kind, flags & _MORE, body)
        window = WINDOW_OF[kind]
        if window in self._open:
            raise PeerProtocolError("a frame begins before the last one is whole")
        if total > self._payload_bytes_max:
            raise PeerProtocolError(f"a payload of {total} bytes; limit {self._payload_bytes_max}")
        if not flags:
            header, payload = bytes(body[:header_bytes]), body[header_bytes:]
            if total < self._in_place_bytes_min or 2 * total < memoryview(payload.obj).nbytes:
                return kind, header, memoryview(bytes(payload))
            return kind, header, payload.toreadonly()
        frame = _OpenFrame(kind, header_bytes, total)
        frame.fill(body, _MORE)
        self._open[window] = frame
        return None

    def _continue(
        self, kind: int, more: int, piece: memoryview
    ) -> tuple[int, bytes, memoryview] | None:
        window = WINDOW_OF[kind]
        frame = self._open.get(window)
        if frame is None or frame.kind != kind:
            raise PeerProtocolError(f"a continuation of kind {kind} without a beginning")
        if not piece:
            raise PeerProtocolError("a continuation without a byte")
        frame.fill(piece, more)
        if more:
            return None
        del self._open[window]
        return kind, frame.header, memoryview(frame.payload).toreadonly()

    @property
    def open_bytes(self) -> int:
        """Payload bytes of unfinished frames, as announced: that much memory is taken."""
        return sum(len(frame.payload) for frame in self._open.values())

    def open_kinds(self) -> Iterator[int]:
        return (frame.kind for frame in self._open.values())
