"""Decoding takes exactly what encoding makes, and refuses everything else by one typed error."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import InternalError, PeerProtocolError
from orbit.model import PathReason
from orbit.protocol.codec import DEPTH_MAX, LIST_LENGTH_MAX, decode, encode

_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | _text
    | st.binary(max_size=40)
)
_plain = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=12,
)


@given(_plain)
def test_what_is_encoded_comes_back(value: object) -> None:
    assert decode(memoryview(encode(value))) == value


@given(_plain, st.binary(min_size=1, max_size=3))
def test_trailing_bytes_are_refused(value: object, more: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode(encode(value) + more)


@given(_plain)
def test_no_prefix_decodes(value: object) -> None:
    packed = encode(value)
    for size in range(len(packed)):
        with pytest.raises(PeerProtocolError):
            decode(packed[:size])


@given(st.binary(max_size=200))
def test_garbage_decodes_or_is_refused_and_never_breaks(data: bytes) -> None:
    try:
        value = decode(data)
    except PeerProtocolError:
        return
    packed = encode(value)  # compared as bytes: NaN is not equal to itself
    assert encode(decode(packed)) == packed


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "incomplete"),
        (b"\xc1", "undecodable"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "ext"),
        (msgpack.packb(msgpack.ExtType(5, b"")), "ext"),
        (msgpack.packb(msgpack.Timestamp(1, 0)), "ext"),
        (b"\xc7\x00\xff", "undecodable"),  # a timestamp of no bytes
        (b"\xa2\xc3\x28", "utf-8"),
        (b"\xa3\xed\xa0\x80", "utf-8"),  # a lone surrogate
        (msgpack.packb({1: 2}), "map key is int"),
        (msgpack.packb({b"a": 2}), "map key is bytes"),
        (b"\x81\x90\x01", "map key is list"),
        (b"\x82\xa1a\x01\xa1a\x02", "stands twice"),
        (b"\xdd\xff\xff\xff\xff", "undecodable"),  # 4 Gi list items announced
        (b"\xdf\xff\xff\xff\xff", "undecodable"),  # 4 Gi map items
        (b"\xc6\xff\xff\xff\xff", "undecodable"),  # 4 GiB of bytes
        (b"\xdb\xff\xff\xff\xff", "undecodable"),  # 4 GiB of text
        (msgpack.packb([0] * (LIST_LENGTH_MAX + 1)), "undecodable"),
        (b"\x91" * 100_000 + b"\x90", "undecodable"),
    ],
)
def test_refusals_name_the_problem(data: bytes, problem: str) -> None:
    with pytest.raises(PeerProtocolError, match=f"(?i){problem}"):
        decode(data)


def test_nesting_stops_at_the_limit() -> None:
    value: object = []
    for _ in range(DEPTH_MAX - 1):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(PeerProtocolError, match="nested deeper"):
        decode(encode([value]))
    with pytest.raises(PeerProtocolError, match="nested deeper"):
        decode(encode({"a": value}))


@pytest.mark.parametrize("value", [object(), 1 << 64, -(1 << 63) - 1, "\ud800", {"a": {1, 2}}])
def test_what_cannot_be_encoded_is_a_bug_of_ours(value: object) -> None:
    with pytest.raises(InternalError):
        encode(value)


def test_enums_and_views_travel_as_plain_values() -> None:
    assert decode(encode([PathReason.OK, memoryview(b"ab"), (1, 2)])) == ["ok", b"ab", [1, 2]]


def test_the_result_does_not_refer_to_the_input() -> None:
    data = bytearray(encode({"a": b"payload"}))
    value = decode(data)
    data[:] = bytes(len(data))
    data.clear()  # would raise BufferError if a view were held
    assert value == {"a": b"payload"}
