"""The name of an engine's region, for peers: what it is called, how large it is, what may be done.

Plain data without authority: it has no address and no key, and using it asks the region's owner.
Bytes for programs, text to paste.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from ..errors import OutOfRange, PeerProtocolError, UsageError
from ..model import Direction, Handle, RegionAccess
from .codec import decode, encode
from .messages import U64_MAX, Message
from .paste import from_text, to_text

REGION_PREFIX: Final = "orbitregion1:"
REGION_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class _WireRegion(Message):
    handle: Handle
    nbytes: int
    access: str


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A region of a peer. `remote[a:b]` names a range of it."""

    handle: Handle
    nbytes: int
    access: RegionAccess

    def __post_init__(self) -> None:
        if not 0 < self.nbytes <= U64_MAX:
            raise UsageError(f"a remote region of {self.nbytes} bytes")

    def __getitem__(self, part: slice) -> RemoteRange:
        """Bytes [start, stop) of it. Raises OutOfRange, UsageError (a step, no slice)."""
        return RemoteRange(self, *byte_range(part, self.nbytes))

    def allows(self, direction: Direction) -> bool:
        """Whether its owner lets peers do that."""
        return direction in self.access.directions

    def __bytes__(self) -> bytes:
        return encode(_WireRegion(self.handle, self.nbytes, self.access.value).to_wire())

    def __str__(self) -> str:
        return to_text(REGION_PREFIX, bytes(self))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Inverse of `bytes`. Raises UsageError."""
        if len(data) > REGION_BYTES_MAX:
            raise UsageError(f"not a remote region: {len(data)} bytes, limit {REGION_BYTES_MAX}")
        try:
            wire = _WireRegion.from_wire(decode(data))
            access = RegionAccess(wire.access)
        except (PeerProtocolError, ValueError) as error:
            raise UsageError(f"not a remote region: {error}") from error
        return cls(wire.handle, wire.nbytes, access)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`; white space around and line breaks inside are forgiven."""
        return cls.from_bytes(from_text("remote region", REGION_PREFIX, text))


@dataclass(frozen=True, slots=True)
class RemoteRange:
    """`nbytes` bytes of a peer's region from its byte `offset` on."""

    region: RemoteRegion
    offset: int
    nbytes: int


def byte_range(part: object, total_bytes: int) -> tuple[int, int]:
    """Offset and size of a slice of bytes. Negative numbers count from the end, and a bound that is
    left out is the end; unlike with lists, one that lies outside is an error. Raises OutOfRange,
    UsageError.
    """
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise UsageError(f"a range of bytes is a slice with step 1, not {part!r}")
    start = _bound(part.start, 0, total_bytes)
    stop = _bound(part.stop, total_bytes, total_bytes)
    if not 0 <= start <= stop <= total_bytes:
        raise OutOfRange(f"bytes [{part.start}:{part.stop}] are not within {total_bytes} bytes")
    return start, stop - start


def _bound(value: object, missing: int, total_bytes: int) -> int:
    if value is None:
        return missing
    if not hasattr(value, "__index__"):
        raise UsageError(f"{value!r} is not a number of bytes")
    number = int(value.__index__())
    return number + total_bytes if number < 0 else number
