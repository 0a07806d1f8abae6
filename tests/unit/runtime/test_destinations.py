"""Where gets put their bytes: lists, registered memory, regions; and what a consumer refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit import events
from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import (
    BudgetExceeded,
    BusyError,
    ClosedError,
    OrbitError,
    UnknownHandle,
    Unquiesced,
    UsageError,
)
from orbit.model import Address, Handle, Lease, PathReason
from orbit.runtime import retained
from orbit.runtime.options import RegisterOptions
from orbit.runtime.sinks import PinnedWriter
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode
from orbit.transport.interface import PullReport, Target

PAYLOAD = pattern(200_000)
SLOW = 100_000.0  # bytes per second: the payload takes 2 s of virtual time
RETAIN = RegisterOptions(retain=True)
PATHS = ["rdma", "tcp", "local"]


def add_pair(world: World, config: NodeConfig | None = None) -> tuple[WorldNode, WorldNode]:
    owner, consumer = world.add_node(config), world.add_node(config)
    world.introduce()
    return owner, consumer


async def get_into(node: WorldNode, handle: Handle, dest: object, **asked: Any) -> Lease:
    wanted = {"transport": None, "timeout": None, "progress": None, **asked}
    return await node.rendezvous.consumer.get_into(handle, dest, **wanted)


async def writer_of(node: WorldNode, nbytes: int) -> PinnedWriter:
    return await node.rendezvous.owner.alloc_pinned_writer(nbytes)


def held(node: WorldNode) -> int:
    return node.rendezvous.statistics().slots.leases_held


def side(path: str, owner: WorldNode, consumer: WorldNode) -> tuple[WorldNode, str]:
    """Who gets, and what it demands."""
    return (owner, "auto") if path == "local" else (consumer, path)


def watch_targets(
    node: WorldNode, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, Address | None]]:
    """What the paths of a node are given to fill: its size, and where it is registered."""
    seen: list[tuple[int, Address | None]] = []
    for path in (node.rdma, node.tcp):
        assert path is not None
        pull = path.pull

        async def note(
            session: Any,
            exposure: Any,
            lease_id: Any,
            target: Target,
            progress: Any = None,
            pull: Any = pull,
        ) -> PullReport:
            seen.append((target.nbytes, None if target.pinned is None else target.pinned.address))
            report = await pull(session, exposure, lease_id, target, progress)
            assert isinstance(report, PullReport)
            return report

        monkeypatch.setattr(path, "pull", note)
    return seen


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("inline", [False, True])
def test_a_list_is_filled_in_order(path: str, inline: bool) -> None:
    config = NodeConfig(rendezvous=RendezvousConfig(inline_max_bytes=500_000 if inline else 0))

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, config)
            node, transport = side(path, owner, consumer)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            writer = await writer_of(node, 30_000)
            region = await node.rendezvous.regions.register_owned(bytearray(40_000))
            first, empty, last = bytearray(100_001), bytearray(), bytearray(50_000)
            dest = [first, empty, writer, region.slice(1, 39_000), last]
            lease = await get_into(node, handle, dest, transport=transport)
            assert (lease.path, lease.nbytes) == (path, len(PAYLOAD))
            first.append(0)
            left = len(PAYLOAD) - 169_001
            _, whole = await region.unregister_owned()
            assert isinstance(whole, bytearray)
            found = bytes(first[:-1]) + bytes(writer.view) + bytes(whole[1:39_001])
            assert found + bytes(last[:left]) == PAYLOAD
            assert last[left:] == bytes(len(last) - left)
            writer.free()
            await node.rendezvous.consumer.release(handle, lease)
            await owner.rendezvous.owner.withdraw(handle)

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp"])
def test_registered_memory_is_read_into_as_it_is(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            seen = watch_targets(consumer, monkeypatch)
            writer = await writer_of(consumer, len(PAYLOAD) + 1)
            region = await consumer.rendezvous.regions.register_owned(bytearray(len(PAYLOAD)))
            for dest in (writer, region.slice()):
                lease = await get_into(consumer, handle, dest, transport=path)
                await consumer.rendezvous.consumer.detach(handle, lease)
            assert [size for size, _ in seen] == [len(PAYLOAD)] * 2
            assert seen[0][1] == writer.buffer.address
            assert seen[1][1] is not None
            assert writer.view[: len(PAYLOAD)] == PAYLOAD
            writer.free()
            _, whole = await region.unregister_owned()
            assert whole == PAYLOAD
            await owner.rendezvous.owner.withdraw(handle)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_list_that_is_too_short_is_refused_and_let_go(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            node, transport = side(path, owner, consumer)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            writer = await writer_of(node, 1000)
            region = await node.rendezvous.regions.register_owned(bytearray(1000))
            buffer = bytearray(len(PAYLOAD) - 2001)
            with pytest.raises(UsageError, match="199999"):
                await get_into(node, handle, [buffer, writer, region.slice()], transport=transport)
            buffer.append(0)
            writer.free()
            await region.unregister()  # nothing uses it
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            await owner.rendezvous.owner.withdraw(handle)

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp"])
@pytest.mark.parametrize("how", ["cancelled", "failed", "unknown", "closed"])
def test_every_end_lets_go_of_the_destination_once(path: str, how: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.rdma, consumer.tcp):
                assert data_path is not None
                data_path.faults.bytes_per_s = SLOW
                if how == "failed":
                    data_path.faults.failures = [(1000, PathReason.GET_FAILED)]
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            if how == "unknown":
                await owner.rendezvous.owner.withdraw(handle)
            writer = await writer_of(consumer, 100_000)
            region = await consumer.rendezvous.regions.register_owned(bytearray(100_000))
            dest = [writer, region.slice()]
            task = asyncio.ensure_future(get_into(consumer, handle, dest, transport=path))
            await asyncio.sleep(0.5)
            if how in ("cancelled", "closed"):
                with pytest.raises(BusyError):
                    writer.take()
            if how == "cancelled":
                task.cancel()
            elif how == "closed":
                world.network.cut_all()
            with pytest.raises((OrbitError, asyncio.CancelledError)):
                await task
            writer.free()
            assert consumer.memory is not None
            assert consumer.memory.allocated_count == 0
            await region.unregister()
            await asyncio.sleep(0.1)
            assert held(owner) == 0

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_region_that_must_go_ends_the_get_into_it(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            for data_path in (consumer.rdma, consumer.tcp):
                assert data_path is not None
                data_path.faults.bytes_per_s = SLOW
            node, transport = side(path, owner, consumer)
            far = path != "local"
            payload = PAYLOAD if far else bytes(64 << 20)
            register = owner.rendezvous.owner.register_data_pinned
            if not far:
                register = owner.rendezvous.owner.register_data
            handle = await register(payload, RETAIN)
            region = await node.rendezvous.regions.register_owned(bytearray(len(payload)))
            task = asyncio.ensure_future(
                get_into(node, handle, region.slice(), transport=transport)
            )
            await asyncio.sleep(0.5 if far else 0)
            assert not task.done()
            await region.unregister(0.1 if far else 0)
            with pytest.raises(ClosedError):
                await task
            with pytest.raises(ClosedError):
                await get_into(node, handle, region.slice(), transport=transport)
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            assert node.rendezvous.statistics().leases_held == 0
            await owner.rendezvous.owner.withdraw(handle)

    run_virtual(main())


def test_a_region_that_must_go_does_not_wait_for_a_dial() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data(PAYLOAD)
            world.network.faults.delay_min_s = world.network.faults.delay_max_s = 50.0
            region = await consumer.rendezvous.regions.register_owned(bytearray(len(PAYLOAD)))
            task = asyncio.ensure_future(get_into(consumer, handle, region.slice()))
            await asyncio.sleep(0.5)
            await region.unregister(0.1)
            with pytest.raises(ClosedError):
                await task
            assert asyncio.get_running_loop().time() < 2

    run_virtual(main())


def test_a_region_that_may_still_be_written_is_never_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retained, "_kept", [])

    async def pull(*args: object) -> PullReport:
        raise Unquiesced("queue pair 7", len(PAYLOAD), "the drain timed out")

    async def main() -> None:
        world = World()
        owner, consumer = add_pair(world)
        monkeypatch.setattr(consumer.rdma, "pull", pull)
        handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
        region = await consumer.rendezvous.regions.register_owned(bytearray(len(PAYLOAD)))
        with pytest.raises(Unquiesced):
            await get_into(consumer, handle, region.slice())
        with pytest.raises(Unquiesced):
            await region.unregister(0.1)
        await world.close()

    run_virtual(main())


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_staged_payload_over_its_limit_is_released(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            node, transport = side(path, owner, consumer)
            api = node.rendezvous.consumer
            for size in (len(PAYLOAD), len(PAYLOAD) + 1):
                handle = await owner.rendezvous.owner.register_data_pinned(pattern(size))
                if size == len(PAYLOAD):
                    data, lease = await api.get(
                        handle, transport=transport, timeout=None, payload_max=len(PAYLOAD)
                    )
                    assert data == PAYLOAD
                    await api.release(handle, lease)
                    continue
                with pytest.raises(BudgetExceeded) as caught:
                    await api.get(
                        handle, transport=transport, timeout=None, payload_max=len(PAYLOAD)
                    )
                assert (caught.value.requested, caught.value.limit) == (size, len(PAYLOAD))
                assert "staged_payload_max" in caught.value.hint
                await asyncio.sleep(0.1)
                with pytest.raises(UnknownHandle):
                    await api.metadata(handle)
            assert owner.rendezvous.statistics().slots.slots == 0

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_the_largest_payload_that_is_fetched(path: str) -> None:
    config = NodeConfig(rendezvous=RendezvousConfig(payload_max_bytes=len(PAYLOAD) - 1))

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, config)
            node, transport = side(path, owner, consumer)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            with pytest.raises(BudgetExceeded) as caught:
                await node.rendezvous.consumer.get(handle, transport=transport, timeout=None)
            assert caught.value.knob == "rendezvous.payload_max_bytes"
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            assert (await node.rendezvous.consumer.metadata(handle)).refcount == 1

    run_virtual(main())


def test_the_read_alone_is_told_of_an_rdma_get() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD, RETAIN)
            for transport in ("rdma", "tcp"):
                _, lease = await consumer.rendezvous.consumer.get(
                    handle, transport=transport, timeout=None
                )
                await consumer.rendezvous.consumer.release(handle, lease)
            first, second = [e for e in consumer.events if isinstance(e, events.Fetched)]
            assert first.read_s is not None
            assert 0 < first.read_s < first.seconds
            assert second.read_s is None
            await owner.rendezvous.owner.withdraw(handle)

    run_virtual(main())
