"""What a work-request id of the message lane says: whose it is, which life, which packet.

    send      serial of the queue pair (32 bits) | marker (1) | sequence number (24)
    receive   1 | generation of the posting (31 bits) | slab (24)

Serials are never reused on a lane and a slab's generation rises with each posting, so that a late
or doubled completion of an earlier life is unknown instead of wrong (D7).
"""

from __future__ import annotations

from typing import Final

RECEIVE: Final = 1 << 63
MARKER: Final = 1 << 24
SEQUENCE_MASK: Final = MARKER - 1
SLAB_MASK: Final = MARKER - 1
_GENERATION_MASK: Final = (1 << 31) - 1
_SHIFT: Final = 32
SERIAL_MAX: Final = (1 << 31) - 1


def send_id(serial: int, sequence: int) -> int:
    return serial << _SHIFT | sequence & SEQUENCE_MASK


def marker_id(serial: int) -> int:
    return serial << _SHIFT | MARKER


def serial_of(wr_id: int) -> int:
    return wr_id >> _SHIFT


def receive_id(slab: int, generation: int) -> int:
    return RECEIVE | (generation & _GENERATION_MASK) << _SHIFT | slab


def slab_of(wr_id: int) -> int:
    return wr_id & SLAB_MASK
