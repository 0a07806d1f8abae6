"""Whole transfers with a native thread for each lane, and the end of those threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import DeviceError
from orbit.model import Direction, PathReason
from orbit.testing.waiting import until
from orbit.verbs import device as device_module
from orbit.verbs.completion_source import PollerSource
from orbit.verbs.settings import RdmaPathConfig
from orbit.verbs.turn import Turn
from tests.contract.poller_suite import pollers
from tests.contract.rdma_pairs import QUICK, Get, Put, rdma_pair
from tests.unit.verbs.queue_pair_bench import CAUSE, CONFIG, open_bench

POLLING = replace(QUICK, progress="polling", num_lanes=2, width=2)
MIB = 1 << 20


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("direction", list(Direction))
def test_transfers(direction: Direction, run_async: Callable[..., Any]) -> None:
    kind = Get if direction == Direction.READ else Put

    async def scenario() -> None:
        async with rdma_pair(config=POLLING) as pair:
            prepared = await pair.consumer.prepare(pair.consumer_session, direction)
            assert prepared is PathReason.OK
            for number, nbytes in enumerate((1, 4096, 300_000, 3 * MIB), 1):
                await kind(pair, nbytes, number).run()
            devices = (*pair.owner.devices, *pair.consumer.devices)
            lanes = [lane for device in devices for lane in device.lanes.lanes]
            assert len(lanes) == 4
            assert all(isinstance(lane.source, PollerSource) for lane in lanes)
            assert len(pollers()) == 4
        assert len(pollers()) == 0

    run_async(scenario())


@pytest.mark.parametrize("progress", ["event", "spin"])
def test_nothing_polls_in_the_other_modes(progress: str) -> None:
    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress=progress)):
            assert len(pollers()) == 0

    asyncio.run(scenario())


def test_a_nap_ends_with_the_completion_that_the_thread_finds() -> None:
    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress="polling")) as bench:
            lane = bench.requester.lane
            bench.requester.post_send([bench.read()])
            lane.nap(lambda: bool(bench.completions), 10_000_000)
            assert [done.status for done in bench.completions] == [0]
            lane.nap(lambda: False, 2000)  # in vain, and over all the same
            bench.requester.post_send([bench.read()])
            # The loop is woken after a nap as before it.
            await until(lambda: len(bench.completions) == 2)

    asyncio.run(scenario())


def test_the_thread_of_a_broken_lane_ends_before_the_queue() -> None:
    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress="polling")) as bench:
            assert len(pollers()) == 2
            lane = bench.requester.lane
            cause = DeviceError("fake", "poll_cq", 5)
            lane.fail(cause)
            assert len(pollers()) == 1
            assert lane.cq.native
            await bench.requester.drain(CAUSE)
            await bench.device.destroy_queue_pair(bench.requester)
            assert bench.device.lanes.recover() == 1
            assert len(pollers()) == 2
        assert len(pollers()) == 0

    asyncio.run(scenario())


def test_threads_poll_near_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    nodes: list[int] = []

    def cpus(node: int) -> tuple[int, ...]:
        nodes.append(node)
        return (0, 5)

    monkeypatch.setattr(device_module, "poll_cpus", cpus)
    monkeypatch.setattr(Turn, "poller_bind", lambda _turn, _poller, cpus: bound.append(cpus))

    async def scenario() -> None:
        async with open_bench(config=replace(CONFIG, progress="polling")) as bench:
            assert nodes == [bench.device.numa_node] * 2
            assert bound == [(0, 5)] * 2

    asyncio.run(scenario())


def test_the_default_is_events() -> None:
    assert RdmaPathConfig().progress == "event"
