"""The bulk connections of one consumer to one owner: few, reused, dialed when needed.

A connection carries one pull at a time. Further pulls wait in order; idle connections are trimmed
one by one. It knows neither handles nor leases, and dialing is a function that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from .tcp_bulk import ConnectionDied
from .tcp_bulk_reader import BulkReader
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
        self._idle: list[BulkReader] = []  # the most recently used one last
        self._busy: set[BulkReader] = set()
        self._trim: asyncio.TimerHandle | None = None
        self._closed = False
        self.dials = 0

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._idle) + len(self._busy)

    @asynccontextmanager
    async def connection(self, *, fresh: bool) -> AsyncIterator[tuple[BulkReader, bool]]:
        """A connection for one pull, and whether it had been idle before. `fresh`: one that was
        not; then the idle ones go too, since what killed one of them most likely killed all.

        Raises ConnectionDied when the pool is closed, and what dialing raises.
        """
        async with self._slots:
            if fresh:
                self._drop_idle()
            reader = self._take_idle()
            reused = reader is not None
            if reader is None:
                reader = await self._open()
            self._busy.add(reader)
            try:
                yield reader, reused
            finally:
                self._busy.discard(reader)
                if self._closed:
                    reader.wire.abort()
                elif not reader.wire.closed:
                    self._idle.append(reader)
                    self._arm_trim()

    def close(self) -> None:
        """Close every connection; pulls in progress fail, and touch their targets no more."""
        self._closed = True
        if self._trim is not None:
            self._trim.cancel()
        self._drop_idle()
        for reader in tuple(self._busy):
            reader.abort("the session is closed")

    async def _open(self) -> BulkReader:
        self._check_open()
        self.dials += 1
        wire = await self._dial()
        try:
            self._check_open()
        except ConnectionDied:
            wire.abort()
            raise
        return BulkReader(wire, self._forget)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionDied("the session is closed", answered=False)

    def _take_idle(self) -> BulkReader | None:
        while self._idle:
            reader = self._idle.pop()
            # The loop may not have run since the peer closed it: look before anything is sent.
            if reader.is_alive():
                return reader
        return None

    def _forget(self, reader: BulkReader) -> None:
        if reader in self._idle:
            self._idle.remove(reader)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().wire.close()

    def _arm_trim(self) -> None:
        if self._trim is None and self._idle:
            due = min(reader.idle_since for reader in self._idle) + self._idle_s
            self._trim = self._loop.call_at(due, self._on_trim)

    def _on_trim(self) -> None:
        self._trim = None
        now = self._loop.time()
        for reader in [r for r in self._idle if r.idle_since + self._idle_s <= now]:
            self._idle.remove(reader)
            reader.wire.close()
        self._arm_trim()
