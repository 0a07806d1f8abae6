"""The bulk connections of one consumer to one owner: few, reused, dialed when needed.

A connection carries one transfer at a time. Further ones wait in order; idle connections are
trimmed one by one. It knows neither handles nor leases, and dialing is a function that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from .tcp_bulk import ConnectionDied
from .tcp_bulk_consumer import BulkConsumer
from .tcp_wire import Wire


class BulkPool:
    """At most `connections_max` sockets, counted while idle, in use or being dialed."""

    def __init__(
        self, dial: Callable[[], Awaitable[Wire]], connections_max: int, idle_s: float
    ) -> None:
        self._dial = dial
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(connections_max)
        self._idle: list[BulkConsumer] = []  # the most recently used one last
        self._busy: set[BulkConsumer] = set()
        self._trim: asyncio.TimerHandle | None = None
        self._closed = False
        self.dials = 0

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._idle) + len(self._busy)

    @asynccontextmanager
    async def connection(self, *, fresh: bool) -> AsyncIterator[tuple[BulkConsumer, bool]]:
        """A connection for one transfer, and whether it had been idle before. `fresh`: one that was
        not; then the idle ones go too, since what killed one of them most likely killed all.

        Raises ConnectionDied when the pool is closed, and what dialing raises.
        """
        async with self._slots:
            if fresh:
                self._drop_idle()
            end = self._take_idle()
            reused = end is not None
            if end is None:
                end = await self._open()
            self._busy.add(end)
            try:
                yield end, reused
            finally:
                self._busy.discard(end)
                if self._closed:
                    end.wire.abort()
                elif not end.wire.closed:
                    self._idle.append(end)
                    self._arm_trim()

    def close(self) -> None:
        """Close every connection; transfers in progress fail, and touch their memory no more."""
        self._closed = True
        if self._trim is not None:
            self._trim.cancel()
        self._drop_idle()
        for end in tuple(self._busy):
            end.abort("the session is closed")

    async def _open(self) -> BulkConsumer:
        self._check_open()
        self.dials += 1
        await asyncio.sleep(0)  # dialing has deadlines, for which it needs to be a task by now
        wire = await self._dial()
        try:
            self._check_open()
        except ConnectionDied:
            wire.abort()
            raise
        return BulkConsumer(wire, self._forget)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionDied("the session is closed", answered=False)

    def _take_idle(self) -> BulkConsumer | None:
        while self._idle:
            end = self._idle.pop()
            # The loop may not have run since the peer closed it: look before anything is sent.
            if end.is_alive():
                return end
        return None

    def _forget(self, end: BulkConsumer) -> None:
        if end in self._idle:
            self._idle.remove(end)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().wire.close()

    def _arm_trim(self) -> None:
        if self._trim is None and self._idle:
            due = min(end.idle_since for end in self._idle) + self._idle_s
            self._trim = self._loop.call_at(due, self._on_trim)

    def _on_trim(self) -> None:
        self._trim = None
        now = self._loop.time()
        for end in [e for e in self._idle if e.idle_since + self._idle_s <= now]:
            self._idle.remove(end)
            end.wire.close()
        self._arm_trim()
