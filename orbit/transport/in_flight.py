"""Which operations have begun and not ended, for whoever waits until those of now have."""

from __future__ import annotations

import asyncio


class InFlight:
    """One future for each. Of one event loop."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self) -> asyncio.Future[None]:
        """One more; give it to `end`."""
        running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(running)
        return running

    def end(self, running: asyncio.Future[None]) -> None:
        """It is over, well or not. Once."""
        self._running.discard(running)
        running.set_result(None)

    async def wait(self) -> None:
        """Until those that run now have ended."""
        if self._running:
            await asyncio.wait(set(self._running))
