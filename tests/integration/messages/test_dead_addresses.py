"""Messages to addresses where nobody answers: they fail together, within one bound, with the cause
of each; messages to others do not notice.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import orbit
from orbit.model import Incarnation, WorkerId
from orbit.protocol.address import NodeAddress
from orbit.protocol.endpoint import Endpoint
from orbit.testing.leftovers import nothing_left
from tests.integration.messages.settled import TCP, settle
from tests.integration.test_connections import black_hole

Run = Callable[[Coroutine[Any, Any, None]], None]
DEAD_CALLS = 100
LIVE_CALLS = 1000
BOUND_S = 0.3
QUICK = replace(TCP, timeouts=orbit.TimeoutConfig(connect_s=BOUND_S, handshake_s=BOUND_S))


def test_calls_to_dead_addresses_of_three_kinds(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        held, hole = black_hole()
        silent = socket.create_server(("127.0.0.1", 0))
        closed = socket.create_server(("127.0.0.1", 0))
        refusing = Endpoint(*closed.getsockname())
        closed.close()
        places = {"timeout": hole, "silent": Endpoint(*silent.getsockname()), "refused": refusing}
        async with nothing_left(), orbit.Node(QUICK) as live, orbit.Node(QUICK) as node:
            live.handler("echo", lambda message: message.payload)
            peer = node.add_peer(live.address)
            dead: dict[str, list[orbit.SendResult[memoryview]]] = {}
            started = loop.time()
            for number, (kind, place) in enumerate(places.items()):
                address = NodeAddress(WorkerId(1000 + number), Incarnation(1), (place,))
                there = node.add_peer(address)
                dead[kind] = [node.unary(there, "echo") for _ in range(DEAD_CALLS)]
            live_calls = [node.unary(peer, "echo", b"x") for _ in range(LIVE_CALLS)]
            assert {bytes(answer) for answer in await asyncio.gather(*live_calls)} == {b"x"}
            for kind, calls in dead.items():
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    assert type(outcome) is orbit.NotAdmitted  # safe to send again
                    assert isinstance(outcome.__cause__, orbit.PeerUnreachable)
                    assert outcome.__cause__.kind == kind
            assert loop.time() - started < DEAD_CALLS * BOUND_S / 3  # not one after the other
            await settle(node, live)
        for sock in (*held, silent):
            sock.close()

    run_async(main())
