"""A TCP relay between two nodes that does what networks do: delay, end with FIN or RST, go silent.

In the test's own event loop. Both ends see one peer at one address throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from orbit.protocol.address import NodeAddress
from orbit.protocol.endpoint import Endpoint

_CHUNK_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Relay:
    """`delay_max_s`: each piece waits up to that long, in order."""

    target: tuple[str, int]
    delay_max_s: float = 0.0
    seed: int = 0
    connections: int = 0
    port: int = 0
    _open: set[_Pair] = field(default_factory=set)
    _server: asyncio.Server | None = None

    def address(self, of: NodeAddress) -> NodeAddress:
        """The node's address, as seen through here."""
        return replace(of, endpoints=(Endpoint("127.0.0.1", self.port),))

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.end("fin")
        tasks = [task for pair in self._open for task in pair.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def end(self, how: str) -> None:
        """End every open connection at both sides: "fin", "rst", or "silence" (nothing passes any
        more, and nobody is told).
        """
        for pair in tuple(self._open):
            pair.end(how)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        rng = random.Random(f"{self.seed}/{self.connections}")
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        pair = _Pair((writer, far_writer))
        self._open.add(pair)
        pair.tasks = [
            asyncio.ensure_future(self._pump(pair, reader, far_writer, rng)),
            asyncio.ensure_future(self._pump(pair, far_reader, writer, rng)),
        ]
        try:
            await asyncio.wait(pair.tasks)
        finally:
            self._open.discard(pair)
            for end in pair.writers:
                end.close()

    async def _pump(
        self,
        pair: _Pair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if pair.silent:
                    continue
                if self.delay_max_s:
                    await asyncio.sleep(rng.uniform(0, self.delay_max_s))
                writer.write(data)
                await writer.drain()
            if not pair.silent:
                writer.close()


@dataclass(eq=False)
class _Pair:
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    silent: bool = False

    def end(self, how: str) -> None:
        if how == "silence":
            self.silent = True
            return
        for writer in self.writers:
            if how == "rst":
                sock: socket.socket = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()


@contextlib.asynccontextmanager
async def relay(of: NodeAddress, delay_max_s: float = 0.0, seed: int = 0) -> AsyncIterator[Relay]:
    """In front of that node."""
    it = Relay(of.endpoints[0].pair, delay_max_s, seed)
    await it.open()
    try:
        yield it
    finally:
        await it.close()
