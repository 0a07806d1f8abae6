"""ucxx: the consumer asks by one tagged message, the owner sends the payload by another. The mode
of progress is the variant: `polling` or `blocking`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np

from adapters.plain import ASK, Part, PlainConsumer, PlainOwner


class UcxxPart(Part):
    path = "not told"
    version = ""

    def start(self) -> None:
        os.environ["UCX_TLS"] = "tcp" if self.args.network == "tcp" else "rc_verbs,ud_verbs"
        os.environ["UCX_NET_DEVICES"] = f"{self.args.device}:1" if self.args.device else "lo"
        os.environ["UCXPY_PROGRESS_MODE"] = self.args.variant
        import ucxx

        self.ucxx = ucxx
        self.version = f"{ucxx.__version__}, UCX {'.'.join(map(str, ucxx.get_ucx_version()))}"
        ucxx.init()
        self.asked = np.zeros(ASK.size, dtype=np.uint8)
        self.echo = np.zeros(64, dtype=np.uint8)


class Owner(UcxxPart, PlainOwner):
    async def open(self) -> None:
        self.start()
        self.listener = self.ucxx.create_listener(self.serve)
        self.offer = (self.args.host, self.listener.port)

    async def serve(self, endpoint: Any) -> None:
        whole = np.frombuffer(self.payload, dtype=np.uint8)
        try:
            while True:
                await endpoint.recv(self.asked)
                (nbytes,) = ASK.unpack(self.asked)
                if nbytes:
                    await endpoint.send(whole[:nbytes])
                else:
                    await endpoint.recv(self.echo)
                    await endpoint.send(self.echo)
        except self.ucxx.exceptions.UCXError:
            return  # the consumer is gone


class Consumer(UcxxPart, PlainConsumer):
    async def open(self) -> None:
        self.start()
        self.whole = np.frombuffer(self.memory, dtype=np.uint8)

    async def connect(self, offer: Any) -> None:
        self.endpoint = await self.ucxx.create_endpoint(*offer)

    async def pull(self, nbytes: int) -> None:
        # The receive is there before the data, as UCX wants it; the ask is 8 bytes.
        received = asyncio.ensure_future(self.endpoint.recv(self.whole[:nbytes]))
        await self.endpoint.send(np.frombuffer(ASK.pack(nbytes), dtype=np.uint8))
        await received

    async def round_trip(self) -> None:
        await self.endpoint.send(np.frombuffer(ASK.pack(0), dtype=np.uint8))
        await self.endpoint.send(self.echo)
        await self.endpoint.recv(self.echo)

    async def close(self) -> None:
        await self.endpoint.close()
