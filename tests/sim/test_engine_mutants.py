"""The random worlds of engines find what they are made to find: each bug that is planted here is
seen within a bounded number of seeds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orbit.errors import PathFailed
from orbit.protocol.messages import EndReply
from orbit.runtime.engine import parent_job
from orbit.runtime.engine.local_memory import LocalMemory
from orbit.runtime.engine.parent_job import ParentJob
from orbit.runtime.engine.parent_run import ParentRun
from orbit.runtime.engine.planning import RailPlanner
from orbit.runtime.engine.staging import StagedMemory
from orbit.runtime.peer_calls import PeerCalls
from orbit.runtime.ranged import RangedPart
from orbit.testing.clock import run_virtual
from tests.sim.test_engine_worlds import run_story

SEEDS_MAX = 60

Plant = Callable[[pytest.MonkeyPatch], None]


def local_range_unlocked_at_once(patch: pytest.MonkeyPatch) -> None:
    class Unlocked(LocalMemory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._lock.release()

    patch.setattr(parent_job, "LocalMemory", Unlocked)


def source_range_unlocked_before_the_verdict(patch: pytest.MonkeyPatch) -> None:
    admit = RangedPart.admit

    async def admit_and_unlock(self: RangedPart, *args: Any) -> None:
        await admit(self, *args)
        if self._lock is not None:
            self._lock.release()
            self._lock = SimpleNamespace(release=lambda: None)  # type: ignore[assignment]

    patch.setattr(RangedPart, "admit", admit_and_unlock)


def success_before_the_receipts(patch: pytest.MonkeyPatch) -> None:
    on_end = PeerCalls._on_end

    async def acknowledge(self: PeerCalls, session: Any, end: Any, *, drop: bool) -> Any:
        with contextlib.suppress(PathFailed):
            await on_end(self, session, end, drop=drop)
        return EndReply(in_place=end.transferred)

    patch.setattr(PeerCalls, "_on_end", acknowledge)


def rails_stay_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RailPlanner, "repay", lambda self, plan: None)


def private_arrays_stay(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: ParentJob) -> None:
        return None

    patch.setattr(ParentJob, "_close_private", nothing)


def the_copy_is_not_copied_out(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: StagedMemory) -> None:
        return None

    patch.setattr(StagedMemory, "empty", nothing)


def unproven_memory_is_given_back(patch: pytest.MonkeyPatch) -> None:
    async def close(self: ParentJob, run: ParentRun, *, succeeded: bool) -> Any:
        return await self._give_back(succeeded=succeeded)

    patch.setattr(LocalMemory, "keep", lambda self, cause: None)
    patch.setattr(ParentJob, "_close", close)


MUTANTS: tuple[Plant, ...] = (
    local_range_unlocked_at_once,
    source_range_unlocked_before_the_verdict,
    success_before_the_receipts,
    rails_stay_charged,
    private_arrays_stay,
    the_copy_is_not_copied_out,
    unproven_memory_is_given_back,
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "orbit"):
        yield


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        _run_worlds(withholds=plant is unproven_memory_is_given_back)


def _run_worlds(*, withholds: bool) -> None:
    for seed in range(SEEDS_MAX):
        run_virtual(run_story(seed, withholds))
