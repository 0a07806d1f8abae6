"""A node in a process of its own that owns and fetches payloads, for tests of what other processes
make of it. As the worker of messages, with these commands besides.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import orbit
from orbit.testing.pattern import pattern
from tests.integration.messages.worker import Worker, config_of, serve


class PayloadWorker(Worker):
    """What it registered is kept, and what it fetches is compared with the pattern."""

    def __init__(self, config: orbit.NodeConfig) -> None:
        super().__init__(config)
        self.destinations: dict[str, bytearray] = {}
        self.fetching: asyncio.Task[str] | None = None

    async def register(self, nbytes: int, seed: int = 0, retain: bool = True) -> dict[str, Any]:
        options = orbit.RegisterOptions(retain=retain)
        return {"handle": str(await self.node.register_data(pattern(nbytes, seed), options))}

    async def offer(self, nbytes: int) -> dict[str, Any]:
        """A destination of puts."""
        memory = bytearray(nbytes)
        handle = str(await self.node.register_destination(memory))
        self.destinations[handle] = memory
        return {"handle": handle}

    async def filled(self, handle: str, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for a put; the bytes that the destination is made of by then."""
        put = await self.node.wait_put(orbit.Handle.parse(handle), timeout=timeout)
        return {"nbytes": put.nbytes, "bytes": sorted(set(self.destinations[handle]))}

    async def begin_fetch(self, handle: str, nbytes: int) -> dict[str, Any]:
        """Answers at the first bytes; the rest is `fetched`'s to tell."""
        begun = asyncio.Event()
        dest = bytearray(nbytes)
        named = orbit.Handle.parse(handle)

        async def fetch() -> str:
            try:
                lease = await self.node.get_into(named, dest, progress=lambda _: begun.set())
                await self.node.detach(named, lease)
            except orbit.OrbitError as error:
                return type(error).__name__
            return "right" if dest == pattern(nbytes) else "wrong"

        self.fetching = asyncio.ensure_future(fetch())
        await begun.wait()
        return {"begun": True}

    async def fetched(self) -> dict[str, Any]:
        """How the fetch ended."""
        assert self.fetching is not None
        return {"outcome": await self.fetching}


if __name__ == "__main__":
    asyncio.run(serve(config_of(json.loads(sys.argv[1])), PayloadWorker))
