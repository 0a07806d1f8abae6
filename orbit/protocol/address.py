"""A node's address: worker id, life (incarnation), TCP endpoints, and its rails as hints.

Plain data without authority: no key, queue pair number or sequence number ever stands in it. One
blob serves all transports; as text it can be pasted. Nothing is resolved or dialed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from ..errors import PeerProtocolError, UsageError
from ..model import Incarnation, PeerIdentity, WorkerId
from .codec import decode, encode
from .endpoint import Endpoint
from .messages import U64_MAX, Message, RailHint
from .paste import from_text, to_text

ADDRESS_PREFIX: Final = "orbit1:"
ADDRESS_BYTES_MAX: Final = 4096
ENDPOINTS_MAX: Final = 16
RAILS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class _WireEndpoint(Message):
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _WireAddress(Message):
    worker_id: int
    incarnation: int
    endpoints: tuple[_WireEndpoint, ...]
    rails: tuple[RailHint, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """One node's address: `bytes(address)` for programs, `str(address)` for people."""

    worker_id: WorkerId
    incarnation: Incarnation
    endpoints: tuple[Endpoint, ...]
    rails: tuple[RailHint, ...] = ()

    def __post_init__(self) -> None:
        if not (0 < self.worker_id <= U64_MAX and 0 <= self.incarnation <= U64_MAX):
            raise UsageError("not a node address: worker id or incarnation is no u64")
        if not 0 < len(self.endpoints) <= ENDPOINTS_MAX:
            raise UsageError(f"a node address has 1 to {ENDPOINTS_MAX} endpoints")
        for endpoint in self.endpoints:
            if endpoint.port == 0 or endpoint.is_wildcard:
                raise UsageError(
                    f"not a node address: {endpoint} cannot be dialed",
                    hint="say with advertise= what peers are to dial",
                )
        if len(self.rails) > RAILS_MAX:
            raise UsageError(f"a node address has at most {RAILS_MAX} rails")

    @property
    def identity(self) -> PeerIdentity:
        return PeerIdentity(self.worker_id, self.incarnation)

    def __bytes__(self) -> bytes:
        wire = _WireAddress(
            self.worker_id,
            self.incarnation,
            tuple(_WireEndpoint(e.host, e.port) for e in self.endpoints),
            self.rails,
        )
        packed = encode(wire.to_wire())
        if len(packed) > ADDRESS_BYTES_MAX:
            raise UsageError(f"a node address of {len(packed)} bytes; limit {ADDRESS_BYTES_MAX}")
        return packed

    def __str__(self) -> str:
        return to_text(ADDRESS_PREFIX, bytes(self))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Inverse of `bytes`. Raises UsageError."""
        if len(data) > ADDRESS_BYTES_MAX:
            raise UsageError(f"not a node address: {len(data)} bytes, limit {ADDRESS_BYTES_MAX}")
        try:
            wire = _WireAddress.from_wire(decode(data))
        except PeerProtocolError as error:
            raise UsageError(f"not a node address: {error}") from error
        return cls(
            WorkerId(wire.worker_id),
            Incarnation(wire.incarnation),
            tuple(Endpoint(e.host, e.port) for e in wire.endpoints),
            wire.rails,
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`; white space around and line breaks inside are forgiven."""
        return cls.from_bytes(from_text("node address", ADDRESS_PREFIX, text))
