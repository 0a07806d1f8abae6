"""A conversation through lost connections and restarts: nothing is handled twice, what was said to
have arrived did, what was said not to did not, and the rest is lost only with a connection whose
end both sides were told of.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.numbered import NUMBER_BYTES, Oracle, payload_of
from tests.integration.messages.settled import SOAK, TCP, counter, settle
from tests.integration.relay import Relay, relay

Run = Callable[[Coroutine[Any, Any, None]], None]
MESSAGES = 100_000 if SOAK else 10_000
RESTARTS = 40 if SOAK else 8
SENDERS = 8
SIZES = (8, 64, 4096, 4096, 30_000, 300_000)


@dataclass
class Ledger:
    """What became of each number, as its sender was told."""

    arrived: set[int] = field(default_factory=set)  # answered
    certain: set[int] = field(default_factory=set)  # NotAdmitted, PeerDraining: not handled
    unknown: set[int] = field(default_factory=set)  # OutcomeUnknown
    sent: set[int] = field(default_factory=set)  # admitted, not answered by nature


async def send_one(
    node: orbit.Node, peer: orbit.PeerIdentity, number: int, by: str, ledger: Ledger, kind: str
) -> None:
    nbytes = SIZES[number % len(SIZES)] if number % 50 == 5 else SIZES[number % 5]
    payload, headers = payload_of(number, nbytes), {"by": by}

    def late(error: orbit.OrbitError) -> None:
        """A plain send that was admitted, and then failed."""
        ledger.sent.discard(number)
        ledger.unknown.add(number)

    try:
        match kind:
            case "send":
                ledger.sent.add(number)
                await node.send(peer, "number", payload, headers=headers, wait=True, on_error=late)
            case "sync":
                await node.sync(peer, "number", payload, headers=headers, wait=True)
                ledger.arrived.add(number)
            case "unary":
                answer = await node.unary(peer, "number", payload, headers=headers, wait=True)
                assert int.from_bytes(answer, "big") == number
                ledger.arrived.add(number)
    except (orbit.NotAdmitted, orbit.PeerDraining):
        ledger.sent.discard(number)
        ledger.certain.add(number)
    except (orbit.OutcomeUnknown, orbit.RequestFailed):  # the latter: cut off by the close
        ledger.sent.discard(number)
        ledger.unknown.add(number)


def check(ledger: Ledger, oracle: Oracle, by: str) -> int:
    """What was handled is what was said to be, and nothing twice (the oracle sees to that). How
    many plain sends were on the wire when their connection ended.
    """
    handled = set(oracle.numbers.get(by, []))
    assert not oracle.wrong, oracle.wrong[:5]
    assert len(handled) == len(oracle.numbers.get(by, []))
    assert ledger.arrived <= handled
    certain = ledger.certain - ledger.unknown
    assert not handled & certain, sorted(handled & certain)[:5]
    assert handled <= ledger.arrived | ledger.unknown | ledger.sent
    return len(ledger.sent - handled)


class Server:
    """A node that is closed and opened again at the same place, under the same worker id. Its
    oracle lives through it.
    """

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.config = replace(TCP, worker_id=7)
        self.node = self._make()
        self.relay: Relay | None = None

    def _make(self) -> orbit.Node:
        node = orbit.Node(self.config)

        def number(message: orbit.Message) -> bytes:
            self.oracle.take(message)
            return bytes(message.payload[:NUMBER_BYTES])

        node.handler("number", number, mode=orbit.Dispatch.ordered())
        return node

    async def open(self) -> None:
        await self.node.open()
        self.config = replace(self.config, listen=str(self.node.address.endpoints[0]))

    async def restart(self) -> None:
        await self.node.close()
        self.node = self._make()
        await self.open()


def test_mixed_messages_through_lost_connections(run_async: Run) -> None:
    """The connection ends at random moments. Every number has one fate, and both ends agree."""

    async def main() -> None:
        rng = random.Random(4)
        server = Server()
        async with nothing_left(), orbit.Node(TCP) as client, AsyncExitStack() as stack:
            await server.open()
            stack.push_async_callback(server.node.close)
            between = await stack.enter_async_context(relay(server.node.address))
            peer = client.add_peer(between.address(server.node.address))
            ledgers = {f"task {n}": Ledger() for n in range(SENDERS)}

            async def work(by: str, seed: int) -> None:
                own = random.Random(seed)
                for number in range(MESSAGES // SENDERS):
                    kind = own.choice(("send", "send", "sync", "unary"))
                    await send_one(client, peer, number, by, ledgers[by], kind)

            async def disturb(over: asyncio.Event) -> int:
                cuts = 0
                while not over.is_set():
                    await asyncio.sleep(rng.uniform(0.02, 0.3))
                    between.end(rng.choice(("fin", "rst")))
                    cuts += 1
                return cuts

            over = asyncio.Event()
            disturbing = asyncio.ensure_future(disturb(over))
            await asyncio.gather(*(work(by, seed) for seed, by in enumerate(ledgers)))
            over.set()
            assert await disturbing > 2
            await settle(client, server.node)
            for by, ledger in ledgers.items():
                lost = check(ledger, server.oracle, by)
                assert not lost or counter(client, "orbit_transport_links_closed_total")
                fates = ledger.arrived | ledger.certain | ledger.unknown | ledger.sent
                assert fates == set(range(MESSAGES // SENDERS))
            # It was a conversation: most of it went through.
            assert server.oracle.count > MESSAGES // 2

    run_async(main())


def test_mixed_messages_through_restarts(run_async: Run) -> None:
    """The peer closes and comes back at the same place. A caller that gets its new address goes on
    where it was; what was said about each message holds across the lives.
    """

    async def main() -> None:
        server = Server()
        async with nothing_left(), orbit.Node(TCP) as client:
            await server.open()
            try:
                client.add_peer(server.node.address)
                ledger, number = Ledger(), 0
                rng = random.Random(9)
                for _ in range(RESTARTS):
                    handled, batch = server.oracle.count, []
                    for _ in range(MESSAGES // RESTARTS):
                        kind = rng.choice(("send", "sync", "unary"))
                        deed = send_one(client, server.node.identity, number, "me", ledger, kind)
                        batch.append(asyncio.ensure_future(deed))
                        number += 1
                    enough = handled + rng.randrange(MESSAGES // RESTARTS // 2)
                    await until(lambda: server.oracle.count > enough)  # noqa: B023
                    await server.restart()
                    await asyncio.gather(*batch)
                    client.add_peer(server.node.address)
                    # At the first try.
                    await client.sync(
                        server.node.identity, "number", payload_of(number, 8), headers={"by": "me"}
                    )
                    ledger.arrived.add(number)
                    number += 1
                await settle(client, server.node)
                check(ledger, server.oracle, "me")
                fates = ledger.arrived | ledger.certain | ledger.unknown | ledger.sent
                assert fates == set(range(number))
            finally:
                await server.node.close()

    run_async(main())
