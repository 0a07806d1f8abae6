"""DLSlime: `read` between registered regions of two endpoints that know each other's description.
It has messages too, but a round trip here is a READ of 64 B, as its users would.

Both ends connect, so the consumer's description goes back to the owner.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from adapters.addresses import address_of
from adapters.plain import Part, PlainConsumer, PlainOwner


class SlimePart(Part):
    version = importlib.metadata.version("dlslime")

    def endpoint_over(self, view: memoryview) -> None:
        os.environ["SLIME_GID_INDEX"] = "1"
        import dlslime  # reads the environment

        if self.args.network == "rdma":
            self.endpoint = dlslime.RDMAEndpoint(self.args.device, 1, "RoCE", 1)
            self.path = f"rdma {self.args.device}"
        else:
            self.endpoint = dlslime.TcpEndpoint(self.args.host, 0)
        self.region = self.endpoint.register_memory_region(
            "payload", address_of(view), 0, len(view)
        )
        self.offer = self.endpoint.endpoint_info()


class Owner(SlimePart, PlainOwner):
    async def open(self) -> None:
        self.endpoint_over(self.payload)

    async def connect(self, offer: Any) -> None:
        if self.args.network == "rdma":
            self.endpoint.connect(offer)


class Consumer(SlimePart, PlainConsumer):
    async def open(self) -> None:
        self.endpoint_over(self.memory)

    async def connect(self, offer: Any) -> None:
        self.endpoint.connect(offer)
        theirs = offer["mr_info"]["payload"]
        self.remote = self.endpoint.register_remote_memory_region("payload", theirs)

    async def pull(self, nbytes: int) -> None:
        future = self.endpoint.read([(self.region, self.remote, 0, 0, nbytes)])
        if status := future.wait():
            raise SystemExit(f"read of {nbytes} bytes: {status}")

    async def round_trip(self) -> None:
        await self.pull(64)
