"""The owner's end against a scripted consumer."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.transport.tcp_bulk import ANSWER, MAGIC, REQUEST, BulkStatus
from orbit.transport.tcp_bulk_writer import BulkWriter
from orbit.transport.tcp_wire import Wire

Run = Callable[[Coroutine[Any, Any, None]], None]
U64_MAX = (1 << 64) - 1


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Peer:
    def __init__(self, sources: dict[int, memoryview], no_progress_s: float = 20.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(listener.getsockname())
        self.sock, _ = listener.accept()
        listener.close()
        self.sock.setblocking(False)
        self.closed: list[BulkWriter] = []
        self.writer = BulkWriter(Wire(mine, "peer"), sources.get, self.closed.append, no_progress_s)

    async def ask(self, transfer_id: int, offset: int, length: int) -> None:
        request = REQUEST.pack(MAGIC, transfer_id, offset, length)
        await asyncio.get_running_loop().sock_sendall(self.sock, request)

    async def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = await asyncio.get_running_loop().sock_recv(self.sock, nbytes - len(data))
            if not piece:
                break
            data += piece
        return data

    async def answer(self) -> tuple[int, bytes]:
        magic, status, length = ANSWER.unpack(await self.read(ANSWER.size))
        assert magic == MAGIC
        return status, await self.read(length)

    def close(self) -> None:
        self.writer.close()
        self.sock.close()


def test_answers_ranges(run_async: Run) -> None:
    async def body() -> None:
        source = pattern(300_000)
        peer = Peer({5: memoryview(source)})
        for offset, length in [(0, 300_000), (0, 1), (299_999, 1), (77, 123_456)]:
            await peer.ask(5, offset, length)
            assert await peer.answer() == (BulkStatus.OK, source[offset : offset + length])
        peer.close()
        assert peer.closed == [peer.writer]

    run_async(body())


@pytest.mark.parametrize(
    ("transfer_id", "offset", "length", "status"),
    [
        (6, 0, 10, BulkStatus.UNKNOWN_TRANSFER),
        (U64_MAX, 0, 10, BulkStatus.UNKNOWN_TRANSFER),
        (5, 0, 0, BulkStatus.RANGE),
        (5, 0, 101, BulkStatus.RANGE),
        (5, 1, 100, BulkStatus.RANGE),
        (5, 101, 1, BulkStatus.RANGE),
        (5, U64_MAX, 1, BulkStatus.RANGE),
        (5, 1, U64_MAX, BulkStatus.RANGE),
        (5, U64_MAX, U64_MAX, BulkStatus.RANGE),
    ],
)
def test_refuses_and_goes_on(
    run_async: Run, transfer_id: int, offset: int, length: int, status: BulkStatus
) -> None:
    async def body() -> None:
        peer = Peer({5: memoryview(pattern(100))})
        await peer.ask(transfer_id, offset, length)
        assert await peer.answer() == (status, b"")
        await peer.ask(5, 0, 100)
        assert await peer.answer() == (BulkStatus.OK, pattern(100))
        peer.close()

    run_async(body())


def test_requests_in_a_row_and_in_pieces(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer({5: memoryview(pattern(50))})
        requests = b"".join(REQUEST.pack(MAGIC, 5, i, 1) for i in range(50))
        loop = asyncio.get_running_loop()
        for i in range(0, len(requests), 11):
            await loop.sock_sendall(peer.sock, requests[i : i + 11])
            await asyncio.sleep(0)
        answers = [await peer.answer() for _ in range(50)]
        assert b"".join(data for _, data in answers) == pattern(50)
        peer.close()

    run_async(body())


def test_wrong_magic_closes(run_async: Run) -> None:
    async def body() -> None:
        peer = Peer({})
        await asyncio.get_running_loop().sock_sendall(peer.sock, b"G" * REQUEST.size)
        await until(lambda: peer.closed)
        assert peer.writer.wire.closed
        peer.close()
        assert len(peer.closed) == 1

    run_async(body())


def test_a_peer_that_does_not_read_is_given_up(run_async: Run) -> None:
    async def body() -> None:
        source = memoryview(bytearray(64 << 20))
        peer = Peer({5: source}, no_progress_s=0.05)
        await peer.ask(5, 0, len(source))
        await until(lambda: peer.closed)
        source.release()  # nothing holds it any more
        peer.close()

    run_async(body())


def test_a_peer_that_leaves_in_the_middle(run_async: Run) -> None:
    async def body() -> None:
        source = memoryview(bytearray(64 << 20))
        peer = Peer({5: source})
        await peer.ask(5, 0, len(source))
        await peer.read(1000)
        assert peer.writer.transfer_id == 5
        peer.sock.close()
        await until(lambda: peer.closed)
        source.release()
        peer.close()

    run_async(body())


def test_close_in_the_middle_lets_go_of_the_source(run_async: Run) -> None:
    async def body() -> None:
        with mmap.mmap(-1, 64 << 20) as memory:
            source = memoryview(memory)
            peer = Peer({5: source})
            await peer.ask(5, 0, len(source))
            await until(lambda: peer.writer.transfer_id == 5)
            peer.close()
            source.release()  # closing the map below fails while a slice of it lives
        assert peer.closed == [peer.writer]

    run_async(body())


def test_a_released_source_is_a_refusal(run_async: Run) -> None:
    async def body() -> None:
        source = memoryview(b"gone")
        peer = Peer({5: source, 6: memoryview(b"here")})
        source.release()
        await peer.ask(5, 0, 4)
        assert await peer.answer() == (BulkStatus.SOURCE_FAILED, b"")
        await peer.ask(6, 0, 4)
        assert await peer.answer() == (BulkStatus.OK, b"here")
        peer.close()

    run_async(body())


@pytest.mark.parametrize(("kept_bytes", "told"), [(0, True), (1 << 20, False)])
def test_a_truncated_file_fails_the_transfer_only(
    run_async: Run, kept_bytes: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(4 << 20))
            file.flush()
            with mmap.mmap(file.fileno(), 4 << 20, prot=mmap.PROT_READ) as memory:
                os.ftruncate(file.fileno(), kept_bytes)
                source = memoryview(memory)
                peer = Peer({5: source, 6: memoryview(b"here")})
                await peer.ask(5, 0, len(source))
                if told:  # nothing was sent yet, so the answer can still say no
                    assert await peer.answer() == (BulkStatus.SOURCE_FAILED, b"")
                    await peer.ask(6, 0, 4)
                    assert await peer.answer() == (BulkStatus.OK, b"here")
                else:
                    with pytest.raises(ConnectionResetError):
                        await peer.read(2 * len(source))
                    assert peer.closed
                peer.close()
                source.release()
        assert "source memory" in caplog.text

    run_async(body())
