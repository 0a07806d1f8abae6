"""Which lane a queue pair goes on, the bound on completions, and the replacement of a lane."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from orbit.errors import BudgetExceeded, ConfigError, DeviceError, OrbitError, Unquiesced
from orbit.verbs import records
from orbit.verbs.device import DeviceContext
from orbit.verbs.lane_group import MARKERS, LaneStatistics, fitted, total
from orbit.verbs.offload import Offload
from orbit.verbs.queue_pair import BulkQueuePair, QueuePairState
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.scripted_fabric import ANY_OPCODE
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import rail_of
from tests.unit.verbs.queue_pair_bench import CAUSE, CONFIG, Bench, open_bench

ENTRIES = CONFIG.work_entries
BROKEN = DeviceError("fake", "poll_cq", 5, "the test broke it")
NOBODY = 1 << 62


@dataclass(eq=False)
class Host:
    fake: ScriptedDevice
    device: DeviceContext

    def add(self) -> BulkQueuePair:
        return self.device.create_queue_pair(lambda cause: None)

    async def end(self, queue_pair: BulkQueuePair) -> None:
        await queue_pair.drain(CAUSE)
        await self.device.destroy_queue_pair(queue_pair)


@contextlib.asynccontextmanager
async def open_host(config: RdmaPathConfig, max_cqe: int = 1 << 20) -> AsyncIterator[Host]:
    """Afterwards the device must hold nothing."""
    fabric, offload = ScriptedFabric(), Offload()
    fake = fabric.add_device("fake")
    fake.facts.limits = replace(fake.facts.limits, max_cqe=max_cqe)
    device = await DeviceContext.open(ScriptedProvider(fabric), rail_of(fake), config, offload)
    yield Host(fake, device)
    fake.clear_rules()
    await device.close()
    offload.close()
    assert fake.counters().live_objects == 0
    assert not fake.counters().misuse


def lanes_of(queues: int, **changes: int) -> RdmaPathConfig:
    """Lanes that each hold so many queue pairs."""
    return replace(CONFIG, cq_depth=queues * ENTRIES, **changes)


def test_every_endpoint_fits_the_lanes_of_one_device_by_default() -> None:
    config = RdmaPathConfig()
    assert config.num_lanes * (config.cq_depth // config.work_entries) == config.endpoints_max


def test_depths_that_fit_a_device_leave_room_for_the_markers() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        send_depth, recv_depth = rng.randint(4, 300), rng.randint(1, 300)
        entries = send_depth + recv_depth
        cq_depth = rng.randint(max(16, entries), 4096)
        config = RdmaPathConfig(send_depth=send_depth, recv_depth=recv_depth, cq_depth=cq_depth)
        max_cqe = rng.choice([rng.randint(16, 700), rng.randint(700, 1 << 20)])
        sends, receives, capacity = fitted(config, max_cqe)
        assert 1 <= sends <= send_depth
        assert 1 <= receives <= recv_depth
        assert sends + receives <= capacity <= config.cq_depth
        assert capacity + MARKERS * (capacity // (sends + receives)) <= max_cqe
        if entries + MARKERS <= max_cqe:
            assert (sends, receives) == (send_depth, recv_depth)


def test_a_queue_that_no_queue_pair_fits_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match=r"rdma\.max_cqes"):
        RdmaPathConfig(send_depth=64, recv_depth=64, cq_depth=127)
    with pytest.raises(ConfigError, match="progress"):
        RdmaPathConfig(progress="often")


def test_the_least_loaded_lane_takes_the_next_and_keeps_it() -> None:
    async def scenario() -> None:
        async with open_host(lanes_of(4, num_lanes=3)) as host:
            assert len(host.device.lanes) == 0  # an idle device has none
            placed = [host.add() for _ in range(6)]
            lanes = host.device.lanes.lanes
            assert [lanes.index(qp.lane) for qp in placed] == [0, 1, 2, 0, 1, 2]
            await host.end(placed.pop(1))
            await host.end(placed.pop(3))  # both of lane 1
            added = [host.add() for _ in range(2)]
            assert [lanes.index(qp.lane) for qp in added] == [1, 1]
            assert [lane.charged for lane in lanes] == [2 * ENTRIES] * 3
            for qp in (*placed, *added):
                await host.end(qp)
            assert [lane.charged for lane in lanes] == [0, 0, 0]

    asyncio.run(scenario())


def test_more_than_the_lanes_hold_is_refused_by_the_name_of_the_knob() -> None:
    async def scenario() -> None:
        async with open_host(lanes_of(2, num_lanes=2)) as host:
            placed = [host.add() for _ in range(4)]
            with pytest.raises(BudgetExceeded) as caught:
                host.add()
            assert caught.value.knob == "rdma.max_cqes"
            assert (caught.value.requested, caught.value.limit) == (ENTRIES, 4 * ENTRIES)
            assert caught.value.charged == 4 * ENTRIES
            assert host.device.queue_pairs == 4
            await host.end(placed.pop())
            placed.append(host.add())
            for qp in placed:
                await host.end(qp)

    asyncio.run(scenario())


def test_a_small_device_gets_shorter_queues() -> None:
    async def scenario() -> None:
        async with open_host(RdmaPathConfig(num_lanes=1), max_cqe=60) as host:
            config = host.device.config
            assert (config.send_depth, config.recv_depth, config.cq_depth) == (29, 29, 58)
            qp = host.add()
            with pytest.raises(BudgetExceeded):
                host.add()
            await host.end(qp)

    asyncio.run(scenario())


def test_a_refused_queue_pair_gives_its_entries_back() -> None:
    async def scenario() -> None:
        async with open_host(lanes_of(1)) as host:
            host.fake.fail_verb("create_qp", 12)
            with pytest.raises(DeviceError):
                host.add()
            assert host.device.lanes.statistics().entries == 0

    asyncio.run(scenario())


def test_lanes_are_shared_where_no_other_can_be_had() -> None:
    async def scenario() -> None:
        async with open_host(lanes_of(4)) as host:
            host.fake.fail_verb("create_cq", 12)
            with pytest.raises(DeviceError):
                host.add()
            first = host.add()
            host.fake.fail_verb("create_cq", 12)
            second = host.add()
            assert first.lane is second.lane
            for qp in (first, second):
                await host.end(qp)

    asyncio.run(scenario())


def test_outstanding_work_of_all_devices_is_counted() -> None:
    async def scenario() -> None:
        async with open_bench() as bench, open_host(CONFIG) as other:
            bench.fake.hold(ANY_OPCODE)
            bench.requester.post_send([bench.read() for _ in range(3)])
            bench.source.post_with_receives([bench.receive() for _ in range(2)], [])
            idle = other.add()
            found = total([bench.device.lanes, other.device.lanes])
            assert found == LaneStatistics(
                lanes=3,
                entries=3 * ENTRIES,
                entries_max=2 * CONFIG.num_lanes * CONFIG.cq_depth,
                sends=3,
                receives=2,
            )
            bench.fake.clear_rules()
            bench.fake.release()
            await bench.requester.drain(CAUSE)
            await bench.source.drain(CAUSE)
            found = total([bench.device.lanes, other.device.lanes])
            assert (found.sends, found.receives) == (0, 0)
            await other.end(idle)

    asyncio.run(scenario())


# --- a lane that fails ---


async def broken(bench: Bench) -> None:
    """The requester's lane says that it is broken, and whoever uses it has heard."""
    assert bench.device.lanes.fail_queue(bench.requester.lane.cq.native, BROKEN)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_who_is_on_a_failed_lane_is_told_and_nobody_else() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            assert bench.requester.lane is not bench.source.lane
            assert not bench.device.lanes.fail_queue(NOBODY, BROKEN)
            await broken(bench)
            assert bench.causes == [BROKEN]
            assert bench.requester.state is QueuePairState.FAILED
            assert bench.source.state is QueuePairState.READY
            assert bench.device.lanes.failed is BROKEN
            assert bench.device.lanes.statistics().lanes_failed == 1
            added = bench.device.create_queue_pair(lambda cause: None)
            assert added.lane is bench.source.lane
            await added.drain(CAUSE)
            await bench.device.destroy_queue_pair(added)

    asyncio.run(scenario())


