"""Puts: on every path, by every way to lose one, and with nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit import events
from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import (
    BusyError,
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    OutOfRange,
    PathFailed,
    PathUnavailable,
    TransferFailed,
    UnknownHandle,
    UsageError,
    WrongDirection,
)
from orbit.model import Handle, PathName, PathReason
from orbit.protocol.messages import AcquireReply, AcquireRequest
from orbit.runtime.options import Put, RegisterOptions
from orbit.runtime.owner import Owner
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode
from orbit.transport.interface import PullReport

PAYLOAD = pattern(200_000)
SLOW = 100_000.0  # bytes per second: the payload takes 2 s of virtual time
PATHS = ["rdma", "tcp", "local"]


def add_pair(world: World, config: NodeConfig | None = None) -> tuple[WorldNode, WorldNode]:
    owner, consumer = world.add_node(config), world.add_node(config)
    world.introduce()
    return owner, consumer


def slow_down(node: WorldNode) -> None:
    for path in (node.rdma, node.tcp):
        assert path is not None
        path.faults.bytes_per_s = SLOW


async def offer(node: WorldNode, where: object, options: RegisterOptions | None = None) -> Handle:
    return await node.rendezvous.owner.register_destination(where, options)


async def put(node: WorldNode, handle: Handle, source: object = PAYLOAD, **asked: Any) -> Put:
    wanted = {"offset": 0, "transport": None, "timeout": None, "progress": None, **asked}
    return await node.rendezvous.consumer.put(handle, source, **wanted)


async def completed(node: WorldNode, handle: Handle) -> Put:
    return await node.rendezvous.owner.wait_put(handle, 5.0)


async def none_completed(node: WorldNode, handle: Handle) -> None:
    with pytest.raises(DeadlineExceeded):
        await node.rendezvous.owner.wait_put(handle, 0.5)


def held(node: WorldNode) -> int:
    return node.rendezvous.statistics().slots.leases_held


def side(path: str, owner: WorldNode, consumer: WorldNode) -> tuple[WorldNode, str]:
    """Who puts, and what it demands."""
    return (owner, "auto") if path == "local" else (consumer, path)


@pytest.mark.parametrize("path", PATHS)
def test_the_bytes_are_in_place_when_put_returns(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            node, transport = side(path, owner, consumer)
            dest = bytearray(len(PAYLOAD) + 20)
            handle = await offer(owner, dest)
            told: list[int] = []
            done = await put(node, handle, offset=7, transport=transport, progress=told.append)
            assert dest[7 : 7 + len(PAYLOAD)] == PAYLOAD
            assert dest[:7] == bytes(7)
            assert dest[-13:] == bytes(13)
            assert told[-1] == len(PAYLOAD)
            assert (done.path, done.offset, done.nbytes) == (path, 7, len(PAYLOAD))
            assert done.peer == owner.identity.worker_id
            assert done.phases["total"] > 0
            seen = await completed(owner, handle)
            assert (seen.path, seen.offset, seen.nbytes) == (path, 7, len(PAYLOAD))
            assert seen.peer == node.identity.worker_id
            await none_completed(owner, handle)
            assert held(owner) == 0
            await owner.rendezvous.owner.withdraw(handle)
            dest.append(0)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_sources_and_destinations_in_pieces(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            node, transport = side(path, owner, consumer)
            region = await owner.rendezvous.regions.register_owned(bytearray(150_000))
            first = bytearray(60_000)
            handle = await offer(owner, [region.slice(10, 140_000), first])
            assert node.memory is not None
            writer = await node.rendezvous.owner.alloc_pinned_writer(100_000)
            writer.view[:] = PAYLOAD[50_000:150_000]
            mine = await node.rendezvous.regions.register_owned(bytearray(PAYLOAD[150_000:]))
            source = [PAYLOAD[:50_000], writer, mine.slice()]
            asked = "auto" if path == "rdma" else transport  # the plain piece is not registered
            done = await put(node, handle, source, transport=asked)
            assert done.nbytes == len(PAYLOAD)
            await owner.rendezvous.owner.withdraw(handle)
            _, whole = await region.unregister_owned()
            assert isinstance(whole, bytearray)
            assert bytes(whole[10:140_010]) + bytes(first) == PAYLOAD
            writer.free()
            await mine.unregister()

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_no_bytes_check_handle_and_range_and_change_nothing(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            node, transport = side(path, owner, consumer)
            dest = bytearray(pattern(100))
            handle = await offer(owner, dest)
            for source in (b"", [b"", bytearray()]):
                done = await put(node, handle, source, offset=100, transport=transport)
                assert (done.path, done.nbytes) == (path, 0)
            with pytest.raises(OutOfRange):
                await put(node, handle, b"", offset=101, transport=transport)
            assert dest == pattern(100)
            await owner.rendezvous.owner.withdraw(handle)
            with pytest.raises(UnknownHandle):
                await put(node, handle, b"", transport=transport)
            assert held(owner) == 0

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_mistakes_are_the_same_errors_near_and_far(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            node, transport = side(path, owner, consumer)
            handle = await offer(owner, bytearray(1000))
            payload = await owner.rendezvous.owner.register_data(PAYLOAD)
            source = bytearray(1000)
            for offset in (1, 1001, 1 << 63, -1, 1 << 64):
                with pytest.raises(OutOfRange):
                    await put(node, handle, source, offset=offset, transport=transport)
            with pytest.raises(WrongDirection):
                await put(node, payload, source, transport=transport)
            with pytest.raises(WrongDirection):
                await node.rendezvous.consumer.get(handle, transport=None, timeout=None)
            wrongs: list[object] = [[], "text", 7, memoryview(bytearray(8))[::2]]
            for wrong in wrongs:
                with pytest.raises(UsageError):
                    await put(node, handle, wrong, transport=transport)
            for strange in (True, 1.0, "1"):
                with pytest.raises(UsageError):
                    await put(node, handle, source, offset=strange, transport=transport)
            source.append(0)
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            await owner.rendezvous.owner.withdraw(payload)

    run_virtual(main())


# --- falling back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", [PathReason.GET_FAILED, PathReason.DECODE_ERROR, PathReason.POOL_EXHAUSTED]
)
@pytest.mark.parametrize("fail_at", [0, 100_000, 200_000])
def test_a_failed_push_falls_back_once_with_its_label(reason: PathReason, fail_at: int) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            assert consumer.rdma is not None
            consumer.rdma.faults.failures = [(fail_at, reason)]
            dest = bytearray(len(PAYLOAD))
            handle = await offer(owner, dest)
            done = await put(consumer, handle)
            assert (done.path, done.reason) == (PathName.TCP, reason)
            assert dest == PAYLOAD
            assert consumer.count(events.FALLBACKS_TOTAL) == 1
            assert (await completed(owner, handle)).path is PathName.TCP
            await none_completed(owner, handle)

    run_virtual(main())


def test_a_push_that_did_not_arrive_whole_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer believes that everything has left; the owner knows better."""

    async def push(*args: object, **kwargs: object) -> PullReport:
        return PullReport()

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            monkeypatch.setattr(consumer.rdma, "push", push)
            dest = bytearray(len(PAYLOAD))
            handle = await offer(owner, dest)
            done = await put(consumer, handle)
            assert (done.path, done.reason) == (PathName.TCP, PathReason.GET_FAILED)
            assert dest == PAYLOAD
            monkeypatch.setattr(consumer.tcp, "push", push)
            with pytest.raises(PathFailed):
                await put(consumer, handle, transport="tcp")
            assert (await completed(owner, handle)).path is PathName.TCP
            await none_completed(owner, handle)
            assert held(owner) == 0

    run_virtual(main())


