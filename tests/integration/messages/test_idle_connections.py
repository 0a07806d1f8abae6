"""Connections and links that end while nobody uses them: by FIN, RST or silence, and by agreement,
also from both sides at once. No message is lost without an error at one of the ends.
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
from tests.integration.messages.settled import SOAK, TCP, counter, settle
from tests.integration.relay import relay

Run = Callable[[Coroutine[Any, Any, None]], None]
ROUNDS = 20 if SOAK else 3
IDLE_S = 5.0 if SOAK else 0.02
AT_ONCE = 64


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_connection_that_ends_while_idle_costs_no_message(run_async: Run, how: str) -> None:
    async def main() -> None:
        oracle, sent = Oracle(), 0
        async with (
            nothing_left(),
            orbit.Node(TCP) as a,
            orbit.Node(TCP) as b,
            relay(b.address) as between,
        ):
            peer = a.add_peer(between.address(b.address))
            b.handler("echo", lambda message: message.payload)
            b.handler("number", oracle.take, mode=orbit.Dispatch.ordered())
            for number in range(ROUNDS):
                calls = [a.unary(peer, "echo", payload_of(n, 4096)) for n in range(AT_ONCE)]
                sends = [
                    a.send(peer, "number", payload_of(sent + n, 512), headers={"by": "a"})
                    for n in range(AT_ONCE)
                ]
                sent += AT_ONCE
                answers = await asyncio.gather(*calls)
                assert [bytes(x) for x in answers] == [payload_of(n, 4096) for n in range(AT_ONCE)]
                await asyncio.gather(*sends)
                await until(lambda: oracle.count == sent)  # noqa: B023
                await asyncio.sleep(IDLE_S)
                between.end(how)
                # Noticed at once, at both ends, not at the next use.
                await until(lambda: not a.statistics().sessions and not b.statistics().sessions)
                assert between.connections == number + 1
            oracle.check({"a": list(range(sent))})
            assert counter(a, "orbit_messenger_sends_failed_total") == 0
            await settle(a, b)

    run_async(main())


def test_a_connection_that_went_silent_costs_one_bounded_wait(run_async: Run) -> None:
    """The peer owes answers, so it is asked, and given up; the next call opens another session."""
    quick = replace(
        TCP,
        timeouts=orbit.TimeoutConfig(no_progress_s=0.2),
        messaging=orbit.MessagingConfig(ping_timeout_s=0.2),
    )

    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(quick) as a,
            orbit.Node(quick) as b,
            relay(b.address) as between,
        ):
            peer = a.add_peer(between.address(b.address))
            b.handler("echo", lambda message: message.payload)
            for _ in range(ROUNDS):
                assert await a.unary(peer, "echo", b"x") == b"x"
                between.end("silence")
                assert not (await a.check_health(peer, timeout=0.1)).reachable
                calls = [a.unary(peer, "echo", timeout=60) for _ in range(AT_ONCE)]
                async with asyncio.timeout(10.0):  # silence, question, verdict: 0.6 s
                    outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert {type(outcome) for outcome in outcomes} == {orbit.OutcomeUnknown}
                await asyncio.gather(*(a.unary(peer, "echo") for _ in range(AT_ONCE)))
            await until(lambda: a.statistics().sessions == b.statistics().sessions == 1)
            await settle(a, b)

    run_async(main())


def test_both_sides_close_an_idle_link_at_the_same_moment(run_async: Run) -> None:
    """And both send again around that moment. Each message arrives, once, in order."""
    config = replace(TCP, messaging=orbit.MessagingConfig(ep_idle_timeout=0.5))
    rounds = 40 if SOAK else 3

    async def main() -> None:
        oracles = (Oracle(), Oracle())
        async with (
            nothing_left(),
            orbit.Node(config) as a,
            orbit.Node(config) as b,
            relay(b.address, 0.01) as between,
        ):
            nodes = (a, b)
            a.add_peer(between.address(b.address))
            for node, oracle in zip(nodes, oracles, strict=True):
                node.handler("number", oracle.take, mode=orbit.Dispatch.ordered())
                node.handler("echo", lambda message: message.payload)
            await a.unary(b.identity, "echo")
            sent = [0, 0]
            told: list[orbit.OrbitError] = []

            async def send(side: int, delay_s: float) -> None:
                node, peer = nodes[side], nodes[1 - side].identity
                await asyncio.sleep(delay_s)
                for _ in range(5):
                    payload = payload_of(sent[side], 512)
                    sent[side] += 1
                    await node.send(
                        peer, "number", payload, headers={"by": "x"}, on_error=told.append
                    )
                assert await node.unary(peer, "echo", b"x") == b"x"

            for number in range(rounds):
                # From before the close to after it; the relay's delays do the rest.
                delay_s = 0.48 + 0.04 * (number % 3)
                await asyncio.gather(send(0, delay_s), send(1, delay_s + 0.005 * (number % 5)))
            await until(lambda: [oracles[1].count, oracles[0].count] == sent)
            oracles[1].check({"x": list(range(sent[0]))})
            oracles[0].check({"x": list(range(sent[1]))})
            assert not told
            await until(lambda: not a.statistics().messaging.links)
            await until(lambda: not b.statistics().messaging.links)
            assert counter(a, "orbit_sessions_opened_total") == 1
            assert between.connections == 1
            await settle(a, b)

    run_async(main())


@pytest.mark.parametrize("nbytes", [10, 300_000])
def test_what_is_sent_while_the_peer_says_goodbye_goes_by_the_next_link(
    run_async: Run, nbytes: int
) -> None:
    """Also a payload that travels by rendezvous: it must outlive the link that gave it back."""
    payload = payload_of(7, nbytes)

    async def main() -> None:
        oracle = Oracle()
        async with (
            nothing_left(),
            orbit.Node(TCP) as a,
            orbit.Node(TCP) as b,
            relay(b.address, 0.02) as between,
        ):
            peer = a.add_peer(between.address(b.address))
            b.handler("echo", lambda message: message.payload)
            b.handler("number", oracle.take)
            for kind in ("send", "sync", "unary"):
                assert await a.unary(peer, "echo", b"x") == b"x"
                await settle(a, b)
                (near,), (far,) = (node._messages().messenger.routes() for node in (a, b))
                parting = asyncio.ensure_future(b._messages().messenger.part(far, 5.0))
                # It has agreed, and has not heard the end of it.
                await until(lambda: near.link._parting.silent)  # type: ignore[attr-defined]  # noqa: B023
                match kind:
                    case "send":
                        await a.send(peer, "number", payload, headers={"by": kind})
                    case "sync":
                        await a.sync(peer, "number", payload, headers={"by": kind})
                    case "unary":
                        assert await a.unary(peer, "echo", payload) == payload
                assert await parting
                await settle(a, b)
            await until(lambda: oracle.count == 2)
            oracle.check({"send": [7], "sync": [7]})
            assert counter(a, "orbit_sessions_opened_total") == 1
            assert counter(a, "orbit_messenger_sends_failed_total") == 0

    run_async(main())
