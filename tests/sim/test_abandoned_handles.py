"""Case C16: handles that nobody picks up, ends that are lost or come twice, and slow readers that
must keep their leases. The owner alone enforces all of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import OrbitError
from orbit.model import Handle, Lease
from orbit.protocol.messages import (
    DetachRequest,
    EndReply,
    LeaseRenewRequest,
    Message,
    ReleaseRequest,
)
from orbit.protocol.slots import TTL_SWEEP_S
from orbit.runtime.options import RegisterOptions
from orbit.runtime.session import ControlSession
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

MIB = 1 << 20
BUDGET = 64 * MIB
LEASE_S = 1.0
CONFIG = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=LEASE_S))
PATHS = ["rdma", "tcp"]
ENDS = (DetachRequest, ReleaseRequest)


def add_pair(world: World) -> tuple[WorldNode, WorldNode]:
    owner = world.add_node(CONFIG, arena_bytes=BUDGET)
    consumer = world.add_node(CONFIG, arena_bytes=BUDGET)
    world.introduce()
    return owner, consumer


def slots(node: WorldNode) -> Any:
    return node.rendezvous.statistics().slots


def assert_gone(owner: WorldNode, world: World) -> None:
    found = slots(owner)
    assert (found.staged_bytes, found.leased_bytes, found.slots) == (0, 0, 0)
    assert owner.memory is not None
    assert owner.memory.allocated_count == 0
    assert world.fabric.exposed_count == 0


async def get(node: WorldNode, handle: Handle, path: str) -> Lease:
    _, lease = await node.rendezvous.consumer.get(handle, transport=path, timeout=None)
    return lease


def test_two_hundred_payloads_that_nobody_fetches_go_within_their_time_to_live() -> None:
    async def main() -> None:
        async with World() as world:
            owner, _ = add_pair(world)
            assert owner.memory is not None
            owner.memory.budget.limit_bytes = BUDGET
            ttl_s, started = 5.0, asyncio.get_running_loop().time()
            for _ in range(200):
                await owner.rendezvous.owner.register_data_pinned(
                    bytes(MIB), RegisterOptions(retain=True, ttl=ttl_s)
                )
                assert owner.memory.registered_bytes <= BUDGET
            found = slots(owner)
            assert (found.staged_bytes, found.ttl_armed) == (200 * MIB, 200)
            assert owner.count("orbit_rendezvous_rdma_path_total", side="owner") > 100
            elapsed_s = asyncio.get_running_loop().time() - started
            await asyncio.sleep(ttl_s + TTL_SWEEP_S - elapsed_s)
            assert_gone(owner, world)
            assert slots(owner).slots_expired == 200
            assert owner.rendezvous._owner._store.next_deadline is None

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_consumer_killed_in_the_middle_leaves_nothing(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.tcp, consumer.rdma):
                assert data_path is not None
                data_path.faults.bytes_per_s = 1e6
            handle = await owner.rendezvous.owner.register_data_pinned(pattern(MIB))
            fetching = asyncio.ensure_future(get(consumer, handle, path))
            await asyncio.sleep(0.5)
            assert slots(owner).leased_bytes == MIB
            world.kill(consumer)
            await asyncio.sleep(1.5 * LEASE_S)
            assert_gone(owner, world)
            with pytest.raises(OrbitError):
                await fetching

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("times", [0, 2, 5])
def test_an_end_that_is_lost_or_comes_several_times_frees_once(
    path: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ControlSession.call

    async def repeated(
        session: ControlSession, request: Message, reply: Any, timeout_s: float | None = None
    ) -> Any:
        if not isinstance(request, ENDS):
            return await call(session, request, reply, timeout_s)
        for _ in range(times):
            assert await call(session, request, reply, timeout_s) == EndReply()
        return EndReply()

    monkeypatch.setattr(ControlSession, "call", repeated)

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handles = [
                await owner.rendezvous.owner.register_data_pinned(pattern(100_000, seed))
                for seed in range(20)
            ]
            for handle in handles:
                lease = await get(consumer, handle, path)
                await consumer.rendezvous.consumer.release(handle, lease)
            await asyncio.sleep(1.5 * LEASE_S)
            assert_gone(owner, world)
            found = slots(owner)
            assert found.late_ends == 20 * max(0, times - 1)
            assert found.leases_reaped == (20 if times == 0 else 0)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_128_slow_fetches_through_a_slow_network_keep_their_leases(path: str) -> None:
    async def main() -> None:
        faults = LinkFaults(delay_min_s=0.19, delay_max_s=0.2)
        async with World(0, faults) as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.tcp, consumer.rdma):
                assert data_path is not None
                data_path.faults.bytes_per_s = 100_000 / (3 * LEASE_S)
            payload = pattern(100_000)
            keep = RegisterOptions(retain=True)
            handle = await owner.rendezvous.owner.register_data_pinned(payload, keep)

            async def fetch() -> None:
                api = consumer.rendezvous.consumer
                data, lease = await api.get(handle, transport=path, timeout=None)
                assert data == payload
                assert lease.path == path
                await api.detach(handle, lease)

            await asyncio.gather(*(fetch() for _ in range(128)))
            found = slots(owner)
            assert (found.leases_reaped, found.late_ends, found.leases_held) == (0, 0, 0)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_fetch_whose_renewals_are_lost_fails_and_delivers_no_wrong_bytes(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify = ControlSession.notify

    def deaf(session: ControlSession, request: Message) -> None:
        if not isinstance(request, LeaseRenewRequest):
            notify(session, request)

    monkeypatch.setattr(ControlSession, "notify", deaf)

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.tcp, consumer.rdma):
                assert data_path is not None
                data_path.faults.bytes_per_s = 100_000 / (3 * LEASE_S)
            keep = RegisterOptions(retain=True)
            handle = await owner.rendezvous.owner.register_data_pinned(pattern(100_000), keep)
            with pytest.raises(OrbitError):
                await get(consumer, handle, path)
            await asyncio.sleep(1.5 * LEASE_S)
            assert slots(owner).leases_reaped >= 1
            assert (slots(owner).leases_held, slots(owner).slots) == (0, 1)

    run_virtual(main())
