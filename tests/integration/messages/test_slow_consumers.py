"""Receivers that do not keep up: memory stays within what was promised, senders hear so by their
deadlines, nothing is lost or reordered, and others do not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.numbered import Oracle, payload_of
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import SOAK, TCP, settle

Run = Callable[[Coroutine[Any, Any, None]], None]
MESSAGES = 1_000_000 if SOAK else 20_000
NBYTES = 4096
DEADLINE_S = 5.0 if SOAK else 0.5
INBOUND_BYTES = 1 << 20
NARROW = {"eager_max_bytes": 64 << 10, "inbound_max_bytes": INBOUND_BYTES, "credits": 16}
QUEUE_FRAMES = 256
# The allocator, and what Python keeps for so many objects.
FIXED_BYTES = 16 << 20
AT_ONCE = 50_000 if SOAK else QUEUE_FRAMES


async def push(
    node: orbit.Node, peer: orbit.PeerIdentity, by: str, count: int
) -> tuple[list[int], list[int]]:
    """Send numbered messages, many at a time, each with its deadline. (those that were taken, those
    that were certainly not)."""
    taken: list[int] = []
    refused: list[int] = []
    for begin in range(0, count, AT_ONCE):
        numbers = range(begin, min(begin + AT_ONCE, count))
        results = [
            node.send(
                peer,
                "gated",
                payload_of(n, NBYTES),
                headers={"by": by},
                wait=True,
                timeout=DEADLINE_S,
            )
            for n in numbers
        ]
        for n, result in zip(numbers, results, strict=True):
            (outcome,) = await asyncio.gather(result, return_exceptions=True)
            if outcome is None:
                taken.append(n)
            else:
                assert isinstance(outcome, orbit.DeadlineExceeded)
                assert isinstance(outcome.__cause__, orbit.NotAdmitted)
                refused.append(n)
        if len(refused) >= 2 * QUEUE_FRAMES and not SOAK:
            break
    return taken, refused


def test_the_memory_of_a_receiver_that_does_not_receive(run_async: Run) -> None:
    sender = replace(TCP, messaging=orbit.MessagingConfig(queue_frames=QUEUE_FRAMES))

    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(sender) as node,
            orbit.Node(TCP) as second,
            worker(messaging=NARROW) as slow,
        ):
            there = node.add_peer(slow.address)
            second.add_peer(slow.address)
            await node.unary(there, "echo")
            before = (await slow.ask("statistics"))["resident_bytes"]
            pushing = asyncio.ensure_future(push(node, there, "fast", MESSAGES))
            for _ in range(20 if SOAK else 2):  # another sender talks normally
                answers = await asyncio.gather(*(second.unary(there, "echo") for _ in range(250)))
                assert len(answers) == 250
            taken, refused = await pushing
            assert len(refused) >= 2 * QUEUE_FRAMES
            found = await slow.ask("statistics")
            # One message may be on its way past the bound for each credit.
            inbound = found["held"]["charged bytes"]
            assert inbound <= INBOUND_BYTES + 16 * (NBYTES + 1024)
            assert found["resident_bytes"] - before < INBOUND_BYTES + 16 * NBYTES + FIXED_BYTES
            assert found["taken"] == 0
            await slow.ask("open_gate", pace_s=0.001)
            await slow.asked_until(lambda found: found["taken"] == len(taken))
            assert await slow.ask("taken") == {"numbers": {"fast": taken}, "wrong": []}
            more, _ = await push(node, there, "later", QUEUE_FRAMES)
            assert more == list(range(QUEUE_FRAMES))
            await settle(node, second)
            await slow.ask("settle")

    run_async(main())


def test_a_slow_receiver_slows_its_sender_and_loses_nothing(run_async: Run) -> None:
    """No deadline is in reach: the sender is held back by credit alone."""

    async def main() -> None:
        count = 20_000 if SOAK else 2000
        async with nothing_left(), orbit.Node(TCP) as node, worker(messaging=NARROW) as slow:
            there = node.add_peer(slow.address)
            await slow.ask("open_gate", pace_s=0.0001)
            for n in range(count):
                await node.send(
                    there, "gated", payload_of(n, NBYTES), headers={"by": "me"}, wait=True
                )
            await slow.asked_until(lambda found: found["taken"] == count)
            said = await slow.ask("taken")
            assert said == {"numbers": {"me": list(range(count))}, "wrong": []}
            assert sum(traffic.credit_stalls for traffic in node.statistics().messaging.traffic)

    run_async(main())


def test_both_sides_only_send(run_async: Run) -> None:
    """It ends by deadline, not by a hang, and what was taken arrives once somebody receives."""
    config = replace(
        TCP,
        messaging=orbit.MessagingConfig(
            queue_frames=QUEUE_FRAMES, eager_max_bytes=64 << 10, inbound_max_bytes=INBOUND_BYTES
        ),
    )

    async def main() -> None:
        async with nothing_left(), orbit.Node(config) as a, orbit.Node(config) as b:
            oracles, gate = (Oracle(), Oracle()), asyncio.Event()
            for node, oracle in zip((a, b), oracles, strict=True):

                async def gated(message: orbit.Message, oracle: Oracle = oracle) -> None:
                    await gate.wait()
                    oracle.take(message)

                node.handler("gated", gated, mode=orbit.Dispatch.ordered())
            a.add_peer(b.address)
            b.add_peer(a.address)
            outcomes = await asyncio.gather(
                push(a, b.identity, "a", MESSAGES), push(b, a.identity, "b", MESSAGES)
            )
            assert all(len(refused) >= 2 * QUEUE_FRAMES for _, refused in outcomes)
            assert [oracle.count for oracle in oracles] == [0, 0]
            gate.set()
            (from_a, _), (from_b, _) = outcomes
            await until(lambda: oracles[0].count + oracles[1].count == len(from_a) + len(from_b))
            oracles[0].check({"b": from_b})
            oracles[1].check({"a": from_a})
            await settle(a, b)

    run_async(main())
