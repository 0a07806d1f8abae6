"""C43 on the scripted device: completions of a dead queue pair that come late, twice, reversed, or
after everything is closed, and completions that nobody asked for.

`Mangled` sits between the helper and a path's lane. Whatever comes, every slot, buffer and window
is back after each round.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import OrbitError, PathFailed, PathUnavailable
from orbit.model import Direction, PathReason
from orbit.verbs import records
from orbit.verbs.completion_source import EventSource
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.records import Completion
from orbit.verbs.scripted_fabric import RECEIVE
from orbit.verbs.status import WR_FLUSH_ERR
from orbit.verbs.turn import Look, Posted
from tests.contract.rdma_pairs import QUICK, Get, Put, ScriptedPair, array_of, counts, rdma_pair

ROUNDS = 3000 if os.environ.get("ORBIT_SOAK") == "1" else 300
CONFIG = replace(QUICK, num_lanes=1, width=1, connect_backoff_s=0.0, progress_timeout_s=5.0)
Mangle = Callable[["Mangled", list[Completion]], list[Completion]]


class Mangled:
    """Passes the completions of a path's one lane through `mangle`."""

    def __init__(self, path: RdmaPath, mangle: Mangle) -> None:
        self.flushes: list[Completion] = []  # every one so far
        self.late: list[Completion] = []
        self._mangle = mangle
        (device,) = path.devices
        (self.lane,) = device.lanes.lanes
        # Paths on one fabric share their helper; a lane's source has its own view of it.
        source = self.lane.source
        assert isinstance(source, EventSource)
        self._turn = source._turn
        source._turn = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._turn, name)

    def wake(self, *arguments: int) -> Look:
        return self._looked(self._turn.wake(*arguments))

    def nap(self, *arguments: int) -> Look:
        return self._looked(self._turn.nap(*arguments))

    def post(self, *arguments: Any) -> Posted:
        posted = self._turn.post(*arguments)
        return posted if posted.look is None else posted._replace(look=self._looked(posted.look))

    def _looked(self, look: Look) -> Look:
        return look._replace(found=self._mangled(look.found))

    def _mangled(self, found: list[Completion]) -> list[Completion]:
        self.flushes += [c for c in found if c.status == WR_FLUSH_ERR]
        return self._mangle(self, found)


def unchanged(_: Mangled, found: list[Completion]) -> list[Completion]:
    return found


def twice(_: Mangled, found: list[Completion]) -> list[Completion]:
    return [*found, *found]


def reversed_flushes(_: Mangled, found: list[Completion]) -> list[Completion]:
    good = [c for c in found if c.status == 0]
    return good + [c for c in reversed(found) if c.status != 0]


def late(mangled: Mangled, found: list[Completion]) -> list[Completion]:
    """Each flush comes a while after the device gave it, in a poll of its own."""
    came, mangled.late = mangled.late, [c for c in found if c.status == WR_FLUSH_ERR]
    if mangled.late:
        asyncio.get_running_loop().call_later(0.002, mangled.lane.poll)
    return came + [c for c in found if c.status != WR_FLUSH_ERR]


def from_the_dead(mangled: Mangled, found: list[Completion]) -> list[Completion]:
    """Flushes of queue pairs that are closed by now come once more, again and again."""
    return [*mangled.flushes[:-8][-16:], *found]


def foreign(_: Mangled, found: list[Completion]) -> list[Completion]:
    """Ids that were never given out: too high, of generation 0, of an earlier generation."""
    ids = (0xFFFF_FFFF_FFFF_FFFF, 0, 1 << 20, 5)
    return [*(Completion(i, WR_FLUSH_ERR, 0, 0, 1, 0, 0, 0) for i in ids), *found]


MANGLES = [unchanged, twice, reversed_flushes, late, from_the_dead, foreign]


@pytest.mark.parametrize("mangle", MANGLES)
def test_free_lists_are_exact_after_every_round(mangle: Mangle) -> None:
    """Each round: transfers with READs or WRITEs in flight, then the queue pair dies under them."""
    rounds = ROUNDS // len(MANGLES)

    async def scenario(pair: ScriptedPair) -> None:
        mangled = [Mangled(path, mangle) for path in (pair.owner, pair.consumer)]
        before = snapshot(pair)
        chance = random.Random(1)
        for number in range(rounds):
            direction = chance.choice(list(Direction))
            await one_round(pair, 1 + number * 10, direction, chance.choice(ENDS))
            assert snapshot(pair) == before, (number, direction)
        pair.b.clear_rules()
        pair.b.release()
        await Get(pair, 5000, 10**6).run()
        await Put(pair, 5000, 10**6 + 1).run()
        unknown = sum(m.statistics().unknown_completions for m in (pair.owner, pair.consumer))
        if mangle in (twice, from_the_dead, foreign):
            assert unknown > rounds
        assert all(m.flushes for m in mangled)

    async def main() -> None:
        async with rdma_pair(config=CONFIG, pinned_targets=False) as pair:
            for direction in Direction:
                assert await prepared(pair, direction)
            await scenario(pair)

    asyncio.run(main())


