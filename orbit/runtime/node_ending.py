"""The two lists of steps that end a node: the sweep, by which a graceful shutdown takes registered
memory back while messages still live, and the close, which ends everything.

Why in this order: docs/design/shutdown.md.
"""

from __future__ import annotations

import asyncio
import functools

from ..errors import Unquiesced
from ..events import Recorder
from ..model import PathName
from ..transport.interface import DataPath, RegisteredPath
from .ending import Ending, Step
from .owner import Owner
from .paths import Paths
from .regions import Regions
from .runner import TaskRunner
from .sessions import Sessions, keep_path

# For consumers to give back leases whose bytes have all left: what was sent last is still on its
# way to them. A lease that somebody holds on to after that needs this node no more.
READ_LEASES_S = 1.0
# For a step that comes late: an orderly end beats what the kernel does.
LATE_S = 1.0


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
