"""The bytes of every message of a control connection, and what a peer from before a field means.

One file a message in golden_messages/: hexadecimal, 32 bytes a line. A change there is a new
protocol version, or a mistake. A field that is added later needs a default that means what was done
before it existed: `BEFORE` says so once more, by hand.
"""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

import orbit.protocol.address
import orbit.protocol.binding
import orbit.protocol.remote_region
import orbit.protocol.streams.frames
import orbit.protocol.ticket  # noqa: F401 (with those above: every message there is)
from orbit.errors import PeerProtocolError
from orbit.model import Handle, SlotId, WorkerId
from orbit.protocol import messages as m
from orbit.protocol.codec import decode, encode
from orbit.protocol.engine_messages import EngineHelloReply, EngineHelloRequest
from orbit.protocol.streams.frames import AttachReply, AttachRequest

GOLDEN = Path(__file__).parent / "golden_messages"
# Bytes of a sender from before transfers of many rails and ranges.
GOLDEN_BEFORE = Path(__file__).parent / "golden_before"

HANDLE = Handle(WorkerId(0x1122334455667788), SlotId(9))
RAIL = m.RailHint("rxe0", 1, "::ffff:10.0.0.1", 1, 1024)
LIMITS = m.Limits(64, 16, 8192, 262_144, 16, 16, 1 << 20, 32, 64, 2)
BIG = (1 << 64) - 1

MESSAGES: dict[str, m.Message] = {
    "rail_hint": m.RailHint("mlx5_0", 2, "fe80::1", 3, 4096, "infiniband", 7, 0x8001, False),
    "limits": LIMITS,
    "hello": m.Hello(
        version_min=1,
        version_max=2,
        worker_id=0x1122334455667788,
        incarnation=0x99AABBCCDDEEFF00,
        target=2,
        attempt=b"attempt.16.bytes",
        nonce=b"nonce...16.bytes",
        features=("one", "two"),
        rails=(RAIL,),
        limits=LIMITS,
        message_qpn=0,
        message_psn=0,
        endpoints=("10.0.0.1:7000",),
        dial_number=3,
        previous=b"previous16.bytes",
    ),
    "proof": m.Proof(bytes(range(32))),
    "welcome": m.Welcome(1),
    "refusal": m.Refusal("version", "yours 2..2, mine 1..1"),
    "bulk_hello": m.BulkHello(b"attempt.16.bytes", bytes(8), bytes(range(32))),
    "metadata_request": m.MetadataRequest(HANDLE),
    "metadata_reply": m.MetadataReply(1 << 40, 3, True),
    "slice_run": m.SliceRun(3, 1 << 33),
    "rdma_offer": m.RdmaOffer(
        ("verbs",), 2, 64, (2, 5), (m.SliceRun(2, 65_536), m.SliceRun(5, 100))
    ),
    "acquire_request": m.AcquireRequest(
        HANDLE,
        m.RdmaOffer(("verbs", "other"), 1, 64),
        65_536,
        True,
        30_000,
        2,
        BIG,
        4096,
        True,
        bytes(range(32)),
    ),
    "acquire_request_plain": m.AcquireRequest(HANDLE),
    "grant_piece": m.GrantPiece(b"descriptor", b"grant"),
    "rdma_answer": m.RdmaAnswer(
        7,
        b"descriptor",
        b"grant",
        30_000,
        1 << 20,
        (m.GrantPiece(b"descriptor 2", b"grant 2"), m.GrantPiece(b"descriptor 3", b"grant 3")),
        2,
    ),
    "ready_answer": m.ReadyAnswer(7, 8, 5, "below_min", b"bytes", 30_000, 2),
    "acquire_reply_rdma": m.AcquireReply(rdma=m.RdmaAnswer(7, b"descriptor", b"grant")),
    "acquire_reply_ready": m.AcquireReply(ready=m.ReadyAnswer(7, 8, 5)),
    "ref_request": m.RefRequest(HANDLE),
    "detach_request": m.DetachRequest(HANDLE, 7, False, True),
    "release_request": m.ReleaseRequest(HANDLE, 7, False),
    "end_reply": m.EndReply(True),
    "lease_renew_request": m.LeaseRenewRequest(HANDLE, 7),
    "empty_reply": m.EmptyReply(),
    "bulk_member": m.BulkMember(1, 17, 0xABCDEF),
    "connect_bulk_request": m.ConnectBulkRequest(
        5,
        2,
        RAIL,
        "::ffff:10.0.0.2",
        (m.BulkMember(0, 17, 1), m.BulkMember(1, 18, 2)),
        16,
        b"requester.16.byt",
        2,
    ),
    "connect_bulk_reply": m.ConnectBulkReply(
        RAIL, (m.BulkMember(0, 19, 3),), 8, b"source.16.bytes.", 2
    ),
    "close_bulk_request": m.CloseBulkRequest(5),
    "bulk_lost_notice": m.BulkLostNotice(5, b"source.16.bytes.", (0, 3)),
    "connect_messages_request": m.ConnectMessagesRequest(
        2, RAIL, "::ffff:10.0.0.2", 17, 1, 64, 16, 8192, 262_144
    ),
    "connect_messages_reply": m.ConnectMessagesReply(RAIL, 18, 2, 64, 16, 8192, 262_144),
    "open_messages_notice": m.OpenMessagesNotice(),
    "messages_lost_notice": m.MessagesLostNotice(2, "not_ready", "nothing came in 3 s"),
    "engine_hello_request": EngineHelloRequest(7),
    "engine_hello_reply": EngineHelloReply(1, "staged", 64, 32),
    "attach_request": AttachRequest(1, 2),
    "attach_reply": AttachReply("full", "no room", 8, 65_536, True, 5000),
}

