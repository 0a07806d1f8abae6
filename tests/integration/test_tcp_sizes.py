"""TcpPath with lengths and offsets that need more than 31 bits, and more than one call to the
kernel, which moves at most 0x7ffff000 bytes at a time.

Touching gigabytes of fresh memory is what takes time here, not moving bytes. So the edges lie in
memory of their own and all between them is one scratch buffer, as often as needed. ORBIT_SOAK
(`make soak`) makes it 2.5 GiB mappings, whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Iterator

import pytest

from orbit.model import Direction, LeaseId
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.transport.interface import Span, Target
from orbit.transport.pieces import cut_span, cut_target
from tests.contract.tcp_pairs import tcp_path_pair
from tests.soak import SOAK

LEASE = LeaseId(1)
SOAK_BYTES = (5 << 29) + 1  # 2.5 GiB and a byte
NBYTES = (1 << 31) + (4 << 20) + 1
MARKS = (0, 0x7FFFEFFF, 0x7FFFF000, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, SOAK_BYTES - 1)
# Where memory of its own lies: at both ends, and around 0x7ffff000 and 2 GiB.
EDGES = (0, 0x7FF00000, NBYTES - (2 << 20))
EDGE_BYTES = 2 << 20
SCRATCH_BYTES = 64 << 20


def edged(scratch: memoryview, edges: list[memoryview]) -> list[memoryview]:
    """NBYTES in pieces: the edges in their places, and scratch between them."""
    pieces: list[memoryview] = []
    at = 0
    for start, edge in zip(EDGES, edges, strict=True):
        while at < start:
            pieces.append(scratch[: min(start - at, len(scratch))])
            at += len(pieces[-1])
        pieces.append(edge)
        at += len(edge)
    assert at == NBYTES
    return pieces


async def move(source: Span, target: Target, direction: Direction) -> None:
    async with nothing_left(), tcp_path_pair() as pair:
        exposed = source if direction is Direction.READ else span_of(target)
        exposure = await pair.owner.expose(pair.owner_session, exposed, LEASE, direction=direction)
        if direction is Direction.READ:
            await pair.consumer.pull(pair.consumer_session, exposure, LEASE, target)
        else:
            await pair.consumer.push(pair.consumer_session, exposure, LEASE, source)
        await pair.owner.retract(pair.owner_session, LEASE, transferred=True)


def span_of(target: Target) -> Span:
    first, *rest = (Span(piece.view) for piece in target.pieces)
    return Span(first.view, rest=tuple(rest))


def target_of(pieces: list[memoryview]) -> Target:
    first, *rest = map(Target, pieces)
    return Target(first.view, rest=tuple(rest))


@pytest.mark.parametrize("direction", Direction)
def test_edges_beyond_two_gib(direction: Direction) -> None:
    scratch, other = (memoryview(bytearray(SCRATCH_BYTES)) for _ in range(2))
    sources = [memoryview(bytearray(pattern(EDGE_BYTES, n))) for n in range(3)]
    targets = [memoryview(bytearray(EDGE_BYTES)) for _ in range(3)]
    source = span_of(target_of(edged(scratch, sources)))
    target = target_of(edged(other, targets))
    assert source.nbytes == target.nbytes == NBYTES
    asyncio.run(move(source, target, direction))
    assert targets == sources
    assert not any(other)


@contextlib.contextmanager
def mapped() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, SOAK_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # half a million page faults less
        yield memory


@pytest.mark.skipif(not SOAK, reason="5 GiB of memory and most of a minute: `make soak`")
@pytest.mark.parametrize("direction", Direction)
def test_two_and_a_half_gib_in_one_piece(direction: Direction) -> None:
    marks = {at: bytes([number]) for number, at in enumerate(MARKS, 1)}
    with mapped() as source, mapped() as memory:
        for at, mark in marks.items():
            source[at : at + 1] = mark
        with memoryview(source).toreadonly() as view, memoryview(memory) as target:
            asyncio.run(move(Span(view), Target(target), direction))
        assert {at: memory[at : at + 1] for at in marks} == marks
        assert [memory.find(mark) for mark in marks.values()] == list(MARKS)


def test_cutting_beyond_32_bits() -> None:
    """Offsets within pieces, without touching what they name."""
    with mmap.mmap(-1, 5 << 30) as memory, memoryview(memory) as view:
        span, target = Span(view, rest=(Span(view),)), Target(view, rest=(Target(view),))
        for at in ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (9 << 30)):
            for cut in (cut_span(span, at, 1 << 29), cut_target(target, at, 1 << 29)):
                assert cut.nbytes == 1 << 29
                for piece in cut.pieces:
                    piece.view.release()
