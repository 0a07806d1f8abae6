"""The road from a completion to its handler, and the admission to a send queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orbit.errors import ClosedError, InternalError
from orbit.verbs.admission import SendAdmission, Share
from orbit.verbs.lane import CompletionTable, Lane
from orbit.verbs.records import Completion, pack_send
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider


def completion(wr_id: int) -> Completion:
    return Completion(wr_id, 0, 0, 0, 1, 0, 0, 0)


def test_a_handler_is_found_once() -> None:
    table = CompletionTable()
    seen: list[int] = []
    wr_id = table.reserve(lambda c: seen.append(c.wr_id))
    handler = table.take(wr_id)
    assert handler is not None
    handler(completion(wr_id))
    assert seen == [wr_id]
    assert table.take(wr_id) is None  # doubled
    assert table.unknown == 1
    assert len(table) == 0


def test_a_late_completion_never_reaches_the_next_user_of_its_place() -> None:
    table = CompletionTable()
    first = table.reserve(lambda c: None)
    table.forget(first)
    second = table.reserve(lambda c: None)
    assert first & 0xFFFF_FFFF == second & 0xFFFF_FFFF
    assert first != second
    assert table.take(first) is None
    assert table.take(second) is not None
    assert table.take(1 << 40 | 99) is None  # foreign
    assert table.unknown == 2


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_an_idle_lane_wakes_for_a_completion(run_async: Callable[..., Any]) -> None:
    async def scenario() -> None:
        fabric = ScriptedFabric()
        fabric.add_device("fake")
        context = ScriptedProvider(fabric).open("fake")
        loop = asyncio.get_running_loop()
        lane = Lane.open(fabric.turn, context, 64, 0)
        domain = context.allocate_domain()
        from orbit.verbs.provider import QueuePairCaps
        from orbit.verbs.turn import QueuePairAttributes

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
    lane = Lane.open(fabric.turn, context, 16, 0)
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
        lane = Lane.open(fabric.turn, context, 64, 0)
        lane.start(asyncio.get_running_loop())
        lane.nap(lambda: False, 5000)  # uvloop's clock stands still within a callback
        assert lane.naps >= 1
        lane.close()
        context.close()

    run_async(scenario())
