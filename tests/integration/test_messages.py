"""Messages between nodes over real sockets: every call, large payloads, restarts and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import orbit
from orbit.config import MessagingConfig, TimeoutConfig
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS

Run = Callable[[Coroutine[Any, Any, Any]], Any]

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)

CEILING = 256 << 10


def config(**messaging: Any) -> orbit.NodeConfig:
    return orbit.NodeConfig(transport="tcp", messaging=MessagingConfig(**messaging))


async def checked_end(*nodes: orbit.Node) -> None:
    """Nothing is left of any message, once what is on its way has come home."""

    def nothing_left() -> bool:
        found = [node.statistics() for node in nodes]
        return not any(
            s.messaging.pending_calls or s.messaging.staged_payloads or s.slots.slots for s in found
        ) and not any(s.leases_held for s in found)

    await until(nothing_left)


def test_every_call_in_both_directions(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:
            got: list[tuple[bytes, str]] = []

            @b.handler("note")
            def note(message: orbit.Message) -> None:
                got.append((bytes(message.payload), message.headers["k"]))

            @b.handler("reverse")
            async def reverse(message: orbit.Message) -> bytes:
                await asyncio.sleep(0)
                return bytes(message.payload)[::-1]

            @b.typed_handler("add")
            def add(value: object, message: orbit.Message) -> object:
                assert isinstance(value, list)
                return sum(value)

            peer = a.add_peer(bytes(b.address))
            await a.send(peer, "note", b"first", headers={"k": "v"})
            await a.sync(peer, "note", b"second", headers={"k": "v"})
            assert got == [(b"first", "v"), (b"second", "v")]
            assert bytes(await a.unary(peer, "reverse", b"abc")) == b"cba"
            assert await a.typed_unary(peer, "add", [1, 2, 3]) == 6
            assert bytes(await a.unary(b.identity.worker_id, "reverse", b"xy")) == b"yx"

            # b was never given a's address: the connection that a opened serves both.
            a.handler("name", lambda message: b"I am a")
            assert bytes(await b.unary(a.identity, "name")) == b"I am a"
            assert a.statistics().sessions == b.statistics().sessions == 1
            await checked_end(a, b)

    run_async(main())


@pytest.mark.parametrize("nbytes", [0, 1, 8 << 10, CEILING, CEILING + 1, 3 << 20])
def test_every_size_arrives_both_ways(run_async: Run, nbytes: int) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:
            b.handler("echo", lambda message: message.payload)
            peer = a.add_peer(b.address)
            payload = pattern(nbytes, seed=nbytes)
            assert bytes(await a.unary(peer, "echo", payload, timeout=20.0)) == payload
            await a.send(peer, "echo", bytearray(payload))
            await checked_end(a, b)
            staged = a.statistics().counters.get("orbit_messenger_staged_payloads_total", 0)
            assert staged == (2 if nbytes > CEILING else 0)

    run_async(main())


def test_issue_order_is_arrival_order_also_above_the_ceiling(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:
            got: list[int] = []
            b.handler("n", lambda m: got.append(int(m.headers["n"])), mode=orbit.Dispatch.ordered())
            peer = a.add_peer(b.address)
            sizes = [10, CEILING + 1, 0, 3000]
            results = [
                a.send(peer, "n", bytes(sizes[n % 4]), headers={"n": str(n)}, wait=True)
                for n in range(200)
            ]
            await asyncio.gather(*(_wait(result) for result in results))
            await a.sync(peer, "n", headers={"n": "200"})
            assert got == list(range(201))
            await checked_end(a, b)

    run_async(main())


async def _wait(result: orbit.SendResult[Any]) -> Any:
    return await result


def test_refusals_say_why(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:

            @b.handler("raises")
            def raises(message: orbit.Message) -> None:
                raise ValueError("no such thing")

            b.typed_handler("typed", lambda value, message: value)
            peer = a.add_peer(b.address)
            for name, payload, reason in (
                ("missing", b"", "unknown_handler"),
                ("missing", bytes(CEILING + 1), "unknown_handler"),
                ("raises", b"", "failed"),
                ("typed", b"\xc1", "decode"),
            ):
                for call in (a.unary, a.sync):
                    with pytest.raises(orbit.RequestFailed) as caught:
                        await call(peer, name, payload)
                    assert caught.value.reason == reason
            await a.send(peer, "missing", b"")
            await a.sync(peer, "typed")
            with pytest.raises(orbit.UsageError):
                a.typed_unary(peer, "typed", {1, 2})
            await checked_end(a, b)

    run_async(main())


def test_nested_calls_over_one_connection(run_async: Run) -> None:
    """Each handler calls back, with a window of one message both ways."""

    async def main() -> None:
        narrow = config(credits=1, reply_credits=1)
        async with orbit.Node(narrow) as a, orbit.Node(narrow) as b:

            def countdown(peer: orbit.PeerIdentity) -> Callable[[orbit.Message], Any]:
                async def handler(message: orbit.Message) -> bytes:
                    left = int(bytes(message.payload))
                    node = message.node
                    assert isinstance(node, orbit.Node)
                    if left == 0:
                        return b"."
                    return b"%d" % left + bytes(await node.unary(peer, "down", b"%d" % (left - 1)))

                return handler

            a.handler("down", countdown(b.identity))
            b.handler("down", countdown(a.identity))
            peer = a.add_peer(b.address)
            results = [a.unary(peer, "down", b"6") for _ in range(20)]
            for result in results:
                assert bytes(await result) == b"654321."

    run_async(main())


def test_a_slow_handler_bounds_the_sender(run_async: Run) -> None:
    """Nobody awaits: sends fail at the bound, and what was admitted arrives without a gap."""

    async def main() -> None:
        small = config(queue_frames=32, credits=4, inbound_max_bytes=1 << 20)
        async with orbit.Node(small) as a, orbit.Node(small) as b:
            got: list[int] = []

            async def slow(message: orbit.Message) -> None:
                await asyncio.sleep(0.0005)
                got.append(int(bytes(message.payload)))

            b.handler("slow", slow, mode=orbit.Dispatch.ordered())
            peer = a.add_peer(b.address)
            await a.sync(peer, "slow", b"-1")
            admitted, refused = [], 0
            for n in range(300):
                result = a.send(peer, "slow", b"%d" % n)
                if result.state is orbit.SendState.FAILED:
                    refused += 1
                    await a.capacity(peer)
                else:
                    admitted.append(n)
                assert a.statistics().messaging.queued_frames <= 32
            await a.sync(peer, "slow", b"300", wait=True)
            assert refused
            assert got == [-1, *admitted, 300]

    run_async(main())


def test_a_peer_that_dies_fails_calls_and_comes_back(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a:
            b = orbit.Node(config())
            await b.open()
            release = asyncio.Event()

            async def hang(message: orbit.Message) -> None:
                await release.wait()

            b.handler("hang", hang)
            peer = a.add_peer(b.address)
            calls = [a.unary(peer, "hang") for _ in range(100)]
            for call in calls:
                await call.admitted()
            await until(lambda: b.statistics().dispatch.guards == 100)
            abort_sessions(a)
            for call in calls:
                with pytest.raises(orbit.OutcomeUnknown):
                    await call
            release.set()
            await a.sync(peer, "hang")
            await b.close()
            with pytest.raises((orbit.NotAdmitted, orbit.OutcomeUnknown)):
                await a.sync(peer, "hang")
            async with orbit.Node(config()) as other:
                other.handler("hang", lambda message: None)
                await a.sync(a.add_peer(other.address), "hang")
            await checked_end(a)

    def abort_sessions(node: orbit.Node) -> None:
        for route in node._messages().messenger.routes():
            assert route.session is not None
            route.session.abort(orbit.PeerLost("b", "cut by the test"))

    run_async(main())


def test_a_draining_peer_turns_requests_away_and_finishes_its_own(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:
            go = asyncio.Event()

            async def finishes(message: orbit.Message) -> bytes:
                await go.wait()
                return b"finished"

            b.handler("work", finishes)
            peer = a.add_peer(b.address)
            running = a.unary(peer, "work")
            await until(lambda: b.statistics().dispatch.guards)
            ending = asyncio.ensure_future(b.graceful_shutdown())
            await asyncio.sleep(0)
            for payload in (b"", bytes(CEILING + 1)):
                with pytest.raises(orbit.PeerDraining):
                    await a.unary(peer, "work", payload)
            go.set()
            assert bytes(await running) == b"finished"
            await ending
            await checked_end(a)

    run_async(main())


def test_a_demanded_transport_and_an_unknown_peer(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:
            b.handler("f", lambda message: b"ok")
            peer = a.add_peer(b.address)
            with pytest.raises(orbit.PathUnavailable) as caught:
                await a.unary(peer, "f", transport="rdma")
            assert caught.value.path == "rdma"
            assert bytes(await a.unary(peer, "f", transport="tcp")) == b"ok"
            stranger = a.send(12345, "f")
            with pytest.raises(orbit.NotAdmitted) as unsent:
                await stranger
            assert isinstance(unsent.value.__cause__, orbit.UnknownPeer)

    run_async(main())


def test_a_node_calls_itself(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a:
            a.handler("echo", lambda message: message.payload)
            for nbytes in (5, CEILING + 1):
                payload = pattern(nbytes)
                assert bytes(await a.unary(a.identity, "echo", payload)) == payload
            assert a.statistics().sessions == 0
            await checked_end(a)

    run_async(main())


def test_a_timeout_bounds_the_whole_call(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config()) as a, orbit.Node(config()) as b:

            async def slow(message: orbit.Message) -> bytes:
                await asyncio.sleep(0.05)
                return b"late"

            b.handler("slow", slow)
            peer = a.add_peer(b.address)
            await a.unary(peer, "slow")
            with pytest.raises(orbit.DeadlineExceeded):
                await a.unary(peer, "slow", timeout=0.01)
            await until(lambda: a.statistics().messaging.late_replies)
            assert a.statistics().messaging.pending_calls == 0

    run_async(main())


def test_idle_links_close_and_the_next_send_opens_another(run_async: Run) -> None:
    async def main() -> None:
        idle = config(ep_idle_timeout=0.5)
        async with orbit.Node(idle) as a, orbit.Node(config()) as b:
            b.handler("f", lambda message: b"ok")
            peer = a.add_peer(b.address)
            await a.unary(peer, "f")
            await until(lambda: not a.statistics().messaging.links)
            assert a.statistics().sessions == 1
            assert bytes(await a.unary(peer, "f")) == b"ok"
            assert len(a.statistics().messaging.links) == 1

    run_async(main())


def test_nodes_that_close_behind_a_large_answer_have_nothing_to_say(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        for turns in range(20):  # of the loop, between the answer and the end
            async with orbit.Node(config()) as a, orbit.Node(config()) as b:
                b.handler("large", lambda message: pattern(2 * CEILING))
                peer = a.add_peer(b.address)
                assert await a.unary(peer, "large", pattern(2 * CEILING)) == pattern(2 * CEILING)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await asyncio.gather(a.close(), b.close())

    run_async(main())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_closed_node_says_so(run_async: Run) -> None:
    async def main() -> None:
        a = orbit.Node(config())
        a.handler("early", lambda message: None)
        with pytest.raises(orbit.ClosedError):
            a.send(1, "f")
        await a.open()
        await a.sync(a.identity, "early")
        hung = a.unary(a.identity, "early")
        await a.close()
        with pytest.raises(orbit.OrbitError):
            await hung
        with pytest.raises(orbit.ClosedError):
            a.send(1, "f")
        assert a.statistics().messaging.pending_calls == 0

    run_async(main())


def test_eager_wireup_opens_the_link_when_the_peer_is_added(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(config(eager_endpoints=True)) as a, orbit.Node(config()) as b:
            a.add_peer(b.address)
            await until(lambda: a.statistics().messaging.links)
            b.handler("f", lambda message: None)
            await a.sync(b.identity, "f")

    run_async(main())


def test_a_dead_address_fails_within_its_deadline(run_async: Run) -> None:
    async def main() -> None:
        quick = orbit.NodeConfig(transport="tcp", timeouts=TimeoutConfig(connect_s=0.5))
        async with orbit.Node(quick) as a:
            b = orbit.Node(config())
            await b.open()
            peer = a.add_peer(b.address)
            await b.close()
            results = [a.unary(peer, "f") for _ in range(100)]
            for result in results:
                with pytest.raises(orbit.NotAdmitted):
                    await result

    run_async(main())
