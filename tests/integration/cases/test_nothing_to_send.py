"""C18 with messages and streams: nothing is a payload, and arrives as nothing.

Transfers of no bytes under handles are tests/scenarios/memory_cases.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.settled import settle

Run = Callable[[Coroutine[Any, Any, None]], None]
EMPTY: tuple[Any, ...] = (b"", bytearray(), np.empty((0, 4)), memoryview(b"abc")[3:])


@pytest.mark.parametrize("eager_max_bytes", [0, 256 << 10], ids=["all staged", "usual"])
def test_messages_without_bytes(run_async: Run, eager_max_bytes: int) -> None:
    messaging = orbit.MessagingConfig(eager_max_bytes=eager_max_bytes)
    config = orbit.NodeConfig(transport="tcp", messaging=messaging)
    seen: list[tuple[bytes, dict[str, str]]] = []

    async def main() -> None:
        async with nothing_left(), orbit.Node(config) as server, orbit.Node(config) as client:
            server.handler("echo", lambda message: message.payload)
            server.handler(
                "keep", lambda message: seen.append((bytes(message.payload), dict(message.headers)))
            )
            there = client.add_peer(server.address)
            for payload in EMPTY:
                assert await client.unary(there, "echo", payload) == b""
                await client.send(there, "keep", payload, wait=True)
                await client.sync(there, "keep", payload, headers={"only": "a header"})
            await until(lambda: len(seen) == 2 * len(EMPTY))
            assert seen == [(b"", {}), (b"", {"only": "a header"})] * len(EMPTY)
            async with server.open_stream() as inbox:

                async def collect() -> list[bytes]:
                    return [bytes(item) async for item in inbox]

                collecting = asyncio.ensure_future(collect())
                async with await client.attach_stream(inbox.handle) as sender:
                    for payload in (*EMPTY, b"x", b""):
                        await sender.send(payload)
                assert await collecting == [b""] * len(EMPTY) + [b"x", b""]
            await settle(server, client)

    run_async(main())
