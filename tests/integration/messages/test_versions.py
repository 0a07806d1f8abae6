"""Peers of another version: what is not known is answered where it is a call, and ends the
connection where it is a frame; a recorded peer without messages is told apart, and still served.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.events import Event, SessionClosed
from orbit.protocol.codec import decode, encode
from orbit.protocol.framing import (
    PREFACE,
    FrameKind,
    FrameParser,
    encode_frame,
    encode_on_stream,
    split_frame,
)
from orbit.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    Hello,
    Limits,
    Proof,
)
from orbit.protocol.security import dialer_proof
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.sessions import make_hello
from orbit.testing.waiting import until
from tests.integration.messages.settled import TCP, settle

Run = Callable[[Coroutine[Any, Any, None]], None]
GOLDEN = Path(__file__).parents[2] / "unit" / "protocol" / "golden"
FIRST = bytes.fromhex((GOLDEN / "preface_and_hello_first.hex").read_text(encoding="ascii"))
CALL_ID = 1 << 16


class RawPeer:
    """A peer that says frames of its own. `hello` is the one that the node answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = FrameParser(1 << 20)

    async def raw_frame(self) -> bytes:
        """The next one that is said to it."""
        async with asyncio.timeout(10):
            while (frame := self._parser.next_frame()) is None:
                data = await self._reader.read(65536)
                if not data:
                    raise ConnectionResetError
                self._parser.feed(data)
        return bytes(frame)

    async def frame(self) -> tuple[FrameKind, Any]:
        """As `raw_frame`, read."""
        kind, body = split_frame(await self.raw_frame())
        return kind, decode(body)

    def say(self, kind: int, body: object) -> None:
        self._writer.write(encode_on_stream(bytes((kind,)) + encode(body)))

    async def call(
        self, method: str, body: object, call_id: int = CALL_ID
    ) -> tuple[FrameKind, Any]:
        self.say(FrameKind.CALL, [call_id, method, body])
        kind, answer = await self.frame()
        assert answer[0] == call_id
        return kind, answer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def raw_peer(node: orbit.Node, opening: bytes) -> AsyncIterator[RawPeer]:
    """One that has said `opening`, and was welcomed."""
    reader, writer = await asyncio.open_connection(*node.address.endpoints[0].pair)
    peer = RawPeer(reader, writer)
    try:
        writer.write(opening)
        answer = await peer.raw_frame()
        assert (await peer.frame())[0] is FrameKind.PROOF
        mac = dialer_proof(b"", frame_of(opening)[1:], answer[1:])
        peer.say(FrameKind.PROOF, Proof(mac).to_wire())
        assert (await peer.frame())[0] is FrameKind.WELCOME
        yield peer
    finally:
        await peer.close()


def opening_of(hello: Hello) -> bytes:
    return PREFACE + encode_on_stream(encode_frame(FrameKind.HELLO, encode(hello.to_wire())))


def frame_of(opening: bytes) -> bytes:
    parser = FrameParser()
    parser.feed(opening)
    frame = parser.next_frame()
    assert frame is not None
    return bytes(frame)


def hello_of_a_messenger(node: orbit.Node) -> Hello:
    return replace(make_hello(9, node.identity.worker_id, b"a" * 16), limits=node._limits)


