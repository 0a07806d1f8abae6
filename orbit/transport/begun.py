"""A coroutine that has begun outside of any task, and whose rest is for a task.

What needs no wait runs through within the call that starts it, as tasks do by themselves where they
can be started eagerly (Python 3.12).

It stands here because the shells above, runtime and verbs, both need it and never see each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Begun(Coroutine[Any, Any, T]):
    """The rest of `work`, which waits for what it yielded. A task that is cancelled before it could
    run cancels that wait: nothing of the work is skipped.
    """

    def __init__(self, work: Coroutine[Any, Any, T], awaited: object) -> None:
        self._work = work
        self._first = [awaited]

    def send(self, value: Any) -> Any:
        """Once it hands out what the work waits for already."""
        return self._first.pop() if self._first else self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Into the work, where it waits."""
        self._first.clear()
        return self._work.throw(*error)

    def close(self) -> None:
        """End the work where it waits."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("it is for a task alone")


def begin(work: Coroutine[Any, Any, T]) -> Begun[T] | T:
    """Run `work` up to its first wait, or to its result. It sees no current task meanwhile, so that
    what needs one (asyncio.timeout) fails there rather than hits somebody else's. Raises what the
    work raises.
    """
    loop = asyncio.get_running_loop()
    outer = asyncio.current_task(loop)
    if outer is not None:
        asyncio.tasks._leave_task(loop, outer)
    try:
        return Begun(work, work.send(None))
    except StopIteration as ended:
        result: T = ended.value
        return result
    finally:
        if outer is not None:
            asyncio.tasks._enter_task(loop, outer)
