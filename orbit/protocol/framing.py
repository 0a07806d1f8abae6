"""Frames on a byte stream: a kind byte and a body, behind a 4-byte big-endian length.

A *frame* here is kind + body, which is what a ControlLink carries; the length and the preface
belong to byte streams alone. `FrameParser` takes the stream in any split and gives whole frames
back; it refuses a stranger at the first wrong byte and an oversize length before it holds anything
for it. It knows kinds, not what bodies mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ..errors import PeerProtocolError, UsageError
from .codec import Readable

# First bytes of every connection, in both directions. NUL and CR LF expose text-mode middle boxes,
# and no other protocol's first line begins like this.
PREFACE: Final = b"orbit\x00\r\n"
HANDSHAKE_FRAME_BYTES_MAX: Final = 4096  # until the peer has proven itself
FRAME_BYTES_MAX: Final = 1 << 20  # afterwards; bulk bytes have their own connections
# A frame of which so much is missing is received straight into its own memory. Far above what a
# stranger may send, for whom nothing is reserved.
_RESERVE_BYTES_MIN: Final = 32 << 10

_LENGTH = struct.Struct(">I")
_LENGTH_BYTES: Final = _LENGTH.size
_NOTHING: Final = memoryview(b"")


class FrameKind(IntEnum):
    """What a body is. Kinds below 16 belong to the handshake. Unknown kinds end the connection."""

    HELLO = 1
    PROOF = 2
    WELCOME = 3
    REFUSAL = 4
    BULK_HELLO = 5
    CALL = 16  # [id, method, body]
    REPLY = 17  # [id, body]
    FAULT = 18  # [id, code, detail]
    NOTIFY = 19  # [method, body]
    PING = 20  # [n]
    PONG = 21  # [n]
    GOODBYE = 22  # []
    PACKET = 23  # a packet of the epoch's TCP message link, raw (messaging/packets.py)


@dataclass(frozen=True, slots=True)
class SendFrame:
    """An effect of the machines above: hand this frame to the link, in order."""

    frame: bytes


_KINDS = {int(kind): kind for kind in FrameKind}


def encode_frame(kind: FrameKind, body: Readable = b"") -> bytes:
    """A frame as a ControlLink carries it: kind byte + body, no length."""
    return bytes((kind,)) + body


def split_frame(frame: Readable) -> tuple[FrameKind, memoryview]:
    """Inverse of `encode_frame`. Raises PeerProtocolError for an empty frame or an unknown kind."""
    if not frame:
        raise PeerProtocolError("an empty frame")
    kind = _KINDS.get(frame[0])
    if kind is None:
        raise PeerProtocolError(f"unknown frame kind {frame[0]}")
    return kind, memoryview(frame)[1:]


def length_prefix(frame: Readable, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """The 4 bytes that precede `frame` on a stream. Raises UsageError when it is over the limit."""
    return pack_length(len(frame), frame_bytes_max)


def pack_length(nbytes: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """As `length_prefix`, of a frame whose bytes lie in several places."""
    if not 0 < nbytes <= frame_bytes_max:
        raise UsageError(f"a frame of {nbytes} bytes; the limit is {frame_bytes_max}")
    return _LENGTH.pack(nbytes)


def encode_on_stream(frame: bytes, frame_bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Length and frame in one piece."""
    return length_prefix(frame, frame_bytes_max) + frame


