"""Cases of the DataPath contract: what `drain` waits for at either side, and what it does not."""

from __future__ import annotations

import asyncio
from typing import Final

from ..model import Direction
from .path_rig import DataPathPair, PathCase, Transfer

_WAIT_S: Final = 20.0  # far above what any of it takes


async def _drained(pair: DataPathPair) -> None:
    """Both sides have nothing on its way."""
    async with asyncio.timeout(_WAIT_S):
        await pair.owner.drain()
        await pair.consumer.drain()


async def drain_of_nothing(pair: DataPathPair) -> None:
    await _drained(pair)
    for lease, direction in enumerate(Direction, 1):
        transfer = Transfer(pair, 5000, lease, direction)
        await transfer.run()
        transfer.free()
    await _drained(pair)


async def drain_waits_for_what_was_exposed(pair: DataPathPair) -> None:
    for lease, direction in enumerate(Direction, 1):
        transfer = Transfer(pair, 5000, lease, direction)
        exposure = await transfer.expose()
        draining = asyncio.ensure_future(pair.owner.drain())
        await asyncio.sleep(0.01)
        assert not draining.done(), "it was exposed, and has not moved"
        await transfer.move(exposure)
        async with asyncio.timeout(_WAIT_S):
            await draining  # its lease is still held
        await transfer.finish()
        transfer.free()


async def drain_ends_with_the_retraction(pair: DataPathPair) -> None:
    for lease, direction in enumerate(Direction, 1):
        transfer = Transfer(pair, 5000, lease, direction)
        await transfer.expose()
        draining = asyncio.ensure_future(pair.owner.drain())
        await asyncio.sleep(0)
        await transfer.retract(transferred=False)
        async with asyncio.timeout(_WAIT_S):
            await draining
        transfer.free()


async def drain_leaves_what_comes_later(pair: DataPathPair) -> None:
    first, second = Transfer(pair, 5000, 1), Transfer(pair, 5000, 2)
    exposure = await first.expose()
    draining = asyncio.ensure_future(pair.owner.drain())
    await asyncio.sleep(0)
    later = await second.expose()
    await first.move(exposure)
    async with asyncio.timeout(_WAIT_S):
        await draining
    await second.move(later)
    for transfer in (first, second):
        await transfer.finish()
        transfer.free()


async def drain_waits_for_what_moves_at_the_consumer(pair: DataPathPair) -> None:
    for lease, direction in enumerate(Direction, 1):
        transfer = Transfer(pair, pair.big_bytes, lease, direction)
        task = await transfer.until_moving(await transfer.expose())
        async with asyncio.timeout(_WAIT_S):
            await pair.consumer.drain()
        await asyncio.sleep(0)
        assert task.done(), "it was still moving"
        await task
        await transfer.finish()
        transfer.free()


DRAIN_CASES: Final[tuple[PathCase, ...]] = (
    drain_of_nothing,
    drain_waits_for_what_was_exposed,
    drain_ends_with_the_retraction,
    drain_leaves_what_comes_later,
    drain_waits_for_what_moves_at_the_consumer,
)
