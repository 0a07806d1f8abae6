"""Large gets over several rails: connected behind the first one, offered from then on, and given up
when one of them fails.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import pytest

from orbit.errors import PathUnavailable
from orbit.model import Lease, PathName, PathReason
from orbit.protocol.messages import SliceRun
from orbit.protocol.paths import SPREAD_BYTES_MIN
from orbit.protocol.slices import BLOCK_BYTES
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.sim_railed_path import SimRailedPath
from orbit.testing.world import World, WorldNode

LARGE = SPREAD_BYTES_MIN + 12_345
RETAIN = RegisterOptions(retain=True)


def railed(node: WorldNode) -> SimRailedPath:
    assert isinstance(node.rdma, SimRailedPath)
    return node.rdma


def note_runs(node: WorldNode, monkeypatch: pytest.MonkeyPatch) -> list[tuple[SliceRun, ...]]:
    """What an owner exposes, as runs; whole exposures on one array are runs of one."""
    seen: list[tuple[SliceRun, ...]] = []
    path = railed(node)
    expose_runs = path.expose_runs

    async def note(
        session: Any, span: Any, lease_id: Any, runs: Sequence[SliceRun], direction: Any
    ) -> Any:
        seen.append(tuple(runs))
        return await expose_runs(session, span, lease_id, runs, direction)

    monkeypatch.setattr(path, "expose_runs", note)
    return seen


def add_pair(world: World, rails: int = 2) -> tuple[WorldNode, WorldNode]:
    nodes = [world.add_node(rails=rails, arena_bytes=32 << 20) for _ in range(2)]
    world.introduce()
    return nodes[0], nodes[1]


@functools.cache
def payload_of(nbytes: int) -> bytes:
    return pattern(nbytes)


async def get(owner: WorldNode, consumer: WorldNode, nbytes: int) -> Lease:
    payload = payload_of(nbytes)
    handle = await owner.rendezvous.owner.register_data_pinned(payload, RETAIN)
    api = consumer.rendezvous.consumer
    data, lease = await api.get(handle, transport=None, timeout=None)
    assert data == payload
    await api.release(handle, lease)
    await owner.rendezvous.owner.withdraw(handle)
    await asyncio.sleep(1.0)  # for what goes on behind it
    return lease


def test_large_gets_use_every_rail_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            seen = note_runs(owner, monkeypatch)
            await get(owner, consumer, 100_000)
            assert len(railed(consumer).arrays.requested) == 1
            await get(owner, consumer, LARGE)
            await get(owner, consumer, LARGE)
            await get(owner, consumer, SPREAD_BYTES_MIN - 1)
            assert [len({run.array for run in runs}) for runs in seen] == [1, 1, 2, 1]
            spread = seen[2]
            assert sum(run.nbytes for run in spread) == LARGE
            assert spread[0].nbytes % BLOCK_BYTES == 0
            assert abs(spread[0].nbytes - spread[1].nbytes) <= BLOCK_BYTES

    run_virtual(main())


def test_one_rail_stays_one_rail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, rails=1)
            seen = note_runs(owner, monkeypatch)
            for _ in range(3):
                await get(owner, consumer, LARGE)
            assert [len(runs) for runs in seen] == [1, 1, 1]

    run_virtual(main())


def test_a_rail_that_fails_costs_one_fallback_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            seen = note_runs(owner, monkeypatch)
            for _ in range(2):
                await get(owner, consumer, LARGE)
            railed(consumer).rail_down(1)
            lease = await get(owner, consumer, LARGE)
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason.GET_FAILED)
            lease = await get(owner, consumer, LARGE)
            assert lease.path is PathName.RDMA
            assert len(seen[-1]) == 1
            railed(consumer).rail_up(1)
            for _ in range(2):
                assert (await get(owner, consumer, LARGE)).path is PathName.RDMA
            assert len(seen[-1]) == 2

    run_virtual(main())


def test_arrays_that_the_owner_has_lost_leave_it_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for _ in range(2):
                await get(owner, consumer, LARGE)
            path = railed(owner)
            expose_runs = path.expose_runs

            async def one_is_lost(session: Any, span: Any, lease: Any, runs: Any, way: Any) -> Any:
                if len(runs) > 1:
                    raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED)
                return await expose_runs(session, span, lease, runs, way)

            monkeypatch.setattr(path, "expose_runs", one_is_lost)
            lease = await get(owner, consumer, LARGE)
            assert (lease.path, lease.reason) == (PathName.RDMA, PathReason.OK)

    run_virtual(main())


def test_an_epoch_that_ends_takes_its_arrays_along() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for _ in range(2):
                await get(owner, consumer, LARGE)
            spreading = consumer.rendezvous._consumer._spreading
            assert [len(arrays) for arrays in spreading._arrays.values()] == [2]
            world.network.cut_all()
            await asyncio.sleep(1.0)
            assert not spreading._arrays
            for _ in range(2):
                lease = await get(owner, consumer, LARGE)
            assert lease.path is PathName.RDMA

    run_virtual(main())
