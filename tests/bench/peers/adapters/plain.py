"""What the adapters have in common, and one over Python's blocking sockets.

An adapter has an Owner, which has the payload and says how it is reached (`offer`), and a Consumer,
which pulls the first n bytes of it into memory that it keeps. `path` is what the peer says about
the way that its bytes took.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from end import memory, payload

ASK = struct.Struct("!Q")  # how many bytes; 0 asks for an echo of 64
ECHO = bytes(64)


class Part:
    """One end, with nothing to open or close."""

    path = "tcp"
    version = ""
    # What a consumer has to do after a pull, if anything.
    release: Callable[[], Awaitable[None]] | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.largest = max(args.sizes)

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class PlainOwner(Part):
    """Has the payload. `offer` is what its consumer is given."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.payload = payload(self.largest)
        self.offer: Any = None

    async def connect(self, offer: Any) -> None:
        """What the consumer offers in turn; most peers need nothing of it."""


class PlainConsumer(Part):
    """Has one buffer, of which a pull fills the beginning."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.memory = memory(self.largest)

    def target(self, nbytes: int) -> memoryview:
        return self.memory[:nbytes]


def take(sock: socket.socket, view: memoryview) -> bool:
    """False at the end of the connection."""
    got = 0
    while got < len(view):
        if not (n := sock.recv_into(view[got:])):
            return False
        got += n
    return True


class Owner(PlainOwner):
    version = platform.python_version()

    async def open(self) -> None:
        listener = socket.create_server((self.args.host, 0))
        self.offer = listener.getsockname()[:2]
        threading.Thread(target=self.serve, args=(listener,), daemon=True).start()

    def serve(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked, echo = memoryview(bytearray(ASK.size)), memoryview(bytearray(64))
        with contextlib.suppress(OSError):
            while take(sock, asked):
                (nbytes,) = ASK.unpack(asked)
                if nbytes:
                    sock.sendall(self.payload[:nbytes])
                elif take(sock, echo):
                    sock.sendall(echo)


class Consumer(PlainConsumer):
    version = platform.python_version()

    async def connect(self, offer: Any) -> None:
        self.socket = socket.create_connection(tuple(offer))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answer = memoryview(bytearray(64))

    async def pull(self, nbytes: int) -> None:
        self.socket.sendall(ASK.pack(nbytes))
        take(self.socket, self.memory[:nbytes])

    async def round_trip(self) -> None:
        self.socket.sendall(ASK.pack(0) + ECHO)
        take(self.socket, self.answer)
