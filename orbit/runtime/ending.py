"""The end of something as a list of named steps under one deadline, which may come nearer.

A step that fails or runs out of time is logged and the next one follows: what it could not prove
stays held by whoever holds it. It knows no step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..transport.timer import DeadlineTimer

_log = logging.getLogger("orbit")


class Outcome(StrEnum):
    DONE = "done"
    ENOUGH = "enough"  # cut short by the step's own limit
    LATE = "late"  # cut short at the deadline
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Step:
    """`at_least_s`: how long it may take even when the deadline has passed; `at_most_s`: when it is
    cut short though there is time left. `patient`: it has a bound of its own, and cutting it short
    would leave unproven what it is about to prove.
    """

    name: str
    work: Callable[[], Awaitable[None]]
    at_least_s: float = 0.0
    at_most_s: float = float("inf")
    patient: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """How one step went."""

    name: str
    seconds: float
    outcome: Outcome


class Ending:
    """Carries out `steps` in order, once, however many ask for it. `what` is for the log."""

    def __init__(self, what: str, steps: Sequence[Step]) -> None:
        self.reports: list[StepReport] = []
        self._what = what
        self._steps = tuple(steps)
        self._deadline = float("inf")
        self._patient = True  # the running step is not cut short
        self._not_before, self._latest = 0.0, float("inf")
        self._enough = False
        self._task: asyncio.Task[None] | None = None
        self._timer: DeadlineTimer | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._running is not None

    @property
    def deadline(self) -> float:
        """Loop time; infinite before `run`."""
        return self._deadline

    async def run(self, deadline: float) -> None:
        """Returns after the last step. The soonest deadline (loop time) of all callers holds;
        cancelling a caller stops nothing.
        """
        self.bring_forward(deadline)
        if self._running is None:
            self._timer = DeadlineTimer(self._out_of_time)
            self._running = asyncio.get_running_loop().create_task(
                self._run(), name=f"orbit {self._what}"
            )
        await asyncio.shield(self._running)

    def bring_forward(self, deadline: float) -> None:
        """From now on it ends by `deadline` (loop time), if that is sooner."""
        self._deadline = min(self._deadline, deadline)
        self._arm()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for step in self._steps:
            begun = loop.time()
            outcome = await self._carry_out(step, begun)
            report = StepReport(step.name, loop.time() - begun, outcome)
            self.reports.append(report)
            _log.debug("%s: %s: %s in %.3f s", self._what, step.name, outcome, report.seconds)

    async def _carry_out(self, step: Step, begun: float) -> Outcome:
        self._patient, self._enough = step.patient, False
        self._not_before, self._latest = begun + step.at_least_s, begun + step.at_most_s
        loop = asyncio.get_running_loop()
        task = loop.create_task(_awaited(step.work), name=f"orbit {step.name}")
        self._task = task
        self._arm()
        try:
            await asyncio.wait([task])
        finally:
            self._task = None
            self._arm()
        if task.cancelled():
            if self._enough:
                return Outcome.ENOUGH
            _log.warning("%s: out of time: %s", self._what, step.name)
            return Outcome.LATE
        error = task.exception()
        if error is None:
            return Outcome.DONE
        _log.error("%s: %s failed", self._what, step.name, exc_info=error)
        return Outcome.FAILED

    def _arm(self) -> None:
        if self._timer is None:
            return
        due = min(max(self._deadline, self._not_before), self._latest)
        idle = self._task is None or self._patient or due == float("inf")
        self._timer.arm(None if idle else due)

    def _out_of_time(self) -> None:
        if self._task is not None:
            self._enough = self._latest < max(self._deadline, self._not_before)
            self._task.cancel()


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()
