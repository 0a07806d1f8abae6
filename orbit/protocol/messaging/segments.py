"""Frames cut into packets, and put together again (D5). Pure; it copies each payload byte once.

The packets of one frame leave in order, and those of one window never mix, so the receiving end
needs one open frame per window. A reply may pass between the segments of a message.
"""

from __future__ import annotations

from collections.abc import Iterator

from .packets import Packet, Returned


class Cutter:
    """One frame on its way out: gives the packets one by one, since credit may run out between
    them.
    """

    __slots__ = ()

    def __init__(self, kind: int, header: bytes, payload: memoryview, slab_bytes: int) -> None:
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    def next(self, returned: Returned) -> tuple[bytes, memoryview]:
        """(fixed part and header bytes, payload piece) of the next packet."""
        raise NotImplementedError


def packet_count(header_bytes: int, payload_bytes: int, slab_bytes: int) -> int:
    """How many packets, and credits, a frame takes."""
    raise NotImplementedError


class Assembler:
    """The open frames of one link's receiving end, at most one per window."""

    __slots__ = ()

    def __init__(self, payload_bytes_max: int) -> None:
        raise NotImplementedError

    def add(self, packet: Packet) -> tuple[int, bytes, memoryview] | None:
        """(kind, header, payload) when a frame is complete; both are the caller's own bytes. Raises
        PeerProtocolError: over the limit (before anything is allocated for it), a continuation
        without a beginning, a beginning inside an open frame, too many or too few bytes.
        """
        raise NotImplementedError

    @property
    def open_bytes(self) -> int:
        """Payload bytes of unfinished frames."""
        raise NotImplementedError

    def open_kinds(self) -> Iterator[int]:
        raise NotImplementedError
