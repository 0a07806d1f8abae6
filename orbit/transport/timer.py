"""One event-loop timer that follows a machine's deadline. Unarmed, it costs nothing.

It stands here because the shells above, runtime and verbs, both need it and never see each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """Calls `fire` once when the loop's clock reaches the armed deadline."""

    __slots__ = ("_deadline", "_fire", "_handle", "_loop", "_wakes_at")

    def __init__(self, fire: Callable[[], None]) -> None:
        self._fire = fire
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._wakes_at = 0.0  # of the handle: at the deadline or, where that was put off, earlier

    @property
    def armed(self) -> bool:
        return self._handle is not None

    def arm(self, deadline: float | None) -> None:
        """Follow `deadline` (loop time) from now on; None disarms. The same one again changes
        nothing.
        """
        if deadline == self._deadline and (deadline is None) == (self._handle is None):
            return
        self._deadline = deadline
        if self._handle is not None:
            if deadline is not None and deadline >= self._wakes_at:
                return  # progress puts it off again and again; a timer for each would cost more
            self._handle.cancel()
            self._handle = None
        if deadline is not None:
            self._start(deadline)

    def _start(self, deadline: float) -> None:
        self._wakes_at = deadline
        self._handle = self._loop.call_at(deadline, self._due)

    def _due(self) -> None:
        self._handle = None
        deadline = self._deadline
        if deadline is not None and deadline > self._wakes_at:
            self._start(deadline)
            return
        self._deadline = None
        self._fire()