class FrameParser:
    """Cuts a byte stream into frames: `feed` what came, then take frames until None.

    `frame_bytes_max` may be raised between two frames, once the handshake is through. After an
    error every call raises it again: the stream has no next frame. While the rest of a long frame
    is awaited, `space` is where it may be received without a copy through `feed`.
    """

    __slots__ = (
        "_buffer",
        "_error",
        "_filled",
        "_preface_left",
        "_reserved",
        "_start",
        "frame_bytes_max",
    )

    def __init__(
        self, frame_bytes_max: int = HANDSHAKE_FRAME_BYTES_MAX, *, preface: bool = True
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._buffer = _NOTHING  # of bytes that nobody changes: frames are views of it
        self._start = 0  # what stands before it was taken already
        self._preface_left = PREFACE if preface else b""
        self._error: PeerProtocolError | None = None
        self._reserved: memoryview | None = None  # a long frame that is partly here
        self._filled = 0

    @property
    def pending_bytes(self) -> int:
        """Fed, but not yet taken. Not 0 at the end of a stream: it broke off inside a frame."""
        reserved = 0 if self._reserved is None else _LENGTH.size + self._filled
        return len(self._buffer) - self._start + reserved

    def space(self) -> memoryview | None:
        """Where the missing rest of a long frame belongs; say by `filled` how much of it came."""
        return None if self._reserved is None else self._reserved[self._filled :]

    def filled(self, nbytes: int) -> None:
        """The first `nbytes` of `space` were received."""
        self._filled += nbytes

    def feed(self, data: Readable) -> None:
        """Add received bytes. Raises PeerProtocolError at the first wrong byte of the preface."""
        if self._error is not None:
            raise self._error
        if self._reserved is not None:
            space = self._reserved[self._filled :]
            count = min(len(space), len(data))
            space[:count] = memoryview(data)[:count]
            self._filled += count
            data = memoryview(data)[count:]
        rest = self._buffer[self._start :]
        self._start = 0
        self._buffer = memoryview(b"".join((rest, data)) if len(rest) else bytes(data))
        if self._preface_left:
            self._take_preface()

    def next_frame(self) -> memoryview | None:
        """The next whole frame (kind known), or None. The view stays valid; frames that were fed
        together may lie in one piece of memory, of which each keeps all.
        """
        if self._error is not None:
            raise self._error
        if self._reserved is not None:
            return self._take_reserved()
        buffer, begin = self._buffer, self._start + _LENGTH_BYTES
        at_hand = len(buffer)
        if self._preface_left or at_hand < begin:
            return None
        (length,) = _LENGTH.unpack_from(buffer, self._start)
        if not 0 < length <= self.frame_bytes_max:
            self._fail(f"a frame length of {length}; the limit is {self.frame_bytes_max}")
        if at_hand > begin and buffer[begin] not in _KINDS:
            self._fail(f"unknown frame kind {buffer[begin]}")
        end = begin + length
        if end <= at_hand:
            self._start = end
            return buffer[begin:end]
        if end - at_hand >= _RESERVE_BYTES_MIN:
            self._reserve(begin, length)
        return None

    def frames(self) -> Iterator[memoryview]:
        """Every whole frame at hand."""
        while (frame := self.next_frame()) is not None:
            yield frame

    def take_rest(self) -> bytes:
        """What follows the last frame, as raw bytes: for a stream that stops being framed."""
        if self._error is not None:
            raise self._error
        rest = bytes(self._buffer[self._start :])
        if self._reserved is not None:
            rest = _LENGTH.pack(len(self._reserved)) + self._reserved[: self._filled] + rest
            self._reserved = None
        self._drop()
        return rest

    def _reserve(self, begin: int, length: int) -> None:
        self._reserved = memoryview(bytearray(length))
        self._filled = len(self._buffer) - begin
        self._reserved[: self._filled] = self._buffer[begin:]
        self._drop()

    def _take_reserved(self) -> memoryview | None:
        frame = self._reserved
        if frame is None or self._filled < len(frame):
            return None
        self._reserved = None
        if frame[0] not in _KINDS:  # its first byte was not here yet when it was reserved
            self._fail(f"unknown frame kind {frame[0]}")
        return frame.toreadonly()

    def _take_preface(self) -> None:
        size = min(len(self._preface_left), len(self._buffer))
        if self._buffer[:size] != self._preface_left[:size]:
            self._fail("not an orbit peer")
        self._buffer = self._buffer[size:]
        self._preface_left = self._preface_left[size:]

    def _fail(self, problem: str) -> None:
        self._error = PeerProtocolError(problem)
        self._drop()
        raise self._error

    def _drop(self) -> None:
        self._buffer = _NOTHING
        self._start = 0
