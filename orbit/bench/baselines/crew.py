"""Threads for the blocking calls of one run of a baseline, and their end.

It knows nothing of what they do; who owns a crew makes whatever blocks them return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...errors import DeadlineExceeded

T = TypeVar("T")


class Crew:
    def __init__(self, size: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)

    def start(self, jobs: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """At most as many run at once as the crew has threads."""
        return [self._pool.submit(job) for job in jobs]

    async def results(self, started: Sequence[Future[T]], timeout_s: float) -> list[T]:
        """Raises the first error of any of them, or DeadlineExceeded; the others run on."""
        waits = [asyncio.wrap_future(job) for job in started]
        for one in waits:
            one.add_done_callback(_seen)
        done, late = await asyncio.wait(
            waits, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for one in done:
            one.result()
        if late:
            raise DeadlineExceeded("a baseline", timeout_s)
        return [one.result() for one in waits]

    async def run(self, jobs: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
        return await self.results(self.start(jobs), timeout_s)

    async def close(self) -> None:
        """Until everything that was started has ended."""
        await asyncio.to_thread(self._pool.shutdown)


def _seen(ended: asyncio.Future[T]) -> None:
    """An error that comes when nobody waits any more is nobody's."""
    if not ended.cancelled():
        ended.exception()
