"""A chain of READs on one plain queue pair through orbit's own bindings: no windows, grants, event
loop or messages. It stands for bare Python bindings of verbs. The round trip is a READ of 64 B.
"""

from __future__ import annotations

import importlib
from typing import Any

import neighbours  # noqa: F401

from adapters.plain import Part

bare_chain = importlib.import_module("bare_chain")


class BarePart(Part):
    version = "orbit's bindings"

    async def open(self) -> None:
        self.end = bare_chain.End(self.args.device, self.largest)
        self.path = f"rdma {self.args.device}"
        self.offer = self.end.offer

    async def connect(self, offer: Any) -> None:
        self.end.connect(offer)


class Owner(BarePart):
    """Its memory has the payload's bytes from the beginning."""


class Consumer(BarePart):
    def target(self, nbytes: int) -> memoryview:
        return memoryview(self.end.memory)[:nbytes]

    async def pull(self, nbytes: int) -> None:
        self.end.move("read", nbytes)

    async def round_trip(self) -> None:
        await self.pull(64)
