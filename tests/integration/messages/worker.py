"""A node in a process of its own that other nodes talk to: one JSON command per line in, one JSON
answer per line out. Started as a module, with the node's configuration as JSON.

Its handlers: `echo`, `hang` (until `go_on`), `number` (ordered, for the oracle), `gated` (as
`number`, but waits for `go_on`, then keeps a pace).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import orbit
from orbit.testing.leftovers import nothing_left
from tests.integration.messages.numbered import Oracle, payload_of
from tests.integration.messages.settled import held, settle


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Worker:
    """The node, its oracle, and the flood that a `flood` left running."""

    def __init__(self, config: orbit.NodeConfig) -> None:
        self.node = node = orbit.Node(config)
        self.oracle = Oracle()
        self.go_on = asyncio.Event()
        self.pace_s = 0.0
        self.hanging = 0
        self.flooding: asyncio.Task[Counter[str]] | None = None
        node.handler("echo", lambda message: message.payload)
        node.handler("hang", self.hang)
        node.handler("number", self.oracle.take, mode=orbit.Dispatch.ordered())
        node.handler("gated", self.gated, mode=orbit.Dispatch.ordered())

    async def hang(self, message: orbit.Message) -> None:
        self.hanging += 1
        await self.go_on.wait()

    async def gated(self, message: orbit.Message) -> None:
        await self.go_on.wait()
        self.oracle.take(message)
        if self.pace_s:
            await asyncio.sleep(self.pace_s)

    # --- commands ---------------------------------------------------------------------------------

    async def add_peer(self, address: str) -> dict[str, Any]:
        return {"peer": self.node.add_peer(address).worker_id}

    async def call(self, peer: int, name: str, timeout: float = 5.0) -> dict[str, Any]:
        return {"answer": bytes(await self.node.unary(peer, name, b"x", timeout=timeout)).hex()}

    async def flood(self, peer: int, name: str, count: int, nbytes: int) -> dict[str, Any]:
        """Begin to send `count` numbered messages, each when the one before was admitted."""

        async def work() -> Counter[str]:
            outcomes: Counter[str] = Counter()
            for number in range(count):
                try:
                    await self.node.send(
                        peer, name, payload_of(number, nbytes), headers={"by": "flood"}, wait=True
                    )
                    outcomes["sent"] += 1
                except orbit.OrbitError as error:
                    outcomes[type(error).__name__] += 1
            return outcomes

        self.flooding = asyncio.ensure_future(work())
        return {"started": count}

    async def flooded(self) -> dict[str, Any]:
        assert self.flooding is not None
        return {"outcomes": dict(await self.flooding)}

    async def open_gate(self, pace_s: float = 0.0) -> dict[str, Any]:
        self.pace_s = pace_s
        self.go_on.set()
        return {"open": True}

    async def statistics(self) -> dict[str, Any]:
        found = self.node.statistics()
        return {
            "held": held(self.node),
            "sessions": found.sessions,
            "hanging": self.hanging,
            "taken": self.oracle.count,
            "resident_bytes": resident_bytes(),
            "counters": dict(found.counters),
        }

    async def taken(self) -> dict[str, Any]:
        """What the oracle has."""
        return {"numbers": self.oracle.numbers, "wrong": self.oracle.wrong[:5]}

    async def settle(self) -> dict[str, Any]:
        await settle(self.node)
        return {"settled": True}


async def serve(config: orbit.NodeConfig, kind: type[Worker] = Worker) -> None:
    loop = asyncio.get_running_loop()
    say(ready=os.getpid())
    await loop.run_in_executor(None, sys.stdin.readline)  # the reader's thread is there from now on
    async with nothing_left():
        worker = kind(config)
        async with worker.node:
            say(address=str(worker.node.address))
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                command = json.loads(line)
                operation: Callable[..., Awaitable[dict[str, Any]]]
                operation = getattr(worker, command.pop("op"))
                try:
                    say(**await operation(**command))
                except orbit.OrbitError as error:
                    say(error=type(error).__name__, code=error.code, text=str(error))
        if worker.flooding is not None:
            await worker.flooding
    say(closed=True)


def config_of(options: dict[str, Any]) -> orbit.NodeConfig:
    messaging = orbit.MessagingConfig(**options.pop("messaging", {}))
    rendezvous = orbit.RendezvousConfig(**options.pop("rendezvous", {}))
    timeouts = orbit.TimeoutConfig(**options.pop("timeouts", {}))
    return orbit.NodeConfig(
        transport="tcp",
        messaging=messaging,
        rendezvous=rendezvous,
        timeouts=timeouts,
        **options,
    )


if __name__ == "__main__":
    asyncio.run(serve(config_of(json.loads(sys.argv[1]))))
