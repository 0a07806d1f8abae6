"""Background tasks of one node: started by name, never lost, ended together.

It knows nothing about what the tasks do. A task that fails is logged once; nobody has to await it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger("orbit")

T = TypeVar("T")


class TaskRunner:
    """Holds a strong reference to each task until it ends; the event loop alone holds weak ones."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work` now."""
        task = asyncio.get_running_loop().create_task(work, name=f"orbit {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

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
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
