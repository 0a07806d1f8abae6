"""The grant record that travels beside a descriptor, and the 141-byte binding that ends the grant.

The source publishes a GrantRecord; the requester compares it with the connection that it holds and
sends the Binding made of it with its last work request (SEND with invalidate); the source verifies
all 141 bytes against its own record. The check of the binding is keyed with the session key, so
bytes of another epoch, or of anyone without the secret, never match. Neither form grants access.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from operator import attrgetter
from typing import Final, Self

from ..errors import PeerProtocolError
from ..model import Address, Direction, PeerIdentity, RemoteKey
from .codec import decode, encode
from .descriptor import Descriptor, DescriptorError
from .messages import Message

MAGIC: Final = b"OrbB"
PROTOCOL: Final = 19  # version of the grant protocol that both layouts descend from
PROFILE: Final = 1  # memory windows; the only one so far
KIND: Final = 1  # receipt
BINDING_BYTES: Final = 141
GRANT_RECORD_BYTES_MAX: Final = 1024  # a record of today has about 400

# magic, protocol, profile, kind | five ids | slice index, slice count, generation, direction,
# address, length, key, source qpn, requester qpn | check
_LAYOUT = struct.Struct(">4sHBB16s16s16s16s16sIIQBQQIII8s")
_CHECK_BYTES = 8
_ID_BYTES = 16
_U32_MAX = (1 << 32) - 1
assert _LAYOUT.size == BINDING_BYTES


class BindingError(ValueError):
    """A receipt that does not match. `fields` names what differs; empty when it is no binding."""

    def __init__(self, problem: str, differing: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.fields = differing


def process_id(peer: PeerIdentity) -> bytes:
    """16 bytes that name one life of one node: worker id and incarnation."""
    return struct.pack(">QQ", peer.worker_id, peer.incarnation)


@dataclass(frozen=True, slots=True)
class Binding:
    """What both sides say at the end of one grant, field by field."""

    source_process: bytes
    requester_process: bytes
    source_connection: bytes
    requester_connection: bytes
    request_id: bytes
    slice_index: int
    slice_count: int
    generation: int
    direction: int
    address: Address
    length: int
    key: RemoteKey = field(repr=False)
    source_qpn: int
    requester_qpn: int

    def encode(self, session_key: bytes) -> bytes:
        """Exactly 141 bytes. `session_key` is the epoch's, 16 to 64 bytes."""
        body = _LAYOUT.pack(
            MAGIC,
            PROTOCOL,
            PROFILE,
            KIND,
            *_binding_values(self),
            bytes(_CHECK_BYTES),
        )[:-_CHECK_BYTES]
        return body + _check(body, session_key)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, session_key: bytes) -> Self:
        """Raises BindingError. The keyed check is verified before any field is looked at."""
        if len(data) != BINDING_BYTES:
            raise BindingError(f"{len(data)} bytes; a binding has {BINDING_BYTES}")
        body = bytes(data[:-_CHECK_BYTES])
        if not hmac.compare_digest(_check(body, session_key), bytes(data[-_CHECK_BYTES:])):
            raise BindingError("the keyed check does not match")
        magic, protocol, profile, kind, *values, _ = _LAYOUT.unpack(data)
        if (magic, protocol, profile, kind) != (MAGIC, PROTOCOL, PROFILE, KIND):
            raise BindingError(f"unknown kind {magic!r} {protocol}.{profile}.{kind}")
        return cls(*values)

    def differences(self, other: Binding) -> tuple[str, ...]:
        """Names of the fields that are not equal, in layout order."""
        return _differing(_BINDING_FIELDS, _binding_values(self), _binding_values(other))


def verify_binding(
    data: bytes | bytearray | memoryview, expected: Binding, session_key: bytes
) -> None:
    """Source: is this the receipt of exactly `expected`? Raises BindingError naming the fields."""
    differing = expected.differences(Binding.decode(data, session_key))
    if differing:
        raise BindingError(f"receipt of another grant: {', '.join(differing)} differ", differing)


@dataclass(frozen=True, slots=True)
class GrantRecord(Message):
    """One grant as its source publishes it (D2). Processes are `process_id`s, connections the bulk
    arrays' incarnations, both 16 bytes. `request_id` (16 bytes) is the source's name for the pull,
    echoed in the binding. A slice is one grant of a pull that has `slice_count` of them."""

    source_process: bytes
    requester_process: bytes
    source_connection: bytes
    requester_connection: bytes
    request_id: bytes
    array: int
    index: int
    source_qpn: int
    requester_qpn: int
    generation: int
    address: int
    length: int
    key: int = field(repr=False)
    direction: int = int(Direction.READ)
    slice_index: int = 0
    slice_count: int = 1

    def __post_init__(self) -> None:
        for name in (
            "source_process",
            "requester_process",
            "source_connection",
            "requester_connection",
            "request_id",
        ):
            if len(getattr(self, name)) != _ID_BYTES:
                raise ValueError(f"{name} must have {_ID_BYTES} bytes")
        for name in ("key", "source_qpn", "requester_qpn", "slice_index", "slice_count"):
            if not 0 <= getattr(self, name) <= _U32_MAX:
                raise ValueError(f"{name} must fit 32 bits")
        if self.slice_index >= self.slice_count:
            raise ValueError(f"slice {self.slice_index} of {self.slice_count}")
        if self.length <= 0 or self.address + self.length > 1 << 64:
            raise ValueError("length must be positive and end inside memory")
        if self.direction not in (Direction.READ, Direction.WRITE):
            raise ValueError(f"direction {self.direction}")

    def binding(self) -> Binding:
        """The receipt that ends this grant."""
        return Binding(*_binding_values(self))

    def encode(self) -> bytes:
        """For RdmaAnswer.grant."""
        return encode(dict(zip(_RECORD_FIELDS, _record_values(self), strict=True)))

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> GrantRecord:
        """Raises DescriptorError."""
        if len(data) > GRANT_RECORD_BYTES_MAX:
            raise DescriptorError(
                f"grant record of {len(data)} bytes, limit {GRANT_RECORD_BYTES_MAX}"
            )
        try:
            return cls.from_wire(decode(data))
        except PeerProtocolError as error:
            raise DescriptorError(str(error)) from error

    def differences(self, expected: GrantRecord) -> tuple[str, ...]:
        """Names of the fields that are not equal, for the log line of a `decode_error`."""
        return _differing(_RECORD_FIELDS, _record_values(self), _record_values(expected))

    def check_descriptor(self, descriptor: Descriptor) -> None:
        """Raises DescriptorError when the descriptor beside this record names other memory."""
        for name in ("generation", "address", "length", "key"):
            if getattr(self, name) != getattr(descriptor, name):
                raise DescriptorError(f"descriptor and grant record differ in {name}")


# Every get makes, compares and packs these, so their fields are fetched in one step.
_BINDING_FIELDS = tuple(field.name for field in fields(Binding))
_RECORD_FIELDS = tuple(field.name for field in fields(GrantRecord))
_binding_values = attrgetter(*_BINDING_FIELDS)
_record_values = attrgetter(*_RECORD_FIELDS)


def _differing(
    names: tuple[str, ...], ours: tuple[object, ...], theirs: tuple[object, ...]
) -> tuple[str, ...]:
    if ours == theirs:
        return ()
    return tuple(n for n, a, b in zip(names, ours, theirs, strict=True) if a != b)


def _check(body: bytes, session_key: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECK_BYTES, key=session_key).digest()
