"""gRPC: one unary call for an echo, one call that streams a payload in messages of 2 MiB.

The messages are made beforehand, since gRPC takes only bytes; its default limit is 4 MiB, and a
payload as one message would be held three times.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from adapters.plain import ASK, ECHO, PlainConsumer, PlainOwner

PIECE = 2 << 20
SERVICE = "orbit.bench"


class Owner(PlainOwner):
    version = grpc.__version__

    async def open(self) -> None:
        whole = self.payload
        self.pieces = [bytes(whole[at : at + PIECE]) for at in range(0, len(whole), PIECE)]
        self.heads = {size: bytes(whole[:size]) for size in self.args.sizes if size < PIECE}
        self.server = grpc.server(ThreadPoolExecutor(2))
        handlers = {
            "echo": grpc.unary_unary_rpc_method_handler(lambda asked, _: asked),
            "pull": grpc.unary_stream_rpc_method_handler(self.pull),
        }
        handler = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self.server.add_generic_rpc_handlers((handler,))
        port = self.server.add_insecure_port(f"{self.args.host}:0")
        self.server.start()
        self.offer = f"{self.args.host}:{port}"

    def pull(self, asked: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        (nbytes,) = ASK.unpack(asked)
        if nbytes < PIECE:
            yield self.heads[nbytes]
        else:
            yield from self.pieces[: nbytes // PIECE]


class Consumer(PlainConsumer):
    version = grpc.__version__

    async def connect(self, offer: Any) -> None:
        self.channel = grpc.insecure_channel(offer)
        self.echo = self.channel.unary_unary(f"/{SERVICE}/echo")
        self.stream = self.channel.unary_stream(f"/{SERVICE}/pull")

    async def pull(self, nbytes: int) -> None:
        got = 0
        for piece in self.stream(ASK.pack(nbytes)):
            self.memory[got : got + len(piece)] = piece
            got += len(piece)

    async def round_trip(self) -> None:
        self.echo(ECHO)
