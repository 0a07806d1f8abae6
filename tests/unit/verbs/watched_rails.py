"""Rails of scripted devices under a monitor, on a clock that jumps and without threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from orbit.errors import OrbitError, PathUnavailable
from orbit.memory.buffer import address_of
from orbit.protocol.messages import RailHint
from orbit.verbs.device import DeviceContext
from orbit.verbs.monitor import Monitor
from orbit.verbs.offload import Offload
from orbit.verbs.provider import NativeRegion
from orbit.verbs.queue_pair import BulkQueuePair
from orbit.verbs.rail_state import RailPlace
from orbit.verbs.records import ACCESS_LOCAL_WRITE
from orbit.verbs.scripted import ScriptedProvider
from orbit.verbs.scripted_fabric import ScriptedDevice, ScriptedFabric
from orbit.verbs.settings import RdmaPathConfig

T = TypeVar("T")

CONFIG = RdmaPathConfig(send_depth=8, recv_depth=8, monitor_interval_s=1.0)


class InlineOffload(Offload):
    """Calls run at once; those of a `stuck` one never end."""

    def __init__(self) -> None:
        self.stuck = False

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.stuck:
            return done
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """There is nothing to end."""


class WatchedRail:
    """One device with an owner of queue pairs, which ends them as the owners of arrays do."""

    def __init__(self, fake: ScriptedDevice, device: DeviceContext) -> None:
        self.fake = fake
        self.device = device
        self.causes: list[OrbitError] = []
        self.hold_end = asyncio.Event()  # set: ends are not held up
        self.hold_end.set()
        self.regions: list[NativeRegion] = []
        self._memory = bytearray(4096)
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def offload(self) -> InlineOffload:
        assert isinstance(self.device.offload, InlineOffload)
        return self.device.offload

    async def register(self) -> NativeRegion:
        address = address_of(memoryview(self._memory))
        region = await self.device.domain.register(address, len(self._memory), ACCESS_LOCAL_WRITE)
        self.regions.append(region)
        return region

    def create(self) -> BulkQueuePair:
        made: list[BulkQueuePair] = []

        def failed(cause: OrbitError) -> None:
            self.causes.append(cause)
            task = asyncio.get_running_loop().create_task(self._end(made[0], cause))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        made.append(self.device.create_queue_pair(failed))
        return made[0]

    def refused(self) -> str:
        """Why no queue pair can be made now."""
        try:
            self.create()
        except PathUnavailable as error:
            return str(error.reason)
        raise AssertionError("a queue pair was made")

    async def _end(self, queue_pair: BulkQueuePair, cause: OrbitError) -> None:
        await self.hold_end.wait()
        await queue_pair.drain(cause)
        await self.device.destroy_queue_pair(queue_pair)


class Watch:
    """Rails and their monitor."""

    def __init__(self, rails: list[WatchedRail], monitor: Monitor) -> None:
        self.rails = rails
        self.monitor = monitor

    @property
    def recoveries(self) -> int:
        return self.monitor.statistics().recoveries

    async def seconds(self, count: float) -> None:
        """Of virtual time."""
        await asyncio.sleep(count)


@contextlib.asynccontextmanager
async def watched(
    *names: str,
    config: RdmaPathConfig = CONFIG,
    prepare: Callable[[ScriptedDevice], None] = lambda fake: None,
    rxe: bool = False,
) -> AsyncIterator[Watch]:
    """`prepare` runs on each device before it is opened. Afterwards nothing may be left."""
    fabric = ScriptedFabric(rxe=rxe)
    rails: list[WatchedRail] = []
    for nic, name in enumerate(names):
        fake = fabric.add_device(name)
        prepare(fake)
        gid_index = 1 if config.gid_index is None else config.gid_index
        hint = RailHint(name, 1, fake.gids[gid_index], gid_index, 4096)
        provider, place = ScriptedProvider(fabric, [name]), RailPlace(nic)
        device = await DeviceContext.open(provider, hint, config, InlineOffload(), 0, place)
        device.state.proven = device.active
        rails.append(WatchedRail(fake, device))
    monitor = Monitor([rail.device for rail in rails], config.monitor_interval_s)
    monitor.start()
    try:
        yield Watch(rails, monitor)
    finally:
        await monitor.close()
    for rail in rails:
        rail.device.state.fence("the test is over")
        await asyncio.sleep(1)
        for region in rail.regions:
            await rail.device.domain.deregister(region)
        await rail.device.close()
        counters = rail.fake.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters
