"""The ticket: everything that one fetch needs, as one word that can be pasted.

It says from whom, under which handle, and how to know that the bytes arrived whole. It holds no
secret, key or queue pair number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from ..errors import PeerProtocolError, UsageError
from ..model import Handle
from .address import NodeAddress
from .codec import decode, encode
from .messages import U64_MAX, Message
from .paste import from_text, to_text

TICKET_PREFIX: Final = "orbit-ticket1:"
NAME_BYTES_MAX: Final = 255  # what file systems take

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class _WireTicket(Message):
    address: bytes
    handle: Handle
    name: str
    size: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """One file to fetch: from whom, under which handle, and how to know that it arrived whole.

    `name` is a bare file name, never a path. `sha256` is 64 lower-case hexadecimal digits.
    """

    address: NodeAddress
    handle: Handle
    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not 0 <= self.size <= U64_MAX:
            raise UsageError(f"ticket: size {self.size}")
        if _SHA256.match(self.sha256) is None:
            raise UsageError("ticket: sha256 must be 64 lower-case hexadecimal digits")
        if self.handle.worker_id != self.address.worker_id:
            raise UsageError("ticket: the handle belongs to another node than the address")

    def __bytes__(self) -> bytes:
        wire = _WireTicket(
            bytes(self.address), self.handle, self.name, self.size, bytes.fromhex(self.sha256)
        )
        return encode(wire.to_wire())

    def __str__(self) -> str:
        return to_text(TICKET_PREFIX, bytes(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`. Raises UsageError naming what is wrong."""
        data = from_text("ticket", TICKET_PREFIX, text)
        try:
            wire = _WireTicket.from_wire(decode(data))
        except PeerProtocolError as error:
            raise UsageError(f"not a ticket: {error}") from error
        address = NodeAddress.from_bytes(wire.address)
        return cls(address, wire.handle, wire.name, wire.size, wire.sha256.hex())


def _check_name(name: str) -> None:
    # The name comes from a stranger and may become a file here.
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"ticket: the file name {name!r} is not valid UTF-8") from error
    if not encoded or len(encoded) > NAME_BYTES_MAX:
        raise UsageError(f"ticket: a file name has 1 to {NAME_BYTES_MAX} bytes")
    if "/" in name or "\\" in name or name in (".", "..") or not name.isprintable():
        raise UsageError(f"ticket: {name!r} is not a bare, printable file name")
