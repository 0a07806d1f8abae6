"""Mooncake's transfer engine: `transfer_sync_read` between registered buffers, peers found by their
handshake alone. It has no messages: the round trip is a READ of 64 B.

The default has several worker threads; variant `one-worker` has one, which is faster where there
are few processors. The protocol argument is not obeyed in every case, so the runner looks at the
device's counters.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from adapters.addresses import address_of
from adapters.plain import Part, PlainConsumer, PlainOwner

PACKAGE = "mooncake-transfer-engine-non-cuda"


class MooncakePart(Part):
    version = importlib.metadata.version(PACKAGE)
    path = "not told"

    async def open(self) -> None:
        if self.args.variant == "one-worker":
            os.environ["MC_WORKERS_PER_CTX"] = "1"
        if self.args.network == "rdma":
            os.environ["MC_GID_INDEX"] = "1"
        from mooncake.engine import TransferEngine  # reads the environment

        self.engine = TransferEngine()
        devices = self.args.device if self.args.network == "rdma" else ""
        status = self.engine.initialize(self.args.host, "P2PHANDSHAKE", self.args.network, devices)
        if status:
            raise SystemExit(f"initialize: {status}")
        self.register()

    def register(self) -> None: ...

    def registered(self, view: memoryview) -> int:
        address = address_of(view)
        if status := self.engine.register_memory(address, len(view)):
            raise SystemExit(f"register_memory: {status}")
        return address


class Owner(MooncakePart, PlainOwner):
    def register(self) -> None:
        session = f"{self.args.host}:{self.engine.get_rpc_port()}"
        self.offer = {"session": session, "address": self.registered(self.payload)}


class Consumer(MooncakePart, PlainConsumer):
    def register(self) -> None:
        self.address = self.registered(self.memory)

    async def connect(self, offer: Any) -> None:
        self.session, self.remote = offer["session"], offer["address"]

    async def pull(self, nbytes: int) -> None:
        status = self.engine.transfer_sync_read(self.session, self.address, self.remote, nbytes)
        if status:
            raise SystemExit(f"transfer_sync_read of {nbytes} bytes: {status}")

    async def round_trip(self) -> None:
        await self.pull(64)