def test_the_recorded_first_peer_has_no_messages_and_is_served_all_the_same(run_async: Run) -> None:
    hello = Hello.from_wire(decode(frame_of(FIRST)[1:]))
    assert hello.limits.message_credits == 0

    async def main() -> None:
        async with nothing_left(), orbit.Node(replace(TCP, worker_id=hello.target)) as node:
            handle = await node.register_data(pattern(5000), orbit.RegisterOptions(retain=True))
            async with raw_peer(node, FIRST) as peer:
                with pytest.raises(orbit.PathUnavailable) as demanded:
                    await node.unary(hello.worker_id, "echo", transport="tcp")
                assert demanded.value.reason == orbit.PathReason.PEER_WITHOUT
                for call in (node.send, node.sync, node.unary):
                    with pytest.raises(orbit.NotAdmitted, match="tcp: peer_without"):
                        await call(hello.worker_id, "echo")
                # What it knows, it gets.
                request = AcquireRequest(handle, inline_max=8192)
                kind, answer = await peer.call(AcquireRequest.METHOD, request.to_wire())
                assert kind is FrameKind.REPLY
                ready = AcquireReply.from_wire(answer[1]).ready
                assert ready is not None
                assert ready.inline == pattern(5000)
                detach = DetachRequest(handle, ready.lease_id)
                kind, _ = await peer.call(DetachRequest.METHOD, detach.to_wire(), 2 * CALL_ID)
                assert kind is FrameKind.REPLY
            await node.withdraw(handle)
            await settle(node)

    run_async(main())


@pytest.mark.parametrize("side", ["dials", "listens"])
def test_a_node_without_messages_beside_one_with(
    run_async: Run, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node, orbit.Node(TCP) as old:
            monkeypatch.setattr(old, "_limits", Limits())
            dialer, listener = (old, node) if side == "dials" else (node, old)
            dialer.add_peer(listener.address)
            handle = await listener.register_data(pattern(9000))
            _, lease = await dialer.get(handle)
            for one, other in ((node, old), (old, node)):
                with pytest.raises(orbit.PathUnavailable):
                    await one.unary(other.identity, "echo", transport="tcp")
                with pytest.raises(orbit.NotAdmitted):
                    await one.send(other.identity, "echo")
            await dialer.detach(handle, lease)
            data, lease = await dialer.get(handle)  # the session has lived through it
            assert data == pattern(9000)
            await dialer.release(handle, lease)
            assert node.statistics().sessions == old.statistics().sessions == 1
            await settle(node, old)

    run_async(main())


def test_an_unknown_call_is_answered(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node, orbit.Node(TCP) as caller:
            peer = caller.add_peer(node.address)
            for call in (caller.unary, caller.sync):
                with pytest.raises(orbit.RequestFailed) as caught:
                    await call(peer, "of_tomorrow")
                assert caught.value.reason == "unknown_handler"
            await caller.send(peer, "of_tomorrow")
            async with raw_peer(node, opening_of(hello_of_a_messenger(node))) as raw:
                kind, answer = await raw.call("_of_tomorrow", {"new": 1})
                assert kind is FrameKind.FAULT
                assert answer[1] == "unknown_method"
                raw.say(FrameKind.NOTIFY, ["_of_tomorrow", {}])
                raw.say(FrameKind.PING, [1])
                assert await raw.frame() == (FrameKind.PONG, [1])
            assert await caller.list_handlers(peer) == []
            await settle(node, caller)

    run_async(main())


@pytest.mark.parametrize("kind", [0, 6, 15, 24, 255])
def test_an_unknown_frame_ends_the_connection_with_a_reason(run_async: Run, kind: int) -> None:
    """The peer sees an end; the node says why. No other session notices."""

    async def main() -> None:
        told: list[Event] = []
        async with (
            nothing_left(),
            orbit.Node(TCP, on_event=told.append) as node,
            orbit.Node(TCP) as bystander,
        ):
            node.handler("echo", lambda message: message.payload)
            there = bystander.add_peer(node.address)
            await bystander.unary(there, "echo")
            async with raw_peer(node, opening_of(hello_of_a_messenger(node))) as peer:
                peer.say(kind, [1])
                with pytest.raises(ConnectionResetError):
                    await peer.frame()
            await until(lambda: any(isinstance(event, SessionClosed) for event in told))
            (closed,) = (event for event in told if isinstance(event, SessionClosed))
            assert str(kind) in closed.cause
            assert await bystander.unary(there, "echo", b"x") == b"x"
            assert node.statistics().sessions == 1
            await settle(node, bystander)

    run_async(main())
