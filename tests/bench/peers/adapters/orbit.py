"""orbit, by its three ways: a payload by handle (variant `get`), a READ of the transfer engine
(`engine`), and a call whose answer is the payload (`message`), copied into the buffer; on uvloop's
event loop when the variant is `uvloop-get` and so on.

Both ends register their memory once, beforehand, which over TCP registers nothing. The transport is
a demand: where it cannot be had there is an error, and no figure.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import orbit
from adapters.plain import ASK, ECHO, Part, PlainConsumer, PlainOwner

RETAIN = orbit.RegisterOptions(retain=True)
SPARE = 64 << 20  # of the budget, for what is registered beside the payload


class OrbitPart(Part):
    version = orbit.__version__

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.way = args.variant.removeprefix("uvloop-")
        self.by_engine = self.way == "engine"
        self.transport: Literal["rdma", "tcp"] = args.network
        self.path = "not yet"

    def node_config(self) -> orbit.NodeConfig:
        pool = orbit.RdmaPoolConfig(registered_bytes_budget=2 * self.largest + SPARE)
        rdma = orbit.RdmaConfig(
            enabled=self.args.network == "rdma",
            whitelist=(self.args.device,) if self.args.device else (),
            device_timeout_s=20.0,
            pool=pool,
        )
        listen = f"{self.args.host}:0"
        return orbit.NodeConfig(listen=listen, transport=self.transport, rdma=rdma)

    async def open(self) -> None:
        if self.by_engine:
            config = orbit.EngineConfig.for_bytes(self.largest, node=self.node_config())
            self.engine = orbit.TransferEngine(config)
            await self.engine.open()
        else:
            self.node = orbit.Node(self.node_config())
            await self.node.open()
        await self.register()

    async def register(self) -> None: ...

    async def close(self) -> None:
        await (self.engine.close() if self.by_engine else self.node.close())


class Owner(OrbitPart, PlainOwner):
    async def register(self) -> None:
        if self.by_engine:
            region = await self.engine.register(self.payload, access="read")
            address = str(self.engine.address)
            self.offer = {"address": address, "region": str(region.remote())}
            return
        self.guard = await self.node.register_owned(self.payload)
        handles = {}
        for size in self.args.sizes:
            part = range(size)
            handle = await self.node.register_data_in_region(self.guard, part, RETAIN)
            handles[str(size)] = str(handle)
        self.node.handler("echo", lambda message: message.payload)
        self.node.handler("pull", lambda message: self.payload[: ASK.unpack(message.payload)[0]])
        self.offer = {"address": str(self.node.address), "handles": handles}


class Consumer(OrbitPart, PlainConsumer):
    async def register(self) -> None:
        if self.by_engine:
            self.region = await self.engine.register(self.memory)
        else:
            self.guard = await self.node.register_owned(self.memory)
        if self.way == "get":
            self.release = self.give_back

    async def connect(self, offer: Any) -> None:
        if self.by_engine:
            await self.engine.open_peer(offer["address"])
            self.remote = orbit.RemoteRegion.parse(offer["region"])
            return
        self.peer = self.node.add_peer(offer["address"])
        self.handles = {
            int(size): orbit.Handle.parse(text) for size, text in offer["handles"].items()
        }
        await self.round_trip()

    async def pull(self, nbytes: int) -> None:
        if self.by_engine:
            local, remote = self.region[:nbytes], self.remote[:nbytes]
            request = orbit.TransferRequest("read", local, remote, transport=self.transport)
            (result,) = await self.engine.submit(request)
            self.path = f"{result.path} {'+'.join(result.rails)}".strip()
            return
        if self.way == "message":
            answer = await self.node.unary(self.peer, "pull", ASK.pack(nbytes))
            self.memory[:nbytes] = answer
            self.path = f"{self.transport}, demanded"
            return
        self.nbytes = nbytes
        self.lease = await self.node.get_into(self.handles[nbytes], self.guard.slice(0, nbytes))
        self.path = str(self.lease.path)

    async def give_back(self) -> None:
        await self.node.detach(self.handles[self.nbytes], self.lease)

    async def round_trip(self) -> None:
        if self.by_engine:
            await self.pull(64)
        else:
            await self.node.unary(self.peer, "echo", ECHO)
