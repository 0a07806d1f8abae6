"""Ends that work although nobody awaits them.

A plain call of a coroutine function does nothing, and what it was to give back stays taken: a
mistake that is easily made and found late. It knows nothing of what is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

Work = Coroutine[Any, Any, None]


class GivingBack(Coroutine[Any, Any, None]):
    """A coroutine that gives something back. One that is dropped before it began is handed to
    `spawn`, from whatever thread drops it: a forgotten `await` costs the errors and nothing else.
    """

    __slots__ = ("_spawn", "_work")

    def __init__(self, work: Work, spawn: Callable[[Work], None]) -> None:
        self._work = work
        self._spawn: Callable[[Work], None] | None = spawn  # None: somebody has begun it

    def __await__(self) -> Generator[Any, Any, None]:
        self._spawn = None
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        self._spawn = None
        return self._work.send(value)

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> Any:
        self._spawn = None
        if value is None and trace is None:
            return self._work.throw(kind)
        return self._work.throw(kind, value, trace)

    def close(self) -> None:
        """Nothing is given back, unless that had begun."""
        self._spawn = None
        self._work.close()

    def __del__(self) -> None:
        spawn, self._spawn = self._spawn, None
        if spawn is not None:
            spawn(self._work)
