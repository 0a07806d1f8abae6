"""Making and comparing payloads: not what is measured, so its processor time is kept apart, and it
never holds the event loop for long, since peers take a silent one for dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE_MAX: Final = 64 << 20  # payload bytes; more of them are a thread's work


class Aside:
    """`cpu_s`: processor time that it has taken so far."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    async def run(self, nbytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work` on so many bytes; what it raises."""

        def timed() -> T:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - began

        return timed() if nbytes <= _AT_ONCE_MAX else await asyncio.to_thread(timed)