def test_the_first_attempt_is_over_before_the_second_begins() -> None:
    """The owner takes its time to take the first lease's authority back."""

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            assert owner.rdma is not None
            assert consumer.rdma is not None
            consumer.rdma.faults.failures = [(1000, PathReason.GET_FAILED)]
            really = owner.rdma.retract
            retracted: list[float] = []
            loop = asyncio.get_running_loop()

            async def retract(*args: Any, **kwargs: Any) -> None:
                await asyncio.sleep(2.0)
                await really(*args, **kwargs)
                retracted.append(loop.time())

            owner.rdma.retract = retract  # type: ignore[method-assign]
            pushed: list[float] = []
            push = consumer.tcp.push

            async def note(*args: Any, **kwargs: Any) -> PullReport:
                pushed.append(loop.time())
                return await push(*args, **kwargs)

            consumer.tcp.push = note  # type: ignore[method-assign]
            handle = await offer(owner, bytearray(len(PAYLOAD)))
            done = await put(consumer, handle)
            assert done.path is PathName.TCP
            assert retracted[0] < pushed[0]

    run_virtual(main())


def test_a_fallback_that_fails_too_tells_both_causes() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            assert consumer.rdma is not None
            consumer.rdma.faults.failures = [(10, PathReason.GET_FAILED)]
            consumer.tcp.faults.failures = [(10, PathReason.GET_FAILED)]
            handle = await offer(owner, bytearray(len(PAYLOAD)))
            with pytest.raises(TransferFailed) as caught:
                await put(consumer, handle)
            assert len(caught.value.attempts) == 2
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            assert (await put(consumer, handle)).path is PathName.RDMA  # the next one is not hurt

    run_virtual(main())


