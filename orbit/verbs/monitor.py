"""Whether the rails still are what they were: asks their ports by the clock, and when a device says
that something changed.

Owns the decision when a rail is fenced and when it serves again: after everything that used its old
address has ended, under an address that the pins allow. Registrations and the history of keys stay
as they are meanwhile. It moves no data and ends no queue pair itself; those who own one hear of the
fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..errors import ClosedError, DeviceError, Unquiesced
from ..model import PathReason
from .async_events import AsyncEvent, AsyncEventKind
from .device import DeviceContext
from .probe import prove
from .rail_state import RailView

logger = logging.getLogger("orbit.verbs")

_PORT_CHANGES: Final = frozenset(
    {
        AsyncEventKind.PORT_ACTIVE,
        AsyncEventKind.LID_CHANGE,
        AsyncEventKind.PKEY_CHANGE,
        AsyncEventKind.SM_CHANGE,
        AsyncEventKind.CLIENT_REREGISTER,
        AsyncEventKind.GID_CHANGE,
    }
)
# What a rail is refused for at the start stays so; anything else may get better.
_FOR_GOOD: Final = frozenset({PathReason.NO_WINDOWS, PathReason.RANGE_NOT_ENFORCED})


@dataclass(frozen=True, slots=True)
class MonitorStatistics:
    """They only grow. `recoveries`: rails that serve again, or for the first time after a start
    with the port down.
    """

    ticks: int = 0
    queries: int = 0
    recoveries: int = 0


class Monitor:
    """All of it runs on one event loop; ports are asked in threads."""

    def __init__(self, devices: Sequence[DeviceContext], interval_s: float) -> None:
        self._rails = [_Rail(device, self.look_soon) for device in devices]
        self._interval_s = interval_s
        self._soon = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._closing = False
        self._ticks = 0

    def start(self) -> None:
        """Watch the events, and look at each rail from now on. In the running loop."""
        for rail in self._rails:
            rail.watch()
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Nothing is asked any more, and no trial is left. Raises Unquiesced when a driver still
        has a question: its device cannot close before it answers. A further call waits again.
        """
        self._closing = True
        self.look_soon()
        for rail in self._rails:
            rail.unwatch()
        if self._running is not None:
            await asyncio.wait([self._running])  # bounded: so is each of its steps
        for rail in self._rails:
            await rail.wait_answered()

    def look_soon(self) -> None:
        """Do not wait for the clock."""
        self._soon.set()

    async def tick(self) -> None:
        """Look at every rail once. Those that are busy are looked at again by a later one."""
        self._ticks += 1
        await asyncio.gather(*(rail.look() for rail in self._rails))

    def statistics(self) -> MonitorStatistics:
        return MonitorStatistics(
            self._ticks,
            sum(rail.queries for rail in self._rails),
            sum(rail.recoveries for rail in self._rails),
        )

    async def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._interval_s)
            self._soon.clear()
            if not self._closing:
                await self.tick()


class _Rail:
    """One device under watch."""

    def __init__(self, device: DeviceContext, look_soon: Callable[[], None]) -> None:
        self._device = device
        self._look_soon = look_soon
        self._asking: asyncio.Future[RailView] | None = None  # until its answer is taken up
        self._heard = 0  # events that make what was read before them worthless
        self._heard_then = 0  # likewise, when the question was put
        self.queries = 0
        self.recoveries = 0

    def watch(self) -> None:
        self._device.messaging.events.watch(self._on_event)

    def unwatch(self) -> None:
        self._device.messaging.events.unwatch(self._on_event)

    async def wait_answered(self) -> None:
        """Raises Unquiesced."""
        asking, timeout_s = self._asking, self._device.config.drain_timeout_s
        if asking is not None:
            await asyncio.wait([asking], timeout=timeout_s)
            if not asking.done():
                raise Unquiesced(str(self._device.state), 0, "its driver does not answer")
            asking.exception()  # nobody takes it up any more

    async def look(self) -> None:
        try:
            await self._look()
        except ClosedError:
            pass  # the device closes
        except Exception:  # the other rails must be looked at all the same
            logger.exception("%s: looking at the port failed", self._device.state)

    async def _look(self) -> None:
        device, state = self._device, self._device.state
        device.lanes.recover()
        if state.dead or device.closed:
            return
        if (lost := device.messaging.events.lost) is not None:
            self._fence(f"its events cannot be read: {lost}", for_good=True)
            return
        try:
            view = await self._ask()
        except DeviceError as error:
            self._fence(f"the port cannot be asked: {error}")
            return
        if view is None:
            return
        heard = self._heard_then
        if heard != self._heard:
            self._look_soon()  # what was read may be older than what was said
            return
        if change := state.change(view):
            self._fence(change)
        elif device.active:
            state.follow(view)
        if device.paused and view.port.active:
            await self._recover(view, heard)

    async def _ask(self) -> RailView | None:
        """None: the driver has not answered yet, which says nothing about the port. What it says
        late is taken up by the next look: reading a table of addresses can take longer than anyone
        waits.
        """
        asking = self._asking
        if asking is not None:
            return self._answer(asking) if asking.done() else None
        device = self._device
        self.queries += 1
        self._heard_then = self._heard
        asking = self._asking = device.offload.start(device.state.look)
        await asyncio.wait([asking], timeout=device.config.drain_timeout_s)
        if asking.done():
            return self._answer(asking)
        logger.warning("%s: the driver does not answer about the port", device.state)
        asking.add_done_callback(lambda _: self._look_soon())
        return None

    def _answer(self, asking: asyncio.Future[RailView]) -> RailView:
        """Raises DeviceError."""
        self._asking = None
        return asking.result()

    async def _recover(self, view: RailView, heard: int) -> None:
        """What used the rail before has to be gone; until then it stays paused."""
        device, state = self._device, self._device.state
        if device.queue_pairs or device.messaging.queue_pairs:
            return
        rail = state.choose(view)
        if rail is None:
            state.paused = "the port has no GID that can be used"
            return
        state.readdress(rail)
        reason, detail = await prove(device)
        if heard != self._heard or state.dead:
            self._look_soon()
        elif reason is not PathReason.OK:
            self._fence(detail, for_good=reason in _FOR_GOOD)
        else:
            state.resume(replace(rail, range_enforced=device.rail.range_enforced))
            self.recoveries += 1
            logger.info("%s: serves with GID %s", state, rail.gid)

    def _fence(self, why: str, *, for_good: bool = False) -> None:
        if self._device.active:
            logger.warning("%s: fenced: %s", self._device.state, why)
        self._device.state.fence(why, for_good=for_good)

    def _on_event(self, event: AsyncEvent) -> None:
        kind = event.kind
        if kind is AsyncEventKind.DEVICE_FATAL:
            self._heard += 1
            self._fence(f"event {kind}", for_good=True)
        elif kind is AsyncEventKind.CQ_ERR:
            error = DeviceError(self._device.name, "poll_cq", 0, f"event {kind}")
            if self._device.lanes.fail_queue(event.native, error):
                self._look_soon()
        elif event.port != self._device.rail.port:
            return
        elif kind is AsyncEventKind.PORT_ERR:
            self._heard += 1
            self._fence(f"event {kind}")
        elif kind in _PORT_CHANGES:
            self._heard += 1
            self._look_soon()
