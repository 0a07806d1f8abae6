"""Shared and exclusive locks over byte ranges of this process' memory, by address.

One table, `LOCKS`, serves the whole process, so two views of one array, two regions over it and two
engines meet in it: the same address is the same memory. What it cannot see: that two mappings at
different addresses show one file or one piece of shared memory, and what is done to memory without
asking, as by an assignment to an array. It never waits: a conflict is refused at once.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from ..errors import InternalError, RangeBusy, UsageError


class RangeLock:
    """What one call locked. Whoever holds it releases it, once and as a whole."""

    __slots__ = ("_intervals", "_locks", "_table", "owner", "shared")

    def __init__(
        self,
        locks: RangeLocks,
        table: _Table,
        intervals: list[tuple[int, int]],
        shared: bool,
        owner: str,
    ) -> None:
        self._locks = locks
        self._table: _Table | None = table
        self._intervals = intervals  # (first, end), sorted, none touches the next
        self.shared = shared
        self.owner = owner

    @property
    def live(self) -> bool:
        return self._table is not None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(address, nbytes), sorted; ranges that touched each other are one."""
        return tuple((first, end - first) for first, end in self._intervals)

    def release(self) -> None:
        """Let others in. Raises InternalError the second time."""
        self._locks._release(self)


class _Segment:
    """Memory with the same holders throughout. One that is exclusive is the only one there."""

    __slots__ = ("end", "holders")

    def __init__(self, end: int, holders: set[RangeLock]) -> None:
        self.end = end
        self.holders = holders


class _Table:
    """All locked memory as segments that do not overlap; two that touch have different holders, so
    there are at most two segments for each locked interval.
    """

    __slots__ = ("at", "held", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.at: dict[int, _Segment] = {}  # by start
        self.held = 0  # live locks, those of no bytes included

    def within(self, first: int, end: int) -> tuple[int, int]:
        """Places in `starts` of the segments that share a byte with [first, end)."""
        low = bisect_right(self.starts, first)
        if low and self.at[self.starts[low - 1]].end > first:
            low -= 1
        return low, bisect_left(self.starts, end, low)

    def conflict(self, first: int, end: int, shared: bool) -> RangeLock | None:
        """Someone there who excludes a lock of that kind."""
        low, high = self.within(first, end)
        for start in self.starts[low:high]:
            holder = next(iter(self.at[start].holders))
            if not (shared and holder.shared):
                return holder
        return None

    def add(self, first: int, end: int, lock: RangeLock) -> None:
        self._border(first)
        self._border(end)
        low, high = self.within(first, end)
        starts: list[int] = []
        reached = first
        for start in self.starts[low:high]:
            if start > reached:
                self._put(starts, reached, start, {lock})
            segment = self.at[start]
            segment.holders.add(lock)
            starts.append(start)
            reached = segment.end
        if reached < end:
            self._put(starts, reached, end, {lock})
        self.starts[low:high] = starts

    def remove(self, first: int, end: int, lock: RangeLock) -> None:
        low, high = self.within(first, end)
        kept: list[int] = []
        for start in self.starts[low:high]:
            holders = self.at[start].holders
            holders.remove(lock)
            if holders:
                kept.append(start)
            else:
                del self.at[start]
        self.starts[low:high] = kept
        # Only where the lock began and ended can neighbours have become alike; the later one first,
        # because joining there moves no place before it.
        self._join(low + len(kept))
        self._join(low)

    def _border(self, address: int) -> None:
        """Cut the segment that `address` lies inside of."""
        place = bisect_left(self.starts, address)
        if not place:
            return
        segment = self.at[self.starts[place - 1]]
        if segment.end > address:
            self.at[address] = _Segment(segment.end, set(segment.holders))
            segment.end = address
            self.starts.insert(place, address)

    def _put(self, starts: list[int], start: int, end: int, holders: set[RangeLock]) -> None:
        self.at[start] = _Segment(end, holders)
        starts.append(start)

    def _join(self, place: int) -> None:
        """The segment at that place with the one before, if they touch and are alike."""
        if not 0 < place < len(self.starts):
            return
        before, after = self.at[self.starts[place - 1]], self.at[self.starts[place]]
        if before.end == self.starts[place] and before.holders == after.holders:
            before.end = after.end
            del self.at[self.starts.pop(place)]


class RangeLocks:
    """A table of locks; safe to ask from any thread, but not from a finalizer. A lock of one range
    costs the logarithm of what is locked, and each segment that it covers.
    """

    __slots__ = ("_mutex", "_table")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child has to: its parent's transfers do not reach its memory. A
        lock from before can still be released; nothing comes of it.
        """
        self._mutex = threading.Lock()
        self._table = _Table()

    @property
    def held(self) -> int:
        """Locks that are not released yet."""
        return self._table.held

    def lock(self, address: int, nbytes: int, shared: bool, owner: str) -> RangeLock:
        """Lock [address, address + nbytes) or raise RangeBusy, which names who is in the way.
        `owner` says to others what holds it ("a transfer that writes", "CPU access"). No bytes
        conflict with nobody. Raises UsageError for what is no range of addresses.
        """
        return self.lock_many(((address, nbytes),), shared, owner)

    def lock_many(self, ranges: Iterable[tuple[int, int]], shared: bool, owner: str) -> RangeLock:
        """As `lock`, for all (address, nbytes) of `ranges` or none. Ranges of one call may overlap
        each other if they are shared; otherwise that is a UsageError.
        """
        intervals = _intervals(ranges, shared)
        with self._mutex:
            table = self._table
            for first, end in intervals:
                holder = table.conflict(first, end, shared)
                if holder is not None:
                    raise _busy(holder, first, end)
            lock = RangeLock(self, table, intervals, shared, owner)
            for first, end in intervals:
                table.add(first, end, lock)
            table.held += 1
        return lock

    def _release(self, lock: RangeLock) -> None:
        with self._mutex:
            table, lock._table = lock._table, None
            if table is None:
                raise InternalError(f"a range lock of {lock.owner} was released twice")
            table.held -= 1
            for first, end in lock._intervals:
                table.remove(first, end, lock)


def _intervals(ranges: Iterable[tuple[int, int]], shared: bool) -> list[tuple[int, int]]:
    """Sorted (first, end) without empty ones, where none touches the next."""
    result: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        end = address + nbytes
        if address < 0 or nbytes < 0 or end > 1 << 64:
            raise UsageError(f"{nbytes} bytes at {address:#x} are no range of addresses")
        if not nbytes:
            continue
        if not result or address > result[-1][1]:
            result.append((address, end))
            continue
        first, reached = result[-1]
        if address < reached and not shared:
            raise UsageError(
                f"{nbytes} bytes at {address:#x} overlap another range of the same request"
            )
        result[-1] = (first, max(reached, end))
    return result


def _busy(holder: RangeLock, first: int, end: int) -> RangeBusy:
    """Names the holder's range that is in the way of [first, end)."""
    place = bisect_left(holder._intervals, (end, 0)) - 1
    low, high = holder._intervals[place]
    assert low < end
    assert high > first
    return RangeBusy(holder.owner, low, high - low, shared=holder.shared)


LOCKS = RangeLocks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOCKS.forget)
