"""A round trip between two event loops with nothing on top: one small frame there, one back.

`echo.py serve HOST` prints where it listens and answers; `echo.py run HOST PORT` prints the median
in seconds.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import time
from typing import cast

from orbit.cli.running import run

FRAME = bytes(200)  # about what an acquire and its answer have
ROUNDS = 200


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Caller(Echo):
    answered: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(None)


async def serve(host: str) -> None:
    server = await asyncio.get_running_loop().create_server(Echo, host, 0)
    print(*server.sockets[0].getsockname()[:2], flush=True)
    await server.serve_forever()


async def measure(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    _, caller = await loop.create_connection(Caller, host, port)
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        caller.answered = loop.create_future()
        caller.transport.write(FRAME)
        await caller.answered
        seconds.append(time.perf_counter() - begin)
    print(statistics.median(seconds))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run(serve(sys.argv[2]))
    else:
        run(measure(sys.argv[2], int(sys.argv[3])))
