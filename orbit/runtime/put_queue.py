"""Completed puts of one destination, and who waits for them."""

from __future__ import annotations

import asyncio
from collections import deque

from ..errors import DeadlineExceeded, UnknownHandle
from ..model import Handle
from .options import Put

# Of one destination whose owner does not wait for its puts; older ones are forgotten.
UNSEEN_MAX = 1024


class PutQueue:
    """Each put goes to one waiter, oldest to the one that has waited longest."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._unseen: deque[Put] = deque(maxlen=UNSEEN_MAX)
        self._waiters: deque[asyncio.Future[Put]] = deque()

    def add(self, put: Put) -> None:
        """Its bytes are in place."""
        if not self._hand_over(put):
            self._unseen.append(put)

    async def next(self, timeout_s: float | None) -> Put:
        """Raises DeadlineExceeded; UnknownHandle when the slot goes meanwhile."""
        if self._unseen:
            return self._unseen.popleft()
        waiter: asyncio.Future[Put] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            self._give_up(waiter)
            raise DeadlineExceeded("wait_put", timeout_s or 0.0) from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def end(self) -> None:
        """The slot is gone."""
        self._unseen.clear()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(UnknownHandle(str(self._handle)))
        self._waiters.clear()

    def _hand_over(self, put: Put) -> bool:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(put)
                return True
        return False

    def _give_up(self, waiter: asyncio.Future[Put]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        # It may have been served in the same turn of the loop: somebody else must see that put.
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            put = waiter.result()
            if not self._hand_over(put):
                self._unseen.appendleft(put)
