"""Transfer engines that have next to nothing of something: all transfers go on, one after another,
and none waits for ever for what only another one that waits could give back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from orbit.config import EngineConfig
from orbit.errors import PathUnavailable
from orbit.model import PathReason, RegionAccess
from orbit.runtime.engine.requests import TransferResult, TransferState
from orbit.testing.clock import run_virtual
from orbit.testing.engine_world import Ask, EngineNode, EngineWorld
from orbit.testing.pattern import pattern

NBYTES = 100_000
STAGED: dict[str, Any] = {"host_memory": "staged", "block_bytes": 1024}
DIRECT: dict[str, Any] = {"block_bytes": 1024}


def _asks(here: EngineNode, there: EngineNode, count: int) -> list[Ask]:
    """READs and WRITEs by turns, no two of the same memory."""
    return [
        Ask(
            "write" if place % 2 else "read",
            here.areas[2 * place],
            there.areas[2 * place + 1],
            [(0, 0, NBYTES)],
        )
        for place in range(count)
    ]


async def _run(
    one: dict[str, Any], other: dict[str, Any], count: int, *, both_ways: bool
) -> list[TransferResult]:
    """All at once, without deadlines."""
    async with EngineWorld() as world:
        near, far = (world.add_engine(EngineConfig(**knobs)) for knobs in (one, other))
        world.introduce()
        for made in (near, far):
            contents = [pattern(NBYTES, place) for place in range(2 * count)]
            await world.place(made, contents, RegionAccess.READ_WRITE)
        ways = [(near, far), (far, near)] if both_ways else [(near, far)]
        batches = [world.transfer(here, _asks(here, there, count)) for here, there in ways]
        found: Sequence[list[TransferResult]] = await asyncio.gather(*batches)
        return [result for results in found for result in results]


@pytest.mark.parametrize(
    "scarce",
    [
        {**STAGED, "max_endpoints": 4},
        {**STAGED, "max_endpoints": 2},
        {**STAGED, "max_staging_bytes": NBYTES},
        {**DIRECT, "max_endpoints": 8},
        {**DIRECT, "max_direct_bytes": NBYTES},
        {**DIRECT, "max_grants": 4},
        {**DIRECT, "max_grants": 1},
    ],
    ids=str,
)
def test_all_of_one_side_go_through(scarce: dict[str, Any]) -> None:
    for result in run_virtual(_run(scarce, DIRECT, 4, both_ways=False)):
        assert result.state is TransferState.SUCCEEDED, result


@pytest.mark.parametrize("endpoints", [2, 4, 6])
@pytest.mark.parametrize("knobs", [STAGED, DIRECT], ids=["staged", "direct"])
def test_two_sides_do_not_wait_for_each_other_for_ever(
    knobs: dict[str, Any], endpoints: int
) -> None:
    scarce = {**knobs, "max_endpoints": endpoints}
    for result in run_virtual(_run(scarce, scarce, 4, both_ways=True)):
        if result.state is not TransferState.SUCCEEDED:  # it says that there was no room
            assert isinstance(result.error, PathUnavailable), result
            assert result.error.reason == PathReason.CONNECT_FAILED
