"""What is due when: deadlines of many keys that move and go far more often than they pass.

Moving one later and removing one cost a dictionary's time; the heap below is brought up to date
when an entry comes to its top, and rebuilt when most of it is stale. It knows no clock.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=int)

_STALE_MIN = 64  # a smaller heap is not worth a rebuild


class Deadlines(Generic[KeyT]):
    """`spacing_s`: `take` is asked for no more often than that, so that thousands of deadlines
    close together cost few wake-ups. What is due is thus taken at most that late.
    """

    def __init__(self, spacing_s: float) -> None:
        self._spacing_s = spacing_s
        self._due: dict[KeyT, float] = {}
        self._heap: list[tuple[float, KeyT]] = []  # at least one entry per key, not later than due
        self._taken_at = -math.inf

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._due

    def set(self, key: KeyT, deadline: float) -> None:
        """A new key, or another deadline for a known one."""
        known = self._due.get(key)
        self._due[key] = deadline
        if known is None or deadline < known:
            heapq.heappush(self._heap, (deadline, key))

    def discard(self, key: KeyT) -> None:
        """No more deadline for it. Unknown keys are fine."""
        if self._due.pop(key, None) is None:
            return
        if not self._due:
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._due) + _STALE_MIN:
            self._heap = [(deadline, known) for known, deadline in self._due.items()]
            heapq.heapify(self._heap)

    @property
    def next(self) -> float | None:
        """When `take` wants to be called; None: nothing has a deadline."""
        while self._heap:
            noted, key = self._heap[0]
            due = self._due.get(key)
            if due == noted:
                return max(due, self._taken_at + self._spacing_s)
            if due is None or due < noted:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (due, key))
        return None

    def take(self, now: float) -> list[KeyT]:
        """Remove and return what is due, earliest first. Nothing before `next`."""
        found: list[KeyT] = []
        due = self.next
        if due is None or now < due:
            return found
        self._taken_at = now
        while self.next is not None and self._heap[0][0] <= now:
            _, key = heapq.heappop(self._heap)
            del self._due[key]
            found.append(key)
        return found
