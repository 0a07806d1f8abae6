"""The end of a node under traffic: gate, drain, close, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import orbit
from orbit.runtime.messaging.draining import ShutdownPolicy
from orbit.runtime.messaging.handlers import Dispatch, Message, OrderedConfig
from orbit.runtime.messaging.health import HealthKind
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS

Run = Callable[[Any], Any]
TCP = orbit.NodeConfig(transport="tcp")

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)


class Slow:
    """A handler that ends when it is told to."""

    def __init__(self, node: orbit.Node, mode: Dispatch | None = None) -> None:
        self.began = 0
        self.go_on = asyncio.Event()
        node.handler("slow", self.handle, mode=mode)

    async def handle(self, message: Message) -> bytes:
        self.began += 1
        await self.go_on.wait()
        return bytes(message.payload)


def dispatched(node: orbit.Node) -> Any:
    return node.statistics().dispatch


def test_health_by_kind(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            assert (await orbit.Node(TCP).check_health(1)).kind is HealthKind.NOT_STARTED
            peer = server.identity
            assert (await client.check_health(peer)).kind is HealthKind.PEER_NOT_REGISTERED
            client.add_peer(server.address)
            first = await client.check_health(peer)
            assert first.kind is HealthKind.NEVER_CONNECTED  # it answered, by the control channel
            assert first.rtt_s is not None
            server.handler("f", lambda message: None)
            await client.sync(peer, "f")
            second = await client.check_health(peer)
            assert (second.kind, second.transport) == (HealthKind.OK, orbit.PathName.TCP)
            server.begin_drain()
            assert (await client.check_health(peer)).kind is HealthKind.OK
            await server.close()
            assert (await client.check_health(peer)).kind is HealthKind.CONNECTION_FAILED

    run_async(main())


def test_a_draining_node_rejects_requests_and_finishes_those_it_has(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            peer = client.add_peer(server.address)
            back = server.add_peer(client.address)
            slow = Slow(server)
            client.handler("echo", lambda message: bytes(message.payload))
            had = client.unary(peer, "slow", b"had")
            await until(lambda: slow.began == 1)
            server.begin_drain()
            server.begin_drain()
            for call in (client.unary, client.sync):
                with pytest.raises(orbit.PeerDraining):
                    await call(peer, "slow", b"late")
            # What the draining node asks for itself still works, and answers still pass.
            assert await server.unary(back, "echo", b"out") == b"out"
            async with orbit.Node(TCP) as newcomer:
                newcomer.add_peer(server.address)
                with pytest.raises(orbit.PeerDraining):
                    await newcomer.unary(peer, "slow")
            slow.go_on.set()
            assert await had == b"had"
            assert slow.began == 1
            assert dispatched(server).guards == 0
            assert dispatched(server).turned_away == 3

    run_async(main())


def test_a_graceful_shutdown_waits_for_handlers_in_flight(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            peer = client.add_peer(server.address)
            slow = Slow(server, Dispatch.ordered())
            calls = [client.unary(peer, "slow", bytes([n])) for n in range(5)]
            await until(lambda: dispatched(server).guards == 5)
            ending = [
                asyncio.create_task(server.graceful_shutdown(ShutdownPolicy.wait_forever()))
                for _ in range(3)
            ]
            ending[0].cancel()  # a caller that gives up leaves it to the others
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in ending[1:])
            assert slow.began == 1  # four are queued, and hold the shutdown up as well
            slow.go_on.set()
            answers = [bytes(await call) for call in calls]
            assert answers == [bytes([n]) for n in range(5)]
            await asyncio.gather(*ending[1:])
            await server.graceful_shutdown()  # idempotent
            with pytest.raises(orbit.ClosedError):
                server.send(peer, "x")

    run_async(main())


def test_a_shutdown_out_of_time_drops_what_is_queued(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            peer = client.add_peer(server.address)
            slow = Slow(server, Dispatch.ordered_with(OrderedConfig(max_concurrent=1)))
            calls = [client.unary(peer, "slow") for _ in range(4)]
            await until(lambda: dispatched(server).guards == 4)
            await server.graceful_shutdown(ShutdownPolicy.timeout(0.05))
            outcomes = await asyncio.gather(*map(_outcome, calls))
            assert outcomes == [orbit.RequestFailed, *[orbit.PeerDraining] * 3]
            found = dispatched(server)
            assert (found.guards, found.dropped) == (0, 4)
            assert [handler.in_flight for handler in found.handlers if handler.name == "slow"] == [
                0
            ]
            assert slow.began == 1

    run_async(main())


def test_closing_settles_every_call(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            peer = client.add_peer(server.address)
            slow = Slow(server)
            calls = [client.unary(peer, "slow") for _ in range(20)]
            await until(lambda: slow.began == 20)
            await server.close()
            for outcome in await asyncio.gather(*map(_outcome, calls)):
                assert issubclass(outcome, orbit.PeerError)
            assert dispatched(server).guards == 0

    run_async(main())


def test_idle_links_are_closed_and_opened_again(run_async: Run) -> None:
    async def main() -> None:
        idle = orbit.NodeConfig(
            transport="tcp", messaging=orbit.MessagingConfig(ep_idle_timeout=0.5)
        )
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(idle) as client:
            peer = client.add_peer(server.address)
            server.handler("echo", lambda message: bytes(message.payload))
            for text in (b"first", b"second"):
                assert await client.unary(peer, "echo", text) == text
                await until(lambda: not client.statistics().messaging.links)
                await until(lambda: not server.statistics().messaging.links)
            series = 'orbit_transport_idle_closes_total{outcome="closed",transport="tcp"}'
            await until(lambda: client.statistics().counters.get(series) == 2)

    run_async(main())


def test_handlers_of_a_peer(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            peer = client.add_peer(server.address)
            assert await client.list_handlers(peer) == []
            waiting = asyncio.create_task(client.wait_for_handler(peer, "late"))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            server.handler("late", lambda message: None)
            await waiting
            assert await client.list_handlers(peer) == ["late"]
            server.remove_handler("late")
            with pytest.raises(orbit.DeadlineExceeded):
                await client.wait_for_handler(peer, "late", timeout=0.05)

    run_async(main())


@pytest.mark.parametrize("staged", ["held", "region"])
def test_a_pull_that_was_admitted_before_the_gate_still_finishes(
    run_async: Run, staged: str
) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            payload = bytearray(pattern(64 << 20))
            expected = bytes(payload)
            if staged == "held":
                handle = await owner.register_data(payload)
                signal = None
            else:
                guard = await owner.register_owned(payload)
                handle = await owner.register_data_in_region(guard)
                signal = asyncio.create_task(guard.watch().deregistered())
            ending: list[asyncio.Task[None]] = []

            def progress(nbytes: int) -> None:
                if not ending:
                    assert nbytes < len(payload)
                    ending.append(asyncio.create_task(owner.graceful_shutdown()))

            into = bytearray(len(payload))
            lease = await consumer.get_into(handle, into, progress=progress)
            assert into == expected
            assert lease.path is orbit.PathName.TCP
            await ending[0]
            if signal is not None:
                assert await asyncio.wait_for(signal, 5) is orbit.Deregistered.DRAINED
            with pytest.raises(orbit.ClosedError):
                await owner.register_data(b"late")
            # The lease ended with its owner: giving it back is not an error.
            await consumer.release(handle, lease)

    run_async(main())


async def _outcome(call: Any) -> type:
    try:
        await call
    except orbit.OrbitError as error:
        return type(error)
    return type(None)
