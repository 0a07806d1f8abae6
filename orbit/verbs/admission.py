"""Who may use the send queue of one requester queue pair: slots, and bytes in flight, in order.

Owns the shares. A long transfer takes most of the byte limit and leaves a quarter, so that a
second one moves beside it; short ones take slots only and never wait behind a long one's bytes.
It posts nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from ..errors import ClosedError


@dataclass(frozen=True, slots=True)
class Share:
    """What one transfer may use until it gives it back."""

    slots: int
    inflight_bytes: int  # 0: a short transfer, not counted


class SendAdmission:
    def __init__(self, slots: int, inflight_bytes: int, piece_bytes: int, short_bytes: int) -> None:
        self._slots = self._slots_free = slots
        self._bytes_free = inflight_bytes
        self._piece_bytes = min(piece_bytes, inflight_bytes)
        self._long_bytes_max = max(self._piece_bytes, inflight_bytes * 3 // 4)
        self._short_bytes = min(short_bytes, self._piece_bytes)
        # (total bytes, cuts, share)
        self._waiting: deque[tuple[int, int, asyncio.Future[Share]]] = deque()
        self._closed = False

    def acquire_nowait(self, total_bytes: int, cuts: int = 0) -> Share | None:
        """A share if nobody of the same kind waits and it fits. `cuts`: borders in the memory, each
        of which may cost one more work request. Raises ClosedError.
        """
        if self._closed:
            raise ClosedError("the queue pair")
        if any(self._is_short(t) == self._is_short(total_bytes) for t, _, _ in self._waiting):
            return None
        return self._take(total_bytes, cuts)

    async def acquire(self, total_bytes: int, cuts: int = 0) -> Share:
        """First come, first served within short and long ones. Raises ClosedError."""
        share = self.acquire_nowait(total_bytes, cuts)
        if share is not None:
            return share
        future: asyncio.Future[Share] = asyncio.get_running_loop().create_future()
        entry = total_bytes, cuts, future
        self._waiting.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def release(self, share: Share) -> None:
        self._slots_free += share.slots
        self._bytes_free += share.inflight_bytes
        self._serve()

    def close(self) -> None:
        """Whoever waits gets ClosedError."""
        self._closed = True
        while self._waiting:
            *_, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ClosedError("the queue pair"))

    def _is_short(self, total_bytes: int) -> bool:
        return total_bytes <= self._short_bytes

    def _take(self, total_bytes: int, cuts: int) -> Share | None:
        if self._is_short(total_bytes):
            return self._grant(1 + cuts, 0)
        nbytes = min(total_bytes, self._long_bytes_max, self._bytes_free)
        if nbytes < min(total_bytes, self._piece_bytes):
            return None
        return self._grant(max(1, nbytes // self._piece_bytes) + cuts, nbytes)

    def _grant(self, pieces: int, nbytes: int) -> Share | None:
        """Fewer pieces than asked only make more rounds: nobody gets more than half of the queue
        for them, and everybody at least one, beside the receipt.
        """
        slots = 1 + max(1, min(pieces, self._slots // 2))
        if self._slots_free < slots:
            return None
        self._slots_free -= slots
        self._bytes_free -= nbytes
        return Share(slots, nbytes)

    def _serve(self) -> None:
        """Hand out what fits; the first that does not fit stops its kind, not the other."""
        stopped: set[bool] = set()
        for entry in list(self._waiting):
            total_bytes, cuts, future = entry
            short = self._is_short(total_bytes)
            if future.done():
                self._waiting.remove(entry)
            elif short not in stopped:
                share = self._take(total_bytes, cuts)
                if share is None:
                    stopped.add(short)
                else:
                    self._waiting.remove(entry)
                    future.set_result(share)
