"""The 29-byte descriptor of an RDMA answer, with the key behind it.

Little-endian: backend u8, version u8, flags u8, generation u64, addr u64, len u64, rkey_len u16,
then exactly rkey_len key bytes and nothing else. Decoding refuses what it cannot account for byte
for byte; a refusal costs one round trip on the TCP path (reason `decode_error`), so it is an
internal ValueError, never an error of the caller. A descriptor is no authority: a device checks it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from ..model import Address, RemoteKey

BACKEND_VERBS: Final = 2  # 1 was UCX in the format this descends from
VERSION: Final = 1
KEY_BYTES_MAX: Final = 4096  # of any backend
VERBS_KEY_BYTES: Final = 4

_HEADER = struct.Struct("<BBBQQQH")
_KEY = struct.Struct("<I")
_U64_MAX = (1 << 64) - 1

HEADER_BYTES: Final = _HEADER.size  # 29


class DescriptorError(ValueError):
    """Bytes that are no descriptor (or grant record) for this node. Callers turn it into
    PathReason.DECODE_ERROR."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where an owner's bytes lie, and the window key that opens exactly them."""

    generation: int  # of the grant; for diagnostics, and checked against the grant record
    address: Address
    length: int
    key: RemoteKey = field(repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.generation <= _U64_MAX:
            raise DescriptorError(f"generation {self.generation} is no u64")
        if self.length <= 0:
            raise DescriptorError(f"length {self.length}: a descriptor names at least one byte")
        if self.address < 0 or self.address + self.length - 1 > _U64_MAX:
            raise DescriptorError("address + length passes the end of memory")
        if not 0 <= self.key < 1 << 32:
            raise DescriptorError("a verbs key has 32 bits")


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """33 bytes: header and key."""
    return _HEADER.pack(
        BACKEND_VERBS,
        VERSION,
        0,
        descriptor.generation,
        descriptor.address,
        descriptor.length,
        VERBS_KEY_BYTES,
    ) + _KEY.pack(descriptor.key)


def decode_descriptor(data: bytes | bytearray | memoryview) -> Descriptor:
    """Raises DescriptorError naming what is wrong."""
    if len(data) < HEADER_BYTES:
        raise DescriptorError(f"{len(data)} bytes; the header alone has {HEADER_BYTES}")
    backend, version, flags, generation, address, length, key_bytes = _HEADER.unpack_from(data)
    if backend != BACKEND_VERBS:
        raise DescriptorError(f"unknown backend {backend}")
    if version != VERSION:
        raise DescriptorError(f"unknown version {version}")
    if flags != 0:
        raise DescriptorError(f"unknown flags {flags:#x}")
    if key_bytes > KEY_BYTES_MAX:
        raise DescriptorError(f"a key of {key_bytes} bytes; the limit is {KEY_BYTES_MAX}")
    if len(data) != HEADER_BYTES + key_bytes:
        raise DescriptorError(
            f"{len(data) - HEADER_BYTES} bytes follow the header, {key_bytes} announced"
        )
    if key_bytes != VERBS_KEY_BYTES:
        raise DescriptorError(f"a verbs key has {VERBS_KEY_BYTES} bytes, not {key_bytes}")
    (key,) = _KEY.unpack_from(data, HEADER_BYTES)
    return Descriptor(generation, Address(address), length, RemoteKey(key))
