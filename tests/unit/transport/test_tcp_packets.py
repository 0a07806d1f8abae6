"""The TCP message link on real sockets: who opens it, how much waits, and what ends the epoch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import (
    OutcomeUnknown,
    PathUnavailable,
    PeerError,
    PeerLost,
    PeerProtocolError,
)
from orbit.model import PathName, PathReason
from orbit.protocol.framing import FrameKind, encode_frame
from orbit.protocol.messages import Limits
from orbit.protocol.messaging.credits import Windows
from orbit.protocol.messaging.packets import PacketKind, Returned, pack_head
from orbit.runtime.session import ControlSession
from orbit.testing.message_link_rig import LinkEnd, Received, payloads
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.testing.waiting import until
from orbit.transport.interface import Session
from orbit.transport.messages import LinkLimits, MessageLink, OutgoingFrame
from orbit.transport.tcp_packets import BACKLOG_BYTES_MAX, TcpMessages
from tests.contract.message_rigs import connected_sockets, tcp_sessions

Run = Callable[[Any], Any]
LIMITS = LinkLimits(windows=Windows(64, 16), ceiling_bytes=64 << 10)


class Side:
    """One session, its transport, and the ends of links that the peer opened."""

    def __init__(self, session: ControlSession, transport: TcpMessages) -> None:
        self.session = session
        self.transport = transport
        self.end = LinkEnd(LIMITS)
        self.opened: list[MessageLink] = []
        transport.watch(self.end, self._on_opened)

    def _on_opened(self, session: Session, link: MessageLink) -> None:
        assert session is self.session
        self.opened.append(link)

    async def open(self) -> LinkEnd:
        self.end.link = await self.transport.open(self.session, self.end)
        return self.end


@asynccontextmanager
async def two_sides() -> AsyncIterator[tuple[Side, Side]]:
    transports: dict[ControlSession, TcpMessages] = {}
    sockets = connected_sockets()
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    sessions = tcp_sessions(sockets, 1, (LIMITS, LIMITS), transports)
    left, right = (Side(session, transports[session]) for session in sessions)
    try:
        yield left, right
    finally:
        for side in (left, right):
            side.session.close()
            await side.session.wait_closed()
        await asyncio.sleep(0)
        for side in (left, right):
            await side.transport.close_session(side.session)
            await side.transport.close()


def test_the_first_packet_opens_the_link_on_the_other_side(run_async: Run) -> None:
    async def case() -> None:
        async with two_sides() as (left, right):
            end = await left.open()
            assert await left.transport.open(left.session, left.end) is end.link
            assert end.link.transport is PathName.TCP
            end.send(b"hello")
            await right.end.wait_frames(1)
            assert right.opened == [right.end.link]
            assert await right.transport.open(right.session, right.end) is right.end.link
            right.end.send(b"back", kind=PacketKind.RESPONSE)
            await end.wait_frames(1)
            assert not left.opened

    run_async(case())


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        (Limits(4, 1), Limits(4, 1), PathReason.OK),
        (Limits(), Limits(4, 1), PathReason.NOT_CONFIGURED),
        (Limits(4, 1), Limits(), PathReason.PEER_WITHOUT),
        (Limits(4, 1), Limits(64, 1), PathReason.PEER_WITHOUT),  # nonsense
        (Limits(4, 1), Limits(1 << 40, 1 << 40), PathReason.PEER_WITHOUT),
    ],
)
def test_availability_comes_from_the_hellos(own: Limits, other: Limits, reason: PathReason) -> None:
    async def case() -> None:
        session = StubSession(1, dialer=True)
        session.local_hello = replace(session.local_hello, limits=own)
        session.peer_hello = replace(session.peer_hello, limits=other)
        transport = TcpMessages(1 << 20)
        assert transport.availability(session) is reason
        if reason is not PathReason.OK:
            with pytest.raises(PathUnavailable, match=reason.value):
                await transport.open(session, LinkEnd())
        session.close()
        with pytest.raises(PathUnavailable):
            await transport.open(session, LinkEnd())
        assert not transport.handlers()

    asyncio.run(case())


def test_packets_leave_room_for_calls(run_async: Run) -> None:
    """A peer that does not read lets a bounded amount of packets pile up, and no more."""

    async def case() -> None:
        async with two_sides() as (left, right):
            end = await left.open()
            right.session.link._wire.unwatch_readable()  # type: ignore[attr-defined]
            frames = [end.send(pattern(60_000, n)) for n in range(200)]
            link = left.session.link
            waiting = link.accepted_bytes - link.taken_bytes
            assert BACKLOG_BYTES_MAX <= waiting <= BACKLOG_BYTES_MAX + 61_000
            assert sum(bool(frame.postings) for frame in frames) < 64  # credit is left, room is not
            assert end.link.statistics().credits > 0
            right.session.link._wire.watch_readable(right.session.link._on_readable)  # type: ignore[attr-defined]
            await right.end.wait_frames(200)
            assert payloads(right.end.frames) == [pattern(60_000, n) for n in range(200)]
            await end.wait_settled()

    run_async(case())


def test_the_first_packet_leaves_at_once_and_a_burst_together(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is that this runs on, sends of one turn of the loop are a burst.
    monkeypatch.setattr("orbit.transport.tcp_packets.BURST_S", 3600.0)

    async def case() -> None:
        async with two_sides() as (left, right):
            end = await left.open()
            left_with: list[int] = []
            link = left.session.link
            gathered = link.send_gathered

            def count(frames: Any) -> None:
                left_with.append(len(frames))
                gathered(frames)

            monkeypatch.setattr(link, "send_gathered", count)
            first = end.send(b"0")
            assert left_with == [1]
            assert first.outcome == ["done"]  # the kernel has it
            rest = [end.send(b"%d" % n) for n in range(1, 4)]
            assert left_with == [1]
            assert all(frame.postings and not frame.settled for frame in rest)
            await asyncio.sleep(0)
            assert left_with == [1, 3]
            assert all(frame.outcome == ["done"] for frame in rest)
            for n in range(4, 40):  # worth a call before the loop has its turn
                end.send(b"%d" % n)
            assert left_with[2:] == [16, 16]
            end.send(pattern(60_000))
            assert left_with[2:] == [16, 16, 5]
            await right.end.wait_frames(41)
            assert payloads(right.end.frames)[:40] == [b"%d" % n for n in range(40)]
            right.end.send(b"reply", kind=PacketKind.RESPONSE)
            await end.wait_frames(1)
            before = len(left_with)
            end.send(b"what a pass brings about is no burst")
            assert len(left_with) == before + 1
            await end.wait_settled()

    run_async(case())


def test_answers_leave_while_the_rest_of_one_read_is_worked_on(run_async: Run) -> None:
    async def case() -> None:
        async with two_sides() as (left, right):
            end = await left.open()
            handled_when_the_first_left: list[int] = []

            class Reply(OutgoingFrame):
                def posted(self) -> None:
                    if not handled_when_the_first_left:
                        handled_when_the_first_left.append(len(right.end.frames))

            def answer(message: Received) -> None:
                if message.kind == PacketKind.MESSAGE:
                    right.end.link.send(Reply(PacketKind.RESPONSE, b""))

            right.end.on_message = answer
            right.session.link._wire.unwatch_readable()  # type: ignore[attr-defined]
            for _ in range(40):
                end.send(b"ask")
            await asyncio.sleep(0)
            right.session.link._wire.watch_readable(right.session.link._on_readable)  # type: ignore[attr-defined]
            await end.wait_frames(40)
            assert handled_when_the_first_left == [16]

    run_async(case())


def test_what_is_gathered_when_the_epoch_ends_is_in_doubt(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbit.transport.tcp_packets.BURST_S", 3600.0)

    async def case() -> None:
        async with two_sides() as (left, _):
            end = await left.open()
            frames = [end.send(b"x") for _ in range(3)]
            left.session.abort(PeerLost("the peer", "reset"))
            await end.wait_lost()
            assert [frame.outcome for frame in frames] == [["done"], ["failed"], ["failed"]]
            assert all(isinstance(frame.errors[0], OutcomeUnknown) for frame in frames[1:])

    run_async(case())


def test_a_malformed_packet_ends_the_epoch_with_its_reason(run_async: Run) -> None:
    async def case() -> None:
        async with two_sides() as (left, right):
            end = await left.open()
            end.send(b"x")
            await right.end.wait_frames(1)
            rogue = pack_head(PacketKind.MESSAGE, 64, Returned(), 0)
            left.session.link.send_nowait(encode_frame(FrameKind.PACKET, rogue))
            error = await right.end.wait_lost()
            assert isinstance(error, PeerProtocolError)
            assert "flags" in str(error)
            assert isinstance(right.session.cause, PeerProtocolError)
            assert isinstance(await end.wait_lost(), PeerError)
            assert left.session.closed

    run_async(case())


def test_a_node_that_takes_no_messages_refuses_packets(run_async: Run) -> None:
    async def case() -> None:
        async with two_sides() as (left, right):
            hello = replace(right.session.local_hello, limits=Limits())
            right.session.epoch = replace(right.session.epoch, local_hello=hello)
            end = await left.open()
            end.send(b"x")
            await end.wait_lost()
            await until(lambda: right.session.closed)
            assert isinstance(right.session.cause, PeerProtocolError)
            assert not right.end.frames

    run_async(case())


def test_the_end_of_the_epoch_is_the_end_of_its_link(run_async: Run) -> None:
    async def case() -> None:
        async with two_sides() as (left, right):
            end = await left.open()
            end.send(b"x")
            await right.end.wait_frames(1)
            left.session.close()
            assert await end.wait_lost() is None
            assert await right.end.wait_lost() is not None
            await left.transport.close_session(left.session)
            await end.link.wait_closed()

    run_async(case())


def test_packets_behind_a_goodbye_open_the_next_link(run_async: Run) -> None:
    """In one stream the last packet of one link and the first of the next may come together."""

    async def case() -> None:
        async with two_sides() as (left, right):
            for round_number in range(5):
                left.end, right.end = LinkEnd(LIMITS), LinkEnd(LIMITS)
                right.transport.watch(right.end, right._on_opened)
                end = await left.open()
                end.send(b"%d" % round_number)
                await right.end.wait_frames(1)
                await end.wait_settled()
                assert await end.link.goodbye(5.0)
            assert len(right.opened) == 5
            assert not left.session.closed

    run_async(case())
