"""Cases of the DataPath contract: pushes, and what one direction's lease is to the other."""

from __future__ import annotations

import asyncio
from typing import Final

from ..errors import PathFailed
from ..model import Direction
from .path_pull_cases import move_at_once, move_every_size, move_unaligned, move_with_progress
from .path_rig import GUARD, REUSED, DataPathPair, PathCase, Transfer, ended, ended_move

_WRITE = Direction.WRITE


async def push_every_size(pair: DataPathPair) -> None:
    await move_every_size(pair, _WRITE)


async def push_unaligned(pair: DataPathPair) -> None:
    await move_unaligned(pair, _WRITE)


async def push_two_at_once(pair: DataPathPair) -> None:
    await move_at_once(pair, _WRITE, [pair.big_bytes // 4 + lease for lease in (1, 2)])


async def push_progress_is_monotone(pair: DataPathPair) -> None:
    await move_with_progress(pair, _WRITE)


async def pulls_and_pushes_mix(pair: DataPathPair) -> None:
    directions = [Direction.READ, _WRITE] * 4
    transfers = [Transfer(pair, 50_000 + n, n, way) for n, way in enumerate(directions, 1)]
    await asyncio.gather(*(transfer.run() for transfer in transfers))
    for transfer in transfers:
        transfer.check_whole()
        transfer.free()


async def retract_during_push(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes, direction=_WRITE)
    task = await transfer.until_moving(await transfer.expose())
    await transfer.retract(transferred=False)
    # From here on the owner's memory is its own again: none of what follows may land in it.
    transfer.owner.reuse()
    snapshot = transfer.owner.snapshot()
    await ended(task)
    await transfer.check_untouched()
    assert transfer.owner.snapshot() == snapshot, "written after the retraction"
    transfer.free()
    await Transfer(pair, 5000, 2, _WRITE).run()


async def cancel_during_push(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes, direction=_WRITE)
    task = await transfer.until_moving(await transfer.expose())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None
    # From here on the source is the caller's again: none of what follows may be sent.
    transfer.source.reuse()
    await transfer.retract(transferred=False)
    assert REUSED * 4096 not in transfer.target.read(), "bytes from after the cancellation arrived"
    await transfer.check_untouched()
    transfer.free()
    await Transfer(pair, 5000, 2, _WRITE).run()


async def owner_dies_during_push(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes, direction=_WRITE)
    task = await transfer.until_moving(await transfer.expose())
    await pair.kill_owner()
    await ended(task)
    await transfer.check_untouched()
    transfer.free()


async def close_session_during_push(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes, direction=_WRITE)
    task = await transfer.until_moving(await transfer.expose())
    await pair.consumer.close_session(pair.consumer_session)
    await ended(task)
    transfer.source.reuse()
    await pair.owner.close_session(pair.owner_session)
    assert REUSED * 4096 not in transfer.target.read(), "bytes from after the close arrived"
    await transfer.check_untouched()
    transfer.free()


async def push_to_a_retracted_lease(pair: DataPathPair) -> None:
    await Transfer(pair, 100, 1, _WRITE).run()
    transfer = Transfer(pair, 5000, 2, _WRITE)
    exposure = await transfer.expose()
    await transfer.retract(transferred=False)
    assert isinstance(await ended_move(transfer, exposure), PathFailed)
    await _check_never_written(transfer)
    await Transfer(pair, 5000, 3, _WRITE).run()


async def push_of_another_size(pair: DataPathPair) -> None:
    for lease, nbytes in enumerate((4999, 5001), 1):
        transfer = Transfer(pair, 5000, lease, _WRITE, consumer_sizes=[nbytes])
        assert isinstance(await ended_move(transfer, await transfer.expose()), PathFailed)
        await transfer.retract(transferred=False)
        await _check_never_written(transfer)
    await Transfer(pair, 5000, 3, _WRITE).run()


async def push_into_a_lease_to_read(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000, direction=_WRITE)
    exposure = await transfer.expose(Direction.READ)
    assert isinstance(await ended_move(transfer, exposure), PathFailed)
    await transfer.retract(transferred=False)
    await _check_never_written(transfer)
    await Transfer(pair, 5000, 2, _WRITE).run()


async def pull_from_a_lease_to_write(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000)
    exposure = await transfer.expose(_WRITE)
    assert isinstance(await ended_move(transfer, exposure), PathFailed)
    await transfer.retract(transferred=False)
    await _check_never_written(transfer)
    await Transfer(pair, 5000, 2).run()


async def push_happens_once(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000, direction=_WRITE)
    exposure = await transfer.expose()
    await transfer.move(exposure)
    transfer.source.reuse()
    assert isinstance(await ended_move(transfer, exposure), PathFailed)
    await transfer.finish()
    transfer.free()
    await Transfer(pair, 5000, 2, _WRITE).run()


async def transferred_without_a_push(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000, direction=_WRITE)
    await transfer.expose()
    try:
        await transfer.retract(transferred=True)
    except PathFailed:
        pass
    else:
        raise AssertionError("a push that never was counts as arrived")
    await transfer.retract(transferred=True)  # unknown by now
    await _check_never_written(transfer)
    await Transfer(pair, 5000, 2, _WRITE).run()


async def _check_never_written(transfer: Transfer) -> None:
    held = transfer.target.read()
    assert held == GUARD * len(held), "bytes arrived that were refused"
    await transfer.check_untouched()
    transfer.free()


PUSH_CASES: Final[tuple[PathCase, ...]] = (
    push_every_size,
    push_unaligned,
    push_two_at_once,
    push_progress_is_monotone,
    pulls_and_pushes_mix,
    retract_during_push,
    cancel_during_push,
    owner_dies_during_push,
    close_session_during_push,
    push_to_a_retracted_lease,
    push_of_another_size,
    push_into_a_lease_to_read,
    pull_from_a_lease_to_write,
    push_happens_once,
    transferred_without_a_push,
)
