"""Bytes of version 1 that must never change: a peer of any later version meets exactly these.

Each golden file holds one value in hexadecimal, 32 bytes a line. A change here is a new protocol
version, or a mistake.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orbit.model import (
    Address,
    Handle,
    Incarnation,
    PeerIdentity,
    RegionAccess,
    RemoteKey,
    SlotId,
    WorkerId,
)
from orbit.protocol.address import NodeAddress
from orbit.protocol.binding import Binding, GrantRecord, process_id, verify_binding
from orbit.protocol.bootstrap import Admit, Established, Listener, Proven, refusal_frame
from orbit.protocol.calls import CallTable, goodbye_frame, notify_frame, ping_frame
from orbit.protocol.codec import decode, encode
from orbit.protocol.descriptor import Descriptor, decode_descriptor, encode_descriptor
from orbit.protocol.endpoint import Endpoint
from orbit.protocol.framing import (
    PREFACE,
    FrameKind,
    FrameParser,
    SendFrame,
    encode_frame,
    encode_on_stream,
)
from orbit.protocol.messages import BulkHello, Hello, Limits, MetadataRequest, Proof, RailHint
from orbit.protocol.remote_region import RemoteRegion
from orbit.protocol.security import BulkGate, BulkTickets, dialer_proof
from orbit.protocol.ticket import Ticket

GOLDEN = Path(__file__).parent / "golden"
SECRET = b"golden secret"
SESSION_KEY = bytes(range(32))
_RAIL = RailHint("rxe0", 1, "::ffff:10.0.0.1", 1, 1024)

HELLO = Hello(
    version_min=1,
    version_max=1,
    worker_id=0x1122334455667788,
    incarnation=0x99AABBCCDDEEFF00,
    target=2,
    attempt=b"attempt.16.bytes",
    nonce=b"nonce...16.bytes",
    features=("feature",),
    rails=(_RAIL,),
    limits=Limits(bulk_width=2),
)
LISTENER_HELLO = Hello(1, 1, 2, 3, 0, bytes(16), b"listener's nonce")
DESCRIPTOR = Descriptor(7, Address(0x7F0012345000), 1 << 20, RemoteKey(0x01020304))
GRANT = GrantRecord(
    source_process=process_id(PeerIdentity(WorkerId(1), Incarnation(2))),
    requester_process=process_id(PeerIdentity(WorkerId(3), Incarnation(4))),
    source_connection=b"source.16.bytes.",
    requester_connection=b"requester.16.byt",
    request_id=b"request.16.bytes",
    array=5,
    index=1,
    source_qpn=17,
    requester_qpn=18,
    generation=7,
    address=0x7F0012345000,
    length=1 << 20,
    key=0x01020304,
)
ADDRESS = NodeAddress(WorkerId(1), Incarnation(2), (Endpoint("10.0.0.1", 7000),), (_RAIL,))
TICKET = Ticket(ADDRESS, Handle(WorkerId(1), SlotId(9)), "file.bin", 12345, "5a" * 32)
REGION = RemoteRegion(Handle(WorkerId(1), SlotId(9)), 1 << 33, RegionAccess.READ_WRITE)


LISTENER_ANSWER = replace(LISTENER_HELLO, target=HELLO.worker_id, attempt=HELLO.attempt)


def _hello_frame() -> bytes:
    return encode_frame(FrameKind.HELLO, encode(HELLO.to_wire()))


def _listener_answer() -> bytes:
    machine = Listener(LISTENER_HELLO, SECRET, endpoint="", now=0.0, timeout_s=1.0)
    effects = machine.on_frame(_hello_frame(), 0.0)
    return b"".join(encode_on_stream(e.frame) for e in effects if isinstance(e, SendFrame))


def _call_frames() -> bytes:
    near, far = CallTable(), CallTable()
    request = MetadataRequest(Handle(WorkerId(1), SlotId(9)))
    call_id, call = near.start(request.METHOD, request.to_wire(), 0.0)
    far.on_frame(call.frame, 0.0)
    (reply,) = far.reply(call_id, {"total_len": 5, "refcount": 1, "pinned": False})
    assert isinstance(reply, SendFrame)
    second, other = near.start(request.METHOD, request.to_wire(), 0.0)
    far.on_frame(other.frame, 0.0)
    (fault,) = far.fault(second, "unknown_handle", "gone")
    assert isinstance(fault, SendFrame)
    frames = [call.frame, reply.frame, fault.frame]
    frames += [notify_frame("_rv_tick", {}), ping_frame(1), goodbye_frame()]
    return b"".join(map(encode_on_stream, frames))


VALUES = {
    "preface_and_hello": PREFACE + encode_on_stream(_hello_frame()),
    "listener_hello_and_proof": _listener_answer(),
    "refusal": encode_on_stream(refusal_frame("version", "yours 2..2, mine 1..1")),
    "bulk_hello": encode(BulkTickets(SESSION_KEY, HELLO.attempt).next_hello().to_wire()),
    "calls": _call_frames(),
    "descriptor": encode_descriptor(DESCRIPTOR),
    "grant_record": GRANT.encode(),
    "binding": GRANT.binding().encode(SESSION_KEY),
    "address": bytes(ADDRESS),
    "ticket": str(TICKET).encode(),
    "remote_region": str(REGION).encode(),
}


# Hellos from before fields were added to them.
EARLIER = {"preface_and_hello_first", "listener_hello_and_proof_first"}


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text(encoding="ascii"))


@pytest.mark.parametrize("name", VALUES)
def test_what_is_made_today_is_what_was_always_made(name: str) -> None:
    assert VALUES[name].hex() == golden(name).hex()


def test_every_golden_file_is_checked() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(VALUES) | EARLIER


def test_golden_bytes_are_still_understood() -> None:
    assert decode_descriptor(golden("descriptor")) == DESCRIPTOR
    assert GrantRecord.decode(golden("grant_record")) == GRANT
    verify_binding(golden("binding"), GRANT.binding(), SESSION_KEY)
    assert Binding.decode(golden("binding"), SESSION_KEY).length == 1 << 20
    assert NodeAddress.from_bytes(golden("address")) == ADDRESS
    assert Ticket.parse(golden("ticket").decode()) == TICKET
    hello = BulkHello.from_wire(decode(golden("bulk_hello")))
    BulkGate(SESSION_KEY, HELLO.attempt).admit(hello)


@pytest.mark.parametrize("name", ["preface_and_hello", "preface_and_hello_first"])
def test_a_listener_of_today_opens_an_epoch_with_the_golden_dialer(name: str) -> None:
    parser = FrameParser()
    parser.feed(golden(name))
    frame = parser.next_frame()
    assert frame is not None
    machine = Listener(LISTENER_HELLO, SECRET, endpoint="", now=0.0, timeout_s=1.0)
    answer, _ = machine.on_frame(frame, 0.0)
    assert isinstance(answer, SendFrame)
    mac = dialer_proof(SECRET, bytes(frame[1:]), answer.frame[1:])
    proof = encode_frame(FrameKind.PROOF, encode(Proof(mac).to_wire()))
    assert isinstance(machine.on_frame(proof, 0.0)[-1], Proven)
    assert isinstance(machine.step(Admit(), 0.0)[-1], Established)


@pytest.mark.parametrize(
    ("earlier", "hello"),
    [("preface_and_hello_first", HELLO), ("listener_hello_and_proof_first", LISTENER_ANSWER)],
)
def test_fields_that_an_earlier_hello_lacks_mean_what_was_done_before(
    earlier: str, hello: Hello
) -> None:
    parser = FrameParser()
    preface = b"" if earlier.startswith("preface") else PREFACE
    parser.feed(preface + golden(earlier))
    frame = parser.next_frame()
    assert frame is not None
    assert Hello.from_wire(decode(frame[1:])) == hello
