"""The consumer's end against a scripted peer on a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import DeadlineExceeded, PathFailed
from orbit.model import PathReason
from orbit.testing.pattern import pattern
from orbit.transport.tcp_bulk import (
    ANSWER,
    CALLBACK_BYTES,
    MAGIC,
    MAGIC_PUSH,
    REQUEST,
    ConnectionDied,
)
from orbit.transport.tcp_bulk_consumer import BulkConsumer
from orbit.transport.tcp_cursor import LOW_WATER_BYTES
from orbit.transport.tcp_wire import Wire

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Peer:
    """The other end, driven by hand."""

    def __init__(self) -> None:
        # Over TCP: low water marks and resets are TCP's.
        listener = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(listener.getsockname())
        self.sock, _ = listener.accept()
        listener.close()
        self.sock.setblocking(False)
        self.idle_deaths: list[BulkConsumer] = []
        self.end = BulkConsumer(Wire(mine, "peer"), self.idle_deaths.append)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def answer(self, data: bytes, status: int = 0) -> None:
        await self.send(ANSWER.pack(MAGIC, status, len(data)) + data)

    async def request(self) -> tuple[int, ...]:
        data = await asyncio.get_running_loop().sock_recv(self.sock, 100)
        return REQUEST.unpack(data)

    async def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            data += await asyncio.get_running_loop().sock_recv(self.sock, nbytes - len(data))
        return data

    def said(self) -> bytes:
        """What has arrived and was not read."""
        try:
            return self.sock.recv(100)
        except BlockingIOError:
            return b""

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()
        self.end.wire.close()


async def pulling(
    peer: Peer, nbytes: int, no_progress_s: float = 20.0
) -> tuple[bytearray, asyncio.Task[None]]:
    """A pull that has sent its request."""
    target = bytearray(nbytes)
    task = asyncio.ensure_future(peer.end.pull(7, [memoryview(target)], no_progress_s))
    await asyncio.sleep(0)
    return target, task


async def pushing(
    peer: Peer, payload: bytes, no_progress_s: float = 20.0
) -> tuple[bytearray, asyncio.Task[None]]:
    """A push that has sent its request; its source, in two pieces."""
    source = bytearray(payload)
    half = len(source) // 2
    view = memoryview(source)
    task = asyncio.ensure_future(peer.end.push(7, [view[:half], view[half:]], no_progress_s))
    await asyncio.sleep(0)
    return source, task


def test_request_and_answer(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        for nbytes in (1, 1000, LOW_WATER_BYTES - 1, LOW_WATER_BYTES, CALLBACK_BYTES + 1):
            target, task = await pulling(peer, nbytes)
            assert await peer.request() == (MAGIC, 7, 0, nbytes)
            await peer.answer(pattern(nbytes))
            await task
            assert target == pattern(nbytes)
        assert peer.end.is_alive()
        peer.close()

    run_async(body())


def test_answer_byte_by_byte(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        target, task = await pulling(peer, 40)
        for byte in ANSWER.pack(MAGIC, 0, 40) + pattern(40):
            await peer.send(bytes([byte]))
            await asyncio.sleep(0)
        await task
        assert target == pattern(40)
        peer.close()

    run_async(body())


@pytest.mark.parametrize("status", [1, 2, 3, 4, 5])
def test_refusal_leaves_the_connection_usable(run_async: Run, status: int) -> None:
    async def body() -> None:
        peer = Peer()
        target, task = await pulling(peer, 1000)
        await peer.answer(b"", status)
        with pytest.raises(PathFailed) as caught:
            await task
        assert caught.value.reason == PathReason.GET_FAILED
        assert target == bytes(1000)
        assert peer.end.is_alive()
        target, task = await pulling(peer, 10)
        await peer.answer(pattern(10))
        await task
        peer.close()

    run_async(body())


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack(">IIQ", MAGIC + 1, 0, 100),
        struct.pack(">IIQ", MAGIC, 6, 0),
        struct.pack(">IIQ", MAGIC, 0, 101),
        struct.pack(">IIQ", MAGIC, 0, 1 << 63),
        struct.pack(">IIQ", MAGIC, 1, 5) + b"bytes",
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_malformed_answer_ends_the_connection(run_async: Run, answer: bytes) -> None:
    async def body() -> None:
        peer = Peer()
        target, task = await pulling(peer, 100)
        await peer.send(answer)
        with pytest.raises(ConnectionDied) as caught:
            await task
        assert caught.value.answered
        assert peer.end.wire.closed
        assert target == bytes(100)
        peer.close()

    run_async(body())


@pytest.mark.parametrize("arrived", [0, 5, ANSWER.size, ANSWER.size + 1, 700_000])
@pytest.mark.parametrize("how", ["reset", "fin"])
def test_peer_leaves(run_async: Run, arrived: int, how: str) -> None:
    async def body() -> None:
        peer = Peer()
        nbytes = 1 << 20
        _target, task = await pulling(peer, nbytes)
        await peer.send((ANSWER.pack(MAGIC, 0, nbytes) + pattern(nbytes))[:arrived])
        if how == "reset":
            await peer.request()  # so that it is this side's choice, not unread bytes
            peer.reset()
        else:
            peer.sock.close()
        with pytest.raises(ConnectionDied) as caught:
            await task
        assert caught.value.answered == (arrived > 0) or how == "reset"
        assert peer.end.wire.closed
        peer.close()

    run_async(body())


def test_reset_right_behind_bytes(run_async: Run) -> None:
    """uvloop reports a reset once; what was readable with it must not wait for another event."""

    async def body() -> None:
        for _ in range(20):
            peer = Peer()
            nbytes = 3 * CALLBACK_BYTES
            _target, task = await pulling(peer, nbytes)
            await asyncio.sleep(0)
            await peer.request()
            peer.sock.send(ANSWER.pack(MAGIC, 0, nbytes) + pattern(100_000))
            peer.reset()
            with pytest.raises(ConnectionDied):
                await asyncio.wait_for(task, 10)
            peer.close()

    run_async(body())


def test_silence_is_a_deadline(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        target, task = await pulling(peer, 1000, no_progress_s=0.03)
        await peer.send(ANSWER.pack(MAGIC, 0, 1000) + pattern(400))
        with pytest.raises(DeadlineExceeded) as caught:
            await task
        assert caught.value.timeout_s == 0.03
        assert peer.end.wire.closed
        assert target == pattern(400) + bytes(600)
        peer.close()

    run_async(body())


def test_a_trickle_is_progress(run_async: Run) -> None:
    """Far below the low water mark, so that no byte wakes the reader; the deadline sees them."""

    async def body() -> None:
        peer = Peer()
        nbytes = 2 * LOW_WATER_BYTES
        data = ANSWER.pack(MAGIC, 0, nbytes) + pattern(nbytes)
        target, task = await pulling(peer, nbytes, no_progress_s=0.05)
        sent = 0
        for _ in range(10):
            await peer.send(data[sent : sent + 100])
            sent += 100
            await asyncio.sleep(0.02)
        assert not task.done()
        await peer.send(data[sent:])
        await task
        assert target == pattern(nbytes)
        peer.close()

    run_async(body())


def test_cancel_stops_writing(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        target, task = await pulling(peer, 1 << 20)
        await peer.send(ANSWER.pack(MAGIC, 0, 1 << 20))
        await asyncio.sleep(0.005)
        task.cancel()
        peer.sock.send(pattern(100_000))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert peer.end.wire.closed
        assert target == bytes(1 << 20)
        peer.close()

    run_async(body())


def test_cancel_when_it_failed_already(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        _target, task = await pulling(peer, 1000)
        await asyncio.sleep(0)
        peer.end.abort("closed under it")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        peer.close()

    run_async(body())


def test_progress_callback_that_fails(run_async: Run) -> None:
    async def body() -> None:
        def fail(arrived: int) -> None:
            raise RuntimeError(f"at {arrived}")

        peer = Peer()
        target = bytearray(1000)
        task = asyncio.ensure_future(peer.end.pull(7, [memoryview(target)], 20, fail))
        await asyncio.sleep(0)
        await peer.send(ANSWER.pack(MAGIC, 0, 1000) + pattern(10))
        with pytest.raises(RuntimeError, match="at 10"):
            await task
        assert peer.end.wire.closed
        peer.close()

    run_async(body())


@pytest.mark.parametrize("what", ["fin", "reset", "bytes"])
def test_idle_death_is_noticed(run_async: Run, what: str) -> None:
    async def body() -> None:
        peer = Peer()
        match what:
            case "fin":
                peer.sock.close()
            case "reset":
                peer.reset()
            case _:
                await peer.send(b"unasked")
        for _ in range(100):
            if peer.idle_deaths:
                break
            await asyncio.sleep(0.001)
        assert peer.idle_deaths == [peer.end]
        assert peer.end.wire.closed
        assert not peer.end.is_alive()
        peer.close()

    run_async(body())


def test_alive_looks_before_the_loop_ran(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        assert peer.end.is_alive()
        peer.sock.close()
        assert not peer.end.is_alive()
        peer.close()

    run_async(body())


def test_pull_into_pieces(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        targets = [bytearray(size) for size in (1, 0, 70_000, *[3] * 200, 999)]
        nbytes = sum(map(len, targets))
        task = asyncio.ensure_future(peer.end.pull(7, [memoryview(t) for t in targets], 20))
        await asyncio.sleep(0)
        assert await peer.request() == (MAGIC, 7, 0, nbytes)
        await peer.answer(pattern(nbytes))
        await task
        assert b"".join(targets) == pattern(nbytes)
        peer.close()

    run_async(body())


def test_push_and_two_answers(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        for nbytes in (1, 2, 1000, CALLBACK_BYTES + 1):
            _source, task = await pushing(peer, pattern(nbytes))
            assert await peer.request() == (MAGIC_PUSH, 7, 0, nbytes)
            await asyncio.sleep(0.002)
            assert peer.said() == b"", "sent before the owner agreed"
            await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
            assert await peer.read(nbytes) == pattern(nbytes)
            await asyncio.sleep(0.002)
            assert not task.done(), "over before the owner had every byte"
            await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
            await task
        assert peer.end.is_alive()
        peer.close()

    run_async(body())


@pytest.mark.parametrize("status", [1, 2, 3, 4, 5])
def test_a_refused_push_sends_nothing(run_async: Run, status: int) -> None:
    async def body() -> None:
        peer = Peer()
        _source, task = await pushing(peer, pattern(1000))
        await peer.request()
        await peer.send(ANSWER.pack(MAGIC, status, 0))
        with pytest.raises(PathFailed) as caught:
            await task
        assert caught.value.reason == PathReason.GET_FAILED
        assert peer.said() == b""
        assert peer.end.is_alive()
        target, pull = await pulling(peer, 10)
        await peer.request()
        await peer.answer(pattern(10))
        await pull
        assert target == pattern(10)
        peer.close()

    run_async(body())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((MAGIC + 1, 0, 1000), None),
        ((MAGIC, 0, 999), None),
        ((MAGIC, 0, 0), None),
        ((MAGIC, 6, 0), None),
        ((MAGIC, 0, 1000), (MAGIC, 0, 999)),
        ((MAGIC, 0, 1000), (MAGIC, 1, 0)),
        ((MAGIC, 0, 1000), (MAGIC_PUSH, 0, 1000)),
    ],
)
def test_a_malformed_answer_to_a_push(
    run_async: Run, first: tuple[int, ...], second: tuple[int, ...] | None
) -> None:
    async def body() -> None:
        peer = Peer()
        _source, task = await pushing(peer, pattern(1000))
        await peer.request()
        await peer.send(ANSWER.pack(*first))
        if second is not None:
            await peer.read(1000)
            await peer.send(ANSWER.pack(*second))
        with pytest.raises(ConnectionDied) as caught:
            await task
        assert caught.value.answered
        assert peer.end.wire.closed
        peer.close()

    run_async(body())


def test_an_owner_that_has_more_than_was_sent(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        nbytes = 32 << 20
        _source, task = await pushing(peer, bytes(nbytes))
        await peer.request()
        await peer.send(ANSWER.pack(MAGIC, 0, nbytes) * 2)
        with pytest.raises(ConnectionDied, match="more than was sent"):
            await task
        assert peer.end.wire.closed
        peer.close()

    run_async(body())


@pytest.mark.parametrize("how", ["reset", "fin"])
@pytest.mark.parametrize("when", ["asked", "answered", "moving", "sent"])
def test_the_owner_leaves_a_push(run_async: Run, when: str, how: str) -> None:
    async def body() -> None:
        peer = Peer()
        nbytes = 1000 if when == "sent" else 32 << 20
        _source, task = await pushing(peer, bytes(nbytes))
        await peer.request()
        if when != "asked":
            await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
        if when in ("moving", "sent"):
            await peer.read(1000)
        if how == "reset":
            peer.reset()
        else:
            peer.sock.close()
        with pytest.raises(ConnectionDied) as caught:
            await asyncio.wait_for(task, 20)
        # An answer may be lost with a reset; then some byte was sent only if it was not.
        assert caught.value.answered == (when != "asked") or when == "answered"
        assert peer.end.wire.closed
        peer.close()

    run_async(body())


@pytest.mark.parametrize("when", ["asked", "moving", "sent"])
def test_a_silent_owner_is_a_deadline_of_the_push(run_async: Run, when: str) -> None:
    async def body() -> None:
        peer = Peer()
        nbytes = 1000 if when == "sent" else 32 << 20
        _source, task = await pushing(peer, bytes(nbytes), no_progress_s=0.03)
        await peer.request()
        if when != "asked":
            await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
            await peer.read(1000)
        with pytest.raises(DeadlineExceeded, match="push"):
            await task
        assert peer.end.wire.closed
        peer.close()

    run_async(body())


def test_what_the_owner_still_takes_is_progress(run_async: Run) -> None:
    """This kernel has every byte at once; the other one takes them for longer than the deadline."""

    async def body() -> None:
        peer = Peer()
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        nbytes = 1_500_000
        _source, task = await pushing(peer, pattern(nbytes), no_progress_s=0.25)
        await peer.request()
        await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
        got = bytearray()
        for _ in range(12):
            await asyncio.sleep(0.05)
            got += await peer.read(100_000)
            assert not task.done()
        got += await peer.read(nbytes - len(got))
        assert got == pattern(nbytes)
        await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
        await task
        peer.close()

    run_async(body())


def test_a_cancelled_push_reads_its_source_no_more(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        nbytes = 32 << 20
        source, task = await pushing(peer, bytes(nbytes))
        await peer.request()
        await peer.send(ANSWER.pack(MAGIC, 0, nbytes))
        await peer.read(1000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert peer.end.wire.closed
        source[:] = b"\xee" * nbytes
        with contextlib.suppress(ConnectionResetError):
            while True:
                assert b"\xee" not in await peer.read(1 << 16)
        peer.close()

    run_async(body())
