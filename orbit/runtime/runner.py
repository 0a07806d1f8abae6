"""Background tasks of one node: started by name, never lost, ended together.

It knows nothing about what the tasks do. A task that fails is logged once; nobody has to await it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..errors import InternalError, OrbitError
from ..transport.begun import Begun, begin

_log = logging.getLogger("orbit")

T = TypeVar("T")


class TaskRunner:
    """Holds a strong reference to each task until it ends; the event loop alone holds weak ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: where `spawn_unwatched` starts its tasks, if that is used."""
        self._tasks: dict[asyncio.Task[Any], None] = {}  # oldest first
        self._loop = loop

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work` now."""
        task = asyncio.get_running_loop().create_task(work, name=f"orbit {name}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def spawn_unwatched(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Start `work` soon, of which nobody will hear; from any thread. Nothing once the loop is
        closed.
        """
        if self._loop is None:
            raise InternalError("a runner without a loop")
        quiet = _in_silence(work)
        try:
            self._loop.call_soon_threadsafe(self.spawn, quiet, name)
        except RuntimeError:
            quiet.close()
            work.close()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T] | None:
        """As `spawn`, but begin within this call: see `begin`. None: it has ended already."""
        try:
            rest = begin(work)
        except asyncio.CancelledError:
            return None
        except Exception as error:
            _log.error("orbit %s failed", name, exc_info=error)
            return None
        return self.spawn(rest, name) if isinstance(rest, Begun) else None

    async def drain(self, deadline: float) -> bool:
        """Wait until every task has ended, tasks started meanwhile included, or until `deadline`
        (loop time). False when some are left.
        """
        loop = asyncio.get_running_loop()
        while pending := self._others():
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            await asyncio.wait(pending, timeout=remaining)
        return True

    async def cancel(self, deadline: float) -> bool:
        """Cancel what is left, then drain."""
        for task in self._others():
            task.cancel()
        return await self.drain(deadline)

    def _others(self) -> list[asyncio.Task[Any]]:
        current = asyncio.current_task()
        return [task for task in self._tasks if task is not current]

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


async def _in_silence(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except OrbitError as error:
        _log.debug("nobody is told: %s", error)
