"""PacketLink packet by packet, over a wire that only remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import (
    DeadlineExceeded,
    InternalError,
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    PeerLost,
    PeerProtocolError,
    UsageError,
)
from orbit.model import PathName
from orbit.protocol.messaging.credits import Windows
from orbit.protocol.messaging.packets import (
    HEADER_BYTES_MAX,
    REPORT_BIT,
    PacketFlags,
    PacketKind,
    Returned,
    pack_head,
    parse_packet,
)
from orbit.testing.message_link_rig import LinkEnd, Received
from orbit.transport.message_link import MESSAGE_OVERHEAD_BYTES, LinkTerms, PacketLink
from orbit.transport.messages import PacketClient

SLAB = 64
MESSAGE, RESPONSE = PacketKind.MESSAGE, PacketKind.RESPONSE
PING, PONG, GRANT = PacketKind.PING, PacketKind.PONG, PacketKind.GRANT
NOTHING = Returned()
GOODBYE, GOODBYE_ACK = PacketKind.GOODBYE, PacketKind.GOODBYE_ACK


class RecordingWire:
    """`said` holds the kinds of what was pushed; the test plays the peer and the network."""

    def __init__(self) -> None:
        self.slab_bytes = SLAB
        self.room = 1000
        self.said: list[int] = []
        self.packets: list[bytes] = []
        self.flushes: list[int] = []  # how many packets had been pushed by each
        self.ends: list[OrbitError | None] = []

    def start(self, client: PacketClient) -> None:
        pass

    def push(self, head: bytes, body: memoryview) -> None:
        packet = head + body
        assert len(packet) <= self.slab_bytes
        self.packets.append(packet)
        self.said.append(parse_packet(memoryview(packet)).kind)

    def flush(self) -> None:
        self.flushes.append(len(self.packets))

    def close(self) -> None:
        self.ends.append(None)

    def abort(self, error: OrbitError | None = None) -> None:
        self.ends.append(error)

    async def wait_closed(self) -> None:
        pass


class Bench:
    """One link, its wire and its client."""

    def __init__(self) -> None:
        self.wire = RecordingWire()
        self.end = LinkEnd()
        terms = LinkTerms(
            transport=PathName.RDMA,
            peer="peer",
            granted=Windows(4, 1),
            allowed=Windows(4, 1),
            ceiling_bytes=200,
            inbound_bytes_max=2000,
        )
        self.link = PacketLink(self.wire, self.end, terms)
        self.end.link = self.link

    def hear(self, *packets: bytes) -> None:
        """One pass."""
        for packet in packets:
            self.link.on_packet(memoryview(packet))
        self.link.on_pass_end()


def packet(kind: int, body: bytes = b"", returned: Returned = NOTHING) -> bytes:
    return pack_head(kind, 0, returned, 0) + body


def reported(*kinds: int) -> Returned:
    return Returned(0, 0, sum(REPORT_BIT[kind] for kind in kinds))


def on_a_loop(case: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(case())

    run.__name__ = case.__name__
    return run


@on_a_loop
async def test_a_send_leaves_at_once_and_a_pass_in_one_flush() -> None:
    bench = Bench()
    bench.end.send(b"a")
    assert bench.wire.flushes == [1]

    def answer(received: Received) -> None:
        bench.end.send(received.payload)

    bench.end.on_message = answer
    bench.hear(packet(MESSAGE, b"b"), packet(MESSAGE, b"c"))
    assert bench.wire.flushes == [1, 3]
    assert [parse_packet(memoryview(p)).returned.credits for p in bench.wire.packets] == [0, 2, 0]


@on_a_loop
async def test_replies_go_first_and_credit_decides() -> None:
    bench = Bench()
    for n in range(6):
        bench.end.send(b"m%d" % n)
    bench.end.send(b"r0", kind=RESPONSE)
    bench.end.send(b"r1", kind=RESPONSE)
    assert bench.wire.said == [MESSAGE] * 4 + [RESPONSE]
    assert bench.link.statistics().credit_stalls == 2
    assert bench.link.statistics().credits == 0
    bench.hear(packet(GRANT, returned=Returned(1, 1, 0)))
    assert bench.wire.said[5:] == [RESPONSE, MESSAGE]
    assert bench.link.statistics().credit_stalls == 3  # the next message waits as well
    assert bench.link.statistics().queued_frames == 1


@on_a_loop
async def test_a_header_at_its_limit_and_over_it() -> None:
    bench = Bench()
    for payload in (b"", b"x" * 100):
        assert not bench.end.send(payload, bytes(1000)).settled  # longer than a slab
        refused = bench.end.send(payload, bytes(HEADER_BYTES_MAX + 1))
        assert isinstance(refused.errors[0], UsageError)


@on_a_loop
async def test_room_holds_frames_but_no_control_packet() -> None:
    bench = Bench()
    bench.wire.room = 0
    frame = bench.end.send(b"a")
    bench.hear(packet(PING))
    assert bench.wire.said == [PONG]
    bench.wire.room = 1
    bench.link.on_room()
    assert bench.wire.said == [PONG, MESSAGE]
    bench.link.on_sent(1)
    assert not frame.settled
    bench.link.on_sent(1)
    assert frame.outcome == ["done"]


@on_a_loop
async def test_returns_that_no_frame_carries_go_by_grant_then_by_ping() -> None:
    bench = Bench()
    bench.hear(packet(MESSAGE))
    assert bench.wire.said == [GRANT]
    bench.hear(packet(MESSAGE))
    assert bench.wire.said == [GRANT, PING]
    bench.hear(packet(MESSAGE))
    assert bench.wire.said == [GRANT, PING]
    assert bench.link.statistics().grants_sent == 1
    bench.hear(packet(PONG, returned=reported(GRANT, PING)))
    assert bench.wire.said == [GRANT, PING, GRANT]


@on_a_loop
async def test_unconsumed_bytes_withhold_credit() -> None:
    bench = Bench()
    bench.end.consume = False
    bench.hear(*[packet(MESSAGE, bytes(50))] * 4)
    charge = 50 + MESSAGE_OVERHEAD_BYTES
    assert bench.end.charges == [charge] * 4
    assert bench.link.statistics().unconsumed_bytes == 4 * charge
    assert not bench.wire.said
    bench.link.consumed(charge)
    assert bench.wire.said == [GRANT]
    assert parse_packet(memoryview(bench.wire.packets[0])).returned.credits == 4
    assert bench.link.idle_s == 0


@on_a_loop
async def test_a_lost_wire_puts_only_begun_frames_in_doubt() -> None:
    bench = Bench()
    sent = [bench.end.send(b"a"), bench.end.send(b"b")]
    bench.link.on_sent(1)
    begun = bench.end.send(bytes(200))  # four packets, credit for two
    waiting = bench.end.send(b"c")
    assert not bench.link.withdraw(begun)
    bench.link.on_lost(PeerLost("peer", "gone"))
    bench.link.on_lost(None)
    assert [frame.outcome for frame in sent] == [["done"], ["failed"]]
    assert isinstance(sent[1].errors[0], OutcomeUnknown)
    assert isinstance(begun.errors[0], OutcomeUnknown)
    assert isinstance(waiting.errors[0], NotAdmitted)
    assert "gone" in str(waiting.errors[0])
    assert len(bench.end.lost) == 1
    bench.link.consumed(10)  # of messages from before: nobody counts any more
    await bench.link.wait_closed()


@on_a_loop
async def test_a_ping_has_its_deadline_and_its_answer() -> None:
    bench = Bench()
    with pytest.raises(DeadlineExceeded, match="ping of peer"):
        await bench.link.ping(0.001)
    assert bench.wire.said == [PING]
    asking = asyncio.ensure_future(bench.link.ping(5.0))  # shares the one that is out
    await asyncio.sleep(0)
    assert bench.wire.said == [PING]
    bench.hear(packet(PONG, returned=reported(PING)))
    assert await asking >= 0


@on_a_loop
async def test_an_answer_that_comes_late_still_closes() -> None:
    bench = Bench()
    assert not await bench.link.goodbye(0.001)
    assert bench.wire.said == [GOODBYE]
    bench.hear(packet(GOODBYE_ACK, returned=reported(GOODBYE)))
    assert bench.wire.said == [GOODBYE, GOODBYE_ACK]
    assert bench.wire.ends == [None]
    bench.link.on_lost(None)
    assert bench.end.lost == [None]


@on_a_loop
async def test_a_late_answer_to_a_revoked_goodbye_means_nothing() -> None:
    bench = Bench()
    parting = asyncio.ensure_future(bench.link.goodbye(5.0))
    await asyncio.sleep(0)
    bench.end.send(b"a")
    assert not await parting
    bench.hear(packet(GOODBYE_ACK, returned=reported(GOODBYE)))
    assert not bench.wire.ends
    assert not bench.link.closed


@on_a_loop
async def test_a_report_without_the_answer_is_a_refusal() -> None:
    bench = Bench()
    parting = asyncio.ensure_future(bench.link.goodbye(5.0))
    await asyncio.sleep(0)
    bench.hear(packet(GRANT, returned=reported(GOODBYE)))
    assert not await parting


@on_a_loop
async def test_whoever_answered_is_silent_until_it_hears_more() -> None:
    bench = Bench()
    bench.hear(packet(GOODBYE))
    assert bench.wire.said == [GOODBYE_ACK]
    frame = bench.end.send(b"a")
    bench.hear(packet(PING))
    assert bench.wire.said == [GOODBYE_ACK]
    assert not frame.settled
    bench.hear(packet(MESSAGE, b"b"))  # the peer has changed its mind
    assert bench.wire.said == [GOODBYE_ACK, PONG, MESSAGE]


@on_a_loop
async def test_a_goodbye_is_refused_by_a_packet_that_reports_it() -> None:
    bench = Bench()
    bench.end.needed = True
    bench.hear(packet(GOODBYE))
    assert bench.wire.said == [GRANT]
    assert parse_packet(memoryview(bench.wire.packets[0])).returned == reported(GOODBYE)


@on_a_loop
async def test_a_bug_of_the_client_ends_the_link() -> None:
    bench = Bench()

    def fail(received: Received) -> None:
        raise ZeroDivisionError

    bench.end.on_message = fail
    bench.hear(packet(MESSAGE), packet(MESSAGE))
    assert len(bench.end.frames) == 1
    assert len(bench.wire.ends) == 1
    assert isinstance(bench.wire.ends[0], InternalError)


MORE, CONTINUED = int(PacketFlags.MORE), int(PacketFlags.CONTINUED)


@pytest.mark.parametrize(
    ("packets", "says"),
    [
        ([b""], "0 bytes"),
        ([b"\x02" + bytes(7)], "version 2"),
        ([packet(9)], "kind 9"),
        ([pack_head(MESSAGE, 4, NOTHING, 0)], "flags"),
        ([packet(PING, b"x")], "a body in control packet"),
        ([packet(PING), packet(PONG)], "pong without a ping"),
        ([packet(PING)] * 2, "before its slab was reported"),
        ([packet(GOODBYE, returned=reported(GRANT))], "reported that were not taken"),
        ([packet(MESSAGE, returned=Returned(1, 0, 0))], "more message credits"),
        ([packet(RESPONSE, returned=Returned(0, 1, 0))], "more reply credits"),
        ([packet(RESPONSE)] * 2, "a reply without credit"),
        ([packet(MESSAGE)] * 5, "a message without credit"),
        ([pack_head(MESSAGE, MORE, NOTHING, 0, 201) + b"x"], "payload of 201 bytes"),
        ([pack_head(MESSAGE, CONTINUED, NOTHING, 0) + b"x"], "without a beginning"),
        ([pack_head(MESSAGE, MORE, NOTHING, 0, 9) + b"x"] * 2, "before the last one is whole"),
    ],
)
def test_what_a_peer_may_not_say_closes_the_link_once(packets: list[bytes], says: str) -> None:
    async def case() -> None:
        bench = Bench()
        for each in packets:  # all in one pass, so that nothing is reported in between
            bench.link.on_packet(memoryview(each))
        bench.link.on_packet(memoryview(packet(MESSAGE)))  # what follows is not looked at
        bench.link.on_pass_end()
        assert len(bench.wire.ends) == 1
        assert isinstance(bench.wire.ends[0], PeerProtocolError)
        assert says in str(bench.wire.ends[0])
        bench.link.on_lost(None)
        assert bench.end.lost == [bench.wire.ends[0]]

    asyncio.run(case())


_heads = st.builds(
    pack_head,
    st.sampled_from([*PacketKind, 7, 200]),
    st.sampled_from([0, 0, 0, 1, 2, 3, 8]),
    st.builds(Returned, *[st.sampled_from([0, 0, 0, 1, 255])] * 3),
    st.sampled_from([0, 0, 1, 20, 40_000]),
    st.none() | st.integers(0, 1000),
)
_packets = st.builds(bytes.__add__, _heads, st.binary(max_size=50)) | st.binary(max_size=60)


@given(st.lists(_packets, max_size=12), st.integers(0, 6))
def test_a_rogue_costs_one_close_with_a_reason_and_nothing_else(
    packets: list[bytes], pass_packets: int
) -> None:
    async def case() -> None:
        bench = Bench()
        frames = [bench.end.send(bytes(150)) for _ in range(3)]
        for n, each in enumerate(packets):
            bench.link.on_packet(memoryview(each))
            if n % (pass_packets + 1) == 0:
                bench.link.on_pass_end()
        bench.link.on_pass_end()
        refused = [error for error in bench.wire.ends if error is not None]
        assert len(bench.wire.ends) <= 1
        assert all(isinstance(error, PeerProtocolError) for error in refused)
        assert bench.link.statistics().unconsumed_bytes == 0
        bench.link.on_lost(None)
        assert all(len(frame.outcome) == 1 for frame in frames)
        assert len(bench.end.lost) == 1

    asyncio.run(case())
