"""The whole runtime over the real RDMA path, on fake devices: bytes, reasons, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from orbit import events
from orbit.config import NodeConfig, RdmaPoolConfig, RendezvousConfig
from orbit.errors import OrbitError
from orbit.model import Lease, PathName, PathReason
from orbit.protocol.messages import RailHint
from orbit.runtime.options import RegisterOptions
from orbit.runtime.paths import Paths
from orbit.testing.fabric import SimPath
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.testing.world import World, WorldNode
from orbit.verbs import records, status
from orbit.verbs.opening import open_rdma_path
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig

Run = Callable[[Any], Any]
MIB = 1 << 20
QUICK = RdmaPathConfig(
    pool=RdmaPoolConfig(initial_arena_bytes=24 * MIB),
    connect_backoff_s=0.05,
    receipt_timeout_s=0.2,
    bind_timeout_s=0.2,
    drain_timeout_s=0.2,
    progress_timeout_s=0.5,
)
RETAIN = RegisterOptions(retain=True)


@dataclass(eq=False)
class Host:
    node: WorldNode
    path: RdmaPath
    device: ScriptedDevice


async def add_host(
    world: World, fabric: ScriptedFabric, name: str, config: NodeConfig | None, rdma: RdmaPathConfig
) -> Host:
    device = fabric.add_device(name)
    rail = RailHint(name, 1, device.gids[1], 1, 4096)
    path, reason, detail = await open_rdma_path(
        ScriptedProvider(fabric, [name]), rdma, rails=[rail]
    )
    assert path is not None, (reason, detail)
    paths = Paths(SimPath(world.fabric), path, PathReason.OK, detail, path.memory)
    node = world.add_node(config, paths=paths)
    node.rails, node.limits = path.rails, path.limits
    return Host(node, path, device)


@contextlib.asynccontextmanager
async def two_hosts(
    config: NodeConfig | None = None, rdma: RdmaPathConfig = QUICK, *, rxe: bool = False
) -> AsyncIterator[tuple[World, Host, Host]]:
    """Afterwards the fakes must have seen no misuse and hold nothing."""
    fabric = ScriptedFabric(rxe=rxe)
    async with World() as world:
        owner = await add_host(world, fabric, "fake_a", config, rdma)
        consumer = await add_host(world, fabric, "fake_b", config, rdma)
        world.introduce()
        yield world, owner, consumer
        for host in (owner, consumer):
            host.device.clear_rules()
            host.device.release()
    for host in (owner, consumer):
        counters = host.device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters
        assert host.path.memory.allocated_bytes == 0


async def get(owner: Host, consumer: Host, nbytes: int, **options: Any) -> Lease:
    payload = pattern(nbytes, nbytes)
    handle = await owner.node.rendezvous.owner.register_data_pinned(payload)
    wanted = {"transport": None, "timeout": None, **options}
    data, lease = await consumer.node.rendezvous.consumer.get(handle, **wanted)
    assert data == payload
    await consumer.node.rendezvous.consumer.release(handle, lease)
    return lease


@pytest.mark.parametrize("rxe", [False, True])
def test_bytes_by_rdma_on_every_target(run_async: Run, rxe: bool) -> None:
    async def main() -> None:
        async with two_hosts(rxe=rxe) as (_, owner, consumer):
            for nbytes in (65_536, 65_537, MIB - 1, MIB, MIB + 1, 5 * MIB + 3):
                lease = await get(owner, consumer, nbytes)
                assert (lease.path, lease.reason) == (PathName.RDMA, PathReason.OK)
            lease = await get(owner, consumer, 1, transport="rdma")
            assert lease.path is PathName.RDMA
            payload = pattern(2 * MIB)
            handle = await owner.node.rendezvous.owner.register_data_pinned(payload)
            pinned, lease = await consumer.node.rendezvous.consumer.get_pinned(
                handle, transport="rdma", timeout=None
            )
            assert pinned.view == payload
            pinned.free()
            await consumer.node.rendezvous.consumer.release(handle, lease)
            found = consumer.path.statistics().counts
            assert found["pulls"] == 8
            assert found["targets_direct"] == 1

    run_async(main())


def test_both_ways_at_once(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (_, one, two):
            leases = await asyncio.gather(
                *(get(one, two, 70_000 + n) for n in range(20)),
                *(get(two, one, 80_000 + n) for n in range(20)),
            )
            assert {lease.path for lease in leases} == {PathName.RDMA}

    run_async(main())


def test_window_keys_run_out(run_async: Run) -> None:
    async def main() -> None:
        few = replace(QUICK, window_key_indices_max=3)
        async with two_hosts(rdma=few) as (_, owner, consumer):
            reasons = []
            for _ in range(800):
                lease = await get(owner, consumer, 65_536)
                reasons.append(lease.reason)
                if lease.reason is PathReason.WINDOW_KEYS:
                    break
            assert reasons[0] is PathReason.OK
            assert reasons[-1] is PathReason.WINDOW_KEYS

    run_async(main())


def test_a_cancelled_read_and_the_next_one(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (_, owner, consumer):
            payload = pattern(4 * MIB)
            api = consumer.node.rendezvous.consumer
            handle = await owner.node.rendezvous.owner.register_data_pinned(payload, RETAIN)
            for delay in (0.0, 0.002, 0.005, 0.02):
                dest = bytearray(len(payload))
                task = asyncio.ensure_future(
                    api.get_into(handle, dest, transport="rdma", timeout=None, progress=None)
                )
                await asyncio.sleep(delay)
                task.cancel()
                outcome = (await asyncio.gather(task, return_exceptions=True))[0]
                assert isinstance(outcome, asyncio.CancelledError | Lease | OrbitError)
                if isinstance(outcome, Lease):
                    await api.release(handle, outcome)
                dest.append(0)
            for _ in range(200):
                data, lease = await api.get(handle, transport=None, timeout=None)
                assert data == payload
                await api.release(handle, lease)
                if lease.path is PathName.RDMA:
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("RDMA never came back")

    run_async(main())


def test_a_consumer_that_vanishes_frees_the_window(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (world, owner, consumer):
            handle = await owner.node.rendezvous.owner.register_data_pinned(pattern(MIB), RETAIN)
            await consumer.node.rendezvous.consumer.get(handle, transport="rdma", timeout=None)
            world.network.cut_all()
            await owner.node.rendezvous.owner.withdraw(handle)
            assert owner.path.memory.allocated_bytes == 0

    run_async(main())


def test_a_silent_lease_is_reaped_with_its_window(run_async: Run) -> None:
    config = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=0.1))

    async def main() -> None:
        async with two_hosts(config) as (_, owner, consumer):
            handle = await owner.node.rendezvous.owner.register_data_pinned(pattern(MIB))
            await consumer.node.rendezvous.consumer.get(handle, transport="rdma", timeout=None)
            for _ in range(100):
                if owner.node.count(events.LEASES_REAPED_TOTAL):
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert owner.path.memory.allocated_bytes == 0
            assert owner.node.count(events.LEASES_REAPED_TOTAL) == 1

    run_async(main())


def test_gets_flushed_with_a_killed_queue_pair_fall_back_once_each(run_async: Run) -> None:
    async def main() -> None:
        patient = replace(QUICK, width=1, drain_timeout_s=5.0, receipt_timeout_s=5.0)
        async with two_hosts(rdma=patient) as (_, owner, consumer):
            await get(owner, consumer, MIB)  # connected
            # The first READ of all succeeds late, the second fails: both are on one queue pair.
            consumer.device.hold(records.READ)
            consumer.device.fail(records.READ, status.REM_ACCESS_ERR, skip=1)
            posted = consumer.path.statistics().counts["reads"] + 4
            gets = [asyncio.ensure_future(get(owner, consumer, 70_000 + n)) for n in range(4)]
            await until(lambda: consumer.path.statistics().counts["reads"] == posted)
            consumer.device.clear_rules()
            consumer.device.release()
            leases = await asyncio.gather(*gets)
            flushed = [lease for lease in leases if lease.path is PathName.TCP]
            assert len(flushed) >= 3
            assert {lease.reason for lease in flushed} == {PathReason.GET_FAILED}
            fell_back = consumer.node.count(events.FALLBACKS_TOTAL, reason="get_failed")
            assert fell_back == len(flushed)

    run_async(main())


def test_both_roles_share_one_session(run_async: Run) -> None:
    """Each node has its own READ array to the other, over the same epoch."""

    async def main() -> None:
        async with two_hosts() as (_, a, b):
            payload = pattern(3 * MIB)
            handles = [
                await host.node.rendezvous.owner.register_data_pinned(payload) for host in (a, b)
            ]

            async def fetch(host: Host, number: int) -> None:
                api = host.node.rendezvous.consumer
                data, lease = await api.get(handles[number], transport="rdma", timeout=5.0)
                assert data == payload
                assert lease.path is PathName.RDMA
                await api.detach(handles[number], lease)

            await fetch(b, 0)
            await fetch(a, 1)
            await asyncio.gather(*(fetch(a, 1) for _ in range(3)), *(fetch(b, 0) for _ in range(3)))
            assert [host.node.rendezvous.statistics().sessions for host in (a, b)] == [1, 1]

    run_async(main())
