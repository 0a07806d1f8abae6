"""Frames cut and put together: limits of each size, interleaved windows, and every refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import InternalError, PeerProtocolError, UsageError
from orbit.protocol.messaging.packets import (
    FIXED_BYTES,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    PacketFlags,
    PacketKind,
    Returned,
    pack_head,
    parse_packet,
)
from orbit.protocol.messaging.segments import Assembler, Cutter, packet_count
from orbit.testing.pattern import pattern

MESSAGE, RESPONSE, EVENT = PacketKind.MESSAGE, PacketKind.RESPONSE, PacketKind.EVENT
MORE, CONTINUED = int(PacketFlags.MORE), int(PacketFlags.CONTINUED)
SLAB = 32
Whole = tuple[int, bytes, memoryview]


def cut(kind: int, header: bytes, payload: bytes, slab_bytes: int = SLAB) -> list[bytes]:
    cutter = Cutter(kind, header, memoryview(payload), slab_bytes)
    packets = []
    while not cutter.finished:
        head, piece = cutter.next(Returned())
        packets.append(head + bytes(piece))
    return packets


def feed(assembler: Assembler, *packets: bytes) -> list[Whole | None]:
    return [assembler.add(parse_packet(memoryview(data))) for data in packets]


def raw(
    kind: int, flags: int, body: bytes, total: int | None = None, header_bytes: int = 0
) -> bytes:
    return pack_head(kind, flags, Returned(), header_bytes, total) + body


@given(st.binary(max_size=150), st.integers(0, 300), st.integers(SLAB, 80))
def test_a_frame_comes_back_whole(header: bytes, payload_bytes: int, slab_bytes: int) -> None:
    payload = pattern(payload_bytes)
    packets = cut(MESSAGE, header, payload, slab_bytes)
    assert len(packets) == packet_count(len(header), payload_bytes, slab_bytes)
    assert all(len(data) <= slab_bytes for data in packets)
    assert all(len(data) == slab_bytes for data in packets[:-1])
    assembler = Assembler(300)
    *before, whole = feed(assembler, *packets)
    assert before == [None] * len(before)
    assert whole is not None
    assert (whole[0], whole[1], bytes(whole[2])) == (MESSAGE, header, payload)
    assert whole[2].readonly
    assert assembler.open_bytes == 0


@pytest.mark.parametrize("header_bytes", [0, 1, 10, SLAB - 12, SLAB - 8])
def test_one_packet_up_to_the_slab_and_one_byte_more(header_bytes: int) -> None:
    header, limit = b"h" * header_bytes, SLAB - FIXED_BYTES - header_bytes
    assert len(cut(MESSAGE, header, pattern(limit))) == 1
    packets = cut(MESSAGE, header, pattern(limit + 1))
    assert [len(data) for data in packets] == [SLAB, FIXED_BYTES + LENGTH_BYTES + 1]


def test_a_header_goes_on_in_the_next_segments() -> None:
    header, payload = pattern(70, 1), pattern(5)
    packets = cut(MESSAGE, header, payload)
    assert [len(data) for data in packets] == [SLAB, SLAB, SLAB, FIXED_BYTES + 75 - 20 - 2 * 24]
    assembler = Assembler(64)
    *_, whole = feed(assembler, *packets)
    assert whole is not None
    assert (whole[1], bytes(whole[2])) == (header, payload)
    *_, whole = feed(assembler, *cut(MESSAGE, header, b""))  # and with no payload behind it
    assert whole is not None
    assert (whole[1], bytes(whole[2])) == (header, b"")


def test_a_frame_that_ends_inside_its_header_is_refused() -> None:
    short = [raw(MESSAGE, MORE, b"h" * 20, 0, 70), raw(MESSAGE, CONTINUED, b"h" * 24)]
    with pytest.raises(PeerProtocolError, match="inside the header"):
        feed(Assembler(64), *short)


def test_the_limits_of_two_packets() -> None:
    two = SLAB - FIXED_BYTES - LENGTH_BYTES + SLAB - FIXED_BYTES
    assert packet_count(0, two, SLAB) == 2
    assert packet_count(0, two + 1, SLAB) == 3


def test_a_header_at_its_limit_and_over_it() -> None:
    assert packet_count(HEADER_BYTES_MAX, 0, 1 << 20) == 1
    with pytest.raises(UsageError, match="limit 32768"):
        packet_count(HEADER_BYTES_MAX + 1, 0, 1 << 20)


def test_the_default_ceiling_takes_33_packets() -> None:
    assert packet_count(64, 256 << 10, 8 << 10) == 33


def test_a_cutter_says_where_it_is_and_stamps_each_packet() -> None:
    cutter = Cutter(RESPONSE, b"h", memoryview(pattern(40)), SLAB)
    assert (cutter.begun, cutter.remaining) == (False, 2)
    head, _ = cutter.next(Returned(1, 2, 4))
    assert parse_packet(memoryview(head)).returned == (1, 2, 4)
    assert (cutter.begun, cutter.remaining, cutter.finished) == (True, 1, False)
    head, _ = cutter.next(Returned(3))
    assert parse_packet(memoryview(head)).returned == (3, 0, 0)
    assert cutter.finished
    with pytest.raises(InternalError):
        cutter.next(Returned())


def test_pieces_are_views_of_the_callers_payload() -> None:
    payload = bytearray(pattern(40))
    cutter = Cutter(MESSAGE, b"", memoryview(payload), SLAB)
    _, piece = cutter.next(Returned())
    payload[0] ^= 0xFF
    assert piece[0] == payload[0]


def test_what_is_assembled_is_the_receivers_own_memory() -> None:
    for payload in (pattern(4), pattern(60)):
        slabs = [bytearray(data) for data in cut(MESSAGE, b"head", payload)]
        assembler = Assembler(64)
        whole = None
        for slab in slabs:
            whole = assembler.add(parse_packet(memoryview(slab)))
            slab[:] = bytes(len(slab))
        assert whole is not None
        assert (whole[1], bytes(whole[2])) == (b"head", payload)


def test_a_reply_passes_between_the_segments_of_a_message() -> None:
    long, other = cut(MESSAGE, b"m", pattern(60)), cut(RESPONSE, b"r", pattern(50))
    assembler = Assembler(64)
    order = [long[0], other[0], *cut(EVENT, b"", b"")[:0], long[1], other[1], other[2], long[2]]
    results = feed(assembler, *order)
    kinds = [None if whole is None else whole[0] for whole in results]
    assert kinds == [None, None, None, None, RESPONSE, MESSAGE]


def test_open_frames_are_counted_with_what_they_announced() -> None:
    assembler = Assembler(64)
    feed(assembler, cut(MESSAGE, b"m", pattern(60))[0], cut(RESPONSE, b"r", pattern(50))[0])
    assert assembler.open_bytes == 110
    assert set(assembler.open_kinds()) == {MESSAGE, RESPONSE}


FIRST = raw(MESSAGE, MORE, b"0123456789", total=20)
REFUSED: dict[str, tuple[list[bytes], str]] = {
    "one packet over the limit": ([raw(MESSAGE, 0, b"x" * 65)], "a payload of 65 bytes; limit 64"),
    "an announcement over the limit": (
        [raw(MESSAGE, MORE, b"x", total=65)],
        "a payload of 65 bytes; limit 64",
    ),
    "an announcement of 4 GiB": ([raw(MESSAGE, MORE, b"x", total=2**32 - 1)], "limit 64"),
    "a continuation of nothing": ([raw(MESSAGE, CONTINUED, b"x")], "without a beginning"),
    "a middle of nothing": ([raw(MESSAGE, MORE | CONTINUED, b"x")], "without a beginning"),
    "a continuation in the other window": (
        [FIRST, raw(RESPONSE, CONTINUED, b"x" * 10)],
        "without a beginning",
    ),
    "a continuation of another kind": (
        [raw(RESPONSE, MORE, b"0123456789", total=20), raw(EVENT, CONTINUED, b"x" * 10)],
        "without a beginning",
    ),
    "a second beginning": ([FIRST, FIRST], "before the last one is whole"),
    "a whole frame inside an open one": ([FIRST, raw(MESSAGE, 0, b"x")], "before the last one"),
    "an event inside an open response": (
        [raw(RESPONSE, MORE, b"0123456789", total=20), raw(EVENT, 0, b"x")],
        "before the last one",
    ),
    "one byte too few": ([FIRST, raw(MESSAGE, CONTINUED, b"x" * 9)], "announced were 20"),
    "one byte too many": ([FIRST, raw(MESSAGE, CONTINUED, b"x" * 11)], "announced were 20"),
    "whole, and more to come": (
        [FIRST, raw(MESSAGE, CONTINUED | MORE, b"x" * 10)],
        "announced were 20",
    ),
    "a first segment that is whole": ([raw(MESSAGE, MORE, b"xx", total=2)], "announced were 2"),
    "segments of nothing": ([raw(MESSAGE, MORE, b"", total=0)], "announced were 0"),
    "an empty continuation": ([FIRST, raw(MESSAGE, CONTINUED | MORE, b"")], "without a byte"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    packets, reason = REFUSED[name]
    assembler = Assembler(64)
    feed(assembler, *packets[:-1])
    with pytest.raises(PeerProtocolError, match=reason):
        feed(assembler, packets[-1])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([MESSAGE, RESPONSE, EVENT]),
            st.integers(0, 3),
            st.binary(max_size=12),
            st.integers(0, 70),
        ),
        max_size=12,
    )
)
def test_any_stream_of_packets_stays_within_two_ceilings(
    stream: list[tuple[int, int, bytes, int]],
) -> None:
    assembler = Assembler(64)
    for kind, flags, body, total in stream:
        data = raw(kind, flags, body, total if flags == MORE else None)
        try:
            whole = assembler.add(parse_packet(memoryview(data)))
        except PeerProtocolError:
            return
        assert assembler.open_bytes <= 128
        assert whole is None or len(whole[2]) <= 64


def test_a_long_frame_is_handed_on_in_place_and_checked_all_the_same() -> None:
    assembler = Assembler(60_000, in_place=True)

    def add(flags: int, payload: bytes, total: int | None = None) -> object:
        head = pack_head(MESSAGE, flags, Returned(), 3, total)
        memory = memoryview(head + b"abc" + payload)
        added = assembler.add(parse_packet(memory))
        return added and (*added, added[2].obj is memory.obj)

    for nbytes, in_place in ((10, False), (50_000, True), (60_000, True)):
        payload = pattern(nbytes)
        assert add(0, payload) == (MESSAGE, b"abc", payload, in_place)
    short = memoryview(bytes(100_000) + pack_head(MESSAGE, 0, Returned(), 0) + bytes(20_000))
    added = assembler.add(parse_packet(short[100_000:]))
    assert added is not None
    assert added[2].obj is not short.obj  # it would keep six times its bytes
    with pytest.raises(PeerProtocolError, match="60001 bytes"):
        add(0, pattern(60_001))
    assert add(MORE, b"x", 50_000) is None
    with pytest.raises(PeerProtocolError, match="before the last one is whole"):
        add(0, pattern(50_000))
