"""What a native poller must do on every helper: find all, in order, once, and wake whoever sleeps.

A user subclasses the contract and gives the fixture `rig` (`turn_rig.py`). Host A's queue is
polled.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orbit.errors import ClosedError, DeviceError
from orbit.verbs import status
from orbit.verbs.poller import NativePoller
from orbit.verbs.turn import STATE_ERR, Completion, QueuePairAttributes, pack_read
from tests.contract.turn_rig import DEPTH, PATIENCE_S, Rig
from tests.contract.turn_suite import readable


@contextmanager
def polled(rig: Rig, entries: int = 4 * DEPTH, **policy: int) -> Iterator[NativePoller]:
    poller = NativePoller(rig.a.turn, rig.a.cq, entries, **policy)
    try:
        yield poller
    finally:
        poller.stop()


def post_empty_reads(rig: Rig, first: int, count: int) -> None:
    """Requests that complete without moving anything."""
    a = rig.a
    ids = range(first, first + count)
    a.post(*(pack_read(i, a.address, a.region.lkey, 0, rig.b.address, 0) for i in ids))


def woken(poller: NativePoller, count: int, batch: int) -> list[Completion]:
    """As a loop does it: sleep until woken, drain until the ring is empty."""
    found: list[Completion] = []
    while len(found) < count:
        assert readable(poller.fd, PATIENCE_S), f"{len(found)} of {count} completions"
        while True:
            got = poller.drain(batch)
            found += got
            if len(got) < batch:
                break
    assert len(found) == count
    return found


def pollers() -> list[int]:
    """The threads of this process that poll."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (task / "comm").read_text() == "orbit-poller\n":
                found.append(int(task.name))
    return found


def processors_of_pollers() -> list[set[int]]:
    return [os.sched_getaffinity(thread) for thread in pollers()]


class PollerContract:
    """A thread that polls instead of events."""

    @pytest.mark.parametrize("batch", [1, 3, 64])
    def test_everything_once_and_in_order(self, rig: Rig, batch: int) -> None:
        with polled(rig) as poller:
            # Few at a time: the thread that polls takes a core from the device when it is software,
            # and a long queue would then outlast its retries.
            for first in range(0, 280, 20):
                post_empty_reads(rig, first, 20)
                found = woken(poller, 20, batch)
                assert [done.wr_id for done in found] == list(range(first, first + 20))
                assert [done for done in found if done.status != status.SUCCESS] == []

    def test_each_time_that_the_ring_stops_being_empty_it_wakes(self, rig: Rig) -> None:
        with polled(rig) as poller:
            for turn in range(200):
                post_empty_reads(rig, turn, 1)
                assert [done.wr_id for done in woken(poller, 1, 64)] == [turn]
            assert poller.drain() == []
            assert not readable(poller.fd, 0)

    def test_it_wakes_from_its_nap(self, rig: Rig) -> None:
        with polled(rig, idle_us=0, nap_us=2000) as poller:
            assert not readable(poller.fd, 0.02)
            post_empty_reads(rig, 1, 1)
            assert woken(poller, 1, 64)[0].wr_id == 1

    def test_a_full_ring_leaves_the_rest_in_the_queue(self, rig: Rig) -> None:
        with polled(rig, entries=4) as poller:
            post_empty_reads(rig, 0, 60)
            assert [done.wr_id for done in woken(poller, 60, 3)] == list(range(60))

    def test_it_stays_on_the_processors_that_it_is_given(self, rig: Rig) -> None:
        mine = os.sched_getaffinity(0)
        with polled(rig):
            assert processors_of_pollers() == [mine]
        poller = NativePoller(rig.a.turn, rig.a.cq, 4 * DEPTH, cpus=[max(mine)])
        try:
            assert processors_of_pollers() == [{max(mine)}]
            assert os.sched_getaffinity(0) == mine
            post_empty_reads(rig, 1, 1)
            assert woken(poller, 1, 64)[0].wr_id == 1
        finally:
            poller.stop()

    @pytest.mark.parametrize("nowhere", [1023, 1 << 20])
    def test_it_polls_all_the_same_where_it_may_not_be_bound(self, rig: Rig, nowhere: int) -> None:
        poller = NativePoller(rig.a.turn, rig.a.cq, 4 * DEPTH, cpus=[nowhere])
        try:
            assert processors_of_pollers() == [os.sched_getaffinity(0)]
            post_empty_reads(rig, 1, 1)
            assert woken(poller, 1, 64)[0].wr_id == 1
        finally:
            poller.stop()

    def test_failures_come_through(self, rig: Rig) -> None:
        a = rig.a
        with polled(rig) as poller:
            a.post(
                *(
                    pack_read(i, a.address, a.region.lkey, 8, rig.b.address, 0xABCD00)
                    for i in range(3)
                )
            )
            found = woken(poller, 3, 64)
        expected = [status.REM_ACCESS_ERR, status.WR_FLUSH_ERR, status.WR_FLUSH_ERR]
        assert [done.status for done in found] == expected

    def test_stop_hands_over_what_was_not_drained(self, rig: Rig) -> None:
        poller = NativePoller(rig.a.turn, rig.a.cq, 4 * DEPTH)
        assert len(pollers()) == 1
        post_empty_reads(rig, 0, 70)
        assert readable(poller.fd, PATIENCE_S)
        fd = poller.fd
        first = poller.drain(1)
        rig.a.qp.modify(QueuePairAttributes(STATE_ERR))
        left = poller.stop()
        assert not poller.running
        assert not pollers()
        assert not Path(f"/proc/self/fd/{fd}").exists()
        rest = rig.a.completions(70 - len(first) - len(left)) if len(left) < 69 else []
        assert [done.wr_id for done in first + left + rest] == list(range(70))
        assert poller.stop() == []
        for use in (poller.drain, lambda: poller.fd):
            with pytest.raises(ClosedError):
                use()
        rig.a.no_completion()

    def test_the_queue_may_be_destroyed_after_it(self, rig: Rig) -> None:
        extra = rig.a.context.create_cq(8, rig.a.channel)
        poller = NativePoller(rig.a.turn, extra, 8)
        assert poller.stop() == []
        extra.close()
        with pytest.raises(DeviceError) as refused:
            NativePoller(rig.a.turn, extra, 8)
        assert refused.value.errno == errno.EBADF

    def test_a_ring_of_nothing_is_refused(self, rig: Rig) -> None:
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(DeviceError) as refused:
            NativePoller(rig.a.turn, rig.a.cq, 0)
        assert refused.value.errno == errno.EINVAL
        assert set(os.listdir("/proc/self/fd")) == before
