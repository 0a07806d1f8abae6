"""Leases: renewed while a pull runs, reaped when silent, returned on every exit."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from orbit import events
from orbit.config import NodeConfig, RendezvousConfig, TimeoutConfig
from orbit.errors import (
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    PeerLost,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    UnknownHandle,
    UnknownPeer,
    UsageError,
)
from orbit.model import Handle, Incarnation, PathName, PeerIdentity, SlotId, WorkerId
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

PAYLOAD = pattern(200_000)
RETAIN = RegisterOptions(retain=True)
SLOW = 100_000.0  # bytes per second: the payload takes 2 s of virtual time


def add_pair(world: World, config: NodeConfig | None = None) -> tuple[WorldNode, WorldNode]:
    owner, consumer = world.add_node(config), world.add_node(config)
    world.introduce()
    return owner, consumer


async def take(node: WorldNode, handle: Handle, **options: object) -> tuple[memoryview, object]:
    wanted: dict[str, object] = {"transport": None, "timeout": None, **options}
    return await node.rendezvous.consumer.get(handle, **wanted)  # type: ignore[arg-type]


def held(node: WorldNode) -> int:
    return node.rendezvous.statistics().slots.leases_held


def test_release_drops_the_reference_and_detach_only_the_lock() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            await consumer.rendezvous.consumer.ref_handle(handle)
            _, first = await take(consumer, handle)
            _, second = await take(consumer, handle)
            assert (await consumer.rendezvous.consumer.metadata(handle)).refcount == 2
            await consumer.rendezvous.consumer.detach(handle, first)  # type: ignore[arg-type]
            assert (await consumer.rendezvous.consumer.metadata(handle)).refcount == 2
            await consumer.rendezvous.consumer.release(handle, second)  # type: ignore[arg-type]
            assert (await consumer.rendezvous.consumer.metadata(handle)).refcount == 1
            _, third = await take(consumer, handle)
            await consumer.rendezvous.consumer.release(handle, third)  # type: ignore[arg-type]
            with pytest.raises(UnknownHandle):
                await consumer.rendezvous.consumer.ref_handle(handle)

    run_virtual(main())


def test_a_lease_is_given_back_once_and_under_its_own_handle() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            other = await owner.rendezvous.owner.register_data(PAYLOAD)
            _, lease = await consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
            with pytest.raises(LeaseError):
                await consumer.rendezvous.consumer.release(other, lease)
            with pytest.raises(LeaseError):
                await owner.rendezvous.consumer.release(handle, lease)  # held by somebody else
            strange = dataclasses.replace(lease, lease_id=99)
            with pytest.raises(LeaseError):
                await consumer.rendezvous.consumer.release(handle, strange)
            await consumer.rendezvous.consumer.detach(handle, lease)
            with pytest.raises(LeaseError):
                await consumer.rendezvous.consumer.detach(handle, lease)
            assert held(owner) == 0

    run_virtual(main())


def test_a_long_pull_is_renewed_and_a_silent_lease_is_reaped() -> None:
    config = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=0.4))

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, config)
            assert consumer.rdma is not None
            consumer.rdma.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            started = asyncio.get_running_loop().time()
            data, lease = await consumer.rendezvous.consumer.get(
                handle, transport=None, timeout=None
            )
            assert data == PAYLOAD
            assert lease.path is PathName.RDMA
            assert asyncio.get_running_loop().time() - started > 4 * 0.4
            assert held(owner) == 1
            before = asyncio.get_running_loop().time()
            while held(owner):  # noqa: ASYNC110 (virtual time; there is no event to wait for)
                await asyncio.sleep(0.01)
            silent_s = asyncio.get_running_loop().time() - before
            assert silent_s < 1.5 * 0.4 + 0.02
            assert owner.count(events.LEASES_REAPED_TOTAL) == 1
            # A forced release drops the reference too; the late release is no error.
            await consumer.rendezvous.consumer.release(handle, lease)
            with pytest.raises(UnknownHandle):
                await consumer.rendezvous.consumer.metadata(handle)

    run_virtual(main())


def test_an_idle_node_arms_no_timer() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            _, lease = await consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
            await consumer.rendezvous.consumer.release(handle, lease)
            await asyncio.sleep(60)  # the reaper ran out of leases meanwhile
            loop = asyncio.get_running_loop()
            timers = [t for t in loop._scheduled if not t.cancelled()]  # type: ignore[attr-defined]
            assert timers == []

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp"])
@pytest.mark.parametrize("after_s", [0.0, 0.0002, 0.001, 0.002, 0.5, 1.9])
def test_a_cancelled_get_leaves_no_lease(path: str, after_s: float) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.rdma, consumer.tcp):
                assert data_path is not None
                data_path.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            dest = bytearray(len(PAYLOAD))
            task = asyncio.ensure_future(
                consumer.rendezvous.consumer.get_into(
                    handle, dest, transport=path, timeout=None, progress=None
                )
            )
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            dest.append(0)  # nobody holds its export any more
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            assert world.fabric.exposed_count == 0
            assert consumer.rendezvous.statistics().leases_held == 0

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp"])
@pytest.mark.parametrize("timeout", [0.0001, 0.0007, 0.003, 1.0])
def test_a_get_that_runs_out_of_time_leaves_no_lease(path: str, timeout: float) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.rdma, consumer.tcp):
                assert data_path is not None
                data_path.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            with pytest.raises(DeadlineExceeded) as caught:
                await take(consumer, handle, transport=path, timeout=timeout)
            assert caught.value.timeout_s == timeout
            await asyncio.sleep(0.1)
            assert held(owner) == 0

    run_virtual(main())


@pytest.mark.parametrize("who", ["owner", "consumer"])
@pytest.mark.parametrize("path", ["rdma", "tcp"])
def test_a_killed_process_is_seen_by_the_other_side(who: str, path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.rdma, consumer.tcp):
                assert data_path is not None
                data_path.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            task = asyncio.ensure_future(take(consumer, handle, transport=path))
            await asyncio.sleep(0.5)
            world.kill(owner if who == "owner" else consumer)
            started = asyncio.get_running_loop().time()
            with pytest.raises(OrbitError):
                await task
            await asyncio.sleep(0.01)  # the other end of a cut link hears of it a delay later
            assert asyncio.get_running_loop().time() - started < 2
            assert held(owner) == 0
            with pytest.raises(PeerUnreachable):
                await (consumer if who == "owner" else owner).rendezvous.consumer.metadata(
                    handle if who == "owner" else Handle(consumer.identity.worker_id, SlotId(1))
                )

    run_virtual(main())


def test_a_lease_whose_epoch_is_over_is_given_back_in_silence() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            _, lease = await consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
            world.network.cut_all()
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            await consumer.rendezvous.consumer.release(handle, lease)
            with pytest.raises(LeaseError):
                await consumer.rendezvous.consumer.release(handle, lease)
            # The forced release dropped the only reference.
            with pytest.raises(UnknownHandle):
                await consumer.rendezvous.consumer.metadata(handle)

    run_virtual(main())


def test_retained_slots_outlive_their_consumers_and_withdraw_ends_them() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            source = bytearray(PAYLOAD)
            handle = await owner.rendezvous.owner.register_data(source, RETAIN)
            for _ in range(3):
                data, lease = await consumer.rendezvous.consumer.get(
                    handle, transport=None, timeout=None
                )
                assert data == PAYLOAD
                await consumer.rendezvous.consumer.release(handle, lease)
            _, lease = await consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
            world.network.cut_all()
            await asyncio.sleep(0.1)
            assert (await owner.rendezvous.consumer.metadata(handle)).refcount == 1
            with pytest.raises(BufferError):
                source.append(0)
            await owner.rendezvous.owner.withdraw(handle)
            source.append(0)
            with pytest.raises(UnknownHandle):
                await owner.rendezvous.owner.withdraw(handle)

    run_virtual(main())


def test_withdraw_in_the_middle_of_a_pull_fails_the_pull() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            consumer.tcp.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            task = asyncio.ensure_future(take(consumer, handle))
            await asyncio.sleep(0.5)
            await owner.rendezvous.owner.withdraw(handle)
            with pytest.raises(OrbitError):
                await task

    run_virtual(main())


def test_a_handle_of_this_node_takes_no_wire() -> None:
    async def main() -> None:
        async with World() as world:
            node = world.add_node()
            for payload in (b"", b"x", PAYLOAD):
                handle = await node.rendezvous.owner.register_data_pinned(payload)
                assert (await node.rendezvous.consumer.metadata(handle)).total_bytes == len(payload)
                data, lease = await node.rendezvous.consumer.get(
                    handle, transport="rdma", timeout=None
                )
                assert data == payload
                assert lease.path is PathName.LOCAL
                await node.rendezvous.consumer.release(handle, lease)
                with pytest.raises(UnknownHandle):
                    await node.rendezvous.consumer.metadata(handle)
            assert world.network.links == []

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp", "local"])
def test_get_pinned_lands_in_the_arena_on_every_path(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            node = owner if path == "local" else consumer
            transport = "auto" if path == "local" else path
            payload, lease = await node.rendezvous.consumer.get_pinned(
                handle, transport=transport, timeout=None
            )
            assert lease.path == path
            assert payload.view == PAYLOAD
            assert node.memory is not None
            allocated = node.memory.allocated_count
            payload.free()
            payload.free()
            assert node.memory.allocated_count == allocated - 1
            with pytest.raises(ClosedError):
                _ = payload.view
            await node.rendezvous.consumer.release(handle, lease)

    run_virtual(main())


def test_bad_calls_are_usage_errors_and_hold_nothing() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD, RETAIN)
            api = consumer.rendezvous.consumer
            small, readonly = bytearray(len(PAYLOAD) - 1), bytes(len(PAYLOAD))
            strided = memoryview(bytearray(2 * len(PAYLOAD)))[::2]
            for dest in (small, readonly, strided, "text", 7):
                with pytest.raises(UsageError):
                    await api.get_into(handle, dest, transport=None, timeout=None, progress=None)
            for wrong in ("0000000000000001-1", 7, None):
                with pytest.raises(UsageError):
                    await take(consumer, wrong)  # type: ignore[arg-type]
            for timeout in (0, -1, float("inf"), float("nan")):
                with pytest.raises(UsageError):
                    await take(consumer, handle, timeout=timeout)
            with pytest.raises(OrbitError):
                await take(consumer, handle, transport="pigeon")
            with pytest.raises(UnknownPeer):
                await take(consumer, Handle(WorkerId(77), SlotId(1)))
            with pytest.raises(UnknownHandle):
                await take(consumer, Handle(owner.identity.worker_id, SlotId(77)))
            for address in (7, b"", "orbit1:nonsense", str(owner.address)[:-3]):
                with pytest.raises(UsageError):
                    consumer.rendezvous.add_peer(address)  # type: ignore[arg-type]
            small.append(0)
            await asyncio.sleep(0.1)
            assert held(owner) == 0

    run_virtual(main())


def test_a_restarted_owner_is_told_from_its_older_life() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            await consumer.rendezvous.consumer.metadata(handle)
            world.kill(owner)
            reborn = world.add_node(identity=PeerIdentity(owner.identity.worker_id, Incarnation(9)))
            reborn.address = dataclasses.replace(reborn.address, endpoints=owner.address.endpoints)
            await asyncio.sleep(0.1)
            with pytest.raises(PeerRestarted):
                await consumer.rendezvous.consumer.metadata(handle)
            consumer.rendezvous.add_peer(reborn.address)
            with pytest.raises(UnknownHandle):
                await consumer.rendezvous.consumer.metadata(handle)

    run_virtual(main())


@pytest.mark.parametrize("secrets", [(b"a", b"b"), (b"a", None), (None, b"b")])
def test_a_wrong_or_missing_secret_is_refused(secrets: tuple[bytes | None, bytes | None]) -> None:
    async def main() -> None:
        async with World() as world:
            owner = world.add_node(NodeConfig(secret=secrets[0]))
            consumer = world.add_node(NodeConfig(secret=secrets[1]))
            world.introduce()
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            with pytest.raises(PeerRefused) as caught:
                await take(consumer, handle)
            assert caught.value.reason == "auth"

    run_virtual(main())


def test_close_ends_everything_and_is_shared() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            assert consumer.rdma is not None
            consumer.rdma.faults.bytes_per_s = SLOW
            source = bytearray(PAYLOAD)
            await owner.rendezvous.owner.register_data(source)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            task = asyncio.ensure_future(take(consumer, handle))
            await asyncio.sleep(0.5)
            await asyncio.gather(*(consumer.rendezvous.close() for _ in range(3)))
            with pytest.raises(OrbitError):
                await task
            await consumer.rendezvous.close()
            with pytest.raises(ClosedError):
                await take(consumer, handle)
            with pytest.raises(ClosedError):
                await consumer.rendezvous.owner.register_data(b"")
            await owner.rendezvous.close()
            source.append(0)

    run_virtual(main())


def test_an_owner_that_closes_tells_its_consumers() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            consumer.tcp.faults.bytes_per_s = SLOW
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            task = asyncio.ensure_future(take(consumer, handle))
            await asyncio.sleep(0.5)
            await owner.rendezvous.close()
            with pytest.raises(OrbitError):
                await task

    run_virtual(main())


def test_an_owner_that_stops_answering_costs_one_call_timeout() -> None:
    config = NodeConfig(timeouts=TimeoutConfig(call_s=2.0))

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, config)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            await consumer.rendezvous.consumer.metadata(handle)
            world.network.faults.stalled = True
            started = asyncio.get_running_loop().time()
            with pytest.raises((DeadlineExceeded, PeerLost)):
                await take(consumer, handle)
            assert asyncio.get_running_loop().time() - started < 2.1
            world.network.faults.stalled = False
            world.network.cut_all()

    run_virtual(main())


def test_a_thousand_gets_from_a_dead_owner_fail_together() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            world.kill(owner)
            outcomes = await asyncio.gather(
                *(take(consumer, handle) for _ in range(1000)), return_exceptions=True
            )
            assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)
            assert asyncio.get_running_loop().time() < 1

    run_virtual(main())
