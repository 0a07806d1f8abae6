"""One cell from the connection to the later close: a parent of three grants on two rails, a sibling
on queue pairs of its own, the fault, and what must be seen of all that afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from orbit.errors import OrbitError, PathFailed, PathUnavailable, Unquiesced
from orbit.model import Direction
from orbit.testing.path_rail_cases import RunTransfer
from orbit.transport.interface import Exposure
from orbit.verbs import records
from orbit.verbs.requester import Transfer
from orbit.verbs.scripted_fabric import RECEIVE
from orbit.verbs.source import SourceGrant
from tests.unit.verbs.faults.fault_rig import CONFIG, PIECE, Side, World, opened
from tests.unit.verbs.faults.matrix import LEGEND, Cell, Expected, Fault, Phase, Role
from tests.unit.verbs.faults.strikes import Strike

# Bytes: two grants on the rail that is hit, and one on the other.
HIT, SHORT, NEXT = 5 * PIECE, 2 * PIECE, 3 * PIECE
_SETTLED_S, _OVER_S = 0.01, 10.0  # less than any deadline, and more than all of them together
# READs or WRITEs on the rail that is hit: the first round of both transfers, what comes before
# those that the receipts ride with, and these.
_FIRST_PIECES, _MIDDLE_PIECES, _LAST_PIECES = 4, 5, 2
_CELL_S = 120.0  # of virtual time: a cell that takes longer hangs


async def run_cell(cell: Cell, direction: Direction) -> str:
    """The letter of what was seen. Raises AssertionError where that is not all that it promises."""
    async with asyncio.timeout(_CELL_S), opened() as world:
        drive = _Drive(world, cell, direction)
        await drive.run()
        seen = drive.seen()
        letter = next((name for name, (_, facts) in LEGEND.items() if facts == seen), f"? {seen}")
        assert seen == cell.expected, f"{cell}: {letter} instead of {cell.letter}"
        drive.check_charges()
        await drive.check_rails_serve()
        await drive.close()
    return cell.letter


class _Drive:
    def __init__(self, world: World, cell: Cell, direction: Direction) -> None:
        self._world = world
        self._cell = cell
        self._direction = direction
        self._move = records.READ if direction is Direction.READ else records.WRITE
        source = cell.role is Role.SOURCE
        self._side = world.source if source else world.requester
        self._well = world.requester if source else world.source
        self._stage = ""
        self._error: OrbitError | None = None
        self._strike: Strike
        self._parent: RunTransfer | None = None
        self._pairs = (0, 0)
        self._leases = 10

    # --- the story ---

    async def run(self) -> None:
        world = self._world
        near, far = world.routes
        session, path = world.consumer_session, world.consumer
        second = await path.connect_route(session, self._direction, far)
        private = await path.connect_route(session, self._direction, far, private=True)
        cold = self._cell.phase is Phase.PATH
        first = 0
        if not cold:
            first = await path.connect_route(session, self._direction, near)
            self._tap()
            before = self._transfer([(first, PIECE), (second, PIECE)])
            await before.run()
            before.free()
        sibling = self._transfer([(private, NEXT)])
        granted = await sibling.expose()
        self._strike = Strike(world, self._cell, self._direction, first)
        self._strike.before_exposing()
        if cold:
            first = await self._connect_cold()
        if not self._stage:
            await self._move_parent(first, second)
        await sibling.move(granted)  # whatever happened
        await sibling.finish()
        sibling.free()
        await asyncio.sleep(_OVER_S)
        self._pairs = (
            world.owner.rail_statistics().endpoints,
            world.consumer.rail_statistics().endpoints,
        )

    async def _connect_cold(self) -> int:
        world = self._world
        try:
            first = await world.consumer.connect_route(
                world.consumer_session, self._direction, world.routes[0]
            )
        except PathUnavailable as error:
            self._fail("connect", error)
            return 0
        self._tap()
        self._strike.array = first
        return first

    def _tap(self) -> None:
        """The lanes of the rail that is hit are open."""
        self._world.source.watch()
        self._world.requester.watch()

    async def _move_parent(self, first: int, second: int) -> None:
        parent = self._parent = self._transfer([(first, HIT), (second, NEXT), (first, SHORT)])
        await self._strike.at(Phase.PLAN)
        await self._strike.at(Phase.PATH)
        exposure = await self._expose(parent)
        if exposure is None:
            return
        await self._strike.at(Phase.PUBLISH)
        await self._strike.at(Phase.HOLD)
        self._strike.before_moving()
        await self._guarded("move", self._frozen_move(parent.move(exposure)))
        moved = not self._stage
        if moved:
            if self._strike.frozen is Phase.MATCH:
                self._world.a.release()  # nobody looks before the strike
            await self._strike.at(Phase.MATCH)
            await asyncio.sleep(_SETTLED_S)
            await self._strike.at(Phase.END)
        await self._guarded("done", parent.retract(transferred=moved))
        if not self._stage:
            parent.check_whole()
        elif isinstance(self._error, PathFailed):
            await parent.check_untouched()

    async def _expose(self, parent: RunTransfer) -> Exposure | None:
        """Stands still while the binds are on their way, or behind the first receive."""
        frozen, fake = self._strike.frozen, self._world.a
        if frozen in (Phase.BIND, Phase.RECEIVE):
            fake.hold(records.BIND_WINDOW, skip=int(frozen is Phase.RECEIVE), count=1)
        exposing = asyncio.ensure_future(parent.expose())
        if frozen in (Phase.BIND, Phase.RECEIVE):
            await asyncio.sleep(_SETTLED_S)
            await self._strike.at(frozen)
            fake.release()
        await self._guarded("expose", exposing)
        return None if self._stage else exposing.result()

    async def _frozen_move(self, moving: Coroutine[Any, Any, None]) -> None:
        """Stands still with the first payload on its way, with the receipts behind the last one, or
        with the receipts there, and nobody looking.
        """
        frozen, world = self._strike.frozen, self._world
        if frozen is Phase.MATCH:
            world.a.hold(RECEIVE, count=2)
        if frozen not in (Phase.PAYLOAD, Phase.RECEIPT):
            await moving
            return
        first = frozen is Phase.PAYLOAD
        skip, count = (0, _FIRST_PIECES) if first else (_MIDDLE_PIECES, _LAST_PIECES)
        world.b.delay_payload(self._move, skip=skip, count=count)
        task = asyncio.ensure_future(moving)
        await asyncio.sleep(_SETTLED_S)
        assert not task.done(), "nothing stands still"
        await self._strike.at(frozen)
        while world.b.release():  # what was behind a fence stands still once more
            pass
        await task

    def _fail(self, stage: str, error: OrbitError) -> None:
        if not self._stage:
            self._stage, self._error = stage, error

    async def _guarded(
        self, stage: str, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]
    ) -> None:
        try:
            await work
        except (PathUnavailable, PathFailed, Unquiesced) as error:
            self._fail(stage, error)

    # --- what was seen ---

    def seen(self) -> Expected:
        other = self._strike.other
        assert not self._well.kept, f"the side that was not hit keeps {self._well.kept}"
        assert other is None or isinstance(other, OrbitError)
        return Expected(
            self._stage,
            None if self._error is None else type(self._error),
            None if other is None else type(other),
            self._pairs,
            tuple(self._side.kept),
        )

    def check_charges(self) -> None:
        """Each charge and each piece of memory is back, or kept and listed."""
        world, kept = self._world, self._cell.expected.kept
        entries = CONFIG.work_entries
        for path, pairs in zip((world.owner, world.consumer), self._pairs, strict=True):
            budgets = path.rail_statistics().budgets
            assert budgets["completion_entries"][0] == pairs * entries
            if path is self._well.path or self._cell.fault is not Fault.LATE or not kept:
                assert budgets["send_work"][0] == 0
                assert budgets["receive_work"][0] == 0
        assert world.owner.statistics().grants_active == 0
        assert self._side.unknown == self._strike.unknown
        assert self._well.unknown == 0
        self._check_retained(self._side)
        if self._parent is not None and not kept:
            self._parent.free()
        if not kept:
            assert world.owner.memory.allocated_bytes == 0
        moved_through = world.consumer.memory.allocated_bytes
        assert bool(moved_through) == ("local memory" in kept), moved_through

    def _check_retained(self, side: Side) -> None:
        statistics, now = side.path.statistics(), asyncio.get_running_loop().time()
        for item in statistics.retained:
            assert item.cause
            assert 0 <= now - item.since < _CELL_S
        held = 0
        for key, item in side.path._context.retained._entries.values():
            if isinstance(key, SourceGrant):
                assert key.keep is not None
            elif isinstance(key, Transfer):
                assert key.memory is not None
                assert key.memory.keep is not None
            else:
                assert item.nbytes == 0
                continue
            assert item.nbytes == key.record.length
            held += item.nbytes
        assert statistics.retained_bytes == held

    async def check_rails_serve(self) -> None:
        """Both of them, with what is left or newly connected."""
        if self._cell.fault is Fault.DESTROY:
            self._side.fake.clear_rules()  # it would destroy others
        path, session = self._world.consumer, self._world.consumer_session
        arrays = [
            await path.connect_route(session, self._direction, route)
            for route in self._world.routes
        ]
        again = self._transfer([(array, NEXT) for array in arrays])
        await again.run()
        again.free()

    # --- the end ---

    async def close(self) -> None:
        """Clean, or it says what is kept; a later one goes on."""
        fault, side = self._cell.fault, self._side.path
        if fault in (Fault.LATE, Fault.DESTROY):
            await self._refused_close()
            assert side.statistics().retained, "nobody can say what is kept"
            self._check_retained(self._side)
        if fault is Fault.DESTROY:
            await self._refused_close()  # nobody tries a second time
            assert self._side.kept == ["queue pair"]
            assert side.rail_statistics().endpoints == 1
        elif fault is Fault.LATE:
            assert self._side.fake.release()
            await self._close_clean(self._side)
        else:
            await self._close_clean(self._side)
        await self._close_clean(self._well)

    async def _refused_close(self) -> None:
        with pytest.raises(Unquiesced) as caught:
            await self._side.path.close()
        assert caught.value.cause

    async def _close_clean(self, side: Side) -> None:
        await side.path.close()
        assert side.path.rail_statistics().endpoints == 0
        assert not side.path.statistics().retained
        for fake in self._world.fakes_of(side):
            counters = fake.counters()
            assert counters.live_objects == 0, counters
            assert not counters.misuse, counters

    def _transfer(self, runs: list[tuple[int, int]]) -> RunTransfer:
        self._leases += 1
        return RunTransfer(self._world, runs, self._leases, self._direction)
