"""The ping of one message link: at most one is out, and all who ask meanwhile share it.

A link also pings to carry credit home; such a ping serves those who ask just as well. It knows
neither packets nor credit.
"""

from __future__ import annotations

import asyncio
import time

from ..errors import DeadlineExceeded, OrbitError


class Pings:
    """`wanted`: somebody waits, and no ping is out."""

    __slots__ = ("_answer", "_peer", "_sent_at")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._answer: asyncio.Future[float] | None = None
        self._sent_at: float | None = None  # None: no ping is out

    @property
    def out(self) -> bool:
        return self._sent_at is not None

    async def wait(self, timeout_s: float) -> float:
        """Seconds from the ping that is out (or goes out next) to its answer."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._answer)
        except TimeoutError:
            raise DeadlineExceeded(f"a ping of {self._peer}", timeout_s) from None

    def on_sent(self) -> None:
        # Not the loop's clock: uvloop's stands still within a callback and counts milliseconds.
        self._sent_at = time.perf_counter()

    def on_answer(self) -> None:
        sent_at, self._sent_at = self._sent_at, None
        answer, self._answer = self._answer, None
        if answer is not None and sent_at is not None and not answer.done():
            answer.set_result(time.perf_counter() - sent_at)

    def fail(self, error: OrbitError) -> None:
        """The link is gone."""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
            answer.exception()  # whoever asked may have given up: nobody must be warned of it
