"""The whole runtime over the real RDMA path, on fake devices: bytes, reasons, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from errno import ENOMEM
from typing import Any

import pytest

from orbit import events
from orbit.config import NodeConfig, RdmaPoolConfig, RendezvousConfig
from orbit.errors import OrbitError
from orbit.model import Lease, PathName, PathReason
from orbit.protocol.messages import RailHint
from orbit.protocol.paths import SPREAD_BYTES_MIN
from orbit.protocol.slices import BLOCK_BYTES
from orbit.runtime.options import RegisterOptions
from orbit.runtime.paths import Paths
from orbit.testing.fabric import SimPath
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.testing.world import World, WorldNode
from orbit.verbs import records, status
from orbit.verbs.opening import open_rdma_path
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.scripted import FOREVER, ScriptedDevice, ScriptedFabric, ScriptedProvider
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
LARGE = SPREAD_BYTES_MIN + 12_345


@dataclass(eq=False)
class Host:
    node: WorldNode
    path: RdmaPath
    devices: tuple[ScriptedDevice, ...]

    @property
    def device(self) -> ScriptedDevice:
        """Of its first rail."""
        return self.devices[0]


async def add_host(
    world: World,
    fabric: ScriptedFabric,
    names: Sequence[str],
    config: NodeConfig | None,
    rdma: RdmaPathConfig,
) -> Host:
    number = len(world.nodes) + 1
    devices = [
        fabric.add_device(name, f"fe80::{rail}:{number}", f"::ffff:198.18.{rail}.{number}")
        for rail, name in enumerate(names, 1)
    ]
    rails = [RailHint(device.name, 1, device.gids[1], 1, 4096) for device in devices]
    path, reason, detail = await open_rdma_path(ScriptedProvider(fabric, names), rdma, rails=rails)
    assert path is not None, (reason, detail)
    paths = Paths(SimPath(world.fabric), path, PathReason.OK, detail, path.memory)
    node = world.add_node(config, paths=paths)
    node.rails, node.limits = path.hints, path.limits
    return Host(node, path, tuple(devices))


@contextlib.asynccontextmanager
async def two_hosts(
    config: NodeConfig | None = None,
    rdma: RdmaPathConfig = QUICK,
    *,
    rxe: bool = False,
    rails: int = 1,
) -> AsyncIterator[tuple[World, Host, Host]]:
    """Each rail has a network of its own. Afterwards the fakes must have seen no misuse and hold
    nothing.
    """
    fabric = ScriptedFabric(rxe=rxe)
    async with World() as world:
        names = [[f"fake_{host}{rail or ''}" for rail in range(rails)] for host in "ab"]
        owner = await add_host(world, fabric, names[0], config, rdma)
        consumer = await add_host(world, fabric, names[1], config, rdma)
        world.introduce()
        yield world, owner, consumer
        for device in (*owner.devices, *consumer.devices):
            device.clear_rules()
            device.release()
    for device in (*owner.devices, *consumer.devices):
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters
    for host in (owner, consumer):
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
            owner.device.fail_verb("alloc_pd", ENOMEM, count=FOREVER)  # no fresh domain
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


# --- several rails --------------------------------------------------------------------------------


def bytes_served(owner: Host) -> list[int]:
    """By RDMA so far, through each of its devices."""
    return [device.counters().sent_bytes for device in owner.devices]


async def get_large(owner: Host, consumer: Host) -> list[int]:
    """By RDMA. How much went through which of the owner's devices."""
    before = bytes_served(owner)
    assert (await get(owner, consumer, LARGE)).path is PathName.RDMA
    return [now - then for now, then in zip(bytes_served(owner), before, strict=True)]


async def spread(owner: Host, consumer: Host) -> list[int]:
    """Large gets, until they use both rails: how much went through which then."""
    for _ in range(20):
        shares = await get_large(owner, consumer)
        if all(shares):
            return shares
        await asyncio.sleep(0.05)
    raise AssertionError("the second rail was never used")


def test_a_large_get_uses_every_rail(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rails=2) as (_, owner, consumer):
            assert await get_large(owner, consumer) == [LARGE, 0]
            shares = await spread(owner, consumer)
            assert sum(shares) == LARGE
            assert abs(shares[0] - shares[1]) <= BLOCK_BYTES
            payload = pattern(LARGE, LARGE)
            handle = await owner.node.rendezvous.owner.register_data_pinned(payload)
            into = bytearray(LARGE)
            api = consumer.node.rendezvous.consumer
            before = bytes_served(owner)
            lease = await api.get_into(handle, into, transport="rdma", timeout=None, progress=None)
            assert into == payload
            assert all(now > then for now, then in zip(bytes_served(owner), before, strict=True))
            await api.release(handle, lease)

    run_async(main())


def test_a_rail_that_fails_costs_a_large_get_its_one_fallback(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rails=2) as (_, owner, consumer):
            await spread(owner, consumer)
            consumer.devices[1].fail(records.READ, status.REM_ACCESS_ERR)
            lease = await get(owner, consumer, LARGE)
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason.GET_FAILED)
            assert consumer.node.count(events.FALLBACKS_TOTAL, reason="get_failed") == 1
            consumer.devices[1].clear_rules()
            await spread(owner, consumer)

    run_async(main())