async def one_round(pair: ScriptedPair, lease: int, direction: Direction, end: End) -> None:
    read = direction is Direction.READ
    kind = Get if read else Put
    moves = [kind(pair, 3 << 20, lease), kind(pair, 5000, lease + 1), kind(pair, 70_000, lease + 2)]
    exposures = [await move.expose() for move in moves]
    pair.b.delay_payload(records.READ if read else records.WRITE)
    tasks = [
        asyncio.ensure_future(m.pull(e) if isinstance(m, Get) else m.push(e))
        for m, e in zip(moves, exposures, strict=True)
    ]
    for _ in range(200):
        await asyncio.sleep(0)
    await end(pair, direction)
    pair.b.clear_rules()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, PathFailed) for error in done), done
    for move in moves:
        assert move.untouched
        await pair.owner.retract(pair.owner_session, move.lease, transferred=False)
        pair.owner.memory.free(move.memory)
    assert await prepared(pair, direction)


async def by_the_consumer(pair: ScriptedPair, direction: Direction) -> None:
    member = array_of(pair, direction).member(0)
    assert member is not None
    member.abort(OrbitError("killed by the test"))


async def by_the_owner(pair: ScriptedPair, direction: Direction) -> None:
    number = 0 if direction is Direction.READ else 1
    array = pair.owner._sources._arrays[pair.owner_session.attempt, number]
    array.members[0].abort(OrbitError("killed by the test"))


End = Callable[[ScriptedPair, Direction], Awaitable[None]]
ENDS: list[End] = [by_the_consumer, by_the_owner]


async def prepared(pair: ScriptedPair, direction: Direction) -> bool:
    """Both ends have a queue pair of that direction again, and nothing of an older one."""
    for _ in range(2000):
        reason = await pair.consumer.prepare(pair.consumer_session, direction)
        if reason is PathReason.OK and await exposes(pair, direction) and settled(pair):
            return True
        await asyncio.sleep(0.001)
    return False


async def exposes(pair: ScriptedPair, direction: Direction) -> bool:
    """The owner's end lives, too."""
    number = 0 if direction is Direction.READ else 1
    try:
        pair.owner._sources.choose(pair.owner_session, number, direction)
    except PathUnavailable:
        return False
    return True


def settled(pair: ScriptedPair) -> bool:
    """No queue pair is on its way out or in."""
    wanted = len(list(pair.consumer._requests.arrays))  # of one member each
    paths = (pair.owner, pair.consumer)
    return all(path.statistics().queue_pairs == wanted for path in paths)


def snapshot(pair: ScriptedPair) -> dict[str, object]:
    """Every free list and count that a round must leave as it was."""
    found: dict[str, object] = {}
    for name, path in (("owner", pair.owner), ("consumer", pair.consumer)):
        statistics = path.statistics()
        (device,) = path.devices
        found[f"{name} queue pairs"] = statistics.queue_pairs
        found[f"{name} grants"] = statistics.grants_active
        found[f"{name} retained"] = statistics.retained
        found[f"{name} room"] = [lane.room for lane in device.lanes.lanes]
        found[f"{name} waited for"] = sum(len(lane.table) for lane in device.lanes.lanes)
    for array in pair.consumer._requests.arrays:
        direction, member = array.name.direction, array.member(0)
        assert member is not None
        found[f"{direction} slots"] = (member.queue_pair.send_free, member.queue_pair.recv_free)
        found[f"{direction} bindings"] = len(member._bindings.free)
        found[f"{direction} admission"] = member.admission._slots_free
        found[f"{direction} transfers"] = len(member._transfers)
    for (_, number), source in pair.owner._sources._arrays.items():
        served = source.members[0]
        found[f"{number} slots"] = (served.queue_pair.send_free, served.queue_pair.recv_free)
        found[f"{number} receives"] = len(served._receives.free)
        found[f"{number} windows"] = served._windows.taken
    return found


def test_a_receive_that_is_refused_loses_no_other_completion() -> None:
    """Binds are on their way; the receive of a further one cannot be posted."""

    async def scenario(pair: ScriptedPair) -> None:
        pair.a.hold(records.BIND_WINDOW)
        pair.a.refuse_post(RECEIVE, 12, skip=2)
        gets = [Get(pair, 1000, lease) for lease in range(1, 5)]
        exposing = [asyncio.ensure_future(get.expose()) for get in gets]
        await asyncio.sleep(0.02)
        pair.a.clear_rules()
        pair.a.release()
        results = await asyncio.gather(*exposing, return_exceptions=True)
        assert any(isinstance(result, PathUnavailable) for result in results)
        assert all(
            isinstance(result, PathUnavailable) or not isinstance(result, BaseException)
            for result in results
        )
        for get in gets:
            await get.retract(transferred=False)
        assert pair.owner.statistics().grants_active == 0
        assert await prepared(pair, Direction.READ)
        await Get(pair, 5000, 9).run()
        assert counts(pair.owner)["aborts"] == 1

    async def main() -> None:
        async with rdma_pair(config=CONFIG, pinned_targets=False) as pair:
            assert await prepared(pair, Direction.READ)
            await scenario(pair)

    asyncio.run(main())
