"""Regions of one node, on memory whose devices answer when the test lets them."""

from __future__ import annotations

import asyncio

from orbit.events import Recorder
from orbit.runtime.regions import Regions
from orbit.runtime.runner import TaskRunner
from orbit.testing.sim_memory import Refusals, SimPinnedMemory
from orbit.transport.interface import RegisteredRange


class SlowMemory(SimPinnedMemory):
    """Devices answer while `open` is set."""

    def __init__(self, limit_bytes: int = 1 << 48) -> None:
        super().__init__(limit_bytes=limit_bytes)
        self.open = asyncio.Event()
        self.open.set()

    @property
    def regions(self) -> int:
        """Registered in place now."""
        return self.statistics().regions

    def refuse(self, deregistrations: int) -> None:
        """That many of the next ones fail."""
        self.refusals = Refusals(deregistrations=deregistrations)

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        await self.open.wait()
        return await super().register(view, remote=remote)

    async def deregister(self, registered: RegisteredRange) -> None:
        await self.open.wait()
        await super().deregister(registered)


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


class RegionRig:
    """Build it within a running loop. `devices` False: a node without RDMA."""

    def __init__(
        self, *, devices: bool = True, drop_timeout_s: float = 30.0, limit_bytes: int = 1 << 48
    ) -> None:
        self.memory = SlowMemory(limit_bytes)
        self.runner = TaskRunner()
        self.recorder = Recorder()
        memory = self.memory if devices else None
        self.regions = Regions(memory, self.runner, self.recorder, drop_timeout_s)

    async def check_nothing_left(self) -> None:
        await settle()  # a task that has just said its last word
        assert len(self.regions) == 0
        assert len(self.runner) == 0
        assert self.memory.regions == self.memory.registered_bytes == 0
