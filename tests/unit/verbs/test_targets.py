"""How local memory is made reachable, where a copy is the way: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orbit.memory.buffer import address_of
from orbit.model import Direction
from orbit.testing.pattern import pattern
from orbit.transport.interface import PinnedBuffer, Span, Target
from orbit.verbs.counters import PathCounters
from orbit.verbs.targets import Targets

LARGE = (20 << 20) + 7


class Pool:
    """Gives out memory at once, so that only the copies can let others run."""

    def __init__(self) -> None:
        self.out: list[PinnedBuffer] = []

    async def allocate(self, nbytes: int) -> PinnedBuffer:
        view = memoryview(bytearray(nbytes))
        arena = SimpleNamespace(region=lambda device: SimpleNamespace(lkey=1))
        self.out.append(PinnedBuffer(view, address_of(view), arena, object()))
        return self.out[-1]

    def free(self, buffer: PinnedBuffer) -> None:
        self.out.remove(buffer)


class Turns:
    """How often the event loop came round."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        self._next = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._next.cancel()


def prepare(pool: Pool, piece: Span | Target, direction: Direction) -> Any:
    targets = Targets(pool, 1 << 30, PathCounters())  # type: ignore[arg-type]
    return targets.prepare([object()], [piece], direction)  # type: ignore[list-item]


def test_a_large_copy_into_the_pool_lets_others_run() -> None:
    async def main() -> None:
        pool, turns, data = Pool(), Turns(), pattern(LARGE)
        prepared = await prepare(pool, Span(memoryview(data)), Direction.WRITE)
        assert turns.count >= 2
        turns.stop()
        assert pool.out[0].view == data
        assert not prepared.copies  # the bytes of a push go nowhere afterwards
        await prepared.discard()
        assert pool.out == []

    asyncio.run(main())


def test_a_large_copy_out_of_the_pool_lets_others_run() -> None:
    async def main() -> None:
        pool, data, into = Pool(), pattern(LARGE), bytearray(LARGE)
        prepared = await prepare(pool, Target(memoryview(into)), Direction.READ)
        pool.out[0].view[:] = data
        turns = Turns()
        await prepared.deliver()
        assert turns.count >= 2
        turns.stop()
        assert into == data
        await prepared.discard()
        assert pool.out == []

    asyncio.run(main())


def test_a_copy_that_is_cancelled_gives_its_piece_back() -> None:
    async def main() -> None:
        pool = Pool()
        source = Span(memoryview(bytes(LARGE)))
        task = asyncio.ensure_future(prepare(pool, source, Direction.WRITE))
        await asyncio.sleep(0)
        assert len(pool.out) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.out == []

    asyncio.run(main())
