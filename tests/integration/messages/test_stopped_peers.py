"""Peers that are alive and deaf (SIGSTOP), in mid-conversation: others do not notice, waits end by
their deadlines, and afterwards everything works again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import orbit
from orbit.model import SlotId
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.numbered import payload_of
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import SOAK, TCP, counter, settle

Run = Callable[[Coroutine[Any, Any, None]], None]
ROUNDS = 10 if SOAK else 2
LIVE_CALLS = 1000
SHORT_QUEUE = replace(TCP, messaging=orbit.MessagingConfig(queue_frames=64))
QUICK = replace(
    TCP,
    timeouts=orbit.TimeoutConfig(no_progress_s=0.3),
    messaging=orbit.MessagingConfig(ping_timeout_s=0.2),
)


async def outcome_of(result: orbit.SendResult[Any]) -> BaseException | None:
    try:
        await result
    except orbit.OrbitError as error:
        return error
    return None


def test_a_short_stop_costs_nothing(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node, worker() as peer:
            there = node.add_peer(peer.address)
            await node.unary(there, "echo")
            for _ in range(ROUNDS):
                peer.stop()
                calls = [node.unary(there, "echo", payload_of(n, 4096)) for n in range(500)]
                await asyncio.sleep(0.05)
                assert not any(call.done for call in calls)
                peer.go_on()
                answers = await asyncio.gather(*calls)
                assert [bytes(a) for a in answers] == [payload_of(n, 4096) for n in range(500)]
            assert counter(node, "orbit_sessions_opened_total") == 1
            await settle(node)

    run_async(main())


def test_a_stopped_peer_holds_up_nobody_else(run_async: Run) -> None:
    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(SHORT_QUEUE) as node,
            worker() as deaf,
            worker() as other,
        ):
            there, elsewhere = node.add_peer(deaf.address), node.add_peer(other.address)
            sent: list[int] = []
            number = 0

            async def send(count: int, timeout: float) -> list[BaseException | None]:
                """Numbered messages; those that were not turned down are to arrive."""
                nonlocal number
                numbers = range(number, number + count)
                number += count
                results = [
                    node.send(
                        there,
                        "number",
                        payload_of(n, 4096),
                        headers={"by": "me"},
                        wait=True,
                        timeout=timeout,
                    )
                    for n in numbers
                ]
                outcomes = [await outcome_of(result) for result in results]
                sent.extend(n for n, out in zip(numbers, outcomes, strict=True) if out is None)
                return outcomes

            for _ in range(ROUNDS):
                assert not any(await send(50, 10))
                deaf.stop()
                stuck = [node.unary(there, "echo", timeout=0.3) for _ in range(5)]
                live = [
                    node.unary(elsewhere, "echo", payload_of(n, 512), wait=True)
                    for n in range(LIVE_CALLS)
                ]
                # More than the window, the kernel and the queue take together.
                outcomes = await send(3000, 0.3)
                answers = await asyncio.gather(*live)
                assert [bytes(a) for a in answers] == [
                    payload_of(n, 512) for n in range(LIVE_CALLS)
                ]
                for call in stuck:
                    assert isinstance(await outcome_of(call), orbit.DeadlineExceeded)
                turned_down = [out for out in outcomes if out is not None]
                assert len(turned_down) > 1000
                for out in turned_down:  # certain: no byte of these has left
                    assert isinstance(out, orbit.DeadlineExceeded)
                    assert isinstance(out.__cause__, orbit.NotAdmitted)
                assert not (await node.check_health(there, timeout=0.1)).reachable
                deaf.go_on()
                assert await node.unary(there, "echo", b"again") == b"again"
                assert not any(await send(50, 10))
                await settle(node)
            await deaf.asked_until(lambda found: found["taken"] == len(sent))
            assert await deaf.ask("taken") == {"numbers": {"me": sent}, "wrong": []}
            assert counter(node, "orbit_sessions_opened_total") == 2
            assert (await node.check_health(there)).reachable

    run_async(main())


@pytest.mark.parametrize("owed", ["messages", "control"])
def test_a_peer_that_owes_an_answer_and_stays_deaf_is_given_up(run_async: Run, owed: str) -> None:
    """Whatever it owes, it is asked; its session ends, and all calls with it."""

    async def main() -> None:
        async with nothing_left(), orbit.Node(QUICK) as node, worker() as peer:
            there = node.add_peer(peer.address)
            for _ in range(ROUNDS):
                await node.unary(there, "echo")
                peer.stop()
                calls = [node.unary(there, "echo", timeout=60) for _ in range(20)]
                if owed == "control":
                    with pytest.raises(orbit.PeerLost):
                        await node.metadata(orbit.Handle(there.worker_id, SlotId(1)))
                async with asyncio.timeout(5.0):
                    for call in calls:
                        assert type(await outcome_of(call)) is orbit.OutcomeUnknown
                await until(lambda: not node.statistics().sessions)
                await settle(node)
                peer.go_on()
                assert await node.unary(there, "echo", b"again") == b"again"

    run_async(main())
