"""The descriptor accounts for every byte: each refusal by name, no mutant passes for another."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.model import Address, RemoteKey
from orbit.protocol.descriptor import (
    HEADER_BYTES,
    KEY_BYTES_MAX,
    Descriptor,
    DescriptorError,
    decode_descriptor,
    encode_descriptor,
)

_U64 = (1 << 64) - 1
_GOOD = Descriptor(7, Address(0x7F00_1234_5000), 1 << 20, RemoteKey(0x0102_0304))


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    length = draw(st.integers(1, _U64))
    address = draw(st.integers(0, _U64 - length + 1))
    return Descriptor(
        draw(st.integers(0, _U64)),
        Address(address),
        length,
        RemoteKey(draw(st.integers(0, (1 << 32) - 1))),
    )


def _raw(**changes: int) -> bytes:
    fields = {"backend": 2, "version": 1, "flags": 0, "generation": 7, "addr": 4096, "len": 10}
    fields |= {"rkey_len": 4, "key_bytes": 4} | changes
    header = struct.pack(
        "<BBBQQQH",
        *(fields[n] for n in ("backend", "version", "flags", "generation", "addr", "len")),
        fields["rkey_len"],
    )
    return header + bytes(fields["key_bytes"])


def test_the_header_has_29_bytes() -> None:
    assert HEADER_BYTES == 29
    assert len(encode_descriptor(_GOOD)) == 33


@given(descriptors())
def test_round_trip(descriptor: Descriptor) -> None:
    packed = encode_descriptor(descriptor)
    assert decode_descriptor(packed) == descriptor
    assert decode_descriptor(memoryview(bytearray(packed))) == descriptor


@given(descriptors(), st.data())
def test_a_mutant_is_refused_or_is_another_descriptor(
    descriptor: Descriptor, data: st.DataObject
) -> None:
    packed = bytearray(encode_descriptor(descriptor))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    try:
        other = decode_descriptor(packed)
    except DescriptorError:
        return
    assert other != descriptor
    assert encode_descriptor(other) == packed


@given(st.binary(max_size=64))
def test_garbage_never_breaks(data: bytes) -> None:
    with contextlib.suppress(DescriptorError):
        assert encode_descriptor(decode_descriptor(data)) == data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes"),
        (_raw()[:28], "28 bytes"),
        (_raw()[:32], "3 bytes follow"),
        (_raw() + b"\x00", "5 bytes follow"),
        (_raw(backend=1), "backend 1"),
        (_raw(backend=0), "backend 0"),
        (_raw(version=2), "version 2"),
        (_raw(version=0), "version 0"),
        (_raw(flags=1), "flags"),
        (_raw(len=0), "length 0"),
        (_raw(rkey_len=0, key_bytes=0), "verbs key has 4"),
        (_raw(rkey_len=5, key_bytes=5), "verbs key has 4"),
        (_raw(rkey_len=3), "follow the header"),
        (_raw(rkey_len=5), "follow the header"),
        (_raw(rkey_len=KEY_BYTES_MAX, key_bytes=KEY_BYTES_MAX), "verbs key has 4"),
        (_raw(rkey_len=KEY_BYTES_MAX + 1, key_bytes=KEY_BYTES_MAX + 1), "limit is 4096"),
        (_raw(addr=_U64, len=2), "end of memory"),
        (_raw(addr=1, len=_U64 + 0), None),
        (_raw(addr=2, len=_U64), "end of memory"),
        (_raw(addr=_U64, len=1), None),
    ],
)
def test_each_refusal_by_name(data: bytes, problem: str | None) -> None:
    if problem is None:
        assert encode_descriptor(decode_descriptor(data)) == data
        return
    with pytest.raises(DescriptorError, match=problem):
        decode_descriptor(data)


@pytest.mark.parametrize(
    ("generation", "address", "length", "key"),
    [(-1, 0, 1, 0), (_U64 + 1, 0, 1, 0), (0, -1, 1, 0), (0, 0, 0, 0), (0, 0, 1, 1 << 32)],
)
def test_no_descriptor_is_made_that_could_not_be_sent(
    generation: int, address: int, length: int, key: int
) -> None:
    with pytest.raises(DescriptorError):
        Descriptor(generation, Address(address), length, RemoteKey(key))


def test_a_key_never_shows_in_a_log() -> None:
    assert str(_GOOD.key) not in repr(_GOOD)
