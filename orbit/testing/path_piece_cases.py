"""Cases of the DataPath contract: memory in several pieces, whose borders differ on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..model import Direction
from .path_rig import DataPathPair, PathCase, Transfer

# Of the owner and of the consumer; each pair of lists has the same sum.
_BORDERS: Final = (
    ([10_000, 20_000], [30_000]),
    ([30_000], [20_000, 10_000]),
    ([10_000, 20_000], [10_000, 20_000]),
    ([1, 4096, 65_535], [65_536, 4095, 1]),
    ([7, 100_000, 1, 8], [50_000, 50_015, 1]),
    ([1, 1, 1], [3]),
)
_WITH_EMPTY: Final = (
    ([0, 5000], [5000]),
    ([5000], [5000, 0]),
    ([2000, 0, 0, 3000], [0, 4999, 0, 1]),
    ([0, 0], [0]),
)


async def pull_in_pieces(pair: DataPathPair) -> None:
    await _move_all(pair, Direction.READ, _BORDERS)


async def push_in_pieces(pair: DataPathPair) -> None:
    await _move_all(pair, Direction.WRITE, _BORDERS)


async def pull_with_empty_pieces(pair: DataPathPair) -> None:
    await _move_all(pair, Direction.READ, _WITH_EMPTY)


async def push_with_empty_pieces(pair: DataPathPair) -> None:
    await _move_all(pair, Direction.WRITE, _WITH_EMPTY)


async def big_pieces(pair: DataPathPair) -> None:
    third = pair.big_bytes // 6
    borders = [([third, 2 * third + 1], [2 * third, third, 1])]
    await _move_all(pair, Direction.READ, borders)
    await _move_all(pair, Direction.WRITE, borders)


async def progress_counts_over_pieces(pair: DataPathPair) -> None:
    for lease, direction in enumerate(Direction, 1):
        transfer = Transfer(
            pair,
            300_000,
            lease,
            direction,
            owner_sizes=[100_000, 200_000],
            consumer_sizes=[200_000, 100_000],
        )
        seen: list[int] = []
        await transfer.move(await transfer.expose(), seen.append)
        await transfer.finish()
        assert seen == sorted(seen)
        assert seen[-1] == 300_000
        transfer.free()


async def _move_all(
    pair: DataPathPair,
    direction: Direction,
    borders: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> None:
    first = 100 * direction
    for lease, (owner, consumer) in enumerate(borders, first):
        transfer = Transfer(
            pair, sum(owner), lease, direction, owner_sizes=owner, consumer_sizes=consumer
        )
        await transfer.run()
        transfer.free()


PIECE_CASES: Final[tuple[PathCase, ...]] = (
    pull_in_pieces,
    push_in_pieces,
    pull_with_empty_pieces,
    push_with_empty_pieces,
    big_pieces,
    progress_counts_over_pieces,
)
