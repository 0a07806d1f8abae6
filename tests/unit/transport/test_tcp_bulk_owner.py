"""The owner's end against a scripted consumer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from orbit.model import Direction
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.transport.tcp_bulk import ANSWER, MAGIC, MAGIC_PUSH, REQUEST, BulkStatus
from orbit.transport.tcp_bulk_owner import Arrival, BulkOwner, Exposed
from orbit.transport.tcp_wire import Wire

Run = Callable[[Coroutine[Any, Any, None]], None]
U64_MAX = (1 << 64) - 1


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Peer:
    def __init__(
        self, sources: Mapping[int, memoryview | Exposed], no_progress_s: float = 20.0
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(listener.getsockname())
        self.sock, _ = listener.accept()
        listener.close()
        self.sock.setblocking(False)
        self.closed: list[BulkOwner] = []
        self.exposed = {
            number: source if isinstance(source, Exposed) else Exposed(number, (source,))
            for number, source in sources.items()
        }
        wire = Wire(mine, "peer")
        self.end = BulkOwner(wire, self.exposed.get, self.closed.append, no_progress_s)

    async def ask(self, transfer_id: int, offset: int, length: int) -> None:
        request = REQUEST.pack(MAGIC, transfer_id, offset, length)
        await asyncio.get_running_loop().sock_sendall(self.sock, request)

    async def offer(self, transfer_id: int, offset: int, length: int) -> tuple[int, int]:
        """Ask to push; status and length of the answer."""
        request = REQUEST.pack(MAGIC_PUSH, transfer_id, offset, length)
        await self.send(request)
        return await self.said()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def said(self) -> tuple[int, int]:
        """An answer that no bytes follow."""
        magic, status, length = ANSWER.unpack(await self.read(ANSWER.size))
        assert magic == MAGIC
        return status, length

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
        self.end.close()
        self.sock.close()


def to_write(*sizes: int) -> Exposed:
    return Exposed(5, [memoryview(bytearray(size)) for size in sizes], Direction.WRITE)


def written(exposed: Exposed) -> bytes:
    return b"".join(exposed.pieces)


def test_answers_ranges(run_async: Run) -> None:
    async def body() -> None:
        source = pattern(300_000)
        peer = Peer({5: memoryview(source)})
        for offset, length in [(0, 300_000), (0, 1), (299_999, 1), (77, 123_456)]:
            await peer.ask(5, offset, length)
            assert await peer.answer() == (BulkStatus.OK, source[offset : offset + length])
        peer.close()
        assert peer.closed == [peer.end]

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
        assert peer.end.wire.closed
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
        assert peer.end.exposed is peer.exposed[5]
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
            await until(lambda: peer.end.exposed is peer.exposed[5])
            peer.close()
            source.release()  # closing the map below fails while a slice of it lives
        assert peer.closed == [peer.end]

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
        assert "its memory cannot be read" in caplog.text

    run_async(body())


def test_answers_ranges_of_pieces(run_async: Run) -> None:
    async def body() -> None:
        whole = pattern(100_000)
        cuts = [0, 1, 1, 50_000, 50_001, *range(60_000, 60_300), 100_000]
        pieces = [memoryview(whole)[a:b] for a, b in itertools.pairwise(cuts)]
        peer = Peer({5: Exposed(5, pieces)})
        for offset, length in [(0, 100_000), (0, 1), (1, 49_999), (49_999, 3), (59_000, 2000)]:
            await peer.ask(5, offset, length)
            assert await peer.answer() == (BulkStatus.OK, whole[offset : offset + length])
        peer.close()

    run_async(body())


@pytest.mark.parametrize("sizes", [(1,), (300_000,), (1, 0, 70_000), (*[7] * 300, 9_000_000)])
def test_takes_a_push(run_async: Run, sizes: tuple[int, ...]) -> None:
    async def body() -> None:
        exposed, nbytes = to_write(*sizes), sum(sizes)
        peer = Peer({5: exposed, 6: memoryview(b"here")})
        assert await peer.offer(5, 0, nbytes) == (BulkStatus.OK, nbytes)
        assert exposed.arrival is Arrival.UNDER_WAY
        await peer.send(pattern(nbytes))
        assert await peer.said() == (BulkStatus.OK, nbytes)
        assert exposed.arrival is Arrival.WHOLE
        assert written(exposed) == pattern(nbytes)
        await peer.ask(6, 0, 4)  # the connection goes on
        assert await peer.answer() == (BulkStatus.OK, b"here")
        peer.close()

    run_async(body())


@pytest.mark.parametrize(
    ("transfer_id", "offset", "length", "status"),
    [
        (4, 0, 100, BulkStatus.UNKNOWN_TRANSFER),
        (6, 0, 4, BulkStatus.DIRECTION),
        (5, 0, 0, BulkStatus.RANGE),
        (5, 0, 99, BulkStatus.RANGE),
        (5, 0, 101, BulkStatus.RANGE),
        (5, 1, 99, BulkStatus.RANGE),
        (5, 1, 100, BulkStatus.RANGE),
        (5, U64_MAX, 101, BulkStatus.RANGE),
        (5, 0, U64_MAX, BulkStatus.RANGE),
    ],
)
def test_refuses_a_push_and_goes_on(
    run_async: Run, transfer_id: int, offset: int, length: int, status: BulkStatus
) -> None:
    async def body() -> None:
        exposed = to_write(100)
        peer = Peer({5: exposed, 6: memoryview(b"here")})
        assert await peer.offer(transfer_id, offset, length) == (status, 0)
        assert await peer.offer(5, 0, 100) == (BulkStatus.OK, 100)
        await peer.send(pattern(100))
        assert await peer.said() == (BulkStatus.OK, 100)
        assert await peer.offer(5, 0, 100) == (BulkStatus.WRITTEN, 0)
        await peer.ask(5, 0, 100)
        assert await peer.said() == (BulkStatus.DIRECTION, 0)
        assert written(exposed) == pattern(100)
        peer.close()

    run_async(body())


@pytest.mark.parametrize("arrived", [0, 1, 1 << 20])
def test_a_writer_that_leaves_in_the_middle(run_async: Run, arrived: int) -> None:
    async def body() -> None:
        exposed = to_write(1000, 4 << 20)
        peer = Peer({5: exposed})
        nbytes = len(written(exposed))
        assert await peer.offer(5, 0, nbytes) == (BulkStatus.OK, nbytes)
        await peer.send(pattern(arrived))
        peer.sock.close()
        await until(lambda: peer.closed)
        assert exposed.arrival is (Arrival.PARTIAL if arrived else Arrival.NONE)
        again = Peer({5: exposed})
        status, _ = await again.offer(5, 0, nbytes)
        assert status == (BulkStatus.WRITTEN if arrived else BulkStatus.OK)
        again.close()
        for piece in exposed.pieces:
            piece.release()

    run_async(body())


def test_two_writers_of_one_transfer(run_async: Run) -> None:
    async def body() -> None:
        exposed = to_write(100)
        first, second = Peer({5: exposed}), Peer({5: exposed})
        assert await first.offer(5, 0, 100) == (BulkStatus.OK, 100)
        assert await second.offer(5, 0, 100) == (BulkStatus.WRITTEN, 0)
        await first.send(pattern(100))
        assert await first.said() == (BulkStatus.OK, 100)
        assert written(exposed) == pattern(100)
        first.close()
        second.close()

    run_async(body())


def test_a_writer_that_falls_silent_is_given_up(run_async: Run) -> None:
    async def body() -> None:
        exposed = to_write(1000)
        peer = Peer({5: exposed}, no_progress_s=0.05)
        await peer.offer(5, 0, 1000)
        await peer.send(pattern(999))
        await until(lambda: peer.closed)
        assert exposed.arrival is Arrival.PARTIAL
        assert written(exposed) == pattern(999) + b"\x00"
        peer.close()

    run_async(body())


def test_a_trickle_is_progress_of_a_push(run_async: Run) -> None:
    """Far below the low water mark, so that no byte wakes the owner; the deadline sees them."""

    async def body() -> None:
        nbytes = 2 << 20
        exposed = to_write(nbytes)
        peer = Peer({5: exposed}, no_progress_s=0.05)
        await peer.offer(5, 0, nbytes)
        sent = 0
        for _ in range(10):
            await peer.send(pattern(nbytes)[sent : sent + 100])
            sent += 100
            await asyncio.sleep(0.02)
        assert not peer.closed
        await peer.send(pattern(nbytes)[sent:])
        assert await peer.said() == (BulkStatus.OK, nbytes)
        assert written(exposed) == pattern(nbytes)
        peer.close()

    run_async(body())


def test_close_in_the_middle_of_a_push_lets_go_of_the_memory(run_async: Run) -> None:
    async def body() -> None:
        with mmap.mmap(-1, 64 << 20) as memory:
            view = memoryview(memory)
            exposed = Exposed(5, [view], Direction.WRITE)
            peer = Peer({5: exposed})
            await peer.offer(5, 0, len(view))
            await peer.send(bytes(100_000))
            peer.end.close()
            assert exposed.arrival is not Arrival.WHOLE
            view.release()  # closing the map below fails while a slice of it lives
        assert peer.closed == [peer.end]
        peer.close()

    run_async(body())


def test_released_memory_takes_no_push(run_async: Run) -> None:
    async def body() -> None:
        exposed = to_write(100)
        exposed.pieces[0].release()
        peer = Peer({5: exposed})
        assert await peer.offer(5, 0, 100) == (BulkStatus.SOURCE_FAILED, 0)
        peer.close()

    run_async(body())


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_truncated_file_fails_the_push_only(
    run_async: Run, kept_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        nbytes = 4 << 20
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            with mmap.mmap(file.fileno(), nbytes) as memory:
                view = memoryview(memory)
                exposed = Exposed(5, [view], Direction.WRITE)
                peer = Peer({5: exposed})
                await peer.offer(5, 0, nbytes)
                os.ftruncate(file.fileno(), kept_bytes)
                with contextlib.suppress(ConnectionError):
                    await peer.send(pattern(nbytes))
                await until(lambda: peer.closed)
                assert exposed.arrival is (Arrival.PARTIAL if kept_bytes else Arrival.NONE)
                peer.close()
                view.release()
        assert "its memory cannot be written" in caplog.text

    run_async(body())
