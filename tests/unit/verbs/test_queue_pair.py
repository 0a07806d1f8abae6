"""The end of a queue pair: what proves that the device is done, and what does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import BusyError, ClosedError, DeviceError, OrbitError, Unquiesced
from orbit.testing.waiting import until
from orbit.verbs import records
from orbit.verbs.device import DeviceContext
from orbit.verbs.offload import Offload
from orbit.verbs.queue_pair import QueuePairState
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider
from orbit.verbs.scripted_fabric import ANY_OPCODE, RECEIVE
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import rail_of
from tests.unit.verbs.queue_pair_bench import CAUSE, CONFIG, connect, open_bench


def test_nothing_outstanding_is_drained_at_once() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            await bench.requester.drain(CAUSE)
            assert bench.requester.state is QueuePairState.DRAINED
            assert bench.causes == [CAUSE]
            await bench.requester.drain(OrbitError("again"))
            assert bench.causes == [CAUSE]

    asyncio.run(scenario())


@pytest.mark.parametrize("rxe", [False, True])
def test_outstanding_work_comes_back_flushed(rxe: bool) -> None:
    async def scenario() -> None:
        async with open_bench(rxe=rxe) as bench:
            bench.fake.delay_payload(records.READ)
            bench.requester.post_with_receives([bench.receive(), bench.receive()], [])
            bench.requester.post_send([bench.read() for _ in range(3)])
            await asyncio.gather(*(bench.requester.drain(CAUSE) for _ in range(3)))
            assert len(bench.completions) == 5
            assert all(c.status for c in bench.completions)
            assert bench.requester.outstanding == 0
            assert (bench.requester.send_free, bench.requester.recv_free) == (8, 8)

    asyncio.run(scenario())


def test_a_lost_completion_is_proven_by_the_marker_behind_it() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.lose(records.READ)
            bench.requester.post_send([bench.read()])
            await asyncio.sleep(0.01)
            assert bench.completions == []
            await bench.requester.drain(CAUSE)
            assert [c.status for c in bench.completions] == [5]

    asyncio.run(scenario())


def test_without_a_marker_there_is_no_proof_and_a_later_drain_may_find_it() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.hold(ANY_OPCODE)
            bench.requester.post_send([bench.read()])
            with pytest.raises(Unquiesced):
                await bench.requester.drain(CAUSE)
            assert bench.requester.state is QueuePairState.FAILED
            bench.fake.clear_rules()
            bench.fake.release()
            await bench.requester.drain(CAUSE)
            assert bench.requester.state is QueuePairState.DRAINED
            assert len(bench.completions) == 1

    asyncio.run(scenario())


def test_a_refused_modify_is_no_proof() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.fail_verb("modify_qp", 5)
            with pytest.raises(Unquiesced):
                await bench.requester.drain(CAUSE)
            await bench.requester.drain(CAUSE)

    asyncio.run(scenario())


def test_a_partly_refused_post_fails_the_queue_pair_and_forgets_the_rest() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.refuse_post(records.READ, 12, skip=2)
            with pytest.raises(DeviceError) as caught:
                bench.requester.post_send([bench.read() for _ in range(4)])
            assert caught.value.errno == 12
            assert bench.requester.state is QueuePairState.FAILED
            await bench.requester.drain(CAUSE)
            assert len(bench.completions) == 2  # the two that were taken
            assert bench.requester.send_free == 8
            assert bench.causes == [caught.value]

    asyncio.run(scenario())


def test_an_unknown_count_keeps_all_of_the_post_charged() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.hold(ANY_OPCODE)
            bench.fake.refuse_post(records.READ, 5, known=False, skip=1)
            with pytest.raises(DeviceError):
                bench.requester.post_send([bench.read() for _ in range(3)])
            assert bench.requester.state is QueuePairState.FAILED
            assert (bench.requester.send_free, bench.requester.sends) == (5, 3)
            with pytest.raises(ClosedError):
                bench.requester.post_send([bench.read()])

    asyncio.run(scenario())


@pytest.mark.parametrize("known", [True, False])
def test_a_refused_receive_is_settled_as_a_refused_send_is(known: bool) -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.refuse_post(RECEIVE, 12, known=known, skip=1)
            with pytest.raises(DeviceError) as caught:
                bench.requester.post_with_receives([bench.receive() for _ in range(3)], [])
            assert caught.value.errno == 12
            assert bench.requester.state is QueuePairState.FAILED
            assert bench.requester.receives == (1 if known else 3)
            await bench.requester.drain(CAUSE)
            assert len(bench.completions) == (1 if known else 3)
            assert bench.requester.recv_free == 8

    asyncio.run(scenario())


def test_an_unknown_count_is_settled_by_the_markers() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.refuse_post(records.READ, 5, known=False, skip=1)
            with pytest.raises(DeviceError):
                bench.requester.post_send([bench.read() for _ in range(3)])
            assert bench.requester.outstanding >= 2  # nobody knows how many were taken
            await bench.requester.drain(CAUSE)
            assert len(bench.completions) == 3
            assert bench.requester.outstanding == 0

    asyncio.run(scenario())


def test_a_failed_request_fails_the_queue_pair_with_its_cause() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.fail(records.READ, 10, vendor_err=77)
            bench.requester.post_send([bench.read(), bench.read()])
            for _ in range(50):
                if len(bench.completions) == 2:
                    break
                await asyncio.sleep(0.001)
            assert [c.status for c in bench.completions] == [10, 5]
            (cause,) = bench.causes
            assert "remote access error" in str(cause)
            with pytest.raises(ClosedError):
                bench.requester.post_send([bench.read()])

    asyncio.run(scenario())


def test_late_and_doubled_completions_are_counted_and_ignored() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.duplicate(records.READ, count=2)
            bench.requester.post_send([bench.read(), bench.read()])
            for _ in range(50):
                await asyncio.sleep(0.001)
                if bench.device.lanes.unknown_completions == 2:
                    break
            assert len(bench.completions) == 2
            assert bench.device.lanes.unknown_completions == 2
            assert bench.requester.state is QueuePairState.READY

    asyncio.run(scenario())


def test_no_room_is_busy_and_takes_nothing() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            with pytest.raises(BusyError):
                bench.requester.post_send([bench.read() for _ in range(9)])
            with pytest.raises(BusyError):
                bench.requester.post_with_receives([bench.receive() for _ in range(9)], [])
            assert bench.requester.outstanding == 0
            assert bench.requester.state is QueuePairState.READY

    asyncio.run(scenario())


def test_a_slow_connect_ends_at_its_deadline_and_the_drain_waits_for_it() -> None:
    async def scenario() -> None:
        async with open_bench(connected=False) as bench:
            bench.fake.set_rtr_delay(0.25)
            with pytest.raises(TimeoutError):
                await connect(bench.requester, bench.source, bench.device)
            assert bench.requester.state is QueuePairState.FAILED
            await bench.requester.drain(CAUSE)
            bench.fake.set_rtr_delay(0)

    asyncio.run(scenario())


def test_the_loop_goes_on_while_a_connect_blocks() -> None:
    async def scenario() -> None:
        async with open_bench(connected=False) as bench:
            bench.fake.set_rtr_delay(0.1)
            ticks = 0
            connecting = asyncio.ensure_future(connect(bench.requester, bench.source, bench.device))
            while not connecting.done():
                await asyncio.sleep(0.001)
                ticks += 1
            await connecting
            assert ticks > 10

    asyncio.run(scenario())


def test_receives_need_a_marker_before_the_error_state() -> None:
    """rdma_rxe flushes the receive queue when the state changes, and never later."""

    async def scenario() -> None:
        async with open_bench(rxe=True) as bench:
            bench.fake.lose(RECEIVE)
            bench.requester.post_with_receives([bench.receive()], [])
            await bench.requester.drain(CAUSE)
            assert [c.status for c in bench.completions] == [5]

    asyncio.run(scenario())


def test_depths_follow_the_device() -> None:
    async def scenario() -> None:
        fabric = ScriptedFabric()
        fake = fabric.add_device("fake")
        fake.facts.limits = replace(fake.facts.limits, max_qp_wr=16)
        offload = Offload()
        device = await DeviceContext.open(
            ScriptedProvider(fabric), rail_of(fake), RdmaPathConfig(), offload
        )
        assert (device.config.send_depth, device.config.recv_depth) == (15, 15)
        qp = device.create_queue_pair(lambda cause: None)
        with pytest.raises(DeviceError):
            await device.close()  # a queue pair is left
        await qp.drain(CAUSE)
        await device.destroy_queue_pair(qp)
        await device.close()
        await device.close()
        with pytest.raises(ClosedError):
            device.create_queue_pair(lambda cause: None)
        offload.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("progress", ["event", "spin", "polling"])
def test_what_has_completed_as_it_was_posted_comes_by_itself(progress: str) -> None:
    """No poll and no nap follows, and no event tells of what the post's own look has found."""

    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress=progress)) as bench:
            for count in range(1, 4):
                bench.requester.post_with_receives([], [bench.read()])
                assert len(bench.completions) == count - 1  # not from within the post
                await until(lambda n=count: len(bench.completions) == n)
            assert bench.requester.outstanding == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("known", [True, False])
def test_refused_receives_fail_the_queue_pair_before_anything_is_sent(known: bool) -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.refuse_post(RECEIVE, 12, known=known, skip=1)
            with pytest.raises(DeviceError, match="post_recv"):
                bench.requester.post_with_receives(
                    [bench.receive(), bench.receive()], [bench.read()]
                )
            assert bench.requester.send_free == 8
            assert bench.requester.recv_free == (7 if known else 6)
            await bench.requester.drain(CAUSE)
            assert len(bench.completions) == (1 if known else 2)
            assert all(done.status for done in bench.completions)

    asyncio.run(scenario())
