"""The contract of RailedPath as cases that every implementation passes, on pairs with at least two
rails on both sides: routes, arrays, and grants that are spread over several of them.

Run one with `check_railed_path`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from ..errors import PathFailed, PathUnavailable
from ..model import Direction
from ..protocol.messages import SliceRun
from ..transport.interface import DataPath, Exposure
from ..transport.rails import RailedPath
from .leftovers import nothing_left
from .path_rig import DataPathPair, Transfer, ended_move
from .waiting import until


class RailedDataPath(DataPath, RailedPath, Protocol):
    """Both seams in one."""


class RailedPathPair(DataPathPair, Protocol):
    """What a factory opens."""

    @property
    def owner(self) -> RailedDataPath: ...
    @property
    def consumer(self) -> RailedDataPath: ...


RailCase = Callable[[RailedPathPair], Awaitable[None]]
RailedPairFactory = Callable[[], AbstractAsyncContextManager[RailedPathPair]]


class RunTransfer(Transfer):
    """A transfer in runs: (array, bytes) in payload order."""

    def __init__(
        self,
        pair: RailedPathPair,
        runs: Sequence[tuple[int, int]],
        lease: int = 1,
        direction: Direction = Direction.READ,
        **memory: Sequence[int],
    ) -> None:
        nbytes = sum(size for _, size in runs)
        owner, consumer = memory.get("owner_sizes"), memory.get("consumer_sizes")
        super().__init__(pair, nbytes, lease, direction, owner_sizes=owner, consumer_sizes=consumer)
        self._path = pair.owner
        self._runs = [SliceRun(array, size) for array, size in runs]

    async def expose(self, direction: Direction | None = None) -> Exposure:
        return await self._path.expose_runs(
            self.pair.owner_session,
            self.owner.span,
            self.lease_id,
            self._runs,
            direction or self.direction,
        )


async def connect_all(
    pair: RailedPathPair, direction: Direction, *, private: bool = False
) -> list[int]:
    """The array of every route, in the order of the routes."""
    path, session = pair.consumer, pair.consumer_session
    return [
        await path.connect_route(session, direction, route, private=private)
        for route in path.routes(session)
    ]


async def each_rail_has_a_route(pair: RailedPathPair) -> None:
    path, session = pair.consumer, pair.consumer_session
    rails, routes = path.rails(), path.routes(session)
    assert len(rails) >= 2, "the cases need two rails"
    assert all(rail.active for rail in rails)
    assert [rail.nic for rail in rails] == sorted({rail.nic for rail in rails})
    assert sorted(route.rail.nic for route in routes) == [rail.nic for rail in rails]
    assert len({route.number for route in routes}) == len(routes)
    there = {(rail.device, rail.gid) for rail in pair.owner.rails()}
    assert {(route.remote_device, route.remote_gid) for route in routes} <= there
    assert path.routes(session) == routes
    named = [route.same_name for route in routes]
    assert named == sorted(named, reverse=True)


async def a_route_has_one_shared_array(pair: RailedPathPair) -> None:
    path, session = pair.consumer, pair.consumer_session
    for direction in Direction:
        found = await asyncio.gather(*(connect_all(pair, direction) for _ in range(5)))
        assert all(arrays == found[0] for arrays in found)
        assert len(set(found[0])) == len(path.routes(session))
    endpoints = path.rail_statistics().endpoints
    assert endpoints == pair.owner.rail_statistics().endpoints > 0
    for direction in Direction:
        await connect_all(pair, direction)
    assert path.rail_statistics().endpoints == endpoints


async def runs_over_all_rails(pair: RailedPathPair) -> None:
    for direction in Direction:
        arrays = await connect_all(pair, direction)
        shapes = (
            [(array, 5000) for array in arrays],
            [(arrays[0], 1), (arrays[1], 70_001), (arrays[0], 4096), (arrays[1], 3)],
            [(arrays[1], 300_000)],
            [(arrays[place % 2], 1000 + place) for place in range(9)],
        )
        for lease, runs in enumerate(shapes, 10 * direction):
            transfer = RunTransfer(pair, runs, lease, direction)
            await transfer.run()
            transfer.free()


async def runs_and_pieces_have_borders_of_their_own(pair: RailedPathPair) -> None:
    borders = (
        ([10_000, 20_000], [30_000], (12_000, 18_000)),
        ([30_000], [7, 29_993], (29_990, 10)),
        ([1, 65_535, 4096], [4096, 65_536], (2, 69_630)),
        ([0, 500, 0, 500], [1000, 0], (500, 500)),
    )
    for direction in Direction:
        first, second = (await connect_all(pair, direction))[:2]
        for lease, (owner, consumer, (a, b)) in enumerate(borders, 10 * direction):
            runs = [(first, a), (second, b)]
            transfer = RunTransfer(
                pair, runs, lease, direction, owner_sizes=owner, consumer_sizes=consumer
            )
            await transfer.run()
            transfer.free()


async def a_big_one_counts_over_all_rails(pair: RailedPathPair) -> None:
    for direction in Direction:
        arrays = await connect_all(pair, direction)
        share = pair.big_bytes // len(arrays)
        transfer = RunTransfer(pair, [(array, share) for array in arrays], 1, direction)
        seen: list[int] = []
        await transfer.move(await transfer.expose(), seen.append)
        await transfer.finish()
        assert seen == sorted(seen)
        assert seen[-1] == share * len(arrays)
        transfer.free()


async def runs_that_do_not_cover_are_refused(pair: RailedPathPair) -> None:
    first, second = (await connect_all(pair, Direction.READ))[:2]
    wrong = (
        [(first, 5000), (second, 4999)],
        [(first, 5000), (second, 5001)],
        [(first, 10_000), (second, 0)],
    )
    for runs in wrong:
        transfer = RunTransfer(pair, runs, owner_sizes=[10_000], consumer_sizes=[10_000])
        await _refused(transfer)
    await RunTransfer(pair, [(first, 5000), (second, 5000)]).run()


async def an_array_that_is_not_connected_refuses_all(pair: RailedPathPair) -> None:
    first, second = (await connect_all(pair, Direction.READ))[:2]
    await _refused(RunTransfer(pair, [(first, 5000), (9999, 5000)]))
    write = RunTransfer(pair, [(first, 5000), (second, 5000)], 1, Direction.WRITE)
    await _refused(write)  # arrays for READs
    await RunTransfer(pair, [(first, 5000), (second, 5000)]).run()


async def private_arrays_are_nobody_elses(pair: RailedPathPair) -> None:
    path, session = pair.consumer, pair.consumer_session
    for direction in Direction:
        shared = await connect_all(pair, direction)
        before = path.rail_statistics().endpoints
        private = await connect_all(pair, direction, private=True)
        again = await connect_all(pair, direction, private=True)
        assert len({*shared, *private, *again}) == 3 * len(shared)
        transfer = RunTransfer(pair, [(array, 40_000) for array in private], 1, direction)
        await transfer.move(await transfer.expose())
        for array in (*private, *again):
            await path.close_array(session, direction, array)
        await transfer.finish()
        assert path.rail_statistics().endpoints == before
        assert pair.owner.rail_statistics().endpoints == before
        for array in private:
            await path.close_array(session, direction, array)  # nothing is left to do
            await _refused(RunTransfer(pair, [(array, 100)], 2, direction))
        await RunTransfer(pair, [(array, 4000) for array in shared], 3, direction).run()
        transfer.free()


async def a_closed_array_ends_what_was_granted_on_it(pair: RailedPathPair) -> None:
    path, session = pair.consumer, pair.consumer_session
    for direction in Direction:
        private = await connect_all(pair, direction, private=True)
        transfer = RunTransfer(pair, [(array, 40_000) for array in private], 1, direction)
        exposure = await transfer.expose()
        await path.close_array(session, direction, private[0])
        assert isinstance(await ended_move(transfer, exposure), PathFailed)
        await transfer.check_untouched()
        await transfer.retract(transferred=False)
        await path.close_array(session, direction, private[1])
        transfer.free()


async def a_retraction_tells_what_did_not_come(pair: RailedPathPair) -> None:
    for direction in Direction:
        arrays = await connect_all(pair, direction)
        transfer = RunTransfer(pair, [(array, 5000) for array in arrays], 1, direction)
        await transfer.expose()
        try:
            await transfer.retract(transferred=True)
        except PathFailed:
            pass
        else:
            raise AssertionError("nothing was transferred, and nobody said so")
        transfer.free()


async def the_end_of_an_epoch_takes_its_arrays(pair: RailedPathPair) -> None:
    for private in (False, True):
        for direction in Direction:
            await connect_all(pair, direction, private=private)
    await pair.consumer.close_session(pair.consumer_session)
    await pair.owner.close_session(pair.owner_session)
    for path in (pair.consumer, pair.owner):
        await until(lambda path=path: path.rail_statistics().endpoints == 0)  # type: ignore[misc]


async def _refused(transfer: RunTransfer) -> None:
    try:
        await transfer.expose()
    except PathUnavailable:
        transfer.free()
    else:
        raise AssertionError("it was exposed")


RAIL_CASES: Final[Mapping[str, RailCase]] = {
    case.__name__: case
    for case in (
        each_rail_has_a_route,
        a_route_has_one_shared_array,
        runs_over_all_rails,
        runs_and_pieces_have_borders_of_their_own,
        a_big_one_counts_over_all_rails,
        runs_that_do_not_cover_are_refused,
        an_array_that_is_not_connected_refuses_all,
        private_arrays_are_nobody_elses,
        a_closed_array_ends_what_was_granted_on_it,
        a_retraction_tells_what_did_not_come,
        the_end_of_an_epoch_takes_its_arrays,
    )
}


async def check_railed_path(case: str, open_pair: RailedPairFactory) -> None:
    """Run one of RAIL_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left(), open_pair() as pair:
        await RAIL_CASES[case](pair)
