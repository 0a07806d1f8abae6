"""Order under concurrent senders, calls that call back, and every dispatch mode, over sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS
from tests.integration.messages.numbered import Oracle, payload_of
from tests.integration.messages.settled import SOAK, TCP, settle

Run = Callable[[Coroutine[Any, Any, None]], None]
SENDERS = 8
MESSAGES = 5000 if SOAK else 300
DEPTH = 4
TIGHT = replace(
    TCP,
    messaging=orbit.MessagingConfig(
        credits=1, reply_credits=1, eager_max_bytes=4096, inbound_max_bytes=(2 * 4096) + 1024
    ),
)
MODES = {
    "spawn": orbit.Dispatch.spawn(),
    "ordered": orbit.Dispatch.ordered(),
    "ordered_global": orbit.Dispatch.ordered_global(),
    "ordered_with": orbit.Dispatch.ordered_with(
        orbit.OrderedConfig(key=lambda message: message.headers["by"], max_concurrent=4)
    ),
}

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)


def test_eight_tasks_send_to_two_peers(run_async: Run, loop_kind: str) -> None:
    """Numbers are given out in the order of the calls, over all tasks: they must arrive in it."""

    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(TCP) as node,
            orbit.Node(TCP) as one,
            orbit.Node(TCP) as two,
        ):
            oracles = {peer.identity: Oracle() for peer in (one, two)}
            for peer in (one, two):
                oracle = oracles[peer.identity]
                peer.handler("number", oracle.take, mode=orbit.Dispatch.ordered())
                node.add_peer(peer.address)
            issued = dict.fromkeys(oracles, 0)

            async def send(seed: int) -> None:
                rng = random.Random(seed)
                for _ in range(MESSAGES):
                    there = rng.choice(list(issued))
                    number = issued[there]
                    issued[there] += 1
                    nbytes = rng.choice((8, 9, 500, 4096, 20_000, 262_144))
                    payload = payload_of(number, nbytes)
                    await node.send(there, "number", payload, headers={"by": "all"}, wait=True)
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)

            await asyncio.gather(*(send(seed) for seed in range(SENDERS)))
            await until(lambda: all(oracles[peer].count == issued[peer] for peer in issued))
            for peer, oracle in oracles.items():
                oracle.check({"all": list(range(issued[peer]))})
            await settle(node, one, two)

    run_async(main())


def test_calls_that_call_back_at_the_smallest_windows(run_async: Run, loop_kind: str) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TIGHT) as a, orbit.Node(TIGHT) as b:
            a.add_peer(b.address)
            b.add_peer(a.address)
            oracle = Oracle()
            for node, other in ((a, b), (b, a)):

                async def nest(
                    message: orbit.Message,
                    node: orbit.Node = node,
                    other: orbit.PeerIdentity = other.identity,
                ) -> bytes:
                    left = message.payload[0]
                    if not left:
                        return b"bottom"
                    below = bytes((left - 1,)) + message.payload[1:]
                    return b"up " + await node.unary(other, "nest", below, wait=True)

                node.handler("nest", nest)
                node.handler("number", oracle.take, mode=orbit.Dispatch.ordered())

            async def call(node: orbit.Node, peer: orbit.PeerIdentity, nbytes: int) -> None:
                answer = await node.unary(
                    peer, "nest", bytes((DEPTH - 1,)) + bytes(nbytes), wait=True
                )
                assert answer == b"up " * (DEPTH - 1) + b"bottom"

            async def load(node: orbit.Node, peer: orbit.PeerIdentity, by: str) -> None:
                for n in range(MESSAGES):
                    payload = payload_of(n, 8 + n * 37 % 4000)
                    await node.send(peer, "number", payload, headers={"by": by}, wait=True)

            async with asyncio.timeout(60):
                await asyncio.gather(
                    load(a, b.identity, "a"),
                    load(b, a.identity, "b"),
                    *(call(a, b.identity, n * 100) for n in range(40)),
                    *(call(b, a.identity, n * 100) for n in range(40)),
                )
                await until(lambda: oracle.count == 2 * MESSAGES)
            oracle.check({"a": list(range(MESSAGES)), "b": list(range(MESSAGES))})
            await settle(a, b)

    run_async(main())


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_from_end_to_end(run_async: Run, loop_kind: str, mode: str) -> None:
    """Each message is handled once; the modes with an order keep it, also where handlers give way;
    a handler that raises fails its own call and no other.
    """

    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(TCP) as server,
            orbit.Node(TCP) as one,
            orbit.Node(TCP) as two,
        ):
            began: dict[str, list[int]] = {}
            running: dict[str, int] = {}
            beside: dict[str, int] = {}

            async def work(message: orbit.Message) -> memoryview:
                by, number = message.headers["by"], int.from_bytes(message.payload, "big")
                began.setdefault(by, []).append(number)
                for lane in (by, "all"):
                    running[lane] = running.get(lane, 0) + 1
                    beside[lane] = max(beside.get(lane, 0), running[lane])
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                for lane in (by, "all"):
                    running[lane] -= 1
                if number % 7 == 3:
                    raise ValueError(f"number {number}")
                return message.payload

            def plain(message: orbit.Message) -> bytes:
                if int.from_bytes(message.payload, "big") % 7 == 3:
                    raise KeyError("plain")
                return bytes(message.payload)

            server.handler("work", work, mode=MODES[mode])
            server.handler("plain", plain, mode=MODES[mode])
            server.typed_handler("typed", lambda value, message: [value], mode=MODES[mode])

            async def use(node: orbit.Node, by: str) -> None:
                peer, headers = node.add_peer(server.address), {"by": by}
                for name in ("work", "plain"):
                    payloads = [n.to_bytes(2, "big") for n in range(200)]
                    calls = [node.unary(peer, name, data, headers=headers) for data in payloads]
                    for n, call in enumerate(calls):
                        if n % 7 == 3:
                            with pytest.raises(orbit.RequestFailed) as caught:
                                await call
                            assert caught.value.reason == "failed"
                        else:
                            assert await call == payloads[n]
                    with pytest.raises(orbit.RequestFailed):
                        await node.sync(peer, name, payloads[3], headers=headers)
                    await node.send(peer, name, payloads[3], headers=headers)
                    await node.sync(peer, name, payloads[4], headers=headers)
                assert await node.typed_unary(peer, "typed", {"n": 1}, headers=headers) == [
                    {"n": 1}
                ]

            await asyncio.gather(use(one, "one"), use(two, "two"))
            await settle(one, two, server)
            expected = [*range(200), 3, 3, 4]
            for by in ("one", "two"):
                assert sorted(began[by]) == sorted(expected)
                if mode != "spawn":
                    assert began[by] == expected
                    assert beside[by] == 1
            assert beside["all"] == 1 if mode == "ordered_global" else beside["all"] > 1
            failures = {h.name: h.failures for h in server.statistics().dispatch.handlers}
            assert failures["work"] == failures["plain"] == 2 * (29 + 2)

    run_async(main())
