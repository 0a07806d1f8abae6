"""Range locks against a plain list of who holds what."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from orbit.errors import BusyError, InternalError, RangeBusy, UsageError
from orbit.memory.range_locks import LOCKS, RangeLock, RangeLocks


@pytest.fixture
def locks() -> Iterator[RangeLocks]:
    """Must be left without a segment."""
    fresh = RangeLocks()
    yield fresh
    assert fresh.held == 0
    assert segments(fresh) == []


def segments(locks: RangeLocks) -> list[tuple[int, int, set[RangeLock]]]:
    table = locks._table
    assert set(table.at) == set(table.starts)
    return [(start, table.at[start].end, table.at[start].holders) for start in table.starts]


def test_shared_locks_overlap_and_exclusive_ones_do_not(locks: RangeLocks) -> None:
    one = locks.lock(100, 50, True, "a reader")
    two = locks.lock(120, 50, True, "another reader")
    for address, nbytes in ((149, 1), (0, 101), (100, 50), (169, 9), (0, 1000)):
        with pytest.raises(RangeBusy):
            locks.lock(address, nbytes, False, "a writer")
    one.release()
    writer = locks.lock(100, 20, False, "a writer")
    with pytest.raises(RangeBusy):
        locks.lock(100, 1, True, "a reader")
    two.release()
    writer.release()


def test_what_only_touches_is_disjoint(locks: RangeLocks) -> None:
    held = [locks.lock(address, 10, False, "a writer") for address in (20, 0, 10)]
    assert len(segments(locks)) == 3
    for lock in held:
        lock.release()


def test_the_error_names_the_holder_and_its_range(locks: RangeLocks) -> None:
    many = locks.lock_many([(0, 10), (100, 10), (200, 10)], False, "a transfer that writes")
    with pytest.raises(RangeBusy) as caught:
        locks.lock(50, 51, True, "CPU access")
    error = caught.value
    assert (error.holder, error.address, error.nbytes) == ("a transfer that writes", 100, 10)
    assert not error.shared
    assert isinstance(error, BusyError)
    assert error.code == "range_busy"
    assert "10 bytes at 0x64" in str(error)
    assert "a transfer that writes" in str(error)
    many.release()
    reader = locks.lock(7, 1, True, "a reader")
    with pytest.raises(RangeBusy) as caught:
        locks.lock(0, 8, False, "a writer")
    assert caught.value.shared
    reader.release()


def test_a_busy_range_of_the_other_side_has_no_address() -> None:
    assert str(RangeBusy("a transfer")) == "the range is in use by a transfer"


def test_many_ranges_are_locked_together_or_not_at_all(locks: RangeLocks) -> None:
    held = locks.lock(500, 1, False, "a writer")
    with pytest.raises(RangeBusy):
        locks.lock_many([(0, 10), (400, 101), (600, 10)], False, "another")
    assert locks.held == 1
    assert len(segments(locks)) == 1
    held.release()


def test_ranges_of_one_call_may_overlap_only_if_shared(locks: RangeLocks) -> None:
    ranges = [(10, 10), (0, 11), (40, 0), (20, 5)]
    with pytest.raises(UsageError, match="overlap"):
        locks.lock_many(ranges, False, "a writer")
    lock = locks.lock_many(ranges, True, "a reader")
    assert lock.ranges == ((0, 25),)
    lock.release()
    touching = locks.lock_many([(10, 10), (0, 10)], False, "a writer")
    assert touching.ranges == ((0, 20),)
    touching.release()


def test_a_lock_is_released_once(locks: RangeLocks) -> None:
    lock = locks.lock(0, 1, False, "a writer")
    assert lock.live
    lock.release()
    assert not lock.live
    other = locks.lock(0, 1, False, "another")
    with pytest.raises(InternalError, match="a writer"):
        lock.release()
    assert other.live
    other.release()


def test_no_bytes_conflict_with_nobody(locks: RangeLocks) -> None:
    held = locks.lock(0, 100, False, "a writer")
    nothing = locks.lock(50, 0, False, "another")
    assert nothing.ranges == ()
    assert locks.held == 2
    nothing.release()
    held.release()


@pytest.mark.parametrize(("address", "nbytes"), [(-1, 1), (0, -1), ((1 << 64) - 1, 2)])
def test_what_is_no_range_of_addresses(locks: RangeLocks, address: int, nbytes: int) -> None:
    with pytest.raises(UsageError):
        locks.lock_many([(0, 1), (address, nbytes)], True, "a reader")


def test_the_last_byte_there_is(locks: RangeLocks) -> None:
    locks.lock((1 << 64) - 1, 1, False, "a writer").release()


def test_short_locks_leave_no_trace_in_a_long_one(locks: RangeLocks) -> None:
    long = locks.lock(0, 1 << 20, True, "a long reader")
    for address in range(0, 1 << 20, 1 << 10):
        locks.lock(address + 1, 5, True, "a short reader").release()
    assert len(segments(locks)) == 1
    long.release()


def test_thousands_of_ranges(locks: RangeLocks) -> None:
    even = locks.lock_many([(a, 16) for a in range(0, 1 << 17, 32)], False, "even")
    odd = locks.lock_many([(a, 16) for a in range(16, 1 << 17, 32)], False, "odd")
    with pytest.raises(RangeBusy):
        locks.lock((1 << 17) - 1, 1, True, "a reader")
    even.release()
    with pytest.raises(RangeBusy) as caught:
        locks.lock(0, 1 << 17, True, "a reader")
    assert caught.value.holder == "odd"
    odd.release()


def test_a_child_begins_anew(locks: RangeLocks) -> None:
    inherited = locks.lock(0, 100, False, "a transfer of the parent")
    locks.forget()
    own = locks.lock(50, 10, False, "a transfer of the child")
    inherited.release()
    assert own.live
    with pytest.raises(RangeBusy):
        locks.lock(50, 1, True, "a reader")
    own.release()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # other tests left threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_table_of_the_process_does_not_survive_a_fork() -> None:
    held = LOCKS.lock(1 << 63, 10, False, "a transfer of the parent")
    child = os.fork()
    if child == 0:  # it only looks and leaves: no test framework runs in it
        code = 1
        try:
            LOCKS.lock(1 << 63, 10, False, "a transfer of the child")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RangeBusy):
        LOCKS.lock(1 << 63, 1, True, "a reader")
    held.release()


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """The interpreter changes threads as often as it can, so also in the midst of a lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_threads_never_hold_one_byte_together(locks: RangeLocks) -> None:
    owners: list[set[str]] = [set() for _ in range(16)]
    wrong: list[object] = []
    ended: list[str] = []
    start = threading.Barrier(4)

    def work(name: str, stride: int) -> None:
        start.wait()
        for turn in range(4000):
            first = (turn * stride) % 12
            try:  # four parts, so that there is more to do inside
                lock = locks.lock_many([(2 * b, 1) for b in range(first, first + 4)], False, name)
            except RangeBusy:
                continue
            for byte in range(first, first + 4):
                if owners[byte]:
                    wrong.append((byte, name, set(owners[byte])))
                owners[byte].add(name)
            for byte in range(first, first + 4):
                owners[byte].discard(name)
            lock.release()
        ended.append(name)

    threads = [
        threading.Thread(target=work, args=(f"thread {n}", stride))
        for n, stride in enumerate((1, 3, 5, 7))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(ended) == 4


class AgainstAList(RuleBasedStateMachine):
    """The model: a list of (lock, ranges, shared), searched from end to end, byte range by byte
    range.
    """

    held: Bundle[RangeLock] = Bundle("held")
    ranges = st.tuples(st.integers(0, 60), st.integers(0, 12))

    def __init__(self) -> None:
        super().__init__()
        self.locks = RangeLocks()
        self.model: list[tuple[RangeLock, list[tuple[int, int]], bool]] = []

    @rule(target=held, ranges=st.lists(ranges, min_size=1, max_size=4), shared=st.booleans())
    def lock(self, ranges: list[tuple[int, int]], shared: bool) -> object:
        solid = [(a, n) for a, n in ranges if n]
        if not shared and any(
            overlap(one, other) for i, one in enumerate(solid) for other in solid[:i]
        ):
            with pytest.raises(UsageError):
                self.locks.lock_many(ranges, shared, "machine")
            return multiple()
        in_the_way = [
            theirs
            for _, others, others_shared in self.model
            for theirs in others
            if not (shared and others_shared) and any(overlap(theirs, mine) for mine in solid)
        ]
        if in_the_way:
            with pytest.raises(RangeBusy) as caught:
                self.locks.lock_many(ranges, shared, "machine")
            named = (caught.value.address, caught.value.nbytes)
            # It may be several that touch; what is named holds one that is in the way, whole.
            assert any(
                named[0] <= a and a + n <= named[0] + named[1] and overlap(named, (a, n))
                for a, n in in_the_way
            )
            return multiple()
        lock = self.locks.lock_many(ranges, shared, "machine")
        self.model.append((lock, solid, shared))
        return lock

    @rule(lock=consumes(held))
    def release(self, lock: RangeLock) -> None:
        lock.release()
        self.model = [entry for entry in self.model if entry[0] is not lock]

    @invariant()
    def holders_of_each_byte(self) -> None:
        found = segments(self.locks)
        assert self.locks.held == len(self.model)
        for byte in range(75):
            expected = {
                lock for lock, ranges, _ in self.model if any(a <= byte < a + n for a, n in ranges)
            }
            here = [holders for start, end, holders in found if start <= byte < end]
            assert here == ([expected] if expected else [])

    @invariant()
    def no_more_segments_than_needed(self) -> None:
        found = segments(self.locks)
        assert all(start < end for start, end, _ in found)
        for (_, end, left), (start, _, right) in pairwise(found):
            assert end <= start
            assert end < start or left != right


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


AgainstAList.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAList = AgainstAList.TestCase
