"""The payload that `orbit doctor --serve` offers to the other host's `--peer`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from ..config import NodeConfig
from ..model import PathReason
from ..node import Node, RegisterOptions
from ..protocol.ticket import Ticket
from .proof import payload

_NAME = "doctor"


@dataclass(frozen=True, slots=True)
class Offer:
    """`memory`: "pinned" where a peer can read it by RDMA, else "plain"."""

    ticket: Ticket
    memory: str


@contextlib.asynccontextmanager
async def serve_payload(config: NodeConfig) -> AsyncIterator[Offer]:
    """An open node with the payload on it. Raises as Node.open."""
    rendezvous = replace(config.rendezvous, rdma_min_bytes=0)
    async with Node(replace(config, rendezvous=rendezvous)) as node:
        data, keep = payload(), RegisterOptions(retain=True)
        by_rdma = node.statistics().rdma_reason is PathReason.OK
        handle = await (node.register_data_pinned if by_rdma else node.register_data)(data, keep)
        memory = "pinned" if (await node.metadata(handle)).pinned else "plain"
        digest = hashlib.sha256(data).hexdigest()
        yield Offer(Ticket(node.address, handle, _NAME, len(data), digest), memory)
