"""How many of something live, and waiting until none does.

What is kept for ever, since its end cannot be proven, is counted too, and said by whoever waits.
"""

from __future__ import annotations

import asyncio

from ...errors import DeadlineExceeded, Unquiesced


class Tally:
    """For one event loop. `what` is for errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._live = 0
        self._kept = 0
        self._kept_bytes = 0
        self._changed: asyncio.Future[None] | None = None

    @property
    def live(self) -> int:
        """Those that are kept included."""
        return self._live

    def enter(self) -> None:
        """One more."""
        self._live += 1

    def leave(self) -> None:
        """One less."""
        self._live -= 1
        self._wake()

    def keep(self, nbytes: int) -> None:
        """One of those that live will not leave, as far as can be told."""
        self._kept += 1
        self._kept_bytes += nbytes
        self._wake()

    async def wait_none(self, deadline: float, timeout_s: float) -> None:
        """Until none lives. Raises DeadlineExceeded at `deadline` (loop time), Unquiesced when all
        that live are kept.
        """
        loop = asyncio.get_running_loop()
        while self._live > self._kept:
            if self._changed is None:
                self._changed = loop.create_future()
            left = deadline - loop.time()
            if left <= 0:
                raise DeadlineExceeded(f"the end of {self._what}", timeout_s)
            await asyncio.wait([self._changed], timeout=left)
        if self._kept:
            raise Unquiesced(self._what, self._kept_bytes, f"{self._kept} without a proven end")

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
