"""The consumer's end against a scripted peer on a socket pair."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import DeadlineExceeded, PathFailed
from orbit.model import PathReason
from orbit.testing.pattern import pattern
from orbit.transport.tcp_bulk import ANSWER, CALLBACK_BYTES, MAGIC, REQUEST, ConnectionDied
from orbit.transport.tcp_bulk_reader import LOW_WATER_BYTES, BulkReader
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
        self.idle_deaths: list[BulkReader] = []
        self.reader = BulkReader(Wire(mine, "peer"), self.idle_deaths.append)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def answer(self, data: bytes, status: int = 0) -> None:
        await self.send(ANSWER.pack(MAGIC, status, len(data)) + data)

    async def request(self) -> tuple[int, ...]:
        data = await asyncio.get_running_loop().sock_recv(self.sock, 100)
        return REQUEST.unpack(data)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()
        self.reader.wire.close()


async def pulling(
    peer: Peer, nbytes: int, no_progress_s: float = 20.0
) -> tuple[bytearray, asyncio.Task[None]]:
    """A pull that has sent its request."""
    target = bytearray(nbytes)
    task = asyncio.ensure_future(peer.reader.pull(7, memoryview(target), no_progress_s))
    await asyncio.sleep(0)
    return target, task


def test_request_and_answer(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        for nbytes in (1, 1000, LOW_WATER_BYTES - 1, LOW_WATER_BYTES, CALLBACK_BYTES + 1):
            target, task = await pulling(peer, nbytes)
            assert await peer.request() == (MAGIC, 7, 0, nbytes)
            await peer.answer(pattern(nbytes))
            await task
            assert target == pattern(nbytes)
        assert peer.reader.is_alive()
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


@pytest.mark.parametrize("status", [1, 2, 3])
def test_refusal_leaves_the_connection_usable(run_async: Run, status: int) -> None:
    async def body() -> None:
        peer = Peer()
        target, task = await pulling(peer, 1000)
        await peer.answer(b"", status)
        with pytest.raises(PathFailed) as caught:
            await task
        assert caught.value.reason == PathReason.GET_FAILED
        assert target == bytes(1000)
        assert peer.reader.is_alive()
        target, task = await pulling(peer, 10)
        await peer.answer(pattern(10))
        await task
        peer.close()

    run_async(body())


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack(">IIQ", MAGIC + 1, 0, 100),
        struct.pack(">IIQ", MAGIC, 4, 0),
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
        assert peer.reader.wire.closed
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
        assert peer.reader.wire.closed
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
        assert peer.reader.wire.closed
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
        assert peer.reader.wire.closed
        assert target == bytes(1 << 20)
        peer.close()

    run_async(body())


def test_cancel_when_it_failed_already(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        _target, task = await pulling(peer, 1000)
        await asyncio.sleep(0)
        peer.reader.abort("closed under it")
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
        task = asyncio.ensure_future(peer.reader.pull(7, memoryview(target), 20, fail))
        await asyncio.sleep(0)
        await peer.send(ANSWER.pack(MAGIC, 0, 1000) + pattern(10))
        with pytest.raises(RuntimeError, match="at 10"):
            await task
        assert peer.reader.wire.closed
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
        assert peer.idle_deaths == [peer.reader]
        assert peer.reader.wire.closed
        assert not peer.reader.is_alive()
        peer.close()

    run_async(body())


def test_alive_looks_before_the_loop_ran(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer()
        assert peer.reader.is_alive()
        peer.sock.close()
        assert not peer.reader.is_alive()
        peer.close()

    run_async(body())
