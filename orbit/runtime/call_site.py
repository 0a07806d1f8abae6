"""Where in its caller's code something was made, for people who look for what was forgotten."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from types import FrameType

_NOT_THE_CALLER = ("orbit", "asyncio", "threading", "contextlib")

_told: contextvars.ContextVar[str | None] = contextvars.ContextVar("orbit_call_site", default=None)


def caller_site() -> str:
    """The nearest caller outside this package and event loops, as file:line; or what a thread that
    calls into the event loop has told of itself.
    """
    told = _told.get()
    return _nearest() if told is None else told


@contextlib.contextmanager
def telling_site() -> Iterator[None]:
    """What is called within, in this context, is called from where this is."""
    token = _told.set(_nearest())
    try:
        yield
    finally:
        _told.reset(token)


def _nearest() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in _NOT_THE_CALLER:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