@pytest.mark.parametrize("progress", ["event", "polling"])
def test_a_drain_still_finds_its_proof_on_a_failed_lane(progress: str) -> None:
    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress=progress)) as bench:
            bench.fake.hold(ANY_OPCODE)
            bench.requester.post_send([bench.read() for _ in range(3)])
            await broken(bench)
            with pytest.raises(Unquiesced):
                await bench.requester.drain(CAUSE)
            assert bench.requester.sends >= 3  # a timeout frees nothing
            bench.fake.clear_rules()
            bench.fake.release()
            await bench.requester.drain(CAUSE)
            assert len(bench.completions) == 3
            assert bench.requester.sends == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("progress", ["event", "polling"])
def test_a_lane_is_replaced_once_nothing_is_on_it(progress: str) -> None:
    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress=progress)) as bench:
            lanes, lkey, domain = bench.device.lanes, bench.block.lkey, bench.device.domain
            old = bench.requester.lane
            assert lanes.recover() == 0  # nothing has failed
            await broken(bench)
            assert lanes.recover() == 0  # the queue pair is not drained
            await bench.requester.drain(CAUSE)
            assert lanes.recover() == 0  # nor destroyed
            await bench.device.destroy_queue_pair(bench.requester)
            assert lanes.recover() == 1
            assert lanes.failed is None
            assert old not in lanes.lanes
            assert old.poll() == 0  # who still knows it finds nothing there
            found = lanes.statistics()
            assert (found.lanes, found.lanes_failed, found.recoveries) == (2, 0, 1)
            assert bench.device.domain is domain
            assert bench.block.lkey == lkey
            bench.requester = bench.device.create_queue_pair(bench.causes.append)
            assert bench.requester.lane not in (old, bench.source.lane)

    asyncio.run(scenario())


