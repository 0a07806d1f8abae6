"""One timer that follows a machine's deadline.

Owns a loop timer handle, re-armed only when the deadline changed. It knows nothing of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    def __init__(self, on_deadline: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_deadline = on_deadline
        self._handle: asyncio.TimerHandle | None = None
        self._deadline: float | None = None

    def arm(self, deadline: float | None) -> None:
        """Fire at `deadline` of the loop's clock, or never for None."""
        if deadline == self._deadline:
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._deadline = deadline
        if deadline is not None:
            self._handle = self._loop.call_at(deadline, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._deadline = None
        self._on_deadline()
