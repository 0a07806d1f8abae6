"""Cases of the DataPath contract: pulls; and sizes and crowds, which both directions share."""

from __future__ import annotations

import asyncio
from typing import Final

from ..errors import OrbitError, PathFailed, PathUnavailable
from ..model import Direction, LeaseId
from ..transport.interface import Exposure
from .path_rig import GUARD, REUSED, DataPathPair, PathCase, Transfer, ended, ended_move


async def every_size(pair: DataPathPair) -> None:
    await move_every_size(pair, Direction.READ)


async def unaligned(pair: DataPathPair) -> None:
    await move_unaligned(pair, Direction.READ)


async def two_at_once(pair: DataPathPair) -> None:
    await move_at_once(pair, Direction.READ, [pair.big_bytes // 4 + lease for lease in (1, 2)])


async def many_at_once(pair: DataPathPair) -> None:
    await move_at_once(pair, Direction.READ, [10_000 + lease for lease in range(1, 13)])


async def progress_is_monotone(pair: DataPathPair) -> None:
    await move_with_progress(pair, Direction.READ)


async def retract_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await transfer.until_moving(await transfer.expose())
    await transfer.retract(transferred=False)
    # From here on the owner's memory may be reused: none of what follows may arrive.
    transfer.owner.reuse()
    if await ended(task) is None:
        transfer.check_whole()
    assert REUSED * 4096 not in transfer.target.read(), "bytes from after the retraction arrived"
    await transfer.check_untouched()
    transfer.free()
    await Transfer(pair, 5000, 2).run()


async def cancel_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await transfer.until_moving(await transfer.expose())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None
    await transfer.check_untouched()
    await transfer.retract(transferred=False)
    transfer.free()
    await Transfer(pair, 5000, 2).run()


async def owner_dies_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await transfer.until_moving(await transfer.expose())
    await pair.kill_owner()
    if await ended(task) is None:
        transfer.check_whole()
    await transfer.check_untouched()
    transfer.free()


async def owner_is_dead_before(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000)
    exposure = await transfer.expose()
    await pair.kill_owner()
    assert await ended_move(transfer, exposure) is not None
    await transfer.check_untouched()
    transfer.free()


async def retracted_is_unknown(pair: DataPathPair) -> None:
    await Transfer(pair, 100, 1).run()
    transfer = Transfer(pair, 5000, 2)
    exposure = await transfer.expose()
    await transfer.retract(transferred=False)
    assert isinstance(await ended_move(transfer, exposure), PathFailed)
    assert transfer.target.read() == GUARD * 5000, "bytes of a retracted span arrived"
    await transfer.check_untouched()
    transfer.free()
    await Transfer(pair, 5000, 3).run()


async def range_beyond_the_span(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000, consumer_sizes=[5001])
    assert isinstance(await ended_move(transfer, await transfer.expose()), PathFailed)
    await transfer.check_untouched()
    await transfer.retract(transferred=False)
    transfer.free()
    await Transfer(pair, 5000, 2).run()


async def retract_is_idempotent(pair: DataPathPair) -> None:
    await pair.owner.retract(pair.owner_session, LeaseId(99), transferred=False)
    transfer = Transfer(pair, 100)
    await transfer.run()
    await transfer.retract(transferred=True)
    await transfer.retract(transferred=False)
    transfer.free()


async def close_session_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await transfer.until_moving(await transfer.expose())
    await pair.consumer.close_session(pair.consumer_session)
    await ended(task)
    await transfer.check_untouched()
    await pair.owner.close_session(pair.owner_session)
    await pair.owner.close_session(pair.owner_session)
    transfer.free()


async def closed_exposes_nothing(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 100)
    await pair.owner.close()
    await pair.owner.close()
    try:
        await transfer.expose()
    except PathUnavailable:
        pass
    else:
        raise AssertionError("a closed path exposed a span")
    await pair.consumer.close()
    try:
        await transfer.move(Exposure(transfer_id=1, descriptor=bytes(29), grant=b""))
    except OrbitError:
        pass
    else:
        raise AssertionError("a closed path pulled")
    transfer.free()


# --- either direction ---


async def move_every_size(pair: DataPathPair, direction: Direction) -> None:
    around = [n + d for n in (64, 4096, 65536, 1 << 20) for d in (-1, 0, 1)]
    for lease, nbytes in enumerate([0, 1, 2, 7, *around, (3 << 20) + 77], 1):
        transfer = Transfer(pair, nbytes, lease, direction)
        await transfer.run()
        transfer.free()


async def move_unaligned(pair: DataPathPair, direction: Direction) -> None:
    for lease, (owner, consumer) in enumerate([(1, 0), (0, 1), (3, 5), (4031, 63)], 1):
        transfer = Transfer(
            pair, 70_001, lease, direction, owner_offset=owner, consumer_offset=consumer
        )
        await transfer.run()
        transfer.free()


async def move_at_once(pair: DataPathPair, direction: Direction, sizes: list[int]) -> None:
    transfers = [Transfer(pair, nbytes, lease, direction) for lease, nbytes in enumerate(sizes, 1)]
    await asyncio.gather(*(transfer.run() for transfer in transfers))
    for transfer in transfers:
        transfer.check_whole()
        transfer.free()


async def move_with_progress(pair: DataPathPair, direction: Direction) -> None:
    transfer = Transfer(pair, pair.big_bytes // 4, direction=direction)
    seen: list[int] = []
    await transfer.move(await transfer.expose(), seen.append)
    await transfer.finish()
    assert seen == sorted(seen)
    assert seen[-1] == len(transfer.payload)
    transfer.free()


PULL_CASES: Final[tuple[PathCase, ...]] = (
    every_size,
    unaligned,
    two_at_once,
    many_at_once,
    progress_is_monotone,
    retract_during_pull,
    cancel_during_pull,
    owner_dies_during_pull,
    owner_is_dead_before,
    retracted_is_unknown,
    range_beyond_the_span,
    retract_is_idempotent,
    close_session_during_pull,
    closed_exposes_nothing,
)
