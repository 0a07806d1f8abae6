"""The end of a node as lists of named steps, each under one deadline that may come nearer.

Two lists: the sweep, by which a graceful shutdown takes registered memory back while messages still
live, and the close, which ends everything. A step that fails or runs out of time is logged and the
next one follows: what it could not prove stays held by whoever holds it. Why this order:
docs/design/shutdown.md.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..errors import Unquiesced
from ..events import Recorder
from ..model import PathName
from ..transport.interface import DataPath, RegisteredPath
from ..transport.timer import DeadlineTimer
from .owner import Owner
from .paths import Paths
from .regions import Regions
from .runner import TaskRunner
from .sessions import Sessions, keep_path

_log = logging.getLogger("orbit")

# For consumers to give back leases whose bytes have all left: what was sent last is still on its
# way to them. A lease that somebody holds on to after that needs this node no more.
READ_LEASES_S = 1.0
# For a step that comes late: an orderly end beats what the kernel does.
LATE_S = 1.0


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


class MemorySweep(Ending):
    """Gives registered memory back while peers still talk to this node: what is staged goes on as a
    copy, over TCP. Messages need none of it.
    """

    def __init__(self, owner: Owner, regions: Regions, paths: Paths, timeout_s: float) -> None:
        """`timeout_s` bounds it where the shutdown itself has no bound."""
        self._owner = owner
        self._regions = regions
        self._paths = paths
        self._memory = paths.memory
        self._rdma = paths.rdma if isinstance(paths.rdma, RegisteredPath) else None
        self._timeout_s = timeout_s
        super().__init__(
            "giving registered memory back",
            [
                Step("gate", self._gate, patient=True),
                Step("registrations in progress", self._settle),
                Step("copying pinned payloads", self._demote),
                Step("transfers", self._drain),
                Step("leases that were read", self._wait_read, at_most_s=READ_LEASES_S),
                Step("uses of regions", regions.drain),
                Step("ending transfers", self._end_transfers, patient=True),
                # What was staged while the others were copied.
                Step("copying what came late", self._demote, at_least_s=LATE_S),
                Step("regions", regions.deregister_all, at_least_s=LATE_S),
                Step("arenas", self._release, patient=True),
            ],
        )

    async def sweep(self) -> None:
        """As `run`, within the timeout, or sooner when that is brought forward."""
        await self.run(asyncio.get_running_loop().time() + self._timeout_s)

    async def _gate(self) -> None:
        # No await between them: nobody finds one shut and the next one open.
        self._owner.gate()
        self._owner.stop_reaper()
        self._regions.gate()
        if self._memory is not None:
            self._memory.gate()
        if self._rdma is not None:
            self._rdma.gate()

    async def _settle(self) -> None:
        if self._memory is not None:
            await self._memory.drain()

    async def _demote(self) -> None:
        await self._owner.demote_all()

    async def _drain(self) -> None:
        async with asyncio.TaskGroup() as together:
            for path in self._paths:
                together.create_task(path.drain())

    async def _wait_read(self) -> None:
        try:
            for path in self._paths:
                await self._owner.wait_unexposed(path.name)
        finally:
            # Nothing is on its way any more, or its time is up.
            for path in self._paths:
                await self._owner.end_exposures(path.name)

    async def _end_transfers(self) -> None:
        if self._rdma is not None:
            await self._rdma.end_transfers()
            await self._owner.end_exposures(PathName.RDMA)

    async def _release(self) -> None:
        if self._rdma is not None:
            await self._rdma.release_memory()


class Closing(Ending):
    """Ends everything that a node's rendezvous half owns, and what rides on its sessions."""

    def __init__(
        self,
        sweep: MemorySweep,
        owner: Owner,
        sessions: Sessions,
        runner: TaskRunner,
        regions: Regions,
        paths: Paths,
        recorder: Recorder,
    ) -> None:
        self._sweep = sweep
        self._runner = runner
        self._recorder = recorder
        # Leases first, while their sessions live: a lease that ends with its receipt costs no queue
        # pair. Then the epochs with their fetches; then what still runs is told to stop.
        steps = [
            Step("the sweep", self._finish_sweep, patient=True),
            Step("leases", owner.close),
            Step("connections", sessions.close),
        ]
        if sessions.service is not None:
            steps.append(Step("message transports", sessions.service.close))
        steps += [
            # Before the paths, which close the devices.
            Step("regions", regions.deregister_all, at_least_s=LATE_S),
            Step("tasks", self._drain_tasks),
            Step("tasks that would not end", self._cancel_tasks, patient=True),
        ]
        for path in paths:
            close = functools.partial(self._close_path, path)
            steps.append(Step(f"the {path.name} path", close, at_least_s=LATE_S))
        steps.append(Step("release signals", regions.latch_all, at_least_s=LATE_S))
        super().__init__("closing", steps)

    async def _finish_sweep(self) -> None:
        """One that is under way uses what is about to end."""
        if self._sweep.started:
            await self._sweep.run(asyncio.get_running_loop().time())

    async def _drain_tasks(self) -> None:
        await self._runner.drain(self.deadline)

    async def _cancel_tasks(self) -> None:
        if len(self._runner):
            await self._runner.cancel(asyncio.get_running_loop().time() + LATE_S)

    async def _close_path(self, path: DataPath) -> None:
        try:
            await path.close()
        except Unquiesced as error:
            keep_path(path, error, self._recorder)
        except asyncio.CancelledError:
            late = Unquiesced(f"the {path.name} path", 0, "closing it ran out of time")
            keep_path(path, late, self._recorder)
            raise
