"""Cursor against a wire that takes and gives as little as it likes."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from typing import Any

import pytest

from orbit.testing.pattern import pattern
from orbit.transport.tcp_bulk import CALLBACK_BYTES
from orbit.transport.tcp_cursor import LOW_WATER_BYTES, Cursor, Pace


class FakeWire:
    """`counts`: how many bytes each call moves at most; None: it would have to wait."""

    def __init__(
        self, counts: Sequence[int | None], *, tls: bool = False, data: bytes = b""
    ) -> None:
        self.tls = tls
        self.call_bytes = CALLBACK_BYTES
        self.sent = bytearray()
        self.offered: list[list[int]] = []
        self.low_waters: list[int] = []
        self._counts = list(counts)
        self._data = data

    def send_vector(self, pieces: Sequence[memoryview]) -> int | None:
        self.offered.append([len(piece) for piece in pieces])
        count = self._counts.pop(0)
        if count is None:
            return None
        taken = b"".join(pieces)[:count]
        self.sent += taken
        return len(taken)

    def recv_vector(self, pieces: Sequence[memoryview]) -> int | None:
        self.offered.append([len(piece) for piece in pieces])
        count = self._counts.pop(0)
        if count is None:
            return None
        moved = 0
        for piece in pieces:
            part = self._data[: min(len(piece), count - moved)]
            piece[: len(part)] = part
            self._data = self._data[len(part) :]
            moved += len(part)
        return moved

    def set_receive_low_water(self, nbytes: int) -> None:
        self.low_waters.append(nbytes)


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def run_out(step: Any, wire: Any) -> int:
    """Steps until everything has moved."""
    steps = 1
    while step(wire) is not Pace.DONE:
        steps += 1
    return steps


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("tls", [False, True])
def test_whatever_the_kernel_takes(seed: int, tls: bool) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 7, 1000, 70_000)) for _ in range(rng.randrange(1, 100))]
    payload = pattern(sum(sizes))
    offset = rng.randrange(len(payload) + 1)
    nbytes = rng.randrange(len(payload) - offset + 1)
    counts = [rng.choice((None, 1, 17, 5000, 1 << 20)) for _ in range(20)] + [20_000] * 5000
    pieces, at = views(*sizes), 0
    for piece in pieces:
        piece[:] = payload[at : at + len(piece)]
        at += len(piece)
    sending = FakeWire(counts, tls=tls)
    cursor = Cursor(pieces, offset, nbytes, b"head")
    run_out(cursor.send, sending)
    assert sending.sent == b"head" + payload[offset : offset + nbytes]
    assert (cursor.position, cursor.left) == (nbytes + 4, 0)

    targets = views(*sizes)
    filling = FakeWire(counts, tls=tls, data=payload)
    run_out(Cursor(targets).receive, filling)
    assert b"".join(targets) == payload


def test_the_end_of_the_stream() -> None:
    cursor = Cursor(views(10))
    with pytest.raises(ConnectionResetError, match="closed by the peer"):
        cursor.receive(FakeWire([4, 0], data=b"abcd"))  # type: ignore[arg-type]
    assert cursor.position == 4


def test_one_callback_moves_a_bounded_share() -> None:
    wire: Any = FakeWire([1 << 20] * 100)
    cursor = Cursor(views(CALLBACK_BYTES + 1, CALLBACK_BYTES))
    assert cursor.send(wire) is Pace.WAIT  # less than was offered: the socket is full
    assert cursor.position == 1 << 20
    wire = FakeWire([1 << 20] * 100, data=bytes(CALLBACK_BYTES * 2 + 1))
    cursor = Cursor(views(CALLBACK_BYTES + 1, CALLBACK_BYTES))
    assert cursor.receive(wire) is Pace.AGAIN
    assert cursor.position == CALLBACK_BYTES


def test_no_call_offers_more_than_the_kernel_takes() -> None:
    """Linux moves at most 0x7ffff000 bytes a call and 1,024 pieces; both are far away."""
    wire: Any = FakeWire([64, None])
    Cursor(views(*[1] * 5000)).send(wire)
    assert sum(wire.offered[0]) == 64
    with mmap.mmap(-1, 3 << 30) as memory:  # reserved, never touched
        view = memoryview(memory)
        cursor = Cursor([view, view])
        assert cursor.nbytes == 6 << 30
        wire = FakeWire([100])
        cursor.send(wire)
        assert wire.offered == [[CALLBACK_BYTES]]
        cursor.release()
        view.release()


def test_low_water_never_beyond_what_is_to_come() -> None:
    nbytes = LOW_WATER_BYTES + 100
    wire: Any = FakeWire([None, 101, None, LOW_WATER_BYTES - 2, None], data=bytes(nbytes))
    cursor = Cursor(views(nbytes))
    for _ in range(3):
        assert cursor.receive(wire) is Pace.WAIT
    assert wire.low_waters == [LOW_WATER_BYTES, LOW_WATER_BYTES - 1, 1]


def test_an_error_keeps_no_memory() -> None:
    """Whoever holds the error, with its traceback, does not hold the pieces."""

    class Broken(FakeWire):
        def send_vector(self, pieces: Sequence[memoryview]) -> int | None:
            raise BrokenPipeError

    with mmap.mmap(-1, 4096) as memory:
        view = memoryview(memory)
        cursor = Cursor([view])
        with pytest.raises(BufferError):
            memory.close()  # an operation holds an export of its own
        wire: Any = Broken([])
        with pytest.raises(BrokenPipeError) as caught:
            cursor.send(wire)
        cursor.release()
        view.release()
        memory.close()
        assert caught.value is not None
