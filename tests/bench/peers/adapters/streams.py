"""asyncio's streams, on its own event loop and on uvloop's: pieces are read and copied in place.

`readexactly` of a whole payload would hold it twice; reading what has come is faster and smaller.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import socket
from typing import Any

from adapters.plain import ASK, ECHO, PlainConsumer, PlainOwner

LIMIT = 1 << 20  # of the reader's own buffer; its default of 64 KiB pauses the socket too often


class Streams:
    @property
    def version(self) -> str:
        if self.args.variant == "uvloop":  # type: ignore[attr-defined]
            return importlib.metadata.version("uvloop")
        return platform.python_version()


class Owner(Streams, PlainOwner):
    async def open(self) -> None:
        self.server = await asyncio.start_server(self.serve, self.args.host, 0, limit=LIMIT)
        self.offer = self.server.sockets[0].getsockname()[:2]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delay(writer)
        try:
            while True:
                (nbytes,) = ASK.unpack(await reader.readexactly(ASK.size))
                writer.write(self.payload[:nbytes] if nbytes else await reader.readexactly(64))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def close(self) -> None:
        self.server.close()


class Consumer(Streams, PlainConsumer):
    async def connect(self, offer: Any) -> None:
        self.reader, self.writer = await asyncio.open_connection(*offer, limit=LIMIT)
        no_delay(self.writer)

    async def pull(self, nbytes: int) -> None:
        self.writer.write(ASK.pack(nbytes))
        got = 0
        while got < nbytes:
            piece = await self.reader.read(nbytes - got)
            if not piece:
                raise SystemExit("the owner is gone")
            self.memory[got : got + len(piece)] = piece
            got += len(piece)

    async def round_trip(self) -> None:
        self.writer.write(ASK.pack(0) + ECHO)
        await self.reader.readexactly(64)

    async def close(self) -> None:
        self.writer.close()


def no_delay(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