def test_a_queue_pair_that_the_device_keeps_keeps_the_lane() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            await broken(bench)
            await bench.requester.drain(CAUSE)
            bench.fake.fail_verb("destroy_qp", 16)
            with pytest.raises(DeviceError):
                await bench.device.destroy_queue_pair(bench.requester)
            assert bench.device.lanes.recover() == 0
            assert bench.device.lanes.statistics().entries == 2 * ENTRIES

    asyncio.run(scenario())


def test_a_lane_that_the_device_keeps_is_not_replaced() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            await broken(bench)
            await bench.requester.drain(CAUSE)
            await bench.device.destroy_queue_pair(bench.requester)
            bench.fake.fail_verb("destroy_cq", 16)
            assert bench.device.lanes.recover() == 0
            assert bench.device.lanes.recover() == 0  # the refusal was no passing one
            found = bench.device.lanes.statistics()
            assert (found.lanes, found.lanes_failed, found.recoveries) == (2, 1, 0)

    asyncio.run(scenario())


def test_a_replacement_that_cannot_open_comes_later() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            lanes = bench.device.lanes
            await broken(bench)
            await bench.requester.drain(CAUSE)
            await bench.device.destroy_queue_pair(bench.requester)
            bench.fake.fail_verb("create_cq", 12, count=2)
            assert lanes.recover() == 0
            assert lanes.statistics().lanes_failed == 1
            added = bench.device.create_queue_pair(lambda cause: None)
            assert added.lane is bench.source.lane  # its place is kept
            assert lanes.recover() == 0
            assert lanes.recover() == 1
            assert lanes.statistics().lanes_failed == 0
            await added.drain(CAUSE)
            await bench.device.destroy_queue_pair(added)

    asyncio.run(scenario())


def test_placing_replaces_what_it_can_and_else_says_what_failed() -> None:
    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, num_lanes=1)) as bench:
            assert bench.requester.lane is bench.source.lane
            await broken(bench)
            with pytest.raises(DeviceError, match="the test broke it"):
                bench.device.create_queue_pair(lambda cause: None)
            for qp in (bench.requester, bench.source):
                await qp.drain(CAUSE)
                await bench.device.destroy_queue_pair(qp)
            bench.requester = bench.device.create_queue_pair(bench.causes.append)
            assert bench.requester.lane.failed is None
            assert bench.device.lanes.statistics().recoveries == 1

    asyncio.run(scenario())


def test_completions_that_nobody_waited_for_are_counted_across_a_replacement() -> None:
    async def scenario() -> None:
        async with open_bench() as bench:
            bench.fake.duplicate(records.READ)
            bench.requester.post_send([bench.read()])
            bench.requester.lane.poll()
            assert bench.device.lanes.unknown_completions == 1
            assert bench.requester.sends == 0
            await broken(bench)
            await bench.requester.drain(OrbitError("over"))
            await bench.device.destroy_queue_pair(bench.requester)
            assert bench.device.lanes.recover() == 1
            assert bench.device.lanes.unknown_completions == 1

    asyncio.run(scenario())
