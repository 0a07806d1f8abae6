"""Leases of the TCP path: renewed whatever the pull and its caller do, and never wrong bytes when
they could not be.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit import events
from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import LeaseError, OrbitError
from orbit.model import Handle, Lease, LeaseEnd
from orbit.protocol.messages import AcquireRequest
from orbit.runtime.fetching import FetchRun
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

PAYLOAD = pattern(200_000)
SLOW = 100_000.0  # bytes per second: the payload takes 2 s of virtual time
RETAIN = RegisterOptions(retain=True)


def config_of(lease_s: float) -> NodeConfig:
    return NodeConfig(rendezvous=RendezvousConfig(lease_timeout=lease_s))


def add_pair(world: World, owner_s: float, consumer_s: float) -> tuple[WorldNode, WorldNode]:
    owner, consumer = world.add_node(config_of(owner_s)), world.add_node(config_of(consumer_s))
    world.introduce()
    return owner, consumer


async def get(node: WorldNode, handle: Handle, transport: str = "tcp") -> tuple[memoryview, Lease]:
    return await node.rendezvous.consumer.get(handle, transport=transport, timeout=None)


def held(node: WorldNode) -> int:
    return node.rendezvous.statistics().slots.leases_held


@pytest.mark.parametrize(("owner_s", "consumer_s"), [(0.4, 30.0), (30.0, 0.4), (0.4, 0.4)])
def test_a_long_pull_is_renewed_by_whoever_has_the_shorter_timeout(
    owner_s: float, consumer_s: float
) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, owner_s, consumer_s)
            consumer.tcp.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            data, lease = await get(consumer, handle)
            assert data == PAYLOAD
            assert held(owner) == 1
            assert owner.count(events.LEASES_REAPED_TOTAL) == 0
            await asyncio.sleep(1.0)  # it is not given back, and nobody renews it any more
            assert held(owner) == 0
            # What expires drops the lock and one reference, as for RDMA.
            await consumer.rendezvous.consumer.release(handle, lease)
            assert owner.rendezvous.statistics().slots.slots == 0

    run_virtual(main())


def test_a_consumer_from_before_deadlines_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    request = FetchRun._request

    def old_request(*args: Any, **kwargs: Any) -> AcquireRequest:
        today = request(*args, **kwargs)
        return AcquireRequest(today.handle, inline_max=today.inline_max)

    monkeypatch.setattr(FetchRun, "_request", old_request)

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, 0.4, 0.4)
            consumer.tcp.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            data, lease = await get(consumer, handle)
            assert data == PAYLOAD
            await asyncio.sleep(60)
            assert held(owner) == 1
            await consumer.rendezvous.consumer.release(handle, lease)

    run_virtual(main())


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_many_slow_gets_through_a_long_line_lose_no_lease(transport: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, 1.0, 1.0)
            for path in (consumer.rdma, consumer.tcp):
                assert path is not None
                path.faults.bytes_per_s = len(PAYLOAD) / 3.0  # three lease periods
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            world.network.faults.delay_min_s = world.network.faults.delay_max_s = 0.2
            got = await asyncio.gather(*(get(consumer, handle, transport) for _ in range(128)))
            assert all(data == PAYLOAD for data, _ in got)
            assert owner.count(events.LEASES_REAPED_TOTAL) == 0
            for _, lease in got:
                consumer.rendezvous._consumer.drop(lease)
            await asyncio.sleep(1)
            assert held(owner) == 0
            assert consumer.rendezvous.statistics().leases_held == 0

    run_virtual(main())


def test_a_renewal_that_never_arrives_costs_the_lease_and_not_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FetchRun, "_renew_after", lambda *args: None)

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, 0.4, 0.4)
            consumer.tcp.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data(PAYLOAD, RETAIN)
            with pytest.raises(OrbitError):
                await get(consumer, handle)
            found = owner.rendezvous.statistics().slots
            assert found.leases_ended[LeaseEnd.REAPED] == 1
            assert found.leases_held == 0

    run_virtual(main())


def test_a_lease_is_given_back_late_in_silence() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, 0.4, 0.4)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD, RETAIN)
            _, lease = await get(consumer, handle)
            await asyncio.sleep(2)
            assert held(owner) == 0
            await consumer.rendezvous.consumer.detach(handle, lease)
            with pytest.raises(LeaseError):
                await consumer.rendezvous.consumer.detach(handle, lease)
            assert owner.rendezvous.statistics().slots.late_ends == 1

    run_virtual(main())


def test_small_gets_that_are_released_leave_nothing_listed() -> None:

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, 30, 30)
            tasks = len(asyncio.all_tasks())
            for size in [0, 1, 100] * 200:
                handle = await owner.rendezvous.owner.register_data(pattern(size))
                data, lease = await get(consumer, handle)
                assert data == pattern(size)
                await consumer.rendezvous.consumer.release(handle, lease)
            assert consumer.rendezvous.statistics().leases_held == 0
            assert consumer.rendezvous._consumer._runs == {}
            assert owner.rendezvous.statistics().slots.slots == 0
            await asyncio.sleep(0.1)
            assert len(asyncio.all_tasks()) == tasks

    run_virtual(main())
