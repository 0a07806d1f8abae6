"""An event loop whose clock jumps: a test of an hour of timeouts takes milliseconds.

Time advances only when nothing is ready, and then straight to the next timer. A loop that waits
with no timer at all is stuck for ever, which is reported instead of hanging. Sockets work, but real
I/O takes no virtual time, so simulated worlds should have none.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from ..errors import InternalError

T = TypeVar("T")

# A stuck world may still wait for a thread (a resolver, an executor): look again for this long.
_GRACE_S = 0.25


class _JumpingSelector(selectors.BaseSelector):
    """Never sleeps while a timer is due some day: it moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._real.select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:
            events = self._real.select(_GRACE_S)
            if not events:
                raise InternalError("the simulated world is stuck: nothing is scheduled")
            return events
        self.now += timeout
        return events

    def register(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and never moves while something is ready to run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a fresh VirtualLoop, as asyncio.run does on a real one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
