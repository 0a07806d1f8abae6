"""Runs a command's coroutine: the fastest event loop there is, and signals as cancellation.

A signal cancels the coroutine, which gives back what it holds; only then does `Stopped` say why.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .failures import Stopped

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end. Raises Stopped after SIGINT or SIGTERM, once `work` has unwound."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_stoppable(work))


async def _stoppable(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()  # a second signal also cuts short the first one's clean-up

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
