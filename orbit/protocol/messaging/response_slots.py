"""Outstanding calls of one node: bounded slots, each with a generation that is part of its id.

An answer finds its call only while the id's generation is the slot's and it comes by the epoch that
carried the call; whatever comes late or twice finds nothing and is counted. `Deadlines` beside it
keeps who must be told when. Both know no link and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from ...errors import BudgetExceeded

CallT = TypeVar("CallT")
EpochT = TypeVar("EpochT")

SLOT_BITS: Final = 16
GENERATION_BITS: Final = 48
_SLOT_MASK: Final = (1 << SLOT_BITS) - 1
GENERATION_MAX: Final = (1 << GENERATION_BITS) - 1
_COMPACT_MIN: Final = 256


class ResponseSlots(Generic[CallT, EpochT]):
    """Ids are u64, never 0: generation (from 1) above, slot below."""

    __slots__ = ("_calls", "_capacity", "_epochs", "_free", "_ids", "_pending", "late", "retired")

    def __init__(self, capacity: int) -> None:
        self._capacity = min(capacity, 1 << SLOT_BITS)
        self._ids: list[int] = []  # by slot: the id that it has now, or will have next
        self._calls: list[CallT | None] = []
        self._epochs: list[EpochT | None] = []
        self._free: list[int] = []
        self._pending = 0
        self.late = 0  # answers that found no call
        self.retired = 0  # slots whose generations are used up

    def __len__(self) -> int:
        return self._pending

    def take(self, call: CallT) -> int:
        """The id for a new call. Raises BudgetExceeded when every slot is in use."""
        if self._free:
            slot = self._free.pop()
        elif len(self._ids) < self._capacity:
            slot = len(self._ids)
            self._ids.append(1 << SLOT_BITS | slot)
            self._calls.append(None)
            self._epochs.append(None)
        else:
            raise BudgetExceeded(
                "outstanding calls",
                1,
                self._capacity - self.retired,
                self._pending,
                "messaging.outstanding_calls",
            )
        self._calls[slot] = call
        self._pending += 1
        return self._ids[slot]

    def bind(self, call_id: int, epoch: EpochT | None) -> None:
        """The call goes by this epoch: only it can answer. None: by none after all."""
        self._epochs[call_id & _SLOT_MASK] = epoch

    def complete(self, call_id: int, epoch: EpochT) -> CallT | None:
        """An answer arrived: the call that it ends, or None for a late one (counted)."""
        slot = call_id & _SLOT_MASK
        if (
            slot >= len(self._ids)
            or self._ids[slot] != call_id
            or self._epochs[slot] is not epoch
            or self._calls[slot] is None
        ):
            self.late += 1
            return None
        return self._release(slot)

    def cancel(self, call_id: int) -> bool:
        """The call is over on this side; its answer will be late. False when it was before."""
        slot = call_id & _SLOT_MASK
        if slot >= len(self._ids) or self._ids[slot] != call_id or self._calls[slot] is None:
            return False
        self._release(slot)
        return True

    def fail_epoch(self, epoch: EpochT) -> list[CallT]:
        """The epoch is over: the calls that it carried, their slots free again."""
        slots = [n for n, bound in enumerate(self._epochs) if bound is epoch]
        return [self._release(slot) for slot in slots]

    def fail_all(self) -> list[CallT]:
        """Every call, bound or not."""
        slots = [n for n, call in enumerate(self._calls) if call is not None]
        return [self._release(slot) for slot in slots]

    def __iter__(self) -> Iterator[CallT]:
        return (call for call in self._calls if call is not None)

    def _release(self, slot: int) -> CallT:
        call = self._calls[slot]
        assert call is not None
        self._calls[slot] = None
        self._epochs[slot] = None
        self._pending -= 1
        if self._ids[slot] >> SLOT_BITS == GENERATION_MAX:
            self.retired += 1  # a generation must never come again
        else:
            self._ids[slot] += 1 << SLOT_BITS
            self._free.append(slot)
        return call


class Deadlines(Generic[CallT]):
    """Who ends when. Items that are over need not be taken out: `live` tells them apart, and they
    go when they are in the way.
    """

    __slots__ = ("_heap", "_limit", "_live", "_order")

    def __init__(self, live: Callable[[CallT], bool]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, CallT]] = []
        self._order = 0
        self._limit = _COMPACT_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, item: CallT) -> None:
        """Each item once."""
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if self._live(entry[2])]
            heapify(self._heap)
            self._limit = max(_COMPACT_MIN, 2 * len(self._heap))  # so that it pays for itself
        self._order += 1
        heappush(self._heap, (deadline, self._order, item))

    @property
    def next(self) -> float | None:
        """The earliest deadline of a live item."""
        while self._heap and not self._live(self._heap[0][2]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[CallT]:
        """Live items whose deadline has come, earliest first; they are taken out."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            item = heappop(self._heap)[2]
            if self._live(item):
                found.append(item)
        return found
