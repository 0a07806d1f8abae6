"""What the two ends of a stream say: the notes in the headers of its frames, and the attach call.

A note is binary, big-endian, since every item carries one:

    schema u8 | kind u8 | stream id u64 | attachment u32 | sequence u64 | what the kind adds

The sender's notes travel as messages, in one order with its items; its heartbeats and all that the
receiver says are events, which no credit of messages can hold up. What does not belong here raises
PeerProtocolError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple

from ...errors import PeerProtocolError, UsageError
from ...model import Handle, SlotId, WorkerId
from ..messages import Message
from ..messaging.call_header import STREAM_SCHEMA

TEXT_BYTES_MAX: Final = 512  # of a reason; a note must stay far below one slab

_FIXED = struct.Struct(">BBQIQ")
_STAGED = struct.Struct(">QQQ")
_CREDIT = struct.Struct(">Q")
FIXED_BYTES: Final = _FIXED.size


class NoteKind(IntEnum):
    """Below 16: sender to receiver."""

    ITEM = 0  # the payload is the item
    STAGED = 1  # the item lies at the sender, under a handle
    FINALIZED = 2  # nothing follows: `sequence` items were sent
    FAILED = 3  # the same, and the producer says that something went wrong
    DROPPED = 4  # the same, and the producer went away without a word
    HEARTBEAT = 5
    CREDIT = 16  # answers heartbeats too: both ends hear from each other
    CANCEL = 17  # the receiver wants no more
    FINISHED = 18  # every item and the end are in the receiver's memory


FROM_SENDER: Final = frozenset(kind for kind in NoteKind if kind < 16)
TERMINALS: Final = frozenset({NoteKind.FINALIZED, NoteKind.FAILED, NoteKind.DROPPED})
ORDERED: Final = TERMINALS | {NoteKind.ITEM, NoteKind.STAGED}  # they travel as messages
_WITH_TEXT = frozenset({NoteKind.FAILED, NoteKind.CANCEL})


class Note(NamedTuple):
    """One note. `sequence`: of an item, how many stand before it; of a terminal, how many were
    sent; of a credit, how many may be sent in all. `bytes_limit` goes with it.
    """

    kind: NoteKind
    stream_id: int
    attachment: int  # the sender's number for its attachment, which names it to both
    sequence: int = 0
    bytes_limit: int = 0
    handle: Handle | None = None
    nbytes: int = 0  # of a staged item
    text: str = ""


def pack_note(note: Note) -> bytes:
    fixed = _FIXED.pack(STREAM_SCHEMA, note.kind, note.stream_id, note.attachment, note.sequence)
    if note.kind is NoteKind.ITEM:
        return fixed
    if note.handle is not None:
        handle = note.handle
        return fixed + _STAGED.pack(handle.worker_id, handle.slot_id, note.nbytes)
    if note.kind is NoteKind.CREDIT:
        return fixed + _CREDIT.pack(note.bytes_limit)
    if note.kind in _WITH_TEXT:
        return fixed + clip(note.text).encode()
    return fixed


def parse_note(data: bytes | memoryview) -> Note:
    """Raises PeerProtocolError."""
    if len(data) < FIXED_BYTES:
        raise PeerProtocolError(f"a stream note of {len(data)} bytes")
    schema, number, stream_id, attachment, sequence = _FIXED.unpack_from(data)
    if schema != STREAM_SCHEMA:
        raise PeerProtocolError(f"stream note schema {schema}; this side speaks {STREAM_SCHEMA}")
    try:
        kind = NoteKind(number)
    except ValueError:
        raise PeerProtocolError(f"unknown stream note {number}") from None
    rest = bytes(data[FIXED_BYTES:])
    if kind is NoteKind.STAGED:
        high, low, nbytes = _unpack(_STAGED, kind, rest)
        return Note(kind, stream_id, attachment, sequence, 0, _handle(high, low), nbytes)
    if kind is NoteKind.CREDIT:
        (bytes_limit,) = _unpack(_CREDIT, kind, rest)
        return Note(kind, stream_id, attachment, sequence, bytes_limit)
    if kind in _WITH_TEXT:
        if len(rest) > TEXT_BYTES_MAX:
            raise PeerProtocolError(f"a stream reason of {len(rest)} bytes")
        return Note(kind, stream_id, attachment, sequence, text=rest.decode(errors="replace"))
    if rest:
        raise PeerProtocolError(f"{len(rest)} bytes behind a stream note of kind {kind.name}")
    return Note(kind, stream_id, attachment, sequence)


def clip(text: str) -> str:
    """A reason, short enough for a note."""
    return text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")


def _unpack(layout: struct.Struct, kind: NoteKind, rest: bytes) -> tuple[int, ...]:
    if len(rest) != layout.size:
        raise PeerProtocolError(f"{len(rest)} bytes behind a stream note of kind {kind.name}")
    return layout.unpack(rest)


def _handle(high: int, low: int) -> Handle:
    try:
        return Handle(WorkerId(high), SlotId(low))
    except UsageError as error:
        raise PeerProtocolError(f"a staged item under no handle: {error}") from error


@dataclass(frozen=True, slots=True)
class AttachRequest(Message):
    """A producer wants to feed a stream, over the link that this call comes by."""

    METHOD: ClassVar[str] = "_stream_attach"
    stream_id: int
    attachment: int


@dataclass(frozen=True, slots=True)
class AttachReply(Message):
    """What the receiver grants, or `refused`: unknown, attached or full. `typed`: items are msgpack
    values. The sender beats at least every `heartbeat_ms` while it has nothing to send.
    """

    refused: str = ""
    detail: str = ""
    items: int = 0  # how many items may wait at the receiver
    window_bytes: int = 0  # and how many bytes of them
    typed: bool = False
    heartbeat_ms: int = 0
