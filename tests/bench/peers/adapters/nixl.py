"""NIXL over its UCX: READ between registered regions, the state of a transfer asked for until it is
done, since there is no call that waits. The round trip is a READ of 64 B.

The UCX of its wheel is told its transports. By RDMA the libibverbs of the wheel finds no provider
of software devices; the runner preloads the system's.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
from typing import Any

from adapters.addresses import address_of
from adapters.plain import Part, PlainConsumer, PlainOwner


class NixlPart(Part):
    version = importlib.metadata.version("nixl-cu12")
    path = "not told"

    def agent_over(self, name: str, view: memoryview) -> None:
        os.environ["UCX_TLS"] = "tcp" if self.args.network == "tcp" else "rc_verbs,ud_verbs"
        os.environ["UCX_NET_DEVICES"] = f"{self.args.device}:1" if self.args.device else "lo"
        if self.args.device:
            os.environ["UCX_IB_GID_INDEX"] = "1"
            # The lab's hosts do not see the net devices below theirs, so UCX finds no route.
            os.environ["UCX_IB_ROCE_REACHABILITY_MODE"] = "all"
        from nixl_cu12 import nixl_agent, nixl_agent_config  # reads the environment

        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.address = address_of(view)
        self.agent.register_memory([(self.address, len(view), 0, "")], "DRAM")


class Owner(NixlPart, PlainOwner):
    async def open(self) -> None:
        self.agent_over("owner", self.payload)
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        self.offer = {"metadata": metadata, "address": self.address}


class Consumer(NixlPart, PlainConsumer):
    async def open(self) -> None:
        self.agent_over("consumer", self.memory)

    async def connect(self, offer: Any) -> None:
        self.agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self.transfers = {
            size: self.agent.initialize_xfer(
                "READ",
                self.agent.get_xfer_descs([(self.address, size, 0)], "DRAM"),
                self.agent.get_xfer_descs([(offer["address"], size, 0)], "DRAM"),
                "owner",
            )
            for size in {64, *self.args.sizes}
        }

    async def pull(self, nbytes: int) -> None:
        transfer = self.transfers[nbytes]
        state = self.agent.transfer(transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(transfer)
        if state != "DONE":
            raise SystemExit(f"transfer of {nbytes} bytes: {state}")

    async def round_trip(self) -> None:
        await self.pull(64)
