"""Two nodes that send each other their first messages at the same instant: one session, no message
lost, nothing left over.

ORBIT_SOAK (`make soak`) makes it 500 rounds, and ten between processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.numbered import Oracle, payload_of
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import SOAK, TCP, counter, settle
from tests.integration.relay import relay

Run = Callable[[Coroutine[Any, Any, None]], None]
ROUNDS = 500 if SOAK else 30
USERS = 8


@pytest.mark.parametrize("delay_max_s", [0.0, 0.01])
def test_first_messages_at_the_same_instant(run_async: Run, delay_max_s: float) -> None:
    async def one_round(seed: int) -> None:
        config = replace(TCP, messaging=orbit.MessagingConfig(eager_endpoints=bool(seed % 2)))
        oracles = (Oracle(), Oracle())
        async with (
            orbit.Node(config) as a,
            orbit.Node(config) as b,
            relay(a.address, delay_max_s, seed) as to_a,
            relay(b.address, delay_max_s, -seed) as to_b,
        ):
            nodes = (a, b)
            for node, oracle in zip(nodes, oracles, strict=True):
                node.handler("number", oracle.take, mode=orbit.Dispatch.ordered())
                node.handler("echo", lambda message: message.payload)
            a.add_peer(to_b.address(b.address))
            b.add_peer(to_a.address(a.address))

            async def use(node: orbit.Node, peer: orbit.PeerIdentity, user: int) -> None:
                headers = {"by": str(user)}
                for n in range(3):
                    node.send(peer, "number", payload_of(n, 4096), headers=headers)
                assert await node.unary(peer, "echo", payload_of(user, 4096)) == payload_of(
                    user, 4096
                )

            async with asyncio.timeout(5.0):
                await asyncio.gather(
                    *(use(a, b.identity, user) for user in range(USERS)),
                    *(use(b, a.identity, user) for user in range(USERS)),
                )
                await until(lambda: all(o.count == 3 * USERS for o in oracles))
            for node, oracle in zip(nodes, oracles, strict=True):
                oracle.check({str(user): [0, 1, 2] for user in range(USERS)})
                assert node.statistics().sessions == 1
                assert counter(node, "orbit_sessions_opened_total") == 1
                assert len(node.statistics().messaging.links) == 1
            await settle(a, b)

    async def main() -> None:
        async with nothing_left():
            for number in range(ROUNDS // 2):
                await one_round(number)

    run_async(main())


def test_two_processes_call_each_other_at_the_same_instant(run_async: Run) -> None:
    async def main() -> None:
        for _ in range(10 if SOAK else 1):
            async with nothing_left(), worker() as one, worker() as two:
                peers = await asyncio.gather(
                    one.ask("add_peer", address=two.address),
                    two.ask("add_peer", address=one.address),
                )
                answers = await asyncio.gather(
                    one.ask("call", peer=peers[0]["peer"], name="echo"),
                    two.ask("call", peer=peers[1]["peer"], name="echo"),
                )
                assert answers == [{"answer": b"x".hex()}] * 2
                for process in (one, two):
                    found = await process.ask("statistics")
                    assert found["sessions"] == 1
                    await process.ask("settle")

    run_async(main())
