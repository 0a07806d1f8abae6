"""One byte stream gives the same frames in any split, and a stranger is refused at once."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import PeerProtocolError, UsageError
from orbit.protocol.framing import (
    FRAME_BYTES_MAX,
    HANDSHAKE_FRAME_BYTES_MAX,
    PREFACE,
    FrameKind,
    FrameParser,
    encode_frame,
    encode_on_stream,
    length_prefix,
    split_frame,
)

_frames = st.lists(
    st.builds(encode_frame, st.sampled_from(FrameKind), st.binary(max_size=60)), max_size=6
)


def _stream(frames: list[bytes]) -> bytes:
    return PREFACE + b"".join(map(encode_on_stream, frames))


def _parse(pieces: list[bytes], frame_bytes_max: int = HANDSHAKE_FRAME_BYTES_MAX) -> list[bytes]:
    parser = FrameParser(frame_bytes_max)
    got: list[bytes] = []
    for piece in pieces:
        parser.feed(piece)
        got += map(bytes, parser.frames())
    return got


@given(_frames, st.data())
def test_whole_byte_by_byte_split_and_with_trailing_bytes(
    frames: list[bytes], data: st.DataObject
) -> None:
    stream = _stream(frames)
    assert _parse([stream]) == frames
    assert _parse([bytes([b]) for b in stream]) == frames
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    edges = [0, *cuts, len(stream)]
    assert _parse([stream[a:b] for a, b in itertools.pairwise(edges)]) == frames
    parser = FrameParser()
    parser.feed(stream + b"\x00\x00\x00\x09\x10abc")  # the beginning of a further frame
    assert list(map(bytes, parser.frames())) == frames
    assert parser.pending_bytes == 8
    assert parser.take_rest() == b"\x00\x00\x00\x09\x10abc"
    assert parser.pending_bytes == 0


@given(st.binary(min_size=1, max_size=100))
def test_garbage_is_refused_or_waits_and_never_breaks(data: bytes) -> None:
    parser = FrameParser()
    try:
        parser.feed(data)
        frames = list(parser.frames())
    except PeerProtocolError:
        with pytest.raises(PeerProtocolError):  # and it stays refused
            parser.feed(_stream([]))
        with pytest.raises(PeerProtocolError):
            parser.next_frame()
    else:
        assert PREFACE.startswith(data[: len(PREFACE)])
        assert all(split_frame(f) for f in frames)


@pytest.mark.parametrize(
    ("right", "wrong"), [(b"", b"GET / HTTP/1.1\r\n"), (b"", b"\x16"), (b"orbit", b"\n")]
)
def test_a_stranger_is_refused_at_its_first_wrong_byte(right: bytes, wrong: bytes) -> None:
    parser = FrameParser()
    for byte in right:
        parser.feed(bytes([byte]))
    with pytest.raises(PeerProtocolError, match="not an orbit peer"):
        parser.feed(wrong[:1])


def test_a_length_of_4_gib_is_refused_before_anything_is_held_for_it() -> None:
    parser = FrameParser(FRAME_BYTES_MAX, preface=False)
    tracemalloc.start()
    try:
        parser.feed(b"\xff\xff\xff\xff\x10")
        with pytest.raises(PeerProtocolError, match="4294967295"):
            parser.next_frame()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_limit_and_limit_plus_one() -> None:
    body = bytes(HANDSHAKE_FRAME_BYTES_MAX - 1)
    frame = encode_frame(FrameKind.HELLO, body)
    assert _parse([PREFACE, encode_on_stream(frame)]) == [frame]
    with pytest.raises(PeerProtocolError, match="limit is 4096"):
        _parse([PREFACE, encode_on_stream(frame + b"x")])
    with pytest.raises(PeerProtocolError, match="length of 0"):
        _parse([PREFACE, bytes(4)])
    assert len(length_prefix(bytes(FRAME_BYTES_MAX))) == 4
    for bad in (b"", bytes(FRAME_BYTES_MAX + 1)):
        with pytest.raises(UsageError):
            length_prefix(bad)


def test_the_limit_can_rise_between_two_frames_of_one_chunk() -> None:
    small = encode_frame(FrameKind.WELCOME)
    large = encode_frame(FrameKind.CALL, bytes(10_000))
    parser = FrameParser()
    parser.feed(PREFACE + encode_on_stream(small) + encode_on_stream(large))
    assert parser.next_frame() == small
    parser.frame_bytes_max = FRAME_BYTES_MAX
    assert parser.next_frame() == large
    assert parser.next_frame() is None


@pytest.mark.parametrize("kind", [0, 6, 15, 24, 255])
def test_an_unknown_kind_is_refused_before_its_body_came(kind: int) -> None:
    parser = FrameParser(preface=False)
    parser.feed(b"\x00\x00\x0f\x00" + bytes([kind]))
    with pytest.raises(PeerProtocolError, match=f"kind {kind}"):
        parser.next_frame()
    with pytest.raises(PeerProtocolError, match=f"kind {kind}"):
        split_frame(bytes([kind]) + b"body")


def test_an_empty_frame_has_no_kind() -> None:
    with pytest.raises(PeerProtocolError, match="empty"):
        split_frame(b"")


def test_frames_stay_valid_while_the_parser_goes_on() -> None:
    parser = FrameParser(preface=False)
    parser.feed(encode_on_stream(encode_frame(FrameKind.PING, b"one")))
    first = parser.next_frame()
    parser.feed(encode_on_stream(encode_frame(FrameKind.PING, b"two")))
    assert parser.next_frame() is not None
    assert first is not None
    assert bytes(first[1:]) == b"one"


@given(
    st.lists(st.sampled_from([0, 5, 40_000, 70_000]), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 90_000), st.booleans()), max_size=8),
)
def test_a_long_frame_may_be_received_in_place(
    sizes: list[int], pieces: list[tuple[int, bool]]
) -> None:
    """`feed` and `space` give the same frames, in any split and mixture."""
    frames = [encode_frame(FrameKind.CALL, bytes([n + 1]) * size) for n, size in enumerate(sizes)]
    stream = memoryview(b"".join(map(encode_on_stream, frames)))
    parser, got = FrameParser(FRAME_BYTES_MAX, preface=False), []
    for nbytes, in_place in [*pieces, (len(stream), False)]:
        space, count = parser.space(), nbytes
        if space is not None and in_place:
            count = min(nbytes, len(space), len(stream))
            space[:count] = stream[:count]
            parser.filled(count)
        else:
            parser.feed(stream[:count])
        stream = stream[count:]
        got += map(bytes, parser.frames())
    assert got == frames
    assert parser.pending_bytes == 0
    assert parser.space() is None


def test_nothing_is_reserved_for_a_stranger_or_a_short_rest() -> None:
    parser = FrameParser(FRAME_BYTES_MAX, preface=False)
    parser.feed(encode_on_stream(encode_frame(FrameKind.CALL, bytes(50_000)))[:20_000])
    assert parser.next_frame() is None
    assert parser.space() is None  # 30,000 bytes are missing
    assert parser.pending_bytes == 20_000


def test_a_stream_that_breaks_off_inside_a_long_frame_has_bytes_pending() -> None:
    data = encode_on_stream(encode_frame(FrameKind.CALL, bytes(100_000)))
    parser = FrameParser(FRAME_BYTES_MAX, preface=False)
    parser.feed(data[:100])
    assert parser.next_frame() is None
    space = parser.space()
    assert space is not None
    assert len(space) == len(data) - 100
    assert parser.pending_bytes == 100
    assert parser.take_rest() == data[:100]
    assert parser.pending_bytes == 0


def test_a_long_frame_of_unknown_kind_is_refused() -> None:
    data = encode_on_stream(b"\xee" + bytes(100_000))
    parser = FrameParser(FRAME_BYTES_MAX, preface=False)
    parser.feed(data[:4])
    assert parser.next_frame() is None
    parser.feed(data[4:])
    with pytest.raises(PeerProtocolError, match="kind 238"):
        parser.next_frame()