# Parts of texts that have golden bytes of their own in test_golden.py.
ELSEWHERE = {"_WireAddress", "_WireEndpoint", "_WireRegion", "_WireTicket", "GrantRecord"}

# What a message from before each field meant, by class.
BEFORE: dict[str, dict[str, object]] = {
    # Ethernet rails whose ranges hold, as all were.
    "RailHint": {"link_layer": "ethernet", "lid": 0, "pkey": 0xFFFF, "range_enforced": True},
    # No messages, no bulk: such a node has neither.
    "Limits": {f.name: 0 for f in fields(m.Limits)},
    "Hello": {
        "features": (),
        "rails": (),
        "limits": m.Limits(),
        "message_qpn": 0,
        "message_psn": 0,
        "endpoints": (),  # cannot be dialed
        "dial_number": 0,  # uses only what it dialed
        "previous": b"",
    },
    "Refusal": {"detail": ""},
    # One descriptor an answer, all of it through `array`.
    "RdmaOffer": {"array": 0, "pieces_max": 1, "arrays": (), "runs": ()},
    "AcquireRequest": {
        "rdma": None,  # no offer
        "inline_max": 0,  # nothing rides on the answer
        "skip_threshold": False,
        "lease_ms": 0,  # no deadline on TCP
        "direction": 1,  # a READ
        "offset": 0,
        "nbytes": 0,
        "ranged": False,  # of a handle to a payload or a destination
        "ranges": b"",
    },
    "RdmaAnswer": {"lease_timeout_ms": 0, "total_len": 0, "rest": (), "direction": 1},
    "ReadyAnswer": {
        "reason": "no_offer",
        "inline": None,
        "lease_timeout_ms": 0,  # no deadline
        "direction": 1,
    },
    "AcquireReply": {"rdma": None, "ready": None},
    "DetachRequest": {"transferred": True, "confirm": False},  # a READ's end is not waited for
    "ReleaseRequest": {"transferred": True},
    "EndReply": {"in_place": False},  # a write is not proven to be in place
    "ConnectBulkRequest": {"rd_atomic": 1, "connection": b"", "direction": 1},
    "ConnectBulkReply": {"rd_atomic": 1, "connection": b"", "direction": 1},
    "MessagesLostNotice": {"detail": ""},
    "EngineHelloRequest": {"protocol": 1},
    # No engine there.
    "EngineHelloReply": {
        "protocol": 0,
        "host_memory": "direct",
        "grants_max": 0,
        "slices_max": 0,
    },
    # It grants nothing.
    "AttachReply": {
        "refused": "",
        "detail": "",
        "items": 0,
        "window_bytes": 0,
        "typed": False,
        "heartbeat_ms": 0,
    },
}


