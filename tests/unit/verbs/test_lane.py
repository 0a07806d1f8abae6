"""The road from a completion to its handler, and the admission to a send queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orbit.errors import ClosedError, DeviceError, InternalError, OrbitError
from orbit.testing.waiting import until
from orbit.verbs.admission import SendAdmission, Share
from orbit.verbs.completion_source import BATCH, open_source
from orbit.verbs.lane import CompletionTable, Lane
from orbit.verbs.provider import NativeObject, QueuePairCaps
from orbit.verbs.records import Completion, QueuePairAttributes, pack_send
from orbit.verbs.scripted import ScriptedContext, ScriptedFabric, ScriptedProvider
from orbit.verbs.turn import Posted


def completion(wr_id: int) -> Completion:
    return Completion(wr_id, 0, 0, 0, 1, 0, 0, 0)


def lane_of(fabric: ScriptedFabric, context: ScriptedContext, depth: int = 64) -> Lane:
    return Lane(open_source(fabric.turn, context, depth, polling=False), depth, 0)


def test_a_handler_is_found_once() -> None:
    table = CompletionTable()
    seen: list[int] = []
    wr_id = table.reserve(lambda c: seen.append(c.wr_id))
    handler = table.take(wr_id, 1)
    assert handler is not None
    handler(completion(wr_id))
    assert seen == [wr_id]
    assert table.take(wr_id, 1) is None  # doubled
    assert table.unknown == 1
    assert len(table) == 0


def test_a_late_completion_never_reaches_the_next_user_of_its_place() -> None:
    table = CompletionTable()
    first = table.reserve(lambda c: None)
    table.forget(first)
    second = table.reserve(lambda c: None)
    assert first & 0xFFFF_FFFF == second & 0xFFFF_FFFF
    assert first != second
    assert table.take(first, 1) is None
    assert table.take(second, 1) is not None
    assert table.take(1 << 40 | 99, 1) is None  # foreign
    assert table.unknown == 2


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_an_idle_lane_wakes_for_a_completion(run_async: Callable[..., Any]) -> None:
    async def scenario() -> None:
        fabric = ScriptedFabric()
        fabric.add_device("fake")
        context = ScriptedProvider(fabric).open("fake")
        loop = asyncio.get_running_loop()
        lane = lane_of(fabric, context)
        domain = context.allocate_domain()
        qp = domain.create_queue_pair(lane.cq, lane.cq, QueuePairCaps(4, 4))
        qp.modify(QueuePairAttributes(state=1))
        qp.modify(QueuePairAttributes(state=6))  # whatever is posted now is flushed
        lane.start(loop)
        for _ in range(3):
            done = loop.create_future()
            wr_id = lane.table.reserve(done.set_result)
            fabric.turn.post_send(qp.native, [pack_send(wr_id, 0, 0, 0)])
            found = await asyncio.wait_for(done, 5)
            assert found.wr_id == wr_id
            assert found.status != 0
        qp.close()
        lane.close()
        domain.close()
        context.close()

    run_async(scenario())


def test_a_lane_promises_no_more_entries_than_it_has() -> None:
    fabric = ScriptedFabric()
    fabric.add_device("fake")
    context = ScriptedProvider(fabric).open("fake")
    lane = lane_of(fabric, context, 16)
    lane.charge(16)
    with pytest.raises(InternalError):
        lane.charge(1)
    lane.repay(16)
    assert lane.room == 16
    lane.close()
    context.close()


class TestSendAdmission:
    """Slots and bytes of one send queue."""

    def test_a_long_transfer_leaves_room_for_a_second(self) -> None:
        admission = SendAdmission(64, 4 << 20, 1 << 20, 256 << 10)
        first = admission.acquire_nowait(64 << 20)
        second = admission.acquire_nowait(64 << 20)
        third = admission.acquire_nowait(64 << 20)
        assert first == Share(4, 3 << 20)
        assert second == Share(2, 1 << 20)
        assert third is None

    def test_a_short_one_never_waits_for_the_bytes_of_long_ones(self) -> None:
        async def scenario() -> None:
            admission = SendAdmission(64, 1 << 20, 1 << 20, 256 << 10)
            long = await admission.acquire(8 << 20)
            waiting = asyncio.ensure_future(admission.acquire(8 << 20))
            await asyncio.sleep(0)
            short = await admission.acquire(4096)
            assert not waiting.done()
            admission.release(long)
            assert await waiting == long
            admission.release(short)

        asyncio.run(scenario())

    def test_everything_comes_back(self) -> None:
        async def scenario() -> None:
            admission = SendAdmission(8, 4 << 20, 1 << 20, 1024)

            async def use(nbytes: int) -> None:
                share = await admission.acquire(nbytes)
                await asyncio.sleep(0)
                admission.release(share)

            await asyncio.gather(*(use(n) for n in (1, 9 << 20, 2000, 5 << 20, 1024, 1 << 20) * 9))
            assert (admission._slots_free, admission._bytes_free) == (8, 4 << 20)

        asyncio.run(scenario())

    def test_a_cancelled_waiter_keeps_nothing(self) -> None:
        async def scenario() -> None:
            admission = SendAdmission(2, 1 << 20, 1 << 20, 1024)
            share = await admission.acquire(1)
            waiting = [asyncio.ensure_future(admission.acquire(1)) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            admission.release(share)
            waiting[0].cancel()
            assert await waiting[1] == share
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            late = asyncio.ensure_future(admission.acquire(1))
            await asyncio.sleep(0)
            admission.release(share)
            late.cancel()  # after the share was handed to it
            await asyncio.wait([late])
            assert admission._slots_free == 2

        asyncio.run(scenario())

    def test_closing_wakes_everyone(self) -> None:
        async def scenario() -> None:
            admission = SendAdmission(2, 1 << 20, 1 << 20, 1024)
            await admission.acquire(1)
            waiting = asyncio.ensure_future(admission.acquire(1))
            await asyncio.sleep(0)
            admission.close()
            with pytest.raises(ClosedError):
                await waiting
            with pytest.raises(ClosedError):
                admission.acquire_nowait(1)

        asyncio.run(scenario())


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_nap_in_vain_ends(run_async: Callable[..., Any]) -> None:
    async def scenario() -> None:
        fabric = ScriptedFabric()
        fabric.add_device("fake")
        context = ScriptedProvider(fabric).open("fake")
        lane = lane_of(fabric, context)
        lane.start(asyncio.get_running_loop())
        lane.nap(lambda: False, 5000)  # uvloop's clock stands still within a callback
        assert lane.naps >= 1
        lane.close()
        context.close()

    run_async(scenario())


class FakeSource:
    """A completion queue that is a list of batches. A batch may be an error."""

    def __init__(self, *batches: list[Completion] | DeviceError) -> None:
        self.events = 0
        self.batches = list(batches)
        self.stopped = 0
        self.parked = 0
        self.spun: list[int] = []
        self.wake: Callable[[], None] = lambda: None

    @property
    def cq(self) -> NativeObject:
        raise AssertionError("nobody asks for it here")

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self.wake = wake

    def post(self, qp: int, receives: Sequence[bytes], sends: Sequence[bytes]) -> Posted:
        raise AssertionError("nothing is posted here")

    def take(self) -> list[Completion]:
        return []

    def poll(self) -> list[Completion]:
        batch = self.batches.pop(0) if self.batches else []
        if isinstance(batch, DeviceError):
            raise batch
        return batch

    def spin(self, spin_us: int) -> list[Completion]:
        self.spun.append(spin_us)
        return self.poll()

    def nap(self, spin_us: int, nap_us: int) -> list[Completion]:
        return self.poll()

    def park(self) -> bool:
        self.parked += 1
        return True

    def look_for_event(self) -> bool:
        return True

    def stop(self) -> None:
        self.stopped += 1

    def close(self) -> None:
        self.stop()


BROKEN = DeviceError("fake", "poll_cq", 5)


def test_a_completion_of_another_queue_pair_changes_nothing() -> None:
    source = FakeSource()
    lane = Lane(source, 16, 0)
    seen: list[int] = []
    wr_id = lane.table.reserve(lambda done: seen.append(done.qp_num), 7)
    source.batches = [
        [completion(wr_id)._replace(qp_num=8)],
        [completion(wr_id)._replace(qp_num=7)],
    ]
    lane.poll()
    assert (seen, lane.table.unknown, len(lane.table)) == ([], 1, 1)
    lane.poll()
    assert (seen, lane.table.unknown, len(lane.table)) == ([7], 1, 0)


def test_a_bug_of_one_handler_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    lane = Lane(source, 16, 0)
    seen: list[int] = []

    def fails(_: Completion) -> None:
        raise RuntimeError("a bug")

    ids = [lane.table.reserve(fails, 1), lane.table.reserve(lambda c: seen.append(c.wr_id), 1)]
    source.batches = [[completion(wr_id) for wr_id in ids]]
    assert lane.poll() == 2
    assert seen == ids[1:]
    assert "a bug" in caplog.text


class User:
    """A queue pair as the lane sees it."""

    sends, receives = 3, 2

    def __init__(self) -> None:
        self.causes: list[OrbitError] = []

    def fail(self, cause: OrbitError) -> None:
        self.causes.append(cause)


def test_a_queue_that_cannot_be_polled_fails_who_is_on_it_once() -> None:
    async def scenario() -> None:
        source = FakeSource(BROKEN, BROKEN, [completion(99)])
        lane = Lane(source, 16, 0)
        on_it, gone = User(), User()
        for user in (on_it, gone):
            lane.attach(user)
        assert lane.outstanding == (6, 4)
        lane.detach(gone)
        lane.start(asyncio.get_running_loop())
        source.wake()
        assert lane.failed is BROKEN
        assert source.stopped == 1
        assert on_it.causes == []  # not from within what found it out
        await asyncio.sleep(0)
        assert lane.poll() == 0
        assert lane.poll() == 1  # what comes after all is looked at
        source.wake()
        lane.nap(lambda: False, 1000)
        await asyncio.sleep(0)
        assert (on_it.causes, gone.causes) == ([BROKEN], [])
        assert (source.parked, lane.naps) == (0, 0)
        lane.close()
        source.batches = [BROKEN]
        assert lane.poll() == 0
        assert source.batches == [BROKEN]

    asyncio.run(scenario())


def test_a_full_queue_lets_the_loop_do_other_things() -> None:
    async def scenario() -> None:
        batch = [completion(1 << 60)] * BATCH
        source = FakeSource(*[batch] * 20)
        lane = Lane(source, 16, 0)
        lane.start(asyncio.get_running_loop())
        source.wake()
        assert 0 < len(source.batches) < 20
        assert source.parked == 0
        for _ in range(5):
            await asyncio.sleep(0)
        assert not source.batches
        assert source.parked == 1
        assert lane.completions == lane.table.unknown == 20 * BATCH

    asyncio.run(scenario())


@pytest.mark.parametrize("spins", [False, True])
def test_spinning_finds_what_follows_before_it_sleeps(spins: bool) -> None:
    async def scenario() -> None:
        source = FakeSource([], [completion(1)], [], [completion(2)], [], BROKEN)
        lane = Lane(source, 16, 10_000_000, spins=spins)
        lane.start(asyncio.get_running_loop())
        source.wake()
        assert (source.parked, source.spun) == (1, [])  # idle costs nothing
        source.wake()
        if not spins:
            assert (source.parked, source.spun, lane.completions) == (2, [], 1)
            return
        assert (source.parked, lane.completions) == (1, 1)
        await until(lambda: lane.failed is not None)
        assert (source.parked, lane.completions) == (1, 2)
        assert set(source.spun) == {20}  # others have their turn in between

    asyncio.run(scenario())


def test_spinning_ends() -> None:
    async def scenario() -> None:
        source = FakeSource([completion(1)])
        lane = Lane(source, 16, 30, spins=True)
        lane.start(asyncio.get_running_loop())
        source.wake()
        await until(lambda: source.parked == 1)
        spun = len(source.spun)
        await asyncio.sleep(0.001)
        assert (source.parked, len(source.spun)) == (1, spun)

    asyncio.run(scenario())


def test_a_channel_that_cannot_be_read_fails_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor stays readable: who ignored that would be woken for ever."""

    async def scenario() -> None:
        fabric = ScriptedFabric()
        fabric.add_device("fake")
        context = ScriptedProvider(fabric).open("fake")
        lane = lane_of(fabric, context)
        domain = context.allocate_domain()
        qp = domain.create_queue_pair(lane.cq, lane.cq, QueuePairCaps(4, 4))
        qp.modify(QueuePairAttributes(state=1))
        qp.modify(QueuePairAttributes(state=6))
        lane.start(asyncio.get_running_loop())

        def unreadable(*_: int) -> None:
            raise BROKEN

        monkeypatch.setattr(fabric.turn, "wake", unreadable)
        fabric.turn.post_send(qp.native, [pack_send(1, 0, 0, 0)])
        await until(lambda: lane.failed is not None)
        assert lane.failed is BROKEN
        qp.close()
        lane.close()
        domain.close()
        context.close()

    asyncio.run(scenario())
