"""Packets of a message link: the 8-byte header, the kinds, and which window pays for each.

A *frame* is what the messenger hands over (kind, header, payload); a *packet* is what one slab
holds. A frame that fits one slab is one packet; a longer one is cut into several (segments). Every
transport carries the same packets, so that one contract holds on all of them. Layout, big-endian:

    version u8 | kind u8 | flags u8 | credits u8 | replies u8 | reports u8 | header length u16

`credits` and `replies` return credit of the two windows (D6), `reports` has one bit for each
control kind of the *receiver* of this packet whose slab was reposted. `MORE` says that further
segments follow, `CONTINUED` that this is one of them; the first of several carries the frame's
payload length (u32) right behind the fixed header. A header longer than the first slab goes on in
the continuations, which themselves say 0.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from ...errors import PeerProtocolError

PACKET_VERSION: Final = 1
FIXED_BYTES: Final = 8
LENGTH_BYTES: Final = 4  # of the payload length in the first of several segments
HEADER_BYTES_MAX: Final = 32 << 10  # name, header map and the fixed part of a call
CREDITS_PER_PACKET_MAX: Final = 255

_HEADER = struct.Struct(">BBBBBBH")
_LENGTH = struct.Struct(">I")


class PacketKind(IntEnum):
    """0 to 4 are frames of the messenger, the others belong to the link itself."""

    MESSAGE = 0
    RESPONSE = 1
    ACK = 2
    EVENT = 3
    SHUTTING_DOWN = 4
    GRANT = 16
    PING = 17
    PONG = 18
    GOODBYE = 19
    GOODBYE_ACK = 20


class PacketFlags(IntFlag):
    """Every other bit is reserved and must be 0."""

    MORE = 1
    CONTINUED = 2


class Window(IntEnum):
    """Who pays for a packet's slab at the receiver (D6)."""

    MESSAGES = 0  # messages and stream items; returned while inbound bytes are under their bound
    REPLIES = 1  # responses, acks, events, drain echoes; never withheld
    CONTROL = 2  # one slab for each control kind, sent again only after it was reported


WINDOW_OF: Final[dict[int, Window]] = {
    PacketKind.MESSAGE: Window.MESSAGES,
    PacketKind.RESPONSE: Window.REPLIES,
    PacketKind.ACK: Window.REPLIES,
    PacketKind.EVENT: Window.REPLIES,
    PacketKind.SHUTTING_DOWN: Window.REPLIES,
    PacketKind.GRANT: Window.CONTROL,
    PacketKind.PING: Window.CONTROL,
    PacketKind.PONG: Window.CONTROL,
    PacketKind.GOODBYE: Window.CONTROL,
    PacketKind.GOODBYE_ACK: Window.CONTROL,
}
CONTROL_KINDS: Final = (
    PacketKind.GRANT,
    PacketKind.PING,
    PacketKind.PONG,
    PacketKind.GOODBYE,
    PacketKind.GOODBYE_ACK,
)
REPORT_BIT: Final[dict[int, int]] = {kind: 1 << n for n, kind in enumerate(CONTROL_KINDS)}
_REPORTS_KNOWN = sum(REPORT_BIT.values())
_FLAGS_KNOWN = int(PacketFlags.MORE | PacketFlags.CONTINUED)
_CONTINUED = int(PacketFlags.CONTINUED)
_new = tuple.__new__  # a NamedTuple's own costs a Python call, for every packet


class Returned(NamedTuple):
    """What a packet gives back to its receiver."""

    credits: int = 0
    replies: int = 0
    reports: int = 0


NOTHING_RETURNED: Final = Returned()


class Packet(NamedTuple):
    """One parsed packet. `body` follows the fixed part (and the length): header, then payload
    bytes. `total` is the whole frame's payload length; in a continuation it is 0.
    """

    kind: int
    flags: int
    returned: Returned
    header_bytes: int
    total: int
    body: memoryview


def pack_head(
    kind: int, flags: int, returned: Returned, header_bytes: int, total: int | None = None
) -> bytes:
    """The fixed part, with the payload length behind it where `total` is given (MORE, and not
    CONTINUED).
    """
    credits, replies, reports = returned
    head = _HEADER.pack(PACKET_VERSION, kind, flags, credits, replies, reports, header_bytes)
    return head if total is None else head + _LENGTH.pack(total)


def parse_packet(view: memoryview) -> Packet:
    """Raises PeerProtocolError naming what is wrong: the link must be closed with it."""
    nbytes = len(view)
    if nbytes < FIXED_BYTES:
        raise PeerProtocolError(f"a packet of {nbytes} bytes")
    version, kind, flags, credits, replies, reports, header_bytes = _HEADER.unpack_from(view)
    if version != PACKET_VERSION:
        raise PeerProtocolError(f"packet version {version}, this side speaks {PACKET_VERSION}")
    if kind not in WINDOW_OF:
        raise PeerProtocolError(f"unknown packet kind {kind}")
    if flags & ~_FLAGS_KNOWN:
        raise PeerProtocolError(f"reserved packet flags {flags:#04x}")
    if reports & ~_REPORTS_KNOWN:
        raise PeerProtocolError(f"reserved report bits {reports:#04x}")
    begin, total = FIXED_BYTES, nbytes - FIXED_BYTES - header_bytes
    if flags:
        begin, total = _parse_segment(view, kind, flags, header_bytes)
    elif total < 0:
        raise PeerProtocolError(f"a header of {header_bytes} bytes in a packet of {nbytes} bytes")
    if header_bytes > HEADER_BYTES_MAX:
        raise PeerProtocolError(f"a header of {header_bytes} bytes; limit {HEADER_BYTES_MAX}")
    returned = NOTHING_RETURNED
    if credits or replies or reports:
        returned = _new(Returned, (credits, replies, reports))
    return _new(Packet, (kind, flags, returned, header_bytes, total, view[begin:]))


def _parse_segment(view: memoryview, kind: int, flags: int, header_bytes: int) -> tuple[int, int]:
    """(where the body begins, the frame's payload length or 0)."""
    if WINDOW_OF[kind] is Window.CONTROL:
        raise PeerProtocolError(f"packet kind {kind} cannot be segmented")
    if flags & _CONTINUED:
        if header_bytes:
            raise PeerProtocolError("a continuation with a header length")
        return FIXED_BYTES, 0
    if len(view) < FIXED_BYTES + LENGTH_BYTES:
        raise PeerProtocolError("a first segment without its length")
    (total,) = _LENGTH.unpack_from(view, FIXED_BYTES)
    return FIXED_BYTES + LENGTH_BYTES, total
