"""The packet header: golden bytes, every refusal, and mutations that are refused or mean what they
say.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbit.errors import PeerProtocolError
from orbit.protocol.messaging.packets import (
    CONTROL_KINDS,
    FIXED_BYTES,
    HEADER_BYTES_MAX,
    REPORT_BIT,
    WINDOW_OF,
    Packet,
    PacketFlags,
    PacketKind,
    Returned,
    Window,
    pack_head,
    parse_packet,
)

MORE, CONTINUED = int(PacketFlags.MORE), int(PacketFlags.CONTINUED)

# version, kind, flags, credits, replies, reports, header length, (payload length), body
GOLDEN = {
    "message": ((0, 0, Returned(), 3, None), b"\x61\x62\x63pay", "0100000000000003616263706179"),
    "empty message": ((0, 0, Returned(), 0, None), b"", "0100000000000000"),
    "response": ((1, 0, Returned(1, 2, 4), 0, None), b"x", "010100010204000078"),
    "ack": ((2, 0, Returned(), 1, None), b"h", "010200000000000168"),
    "event": ((3, 0, Returned(0, 16, 0), 0, None), b"", "0103000010000000"),
    "echo": ((4, 0, Returned(), 2, None), b"hh", "01040000000000026868"),
    "grant": ((16, 0, Returned(255, 255, 0x1F), 0, None), b"", "011000ffff1f0000"),
    "ping": ((17, 0, Returned(0, 0, 1), 0, None), b"", "0111000000010000"),
    "pong": ((18, 0, Returned(0, 0, 2), 0, None), b"", "0112000000020000"),
    "goodbye": ((19, 0, Returned(), 0, None), b"", "0113000000000000"),
    "goodbye ack": ((20, 0, Returned(0, 0, 8), 0, None), b"", "0114000000080000"),
    "first segment": ((0, MORE, Returned(7), 1, 300), b"hp", "01000107000000010000012c6870"),
    "middle segment": ((1, MORE | CONTINUED, Returned(), 0, None), b"pp", "01010300000000007070"),
    "last segment": ((1, CONTINUED, Returned(), 0, None), b"p", "010102000000000070"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_both_ways(name: str) -> None:
    (kind, flags, returned, header_bytes, total), body, golden = GOLDEN[name]
    data = pack_head(kind, flags, returned, header_bytes, total) + body
    assert data.hex() == golden
    packet = parse_packet(memoryview(data))
    expected = len(body) - header_bytes if not flags else total or 0
    assert packet == Packet(kind, flags, returned, header_bytes, expected, memoryview(body))


def test_the_kinds_are_what_they_were() -> None:
    assert {kind.name: int(kind) for kind in PacketKind} == {
        "MESSAGE": 0,
        "RESPONSE": 1,
        "ACK": 2,
        "EVENT": 3,
        "SHUTTING_DOWN": 4,
        "GRANT": 16,
        "PING": 17,
        "PONG": 18,
        "GOODBYE": 19,
        "GOODBYE_ACK": 20,
    }
    assert set(WINDOW_OF) == set(PacketKind)
    assert [REPORT_BIT[kind] for kind in CONTROL_KINDS] == [1, 2, 4, 8, 16]


REFUSED = {
    "nothing": ("", "a packet of 0 bytes"),
    "seven bytes": ("01000000000000", "a packet of 7 bytes"),
    "another version": ("0200000000000000", "packet version 2, this side speaks 1"),
    "version 0": ("0000000000000000", "packet version 0"),
    "an unknown kind": ("0105000000000000", "unknown packet kind 5"),
    "the kind behind the last": ("0115000000000000", "unknown packet kind 21"),
    "a reserved flag": ("0100040000000000", "reserved packet flags 0x04"),
    "a reserved flag beside known ones": ("0100830000000000", "reserved packet flags 0x83"),
    "a reserved report": ("0100000000200000", "reserved report bits 0x20"),
    "a segmented ping": ("0111010000000000" + "00000001", "kind 17 cannot be segmented"),
    "a continued grant": ("0110020000000000", "kind 16 cannot be segmented"),
    "a continuation with a header length": (
        "010002000000000161",
        "a continuation with a header length",
    ),
    "no length": ("0100010000000000000000", "a first segment without its length"),
    "a header over the end": ("010000000000000261", "a header of 2 bytes in a packet of 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(PeerProtocolError, match=reason):
        parse_packet(memoryview(bytes.fromhex(data)))


def test_the_header_limit_and_one_more() -> None:
    body = b"h" * (HEADER_BYTES_MAX + 1)
    head = pack_head(0, 0, Returned(), HEADER_BYTES_MAX)
    assert parse_packet(memoryview(head + body)).total == 1
    head = pack_head(0, 0, Returned(), HEADER_BYTES_MAX + 1)
    with pytest.raises(PeerProtocolError, match="limit 32768"):
        parse_packet(memoryview(head + body))


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(list(PacketKind)))
    control = WINDOW_OF[kind] is Window.CONTROL
    flags = 0 if control else draw(st.integers(0, 3))
    returned = Returned(*draw(st.tuples(*[st.integers(0, 255)] * 2, st.integers(0, 31))))
    header = b"" if flags & CONTINUED else draw(st.binary(max_size=20))
    total = draw(st.integers(0, 2**32 - 1)) if flags == MORE else None
    head = pack_head(kind, flags, returned, len(header), total)
    return head + header + draw(st.binary(max_size=40))


def packed_again(packet: Packet) -> bytes:
    total = packet.total if packet.flags == MORE else None
    head = pack_head(packet.kind, packet.flags, packet.returned, packet.header_bytes, total)
    return head + bytes(packet.body)


@given(packets())
def test_what_is_packed_is_parsed(data: bytes) -> None:
    assert packed_again(parse_packet(memoryview(data))) == data


@given(packets(), st.integers(0, 40), st.integers(0, 255), st.integers(0, 60))
@example(bytes.fromhex("010001000000000000000005"), 2, 1, 12)
def test_a_mutation_is_refused_or_says_what_it_says(
    data: bytes, place: int, value: int, length: int
) -> None:
    mutated = bytearray(data)
    if place < len(mutated):
        mutated[place] = value
    try:
        packet = parse_packet(memoryview(mutated)[:length])
    except PeerProtocolError:
        return
    assert packed_again(packet) == bytes(mutated[:length])


@given(st.binary(max_size=64))
def test_noise_never_crashes(data: bytes) -> None:
    try:
        packet = parse_packet(memoryview(data))
    except PeerProtocolError:
        return
    assert len(data) >= FIXED_BYTES
    assert packed_again(packet) == data
