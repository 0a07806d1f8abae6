"""Races between an exposure, a copy or a demotion and the end of its lease: memory goes only after
the verdict.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit.errors import (
    BusyError,
    DeadlineExceeded,
    LeaseError,
    OutOfRange,
    PathFailed,
    PathUnavailable,
    UnknownHandle,
    Unquiesced,
    WrongDirection,
)
from orbit.events import Recorder
from orbit.model import Address, Direction, Handle, PathName, PathReason, WorkerId
from orbit.protocol.slots import LOCAL_EPOCH
from orbit.runtime import put_queue, retained
from orbit.runtime.options import Put
from orbit.runtime.runner import TaskRunner
from orbit.runtime.shelf import Shelf
from orbit.runtime.shelved import Access
from orbit.runtime.staging import Staged, stage_held
from orbit.testing.clock import run_virtual
from orbit.testing.sessions import StubSession
from orbit.transport.interface import Exposure, PinnedBuffer, Span


class SlowPath:
    """Exposes and retracts when its gates open; says what it did."""

    name = PathName.RDMA

    def __init__(self) -> None:
        self.exposing, self.retracting = asyncio.Event(), asyncio.Event()
        self.fail_expose = False
        self.fail_retract: Exception | None = None
        self.log: list[str] = []

    async def expose(self, *args: Any, **named: Any) -> Exposure:
        await self.exposing.wait()
        if self.fail_expose:
            raise PathUnavailable(PathName.RDMA, PathReason.WINDOWS_BUSY)
        self.log.append("exposed")
        return Exposure(descriptor=b"d")

    async def retract(self, *args: Any, transferred: bool) -> None:
        await self.retracting.wait()
        if self.fail_retract is not None:
            raise self.fail_retract
        self.log.append("retracted")

    def open(self) -> None:
        self.exposing.set()
        self.retracting.set()


class CountedStaged(Staged):
    """Says how often it was freed."""

    __slots__ = ("frees",)

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.frees = 0

    def free(self) -> None:
        self.frees += 1


def pinned(data: bytearray) -> CountedStaged:
    view = memoryview(data)
    return CountedStaged(Span(view, PinnedBuffer(view, Address(1), None, None)))


class Bench:
    """One shelf, one slot of `source`, one lease on it that is being exposed."""

    def __init__(self) -> None:
        self.source = bytearray(10)
        self.runner = TaskRunner()
        self.shelf = Shelf(WorkerId(1), 30.0, Recorder(), self.runner)
        self.path: Any = SlowPath()
        self.session: Any = StubSession(1, dialer=False)
        self.handle = self.shelf.register(stage_held(self.source), retain_slot=False)
        self.access = self.shelf.acquire(self.handle, self.session.attempt)
        self.exposing = asyncio.ensure_future(self.access.expose(self.path, self.session))

    @property
    def freed(self) -> bool:
        try:
            self.source.append(0)
        except BufferError:
            return False
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_withdrawn_while_it_is_being_exposed(fails: bool) -> None:
    async def main() -> None:
        bench = Bench()
        bench.path.fail_expose = fails
        await asyncio.sleep(0.1)
        withdrawing = asyncio.ensure_future(bench.shelf.withdraw(bench.handle))
        await asyncio.sleep(0.1)
        assert not bench.freed
        assert not bench.shelf.arm(bench.access.lease_id)
        bench.path.exposing.set()
        await asyncio.sleep(0.1)
        assert bench.freed == fails
        bench.path.retracting.set()
        await withdrawing
        assert bench.freed
        assert bench.path.log == ([] if fails else ["exposed", "retracted"])
        await asyncio.gather(bench.exposing, return_exceptions=True)
        assert len(bench.runner) == 0

    run_virtual(main())


def test_an_epoch_that_ends_meanwhile_waits_for_the_verdict() -> None:
    async def main() -> None:
        bench = Bench()
        await asyncio.sleep(0.1)
        ending = asyncio.ensure_future(bench.shelf.end_epoch(bench.session.attempt))
        bench.path.exposing.set()
        await asyncio.sleep(0.1)
        assert not ending.done()
        bench.path.retracting.set()
        await ending
        assert bench.freed
        await bench.exposing

    run_virtual(main())


@pytest.mark.parametrize("error", [OSError("a bug"), PathFailed("rdma", "get_failed")])
def test_a_retraction_that_fails_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def main() -> None:
        bench = Bench()
        bench.path.fail_retract = error
        bench.path.open()
        await bench.exposing
        with pytest.raises(Unquiesced):
            await bench.shelf.withdraw(bench.handle)
        assert not bench.freed
        await bench.shelf.close()
        assert not bench.freed
        assert bench.shelf.store.statistics().leases_unquiesced == 1

    run_virtual(main())
    assert len(kept) == 1


def test_a_slot_that_cannot_be_freed_says_so_to_a_later_withdraw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def main() -> None:
        bench = Bench()
        bench.path.fail_retract = OSError("a bug")
        bench.path.open()
        await bench.exposing
        attempt = bench.session.attempt
        bench.shelf.end(bench.handle, bench.access.lease_id, attempt, drop=False)
        await asyncio.sleep(0.1)
        assert bench.shelf.store.metadata(bench.handle).refcount == 1
        with pytest.raises(Unquiesced):
            await bench.shelf.withdraw(bench.handle)
        assert not bench.freed

    run_virtual(main())
    assert len(kept) == 1


# --- times to live --------------------------------------------------------------------------------


def test_a_slot_goes_with_its_time_to_live_in_the_middle_of_a_read() -> None:
    async def main() -> None:
        shelf = Shelf(WorkerId(1), 30.0, Recorder(), TaskRunner())
        loop = asyncio.get_running_loop()
        staged = pinned(bytearray(10))
        handle = shelf.register(staged, retain_slot=True, ttl_s=1.0)
        path: Any = SlowPath()
        session: Any = StubSession(1, dialer=False)
        path.open()
        access = shelf.acquire(handle, session.attempt)
        await access.expose(path, session)
        await asyncio.sleep(0.9)
        assert staged.frees == 0
        assert await access.verdict is False
        assert 1.0 <= loop.time() <= 1.2
        assert staged.frees == 1
        with pytest.raises(UnknownHandle):
            shelf.store.metadata(handle)
        assert shelf.store.next_deadline is None
        found = shelf.store.statistics()
        assert (found.slots_expired, found.ttl_armed, found.staged_bytes) == (1, 0, 0)

    run_virtual(main())


def test_the_timer_runs_only_while_something_has_a_deadline() -> None:
    async def main() -> None:
        shelf = Shelf(WorkerId(1), 30.0, Recorder(), TaskRunner())
        plain = shelf.register(pinned(bytearray(1)), retain_slot=True)
        lease = shelf.acquire(plain, b"epoch").lease_id
        assert not shelf._reaper.armed
        mortal = shelf.register(pinned(bytearray(1)), retain_slot=True, ttl_s=60.0)
        assert shelf._reaper.armed
        await shelf.withdraw(mortal)
        assert not shelf._reaper.armed
        assert shelf.arm(lease)
        assert shelf._reaper.armed
        shelf.end(plain, lease, b"epoch", drop=False)
        assert not shelf._reaper.armed

    run_virtual(main())


def test_a_stopped_reaper_ends_nothing() -> None:
    async def main() -> None:
        shelf = Shelf(WorkerId(1), 0.5, Recorder(), TaskRunner())
        handle = shelf.register(pinned(bytearray(1)), retain_slot=True, ttl_s=1.0)
        access = shelf.acquire(handle, b"epoch")
        assert shelf.arm(access.lease_id) == 0.5
        shelf.stop_reaper()
        await asyncio.sleep(10)
        assert shelf.arm(access.lease_id) == 0.5
        await asyncio.sleep(10)
        assert shelf.store.is_held(access.lease_id)

    run_virtual(main())


# --- copies within the node -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["withdraw", "ttl", "close", "demote", "release"])
def test_nothing_frees_memory_that_this_node_itself_still_copies(how: str) -> None:
    async def main() -> None:
        shelf = Shelf(WorkerId(1), 30.0, Recorder(), TaskRunner())
        staged = pinned(bytearray(b"0123456789"))
        ttl_s = 1.0 if how == "ttl" else None
        handle = shelf.register(staged, retain_slot=False, ttl_s=ttl_s)
        access = shelf.acquire(handle, LOCAL_EPOCH)
        span = access.begin_copy()
        work: asyncio.Future[Any] | None = None
        match how:
            case "withdraw":
                work = asyncio.ensure_future(shelf.withdraw(handle))
            case "close":
                work = asyncio.ensure_future(shelf.close())
            case "demote":
                await shelf.demote_all()
                assert bytes(shelf.acquire(handle, b"another").span.view) == b"0123456789"
            case "release":
                shelf.end(handle, access.lease_id, LOCAL_EPOCH, drop=True)
        await asyncio.sleep(2)
        assert staged.frees == 0
        assert bytes(span.view) == b"0123456789"
        access.copied()
        access.copied()
        await asyncio.sleep(0.1)
        assert staged.frees == 1
        if work is not None:
            await work

    run_virtual(main())


# --- destinations ---------------------------------------------------------------------------------


class Destination:
    """A shelf with one destination of ten bytes, and a session that writes to it."""

    def __init__(self, ttl_s: float | None = None) -> None:
        self.shelf = Shelf(WorkerId(1), 30.0, Recorder(), TaskRunner())
        self.staged = pinned(bytearray(10))
        self.handle = self.shelf.register(
            self.staged, retain_slot=True, ttl_s=ttl_s, direction=Direction.WRITE
        )
        self.path: Any = SlowPath()
        self.path.exposing.set()
        self.session: Any = StubSession(1, dialer=False)

    async def write(self, number: int = 0) -> Access:
        access = self.shelf.acquire(self.handle, self.session.attempt, Direction.WRITE)
        access.restrict(number, 1)
        access.put = put(self.handle, number)
        await access.expose(self.path, self.session)
        return access

    def end(self, access: Access, *, transferred: bool) -> None:
        ended = self.shelf.end(
            self.handle,
            access.lease_id,
            self.session.attempt,
            drop=False,
            transferred=transferred,
        )
        assert ended is access


def put(handle: Handle, number: int) -> Put:
    return Put(handle, WorkerId(2), PathName.RDMA, PathReason.OK, number, 1)


def test_a_put_is_reported_when_its_bytes_are_in_place_and_not_before() -> None:
    async def main() -> None:
        bench = Destination()
        waiting = asyncio.ensure_future(bench.shelf.wait_put(bench.handle, None))
        access = await bench.write(3)
        bench.end(access, transferred=True)
        await asyncio.sleep(1)
        assert not access.verdict.done()
        assert not waiting.done()
        with pytest.raises(BusyError):
            await bench.write()
        bench.path.retracting.set()
        assert await access.verdict is True
        assert await waiting == put(bench.handle, 3)
        with pytest.raises(DeadlineExceeded):
            await bench.shelf.wait_put(bench.handle, 1.0)

    run_virtual(main())


@pytest.mark.parametrize("how", ["failed", "given up", "withdrawn", "epoch", "unproven"])
def test_a_put_that_did_not_arrive_whole_is_not_reported(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def main() -> None:
        bench = Destination()
        waiting = asyncio.ensure_future(bench.shelf.wait_put(bench.handle, 5.0))
        access = await bench.write()
        bench.path.retracting.set()
        match how:
            case "failed":
                bench.path.fail_retract = PathFailed("rdma", "get_failed", "bytes are missing")
                bench.end(access, transferred=True)
                with pytest.raises(PathFailed):
                    await access.verdict
                again = await bench.write()  # it is over all the same
                assert again.lease_id != access.lease_id
            case "unproven":
                bench.path.fail_retract = OSError("a bug")
                bench.end(access, transferred=True)
                with pytest.raises(Unquiesced):
                    await access.verdict
                with pytest.raises(BusyError):
                    await bench.write()
            case "given up":
                bench.end(access, transferred=False)
                assert await access.verdict is False
            case "withdrawn":
                await bench.shelf.withdraw(bench.handle)
                assert await access.verdict is False
            case "epoch":
                await bench.shelf.end_epoch(bench.session.attempt)
                assert await access.verdict is False
        gone = how == "withdrawn"
        with pytest.raises(UnknownHandle if gone else DeadlineExceeded):
            await waiting
        assert bench.staged.frees == int(gone)

    run_virtual(main())
    assert len(kept) == (how == "unproven")


def test_a_write_that_is_finished_after_its_lease_had_ended_is_refused() -> None:
    async def main() -> None:
        bench = Destination()
        bench.path.retracting.set()
        access = await bench.write()
        assert bench.shelf.arm(access.lease_id, PathName.RDMA, 0.2) == 0.2
        await asyncio.sleep(1)
        with pytest.raises(LeaseError):
            bench.shelf.end(bench.handle, access.lease_id, bench.session.attempt, drop=False)
        late = bench.shelf.end(
            bench.handle, access.lease_id, bench.session.attempt, drop=False, transferred=False
        )
        assert late is None
        with pytest.raises(DeadlineExceeded):
            await bench.shelf.wait_put(bench.handle, 0.1)

    run_virtual(main())


def test_destinations_and_payloads_are_not_confused() -> None:
    async def main() -> None:
        bench = Destination()
        payload = bench.shelf.register(pinned(bytearray(1)), retain_slot=True)
        with pytest.raises(WrongDirection):
            bench.shelf.acquire(bench.handle, LOCAL_EPOCH)
        with pytest.raises(WrongDirection):
            bench.shelf.acquire(payload, LOCAL_EPOCH, Direction.WRITE)
        with pytest.raises(WrongDirection):
            await bench.shelf.wait_put(payload, None)
        access = bench.shelf.acquire(bench.handle, LOCAL_EPOCH, Direction.WRITE)
        for offset, nbytes in ((0, 11), (11, 0), (10, 1), (-1, 1)):
            with pytest.raises(OutOfRange):
                access.restrict(offset, nbytes)
        access.restrict(10, 0)
        assert access.span.nbytes == 0

    run_virtual(main())


def test_each_put_goes_to_one_waiter_and_none_is_lost_to_one_that_gave_up() -> None:
    async def main() -> None:
        handle = Destination().handle
        queue = put_queue.PutQueue(handle)
        first, second, third = (asyncio.ensure_future(queue.next(None)) for _ in range(3))
        await asyncio.sleep(0)
        queue.add(put(handle, 1))
        first.cancel()  # in the very turn in which it was served
        queue.add(put(handle, 2))
        found = await asyncio.gather(first, second, third, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [found[1], found[2]] == [put(handle, 2), put(handle, 1)]
        last = asyncio.ensure_future(queue.next(None))
        await asyncio.sleep(0)
        queue.add(put(handle, 3))
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        assert await queue.next(None) == put(handle, 3)

    run_virtual(main())


def test_puts_that_nobody_waits_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_queue, "UNSEEN_MAX", 3)

    async def main() -> None:
        bench = Destination()
        bench.path.retracting.set()
        for number in range(5):
            access = await bench.write(number)
            bench.end(access, transferred=True)
            await access.verdict
        seen = [(await bench.shelf.wait_put(bench.handle, 1.0)).offset for _ in range(3)]
        assert seen == [2, 3, 4]

    run_virtual(main())


# --- demotion -------------------------------------------------------------------------------------


def test_demotion_copies_and_the_old_memory_goes_with_its_last_reader() -> None:
    async def main() -> None:
        shelf = Shelf(WorkerId(1), 30.0, Recorder(), TaskRunner())
        read, unread = pinned(bytearray(b"abc")), pinned(bytearray(b"def"))
        held = stage_held(bytearray(b"ghi"))
        handles = [shelf.register(staged, retain_slot=False) for staged in (read, unread, held)]
        path: Any = SlowPath()
        session: Any = StubSession(1, dialer=False)
        path.open()
        reader = shelf.acquire(handles[0], session.attempt)
        await reader.expose(path, session)
        waiting = asyncio.ensure_future(shelf.wait_unexposed(PathName.RDMA))
        await shelf.demote_all()
        await shelf.demote_all()
        assert (read.frees, unread.frees) == (0, 1)
        for handle, expected in zip(handles, (b"abc", b"def", b"ghi"), strict=True):
            access = shelf.acquire(handle, session.attempt)
            assert bytes(access.span.view) == expected
            assert not access.span.all_pinned
            assert not shelf.store.metadata(handle).pinned
            shelf.end(handle, access.lease_id, session.attempt, drop=False)
        assert not waiting.done()
        shelf.end(handles[0], reader.lease_id, session.attempt, drop=False)
        await waiting
        assert read.frees == 1
        assert shelf.store.statistics().slots == 3
        assert shelf.store.statistics().leases_held == 0
        await shelf.close()
        assert (read.frees, unread.frees) == (1, 1)

    run_virtual(main())


def test_memory_of_a_reader_whose_end_is_not_proven_outlives_a_demotion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def main() -> None:
        shelf = Shelf(WorkerId(1), 30.0, Recorder(), TaskRunner())
        staged = pinned(bytearray(b"abc"))
        handle = shelf.register(staged, retain_slot=True)
        path: Any = SlowPath()
        session: Any = StubSession(1, dialer=False)
        path.open()
        path.fail_retract = OSError("a bug")
        reader = shelf.acquire(handle, session.attempt)
        await reader.expose(path, session)
        await shelf.demote_all()
        shelf.end(handle, reader.lease_id, session.attempt, drop=False)
        await asyncio.sleep(0.1)
        assert kept[0].holder is staged
        assert bytes(shelf.acquire(handle, LOCAL_EPOCH).span.view) == b"abc"
        await shelf.close()
        assert staged.frees == 0

    run_virtual(main())


def test_a_destination_takes_no_writer_after_the_demotion_and_goes_with_the_one_it_has() -> None:
    async def main() -> None:
        busy, idle = Destination(), Destination()
        busy.path.retracting.set()
        access = await busy.write()
        await busy.shelf.demote_all()
        await idle.shelf.demote_all()
        assert (busy.staged.frees, idle.staged.frees) == (0, 1)
        with pytest.raises(UnknownHandle):
            await busy.write()
        busy.end(access, transferred=True)
        assert await access.verdict is True
        assert busy.staged.frees == 1

    run_virtual(main())
