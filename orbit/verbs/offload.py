"""Threads for verbs that may block: modify, register, destroy, prefaulting.

Owns a small pool and the rule that the event loop never waits inside a verb. A call that outlives
its timeout goes on in its thread; whoever called must treat its object as in use until the future
that `start` returned is done. It knows no verbs objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Barrier
from typing import TypeVar

from ..daemon_pool import DaemonPool
from ..errors import ClosedError, DeadlineExceeded

T = TypeVar("T")

# An RTR towards an absent neighbour blocks a thread for a second; four such dials at once still
# leave the device's other users waiting no longer than that.
_THREADS_MAX = 4


class Offload:
    """Threads start with it and end with `close`."""

    def __init__(self) -> None:
        self._executor = DaemonPool(_THREADS_MAX, "orbit-verbs")
        # All at once: a thread that starts in a process that is out of mappings may fail before it
        # reports that it runs, and CPython waits for that report for ever.
        started = Barrier(_THREADS_MAX + 1)
        for _ in range(_THREADS_MAX):
            self._executor.submit(started.wait)
        started.wait()
        self._closed = False

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run it in a thread; the future belongs to the running loop."""
        if self._closed:
            raise ClosedError("the verbs thread pool")
        return asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def run(self, operation: str, timeout_s: float, function: Callable[[], T]) -> T:
        """As `start`, and wait for it. Raises DeadlineExceeded; the call itself goes on."""
        return await finish(operation, timeout_s, self.start(function))

    def close(self) -> None:
        """Idle threads end now, a busy one after its call. Nothing is waited for."""
        self._closed = True
        self._executor.shutdown(wait=False)


async def finish(operation: str, timeout_s: float, future: asyncio.Future[T]) -> T:
    """The result of a future that is not cancelled with the waiter. Raises DeadlineExceeded."""
    done, _ = await asyncio.wait([future], timeout=max(0.0, timeout_s))
    if not done:
        future.add_done_callback(_ignore)
        raise DeadlineExceeded(operation, timeout_s)
    return future.result()


def _ignore(future: asyncio.Future[T]) -> None:
    """Take the exception of an abandoned call, so that it is not reported as forgotten."""
    if not future.cancelled():
        future.exception()
