"""A whole path whose completion queue breaks: its queue pairs end, another queue takes its place,
and everything else of the device stays as it was.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import PathFailed
from orbit.model import PathReason
from orbit.testing.waiting import until
from orbit.verbs.async_events import AsyncEventKind
from orbit.verbs.lane_group import total
from orbit.verbs.records import READ
from tests.contract.rdma_pairs import QUICK, Get, ScriptedPair, rdma_pair

CONFIG = replace(QUICK, num_lanes=1, monitor_interval_s=0.02)


async def ready(pair: ScriptedPair) -> bool:
    return await pair.consumer.prepare(pair.consumer_session) is PathReason.OK


@pytest.mark.parametrize("progress", ["event", "polling"])
@pytest.mark.parametrize("side", ["owner", "consumer"])
def test_the_owner_of_progress_is_replaced(side: str, progress: str) -> None:
    async def scenario() -> None:
        async with rdma_pair(config=replace(CONFIG, progress=progress)) as pair:
            fake, path = (pair.a, pair.owner) if side == "owner" else (pair.b, pair.consumer)
            (device,) = path.devices
            assert await ready(pair)
            await Get(pair, 300_000).run()
            (old,) = device.lanes.lanes
            natives = (device._context.native, device.domain.native.native)
            held = await path.memory.register(memoryview(bytearray(8192)))
            keys = device.domain.windows.history.keys_used
            fake.raise_event(AsyncEventKind.CQ_ERR, old.cq)
            await until(lambda: path.rail_statistics().progress_recoveries == 1)
            assert old not in device.lanes.lanes
            assert not old.charged
            assert device.lanes.failed is None
            assert (device._context.native, device.domain.native.native) == natives
            assert device.domain.windows.history.keys_used >= keys
            assert device.active  # the route was never fenced
            await path.memory.deregister(held)
            await asyncio.sleep(CONFIG.connect_backoff_s)
            assert await ready(pair)
            await Get(pair, 300_000, 2).run()

    asyncio.run(scenario())


def test_a_transfer_on_the_broken_queue_fails_by_proof() -> None:
    async def scenario() -> None:
        async with rdma_pair(config=CONFIG) as pair:
            assert await ready(pair)
            pair.b.delay_payload(READ)
            get = Get(pair, 300_000)
            pulling = asyncio.create_task(get.pull(await get.expose()))
            await asyncio.sleep(0)
            (device,) = pair.consumer.devices
            assert pair.consumer.rail_statistics().budgets["send_work"][0] > 0
            pair.b.raise_event(AsyncEventKind.CQ_ERR, device.lanes.lanes[0].cq)
            with pytest.raises(PathFailed):
                await pulling
            assert get.untouched
            pair.b.clear_rules()
            await get.retract(transferred=False)
            await until(lambda: pair.consumer.rail_statistics().progress_recoveries == 1)
            assert not pair.consumer.statistics().retained

    asyncio.run(scenario())


def test_what_is_owed_is_seen_beside_its_bound() -> None:
    async def scenario() -> None:
        async with rdma_pair(config=CONFIG) as pair:
            assert await ready(pair)
            budgets = pair.consumer.rail_statistics().budgets
            made, work = pair.consumer.devices[0].queue_pairs, CONFIG.work_entries
            assert budgets["completion_entries"] == (made * work, CONFIG.cq_depth)
            endpoints = CONFIG.endpoints_max
            assert budgets["send_work"] == (0, endpoints * CONFIG.send_depth)
            assert budgets["receive_work"] == (0, endpoints * CONFIG.recv_depth)
            assert total(d.lanes for d in pair.owner.devices).lanes == 1

    asyncio.run(scenario())
