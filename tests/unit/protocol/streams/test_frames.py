"""Notes and handles of streams as bytes: golden ones, there and back, and what is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import PeerProtocolError, UsageError
from orbit.model import Handle, SlotId, WorkerId
from orbit.protocol.codec import decode, encode
from orbit.protocol.streams.ends import (
    PEER_BYTES_MAX,
    WINDOW_BYTES_DEFAULT,
    WINDOW_BYTES_MIN,
    StreamWindow,
    WindowBudget,
)
from orbit.protocol.streams.frames import (
    FIXED_BYTES,
    TEXT_BYTES_MAX,
    AttachReply,
    AttachRequest,
    Note,
    NoteKind,
    pack_note,
    parse_note,
)
from orbit.protocol.streams.handle import StreamHandle

HANDLE = Handle(WorkerId(7), SlotId(9))
NOTES = {
    Note(NoteKind.ITEM, 1, 2, 3): "0200 0000000000000001 00000002 0000000000000003",
    Note(NoteKind.STAGED, 1, 2, 3, 0, HANDLE, 300_000): (
        "0201 0000000000000001 00000002 0000000000000003"
        "0000000000000007 0000000000000009 00000000000493e0"
    ),
    Note(NoteKind.FINALIZED, 1, 2, 3): "0202 0000000000000001 00000002 0000000000000003",
    Note(NoteKind.FAILED, 1, 2, 3, text="why"): (
        "0203 0000000000000001 00000002 0000000000000003 776879"
    ),
    Note(NoteKind.DROPPED, 1, 2, 3): "0204 0000000000000001 00000002 0000000000000003",
    Note(NoteKind.HEARTBEAT, 1, 2): "0205 0000000000000001 00000002 0000000000000000",
    Note(NoteKind.CREDIT, 1, 2, 3, 4): (
        "0210 0000000000000001 00000002 0000000000000003 0000000000000004"
    ),
    Note(NoteKind.CANCEL, 1, 2): "0211 0000000000000001 00000002 0000000000000000",
    Note(NoteKind.FINISHED, 1, 2): "0212 0000000000000001 00000002 0000000000000000",
}


@pytest.mark.parametrize(("note", "text"), NOTES.items(), ids=lambda x: getattr(x, "kind", None))
def test_golden_notes(note: Note, text: str) -> None:
    assert pack_note(note) == bytes.fromhex(text)
    assert parse_note(pack_note(note)) == note


def test_every_kind_has_golden_bytes() -> None:
    assert {note.kind for note in NOTES} == set(NoteKind)


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.kind.name)
def test_what_is_cut_short_or_goes_on_is_refused(note: Note) -> None:
    packed = pack_note(note)
    for end in range(FIXED_BYTES):
        with pytest.raises(PeerProtocolError):
            parse_note(packed[:end])
    if not note.text and note.kind is not NoteKind.CANCEL:
        with pytest.raises(PeerProtocolError):
            parse_note(packed + b"x")
    if len(packed) > FIXED_BYTES and not note.text:
        with pytest.raises(PeerProtocolError):
            parse_note(packed[:-1])


@pytest.mark.parametrize("first", [b"\x01\x00", b"\x02\x06", b"\x02\xff"])
def test_an_unknown_schema_or_kind_is_refused(first: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        parse_note(first + bytes(FIXED_BYTES - 2))


def test_a_staged_item_needs_a_handle() -> None:
    packed = bytearray(pack_note(Note(NoteKind.STAGED, 1, 2, 3, 0, HANDLE, 1)))
    packed[FIXED_BYTES : FIXED_BYTES + 8] = bytes(8)
    with pytest.raises(PeerProtocolError, match="no handle"):
        parse_note(packed)


def test_reasons_are_clipped_and_a_longer_one_is_refused() -> None:
    note = Note(NoteKind.FAILED, 1, 2, text="é" * TEXT_BYTES_MAX)
    assert parse_note(pack_note(note)).text == "é" * (TEXT_BYTES_MAX // 2)
    with pytest.raises(PeerProtocolError):
        parse_note(pack_note(note) + b"x")


@given(st.binary(max_size=80))
def test_bytes_of_strangers_raise_nothing_else(data: bytes) -> None:
    for head in (b"", b"\x02"):
        try:
            note = parse_note(head + data)
        except PeerProtocolError:
            continue
        assert note.kind in NoteKind


def test_attach_messages() -> None:
    request = AttachRequest(5, 6)
    assert AttachRequest.from_wire(decode(encode(request.to_wire()))) == request
    reply = AttachReply(items=1, window_bytes=2, typed=True, heartbeat_ms=5000)
    assert AttachReply.from_wire(decode(encode(reply.to_wire()))) == reply
    assert AttachReply.from_wire({"refused": "unknown"}).items == 0


# --- handles --------------------------------------------------------------------------------------


def test_handles_travel_by_any_road() -> None:
    handle = StreamHandle(WorkerId(0xABC), (1 << 63) + 5)
    assert str(handle) == "stream-0000000000000abc-8000000000000005"
    assert StreamHandle.parse(str(handle)) == handle
    assert StreamHandle.from_bytes(bytes(handle)) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle


@pytest.mark.parametrize("text", ["", "stream-", "0000000000000abc-1", "stream-xyz-1"])
def test_other_text_is_no_handle(text: str) -> None:
    with pytest.raises(UsageError):
        StreamHandle.parse(text)


@pytest.mark.parametrize("data", [b"", bytes(15), bytes(16), bytes(17)])
def test_other_bytes_are_no_handle(data: bytes) -> None:
    with pytest.raises(UsageError):
        StreamHandle.from_bytes(data)


# --- windows --------------------------------------------------------------------------------------


def test_no_item_takes_more_than_half_a_window() -> None:
    window = StreamWindow(4, 100)
    assert [window.charge(n) for n in (0, 50, 51, 1 << 40)] == [0, 50, 50, 50]
    assert window.due(1, 0)
    assert not window.due(0, 24)
    assert window.due(0, 25)


def test_a_hundred_streams_of_one_peer_find_windows_and_the_bound_holds() -> None:
    budget = WindowBudget()
    windows = []
    while window := budget.promise(WINDOW_BYTES_DEFAULT):
        windows.append(window)
        assert sum(windows) == budget.promised_bytes <= PEER_BYTES_MAX
    assert len(windows) >= 100
    assert windows[0] == WINDOW_BYTES_DEFAULT
    assert min(windows) >= WINDOW_BYTES_MIN
    for window in windows:
        budget.take_back(window)
    assert budget.promised_bytes == 0