def test_a_demand_never_falls_back_and_names_what_is_missing() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            assert owner.rdma is not None
            assert consumer.rdma is not None
            handle = await offer(owner, bytearray(len(PAYLOAD)))
            consumer.rdma.faults.failures = [(10, PathReason.GET_FAILED)]
            with pytest.raises(PathFailed):
                await put(consumer, handle, transport="rdma")
            await asyncio.sleep(0.1)
            owner.rdma.faults.expose = PathReason.WINDOWS_BUSY
            with pytest.raises(PathUnavailable) as caught:
                await put(consumer, handle, transport="rdma")
            assert caught.value.reason == PathReason.WINDOWS_BUSY
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            assert (await put(consumer, handle)).reason is PathReason.WINDOWS_BUSY

    run_virtual(main())


def test_an_owner_from_before_there_were_puts_is_told_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads no direction in the request, grants a READ, and names no direction."""
    answer_as_today = Owner._on_acquire

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await owner.rendezvous.owner.register_data_pinned(
                PAYLOAD, RegisterOptions(retain=True)
            )

            async def on_acquire(self: Owner, session: Any, body: Any) -> AcquireReply:
                old = AcquireRequest(handle, AcquireRequest.from_wire(body).rdma)
                reply = await answer_as_today(self, session, old.to_wire())
                assert isinstance(reply, AcquireReply)
                return reply

            handlers = owner.rendezvous._sessions._handlers
            bound = on_acquire.__get__(owner.rendezvous._owner)
            monkeypatch.setitem(handlers, AcquireRequest.METHOD, bound)
            for transport in ("auto", "rdma", "tcp"):
                with pytest.raises(PathUnavailable) as caught:
                    await put(consumer, handle, transport=transport)
                assert caught.value.reason == PathReason.PEER_WITHOUT
                assert "too old" in str(caught.value)
            await asyncio.sleep(0.1)
            assert held(owner) == 0

    run_virtual(main())


# --- one writer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["rdma", "tcp"])
def test_one_writer_at_a_time(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            other = world.add_node()
            world.introduce()
            slow_down(consumer)
            dest = bytearray(len(PAYLOAD))
            handle = await offer(owner, dest)
            task = asyncio.ensure_future(put(consumer, handle, transport=path))
            await asyncio.sleep(0.5)
            for node in (other, owner):
                with pytest.raises(BusyError):
                    await put(node, handle, bytes(len(PAYLOAD)))
            await task
            assert dest == PAYLOAD
            await put(other, handle, bytes(len(PAYLOAD)))
            assert dest == bytes(len(PAYLOAD))
            peers = [(await completed(owner, handle)).peer for _ in range(2)]
            assert peers == [consumer.identity.worker_id, other.identity.worker_id]

    run_virtual(main())


# --- giving up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["rdma", "tcp"])
@pytest.mark.parametrize("after_s", [0.0, 0.0002, 0.001, 0.002, 0.5, 1.9, 2.0017])
def test_a_cancelled_put_leaves_no_lease_and_no_success(path: str, after_s: float) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            slow_down(consumer)
            handle = await offer(owner, bytearray(len(PAYLOAD)))
            source = bytearray(PAYLOAD)
            task = asyncio.ensure_future(put(consumer, handle, source, transport=path))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            source.append(0)  # the caller's again
            await asyncio.sleep(0.2)
            assert held(owner) == 0
            assert world.fabric.exposed_count == 0
            if after_s < 2:
                await none_completed(owner, handle)

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp"])
@pytest.mark.parametrize("timeout", [0.0001, 0.0007, 0.003, 1.0])
def test_a_put_that_runs_out_of_time_leaves_no_lease(path: str, timeout: float) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            slow_down(consumer)
            handle = await offer(owner, bytearray(len(PAYLOAD)))
            with pytest.raises(DeadlineExceeded) as caught:
                await put(consumer, handle, transport=path, timeout=timeout)
            assert (caught.value.operation, caught.value.timeout_s) == ("put", timeout)
            await asyncio.sleep(0.2)
            assert held(owner) == 0

    run_virtual(main())


@pytest.mark.parametrize("who", ["owner", "consumer"])
@pytest.mark.parametrize("path", ["rdma", "tcp"])
def test_a_killed_process_is_seen_by_the_other_side(who: str, path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            slow_down(consumer)
            source = bytearray(PAYLOAD)
            handle = await offer(owner, bytearray(len(PAYLOAD)), RegisterOptions(retain=True))
            task = asyncio.ensure_future(put(consumer, handle, source, transport=path))
            await asyncio.sleep(0.5)
            world.kill(owner if who == "owner" else consumer)
            with pytest.raises(OrbitError):
                await task
            source.append(0)
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            await none_completed(owner, handle)

    run_virtual(main())


@pytest.mark.parametrize("path", ["rdma", "tcp"])
def test_a_withdrawn_destination_ends_its_writer(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            slow_down(consumer)
            dest = bytearray(len(PAYLOAD))
            handle = await offer(owner, dest)
            task = asyncio.ensure_future(put(consumer, handle, transport=path))
            await asyncio.sleep(0.5)
            await owner.rendezvous.owner.withdraw(handle)
            dest.append(0)
            before = bytes(dest)
            with pytest.raises(OrbitError):
                await task
            assert dest == before

    run_virtual(main())


@pytest.mark.parametrize("retain", [True, False], ids=["slot stays", "slot goes too"])
def test_a_lease_that_ended_before_the_last_word_is_no_success(retain: bool) -> None:
    """Nothing renews a lease once its bytes have left, and this one's last word comes late."""
    config = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=0.4))

    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world, config)
            options = RegisterOptions(retain=retain)
            handle = await offer(owner, bytearray(len(PAYLOAD)), options)
            await put(consumer, handle)
            await completed(owner, handle)
            really = consumer.tcp.push

            async def push(*args: Any, **kwargs: Any) -> PullReport:
                report = await really(*args, **kwargs)
                world.network.faults.delay_min_s = world.network.faults.delay_max_s = 2.0
                return report

            consumer.tcp.push = push  # type: ignore[method-assign]
            with pytest.raises(LeaseError):
                await put(consumer, handle, transport="tcp")
            if retain:
                await none_completed(owner, handle)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_region_that_must_go_ends_the_put_from_it(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            slow_down(consumer)
            node, transport = side(path, owner, consumer)
            size = 200_000 if path != "local" else 64 << 20
            dest = bytearray(size)
            handle = await offer(owner, dest)
            region = await node.rendezvous.regions.register_owned(bytearray(size))
            task = asyncio.ensure_future(put(node, handle, region.slice(), transport=transport))
            await asyncio.sleep(0.5 if path != "local" else 0)
            assert not task.done()
            await region.unregister(0.1 if path != "local" else 0)
            with pytest.raises(ClosedError):
                await task
            with pytest.raises(ClosedError):
                await put(node, handle, region.slice(), transport=transport)
            await asyncio.sleep(0.1)
            assert held(owner) == 0
            await none_completed(owner, handle)

    run_virtual(main())


def test_a_closed_node_puts_nothing() -> None:
    async def main() -> None:
        async with World() as world:
            owner, consumer = add_pair(world)
            handle = await offer(owner, bytearray(10))
            await consumer.rendezvous.close()
            source = bytearray(10)
            with pytest.raises(ClosedError):
                await put(consumer, handle, source)
            source.append(0)

    run_virtual(main())
