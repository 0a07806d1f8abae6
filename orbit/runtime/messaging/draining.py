"""The end of a node in steps under one deadline: gate, sweep, drain, close.

The gate counts what was taken on and says no to what comes after it was shut; the shutdown has
registered memory given back, waits for the count to fall to zero and for open streams to end, drops
what is left when the time is up, and closes. Neither knows what a request or a stream is, nor what
is registered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ...errors import UsageError
from ...transport.timer import DeadlineTimer

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True)
class ShutdownPolicy:
    """How long a graceful shutdown waits for the requests that were taken on, and for streams."""

    timeout_s: float | None = None  # None: for as long as it takes

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 <= self.timeout_s < float("inf"):
            raise UsageError(f"timeout_s={self.timeout_s!r} is not a number of seconds")

    @classmethod
    def wait_forever(cls) -> ShutdownPolicy:
        """Until the last handler has answered and the last stream with a producer has ended: so no
        handler and no end of a stream may wait for it.
        """
        return cls()

    @classmethod
    def timeout(cls, seconds: float) -> ShutdownPolicy:
        """As `wait_forever`, or until `seconds` later; then the rest is dropped."""
        return cls(seconds)


class DrainGate:
    """Counts what was taken on. A *guard* is one `enter` that returned True and was not left yet.

    The guard is taken first and the flag is read second: whoever shuts the gate and then finds the
    count at zero knows that nothing is on its way in.
    """

    __slots__ = ("_draining", "_guards", "_waiters", "turned_away")

    def __init__(self) -> None:
        self._guards = 0
        self._draining = False
        self._waiters: list[asyncio.Future[None]] = []
        self.turned_away = 0

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def guards(self) -> int:
        return self._guards

    def enter(self) -> bool:
        """Take a guard. False: the gate is shut, and no guard is held."""
        self._guards += 1
        if self._draining:
            self.turned_away += 1
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """Give one guard back."""
        self._guards -= 1
        if self._guards == 0 and self._waiters:
            self._wake()

    def shut(self) -> None:
        """From now on `enter` says no. Idempotent; it is not opened again."""
        self._draining = True

    def watch_idle(self) -> asyncio.Future[None]:
        """Resolves when no guard is held. The waiter stands in the list before the count
        is read, so a guard that is left in between wakes it.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if self._guards == 0:
            self._wake()
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Sweep(Protocol):
    """Gives registered memory back, before the links go and with bounds of its own."""

    async def sweep(self) -> None:
        """Never raises."""

    def bring_forward(self, deadline: float) -> None:
        """What it waits for ends by force at `deadline` (loop time)."""


class GracefulShutdown:
    """Gate, sweep, drain, close: once, however many ask for it.

    `sweep` runs first, within the same deadline. `streams_idle` is awaited once no guard is held.
    `drop` gives up what is still queued or running and says how much that was; the guards of it are
    left by the time that its tasks have ended. `close` must have its own bound; it ends what
    streams are left.
    """

    def __init__(
        self,
        gate: DrainGate,
        streams_idle: Callable[[], Awaitable[None]],
        drop: Callable[[], int],
        close: Callable[[], Awaitable[None]],
        sweep: Sweep | None = None,
    ) -> None:
        self._gate = gate
        self._sweep = sweep
        self._streams_idle = streams_idle
        self._drop = drop
        self._close = close
        self._running: asyncio.Task[None] | None = None
        self._idle: asyncio.Task[None] | None = None
        self._timer: DeadlineTimer | None = None
        self._deadline: float | None = None
        self.dropped = 0

    async def run(self, policy: ShutdownPolicy) -> None:
        """Returns when the node is closed. Concurrent callers share one shutdown, and the soonest
        of their deadlines holds; cancelling a caller does not stop it.
        """
        loop = asyncio.get_running_loop()
        if self._running is None:
            self._gate.shut()
            self._idle = loop.create_task(self._wait_idle(), name="orbit drain")
            self._timer = DeadlineTimer(self._out_of_time)
            self._running = loop.create_task(self._run(self._idle), name="orbit graceful shutdown")
        if policy.timeout_s is not None:
            self._bring_forward(loop.time() + policy.timeout_s)
        await asyncio.shield(self._running)

    def _bring_forward(self, deadline: float) -> None:
        assert self._idle is not None
        assert self._timer is not None
        if self._sweep is not None:
            self._sweep.bring_forward(deadline)
        if self._idle.done() or (self._deadline is not None and self._deadline <= deadline):
            return
        self._deadline = deadline
        self._timer.arm(deadline)

    def _out_of_time(self) -> None:
        assert self._idle is not None
        self._idle.cancel()

    async def _wait_idle(self) -> None:
        await self._gate.watch_idle()
        await self._streams_idle()

    async def _run(self, idle: asyncio.Task[None]) -> None:
        try:
            if self._sweep is not None:
                await self._sweep.sweep()
            await asyncio.wait([idle])
        finally:
            assert self._timer is not None
            self._timer.arm(None)
            idle.cancel()
        if idle.cancelled():
            self.dropped = self._drop()
            _log.warning("shutting down out of time: %d requests were dropped", self.dropped)
        await self._close()
