"""Peers that die: whoever waits for them hears so at once, and their successors are called at the
first try.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import orbit
from orbit.protocol.address import NodeAddress
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.numbered import Oracle, payload_of
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import SOAK, TCP, settle

Run = Callable[[Coroutine[Any, Any, None]], None]
CALLS = 1000
FLOOD = 100_000
TYPED = (orbit.OutcomeUnknown, orbit.NotAdmitted)


def test_a_killed_peer_ends_a_thousand_calls_and_its_successor_is_called_at_the_first_try(
    run_async: Run,
) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node:
            listen = "127.0.0.1:0"
            for _ in range(10 if SOAK else 2):
                async with worker(worker_id=7, listen=listen) as peer:
                    there = node.add_peer(peer.address)
                    assert await node.unary(there, "echo", b"x") == b"x"
                    told: list[orbit.OrbitError] = []
                    calls = [
                        node.unary(there, "hang", timeout=60, on_error=told.append)
                        for _ in range(CALLS)
                    ]
                    await peer.asked_until(lambda found: found["hanging"] == CALLS)
                    await peer.kill()
                    async with asyncio.timeout(5.0):
                        outcomes = await asyncio.gather(*calls, return_exceptions=True)
                    assert Counter(map(type, outcomes)) == {orbit.OutcomeUnknown: CALLS}
                    await settle(node)
                    assert len(told) == CALLS
                    listen = str(NodeAddress.parse(peer.address).endpoints[0])

    run_async(main())


def test_an_idle_peer_is_missed_at_once(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node, worker() as peer:
            there = node.add_peer(peer.address)
            await node.unary(there, "echo")
            await peer.kill()
            await until(lambda: not node.statistics().sessions)  # nobody asked
            assert not node.statistics().messaging.links
            with pytest.raises(orbit.NotAdmitted, match="refused"):
                await node.send(there, "echo")
            with pytest.raises(orbit.NotAdmitted):
                await node.unary(there, "echo")
            await settle(node)

    run_async(main())


def test_a_peer_dies_while_it_sends(run_async: Run) -> None:
    """What it sent is a whole and gap-free beginning."""

    async def main() -> None:
        for nbytes in (64, 4096, 200_000):
            oracle = Oracle()
            async with nothing_left(), orbit.Node(TCP) as node, worker() as peer:
                node.handler("number", oracle.take, mode=orbit.Dispatch.ordered())
                there = await peer.ask("add_peer", address=str(node.address))
                await peer.ask(
                    "flood", peer=there["peer"], name="number", count=FLOOD, nbytes=nbytes
                )
                await until(lambda: oracle.count >= 200)  # noqa: B023
                await peer.kill()
                await until(lambda: not node.statistics().sessions)
                await settle(node)
                assert oracle.count < FLOOD
                oracle.check({"flood": list(range(oracle.count))})

    run_async(main())


def test_a_peer_dies_while_it_receives(run_async: Run) -> None:
    """Each send has one typed outcome; nothing waits for a deadline."""

    async def main() -> None:
        for nbytes in (64, 4096, 300_000):  # the last by rendezvous
            async with nothing_left(), orbit.Node(TCP) as node, worker() as peer:
                there = node.add_peer(peer.address)
                told: list[orbit.OrbitError] = []
                results: list[orbit.SendResult[None]] = []
                # A fetch is cut off by the end of its session; all else has no deadline in reach.
                for number in range(5000 if nbytes < 100_000 else 100):
                    results.append(
                        node.send(
                            there,
                            "number",
                            payload_of(number, nbytes),
                            wait=True,
                            timeout=60,
                            on_error=told.append,
                        )
                    )
                await peer.asked_until(lambda found: found["taken"] > 20)
                await peer.kill()
                async with asyncio.timeout(5.0):
                    outcomes = await asyncio.gather(*results, return_exceptions=True)
                failed = [outcome for outcome in outcomes if outcome is not None]
                assert all(isinstance(outcome, TYPED) for outcome in failed), set(map(repr, failed))
                await settle(node)
                assert all(isinstance(error, TYPED) for error in told)
                done = sum(r.state is orbit.SendState.DONE for r in results)
                assert done + len(told) == len(results)

    run_async(main())
