"""Addresses and tickets: bytes and text both ways, and no damaged paste that still parses."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import UsageError
from orbit.model import Handle, Incarnation, PeerIdentity, SlotId, WorkerId
from orbit.protocol.address import ADDRESS_PREFIX, NodeAddress
from orbit.protocol.codec import decode, encode
from orbit.protocol.endpoint import Endpoint
from orbit.protocol.messages import RailHint
from orbit.protocol.paste import TEXT_CHARS_MAX, to_text
from orbit.protocol.ticket import TICKET_PREFIX, Ticket

ADDRESS = NodeAddress(
    WorkerId(0xA),
    Incarnation(7),
    (Endpoint("10.0.0.1", 7000), Endpoint("fe80::1%eth0", 7000)),
    (RailHint("mlx5_0", 1, "::ffff:10.0.0.1", 3, 4096),),
)
TICKET = Ticket(ADDRESS, Handle(WorkerId(0xA), SlotId(1)), "a file.bin", 12345, "ab" * 32)


def test_bytes_and_text_come_back() -> None:
    assert NodeAddress.from_bytes(memoryview(bytes(ADDRESS))) == ADDRESS
    text = str(ADDRESS)
    assert text.startswith(ADDRESS_PREFIX)
    assert NodeAddress.parse(text) == ADDRESS
    assert ADDRESS.identity == PeerIdentity(WorkerId(0xA), Incarnation(7))
    assert str(TICKET).startswith(TICKET_PREFIX)
    assert Ticket.parse(str(TICKET)) == TICKET
    assert pickle.loads(pickle.dumps(TICKET)) == TICKET


def test_what_mail_and_terminals_do_to_a_paste_is_forgiven() -> None:
    text = str(TICKET)
    wrapped = " " + text[:50] + "\n" + text[50:] + "\r\n"
    assert Ticket.parse(wrapped) == TICKET
    assert Ticket.parse(text.upper()) == TICKET


@given(st.data())
def test_no_damaged_text_parses(data: st.DataObject) -> None:
    text = str(data.draw(st.sampled_from([ADDRESS, TICKET])))
    at = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["drop", "change", "cut", "double"]))
    match how:
        case "drop":
            damaged = text[:at] + text[at + 1 :]
        case "change":
            damaged = text[:at] + data.draw(st.sampled_from("abcxyz27:=")) + text[at + 1 :]
        case "cut":
            damaged = text[:at]
        case _:
            damaged = text[:at] + text[at] + text[at:]
    if damaged == text:
        return
    for parse in (NodeAddress.parse, Ticket.parse):
        with pytest.raises(UsageError):
            parse(damaged)


@given(st.text(max_size=60))
def test_any_text_is_refused_with_a_hint(text: str) -> None:
    for parse in (NodeAddress.parse, Ticket.parse):
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not begin with"),
        ("orbit2:abc", "does not begin with"),
        (str(ADDRESS), "does not begin with"),
        (TICKET_PREFIX, "checksum"),
        (TICKET_PREFIX + "a", "cut short"),
        (TICKET_PREFIX + "aaaa0aaa", "character '0'"),
        (str(TICKET)[:-1], "cut short|checksum"),
        ("x" * (TEXT_CHARS_MAX + 1), "characters"),
        (to_text(TICKET_PREFIX, encode([1])), "expected a map"),
        (to_text(TICKET_PREFIX, encode({})), "missing"),
        (to_text(TICKET_PREFIX, b"\xc1"), "undecodable"),
    ],
)
def test_a_malformed_ticket_says_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Ticket.parse(text)


def _address_wire(**changes: object) -> bytes:
    wire = decode(bytes(ADDRESS))
    assert isinstance(wire, dict)
    return encode(wire | changes)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "undecodable"),
        (bytes(ADDRESS)[:-1], "undecodable"),
        (bytes(ADDRESS) + b"\x00", "undecodable"),
        (bytes(5000), "5000 bytes"),
        (_address_wire(worker_id=0), "worker id"),
        (_address_wire(endpoints=[]), "1 to 16 endpoints"),
        (_address_wire(endpoints=[{"host": "h", "port": 1}] * 17), "1 to 16 endpoints"),
        (_address_wire(endpoints=[{"host": "h", "port": 0}]), "cannot be dialed"),
        (_address_wire(endpoints=[{"host": "::", "port": 1}]), "cannot be dialed"),
        (_address_wire(endpoints=[{"host": "h", "port": 70000}]), "port"),
        (_address_wire(endpoints=[{"host": "a b", "port": 1}]), "host name"),
        (_address_wire(endpoints=[{"host": "h"}]), "missing"),
    ],
)
def test_a_malformed_address_says_what_is_wrong(data: bytes, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        NodeAddress.from_bytes(data)


def test_fields_added_later_are_ignored() -> None:
    assert NodeAddress.from_bytes(_address_wire(later=1)) == ADDRESS


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "a\\b", "a\nb", "\x1b[31m", "x" * 256, "\ud800"]
)
def test_a_ticket_never_names_a_path(name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        replace(TICKET, name=name)


@pytest.mark.parametrize("digest", ["", "AB" * 32, "ab" * 31, "zz" * 32, "ab" * 33])
def test_a_digest_has_one_spelling(digest: str) -> None:
    with pytest.raises(UsageError, match="sha256"):
        replace(TICKET, sha256=digest)


def test_a_ticket_is_about_one_node() -> None:
    with pytest.raises(UsageError, match="another node"):
        replace(TICKET, handle=Handle(WorkerId(0xB), SlotId(1)))