def golden(name: str, folder: Path = GOLDEN) -> bytes:
    return bytes.fromhex((folder / f"{name}.hex").read_text(encoding="ascii"))


def as_text(data: bytes) -> str:
    """As the golden files hold it."""
    return "\n".join([*textwrap.wrap(data.hex(), 64), ""])


def every_message() -> list[type[m.Message]]:
    return [cls for cls in m.Message.__subclasses__() if cls.__module__.startswith("orbit.")]


def defaulted(cls: type[m.Message]) -> list[str]:
    found = fields(cls)  # type: ignore[arg-type]
    return [f.name for f in found if f.default is not MISSING or f.default_factory is not MISSING]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_what_it_always_was(name: str) -> None:
    message = MESSAGES[name]
    assert encode(message.to_wire()).hex() == golden(name).hex()
    assert type(message).from_wire(decode(golden(name))) == message


def test_every_message_and_every_golden_file_is_there() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(MESSAGES)
    here = {type(message).__name__ for message in MESSAGES.values()}
    assert here == {cls.__name__ for cls in every_message()} - ELSEWHERE


@pytest.mark.parametrize("name", MESSAGES)
def test_no_field_of_a_golden_message_is_at_its_default(name: str) -> None:
    """Else its bytes would say nothing about that field."""
    if name in {"acquire_request_plain", "acquire_reply_rdma", "acquire_reply_ready", "hello"}:
        return
    message: Any = MESSAGES[name]
    before = BEFORE.get(type(message).__name__, {})
    assert [f for f in before if getattr(message, f) == before[f]] == []


def test_every_field_with_a_default_says_what_its_absence_means() -> None:
    found = {cls.__name__: defaulted(cls) for cls in every_message()}
    expected = {name: list(BEFORE.get(name, {})) for name in found}
    assert {k: v for k, v in found.items() if k not in ELSEWHERE} == {
        k: v for k, v in expected.items() if k not in ELSEWHERE
    }


FIELDS = [
    (name, field)
    for name, message in MESSAGES.items()
    for field in defaulted(type(message))
    if not name.startswith("acquire_reply")
]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=[".".join(x) for x in FIELDS])
def test_a_message_from_before_a_field_keeps_its_meaning(name: str, field: str) -> None:
    message: Any = MESSAGES[name]
    wire = decode(golden(name))
    assert isinstance(wire, dict)
    del wire[field]
    expected = replace(message, **{field: BEFORE[type(message).__name__][field]})
    assert type(message).from_wire(wire) == expected


# What today's golden message says beyond the one in golden_before/.
NEWER: dict[str, dict[str, object]] = {
    "rdma_offer": {"arrays": (), "runs": ()},
    "acquire_request": {"ranged": False, "ranges": b""},
    "acquire_request_plain": {},
    "detach_request": {"confirm": False},
}


def test_every_golden_file_of_before_is_looked_at() -> None:
    assert {path.stem for path in GOLDEN_BEFORE.iterdir()} == set(NEWER)


@pytest.mark.parametrize("name", NEWER)
def test_bytes_from_before_mean_what_they_meant(name: str) -> None:
    message: Any = MESSAGES[name]
    before = golden(name, GOLDEN_BEFORE)
    assert type(message).from_wire(decode(before)) == replace(message, **NEWER[name])
    assert before != golden(name)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_has_been_there_from_the_first_version_must_be_there(name: str) -> None:
    message: Any = MESSAGES[name]
    later = defaulted(type(message))
    for field in fields(message):
        if field.name not in later:
            wire = decode(golden(name))
            assert isinstance(wire, dict)
            del wire[field.name]
            with pytest.raises(PeerProtocolError, match=field.name):
                type(message).from_wire(wire)


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_of_a_later_version_are_ignored(name: str) -> None:
    message = MESSAGES[name]
    wire = decode(golden(name))
    assert isinstance(wire, dict)
    wire["of a later version"] = {"what": [1, None]}
    assert type(message).from_wire(wire) == message
