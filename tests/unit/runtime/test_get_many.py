"""get_many: in order, all or nothing, and no lease of a failure is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit.errors import DeadlineExceeded, TransferFailed, UnknownHandle, UsageError
from orbit.model import Handle, Lease, PathReason, SlotId
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

RETAIN = RegisterOptions(retain=True)
SIZES = (0, 1, 5_000, 70_000, 200_000)


async def get_many(
    node: WorldNode, handles: list[Handle], **asked: Any
) -> list[tuple[memoryview | None, Lease]]:
    wanted = {"into": None, "transport": None, "timeout": None, "concurrency": 32, **asked}
    return await node.rendezvous.consumer.get_many(handles, **wanted)


async def populate(world: World) -> tuple[WorldNode, list[Handle], list[bytes]]:
    """A consumer, and handles of two other nodes and of itself."""
    nodes = [world.add_node() for _ in range(3)]
    world.introduce()
    handles, payloads = [], []
    for seed, size in enumerate(SIZES * 3):
        payload = pattern(size, seed)
        owner = nodes[seed % 3].rendezvous.owner
        handles.append(await owner.register_data_pinned(payload, RETAIN))
        payloads.append(payload)
    return nodes[0], handles, payloads


async def leases_left(world: World) -> int:
    await asyncio.sleep(0.5)
    found = [node.rendezvous.statistics() for node in world.nodes]
    return sum(one.leases_held + one.slots.leases_held for one in found)


@pytest.mark.parametrize("concurrency", [1, 2, 32])
def test_results_come_in_the_order_of_the_handles(concurrency: int) -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, payloads = await populate(world)
            order = [*range(len(handles)), 4, 4, 4, 0]  # the same handle again and again
            asked = [handles[number] for number in order]
            got = await get_many(node, asked, concurrency=concurrency)
            assert [bytes(view or b"") for view, _ in got] == [payloads[n] for n in order]
            assert [lease.handle for _, lease in got] == asked
            assert len({(lease.handle, lease.lease_id) for _, lease in got}) == len(order)
            for _, lease in got:
                await node.rendezvous.consumer.release(lease.handle, lease)
            assert await leases_left(world) == 0
            assert await get_many(node, []) == []

    run_virtual(main())


def test_destinations_are_filled_in_the_order_of_the_handles() -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, payloads = await populate(world)
            into: list[Any] = [bytearray(len(payload) + 1) for payload in payloads]
            into[4] = [bytearray(100_000), bytearray(100_001)]
            got = await get_many(node, handles, into=into, concurrency=3)
            assert [view for view, _ in got] == [None] * len(handles)
            into[4] = b"".join(into[4])
            for dest, payload in zip(into, payloads, strict=True):
                assert dest == payload + b"\0"
            into[3].append(0)
            for _, lease in got:
                await node.rendezvous.consumer.detach(lease.handle, lease)
            for short in (into[:-1], [*into, bytearray(1)]):
                with pytest.raises(UsageError):
                    await get_many(node, handles, into=short)

    run_virtual(main())


@pytest.mark.parametrize("concurrency", [1, 3, 32])
@pytest.mark.parametrize("where", [0, 7, 14])
def test_one_error_gives_every_lease_back(concurrency: int, where: int) -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, _ = await populate(world)
            missing = Handle(handles[where].worker_id, SlotId(999))
            into = [bytearray(200_000) for _ in handles]
            with pytest.raises(UnknownHandle):
                await get_many(
                    node,
                    [*handles[:where], missing, *handles[where + 1 :]],
                    into=into,
                    concurrency=concurrency,
                )
            for dest in into:
                dest.append(0)
            assert await leases_left(world) == 0

    run_virtual(main())


def test_a_pull_that_fails_is_told_and_the_others_are_given_back() -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, _ = await populate(world)
            for path in (node.rdma, node.tcp):
                assert path is not None
                path.faults.failures = [(1, PathReason.GET_FAILED)] * 20
            with pytest.raises(TransferFailed):
                await get_many(node, handles)
            assert await leases_left(world) == 0

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.5, 2.0])
def test_a_cancelled_caller_gives_every_lease_back(after_s: float) -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, _ = await populate(world)
            for path in (node.rdma, node.tcp):
                assert path is not None
                path.faults.bytes_per_s = 1e5
            into = [bytearray(200_000) for _ in handles]
            task = asyncio.ensure_future(get_many(node, handles, into=into, concurrency=4))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for dest in into:
                dest.append(0)
            assert await leases_left(world) == 0

    run_virtual(main())


def test_the_timeout_is_for_all_of_it() -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, _ = await populate(world)
            for path in (node.rdma, node.tcp):
                assert path is not None
                path.faults.bytes_per_s = 1e5
            started = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded) as caught:
                await get_many(node, handles, concurrency=1, timeout=3.0)
            assert caught.value.timeout_s == 3.0
            assert 3.0 <= asyncio.get_running_loop().time() - started < 3.5
            assert await leases_left(world) == 0

    run_virtual(main())


def test_bad_calls_fetch_nothing() -> None:
    async def main() -> None:
        async with World() as world:
            node, handles, _ = await populate(world)
            for concurrency in (0, -1, 1.5, None, True):
                with pytest.raises(UsageError):
                    await get_many(node, handles, concurrency=concurrency)
            with pytest.raises(UsageError):
                await get_many(node, [*handles, "no handle"])  # type: ignore[list-item]
            assert await leases_left(world) == 0
            assert world.network.links == []

    run_virtual(main())
