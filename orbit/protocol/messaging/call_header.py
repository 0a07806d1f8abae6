"""Headers of the messenger's frames: requests, responses, acks and its own events. Big-endian:

    schema u8 | code u8 | id u64 | text length u8 | text | map length u16 | map (msgpack)

The first byte says whose frame it is: `CALL_SCHEMA` is laid out here, `STREAM_SCHEMA` belongs to
streams. In a request the code is what the sender wants back and the text is the handler's name; in
a response or ack the code is the outcome and the text the reason of a refusal, whose detail is the
payload. Keys that begin with an underscore are orbit's own and never reach a handler.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from ...errors import PeerProtocolError, UsageError
from ..codec import decode, encode

CALL_SCHEMA: Final = 1
STREAM_SCHEMA: Final = 2
NAME_BYTES_MAX: Final = 255
VALUE_BYTES_MAX: Final = 1024
MAP_BYTES_MAX: Final = 16_384
STAGED_KEY: Final = "_rv"  # the handle of a payload that travels by rendezvous
BUDGET_KEY: Final = "_rv_budget_ms"  # beside it: for how long the sender of a call still waits
_BUDGET_DIGITS_MAX: Final = 20

_FIXED = struct.Struct(">BBQB")
_MAP_LENGTH = struct.Struct(">H")
_FIXED_BYTES: Final = _FIXED.size
_EMPTY_MAP: Final = _MAP_LENGTH.pack(0)
_NO_HEADERS: Final[Mapping[str, str]] = {}
_new = tuple.__new__  # a NamedTuple's own costs a Python call, for every frame


class Wants(IntEnum):
    """What the sender of a request waits for."""

    NOTHING = 0
    ACK = 1  # the handler has finished, or why not
    RESPONSE = 2


class Outcome(IntEnum):
    """How a request ended."""

    OK = 0
    FAILED = 1


class EventCode(IntEnum):
    """The messenger's own events."""

    STAGED_DONE = 0  # `id` is the slot of a staged payload that the receiver needs no more


class CallHeader(NamedTuple):
    """One parsed header. `code` is a Wants, an Outcome or an EventCode, by the frame's kind."""

    code: int
    id: int
    text: str
    headers: Mapping[str, str]


def pack_name(name: str) -> bytes:
    """A handler's name as it travels. Raises UsageError for one that is empty, too long, or not
    text.
    """
    if not isinstance(name, str):
        raise UsageError(f"a handler name is text, not {type(name).__name__}")
    try:
        packed = name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"handler name {name!r} is not valid text") from error
    if not 0 < len(packed) <= NAME_BYTES_MAX:
        raise UsageError(f"a handler name of {len(packed)} bytes; from 1 to {NAME_BYTES_MAX}")
    return packed


def pack_headers(headers: Mapping[str, str] | None) -> bytes:
    """The map with its length in front. Raises UsageError: not text, or over a limit."""
    if not headers:
        return _EMPTY_MAP
    for key, value in headers.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"header {key!r} and its value must be text")
        try:
            size = len(value.encode())
            key.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"header {key!r} is not valid text") from error
        if size > VALUE_BYTES_MAX:
            raise UsageError(f"header {key!r} has {size} bytes; the limit is {VALUE_BYTES_MAX}")
    packed = encode(dict(headers))
    if len(packed) > MAP_BYTES_MAX:
        raise UsageError(f"headers of {len(packed)} bytes; the limit is {MAP_BYTES_MAX}")
    return _MAP_LENGTH.pack(len(packed)) + packed


def pack_budget(remaining_s: float) -> str:
    """Whole milliseconds, rounded up, so that the receiver does not give up before the sender does.
    A duration and no instant: the two nodes share no clock.
    """
    nanoseconds = max(1, round(remaining_s * 1_000_000_000))
    return str(-(-nanoseconds // 1_000_000))


def parse_budget(text: str) -> float:
    """Seconds. Raises PeerProtocolError for what is no whole number above 0."""
    digits = text.isascii() and text.isdigit() and len(text) <= _BUDGET_DIGITS_MAX
    if not digits or int(text) == 0:
        raise PeerProtocolError(f"a budget of {text[:40]!r} ms")
    return int(text) / 1000


def pack_call(code: int, call_id: int, text: bytes = b"", headers: bytes = _EMPTY_MAP) -> bytes:
    """A whole header. `text` and `headers` come from `pack_name` and `pack_headers`."""
    return _FIXED.pack(CALL_SCHEMA, code, call_id, len(text)) + text + headers


def parse_request(header: bytes) -> CallHeader:
    """Raises PeerProtocolError naming what is wrong."""
    parsed = _parse(header)
    if parsed.code > Wants.RESPONSE:
        raise PeerProtocolError(f"a request that wants {parsed.code}")
    if not parsed.text:
        raise PeerProtocolError("a request without a handler name")
    if (parsed.code == Wants.NOTHING) != (parsed.id == 0):
        raise PeerProtocolError("a request whose id does not fit what it wants")
    return parsed


def parse_outcome(header: bytes) -> CallHeader:
    """Of a response or an ack."""
    parsed = _parse(header)
    if parsed.code > Outcome.FAILED:
        raise PeerProtocolError(f"unknown outcome {parsed.code}")
    return parsed


def parse_event(header: bytes) -> CallHeader:
    """Of one of the messenger's own events."""
    parsed = _parse(header)
    if parsed.code != EventCode.STAGED_DONE:
        raise PeerProtocolError(f"unknown event {parsed.code}")
    return parsed


def _parse(header: bytes) -> CallHeader:
    try:
        schema, code, call_id, text_bytes = _FIXED.unpack_from(header)
        end = _FIXED_BYTES + text_bytes
        (map_bytes,) = _MAP_LENGTH.unpack_from(header, end)
    except struct.error:
        raise PeerProtocolError(f"a call header of {len(header)} bytes is cut short") from None
    if schema != CALL_SCHEMA:
        raise PeerProtocolError(f"call header schema {schema}; this side speaks {CALL_SCHEMA}")
    if len(header) != end + 2 + map_bytes:
        raise PeerProtocolError(
            f"a call header of {len(header)} bytes that announces {end + 2 + map_bytes}"
        )
    try:
        text = header[_FIXED_BYTES:end].decode()
    except UnicodeDecodeError as error:
        raise PeerProtocolError("a call header's name is not UTF-8") from error
    if map_bytes == 0:
        return _new(CallHeader, (code, call_id, text, _NO_HEADERS))
    if map_bytes > MAP_BYTES_MAX:
        raise PeerProtocolError(f"headers of {map_bytes} bytes; the limit is {MAP_BYTES_MAX}")
    return CallHeader(code, call_id, text, _checked(decode(header[end + 2 :])))


def _checked(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise PeerProtocolError(f"headers: expected a map, got {type(value).__name__}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise PeerProtocolError(f"header {key[:40]!r} is {type(text).__name__}, not text")
        if len(text) > VALUE_BYTES_MAX or len(text.encode()) > VALUE_BYTES_MAX:
            raise PeerProtocolError(f"header {key[:40]!r} is over {VALUE_BYTES_MAX} bytes")
    return value
