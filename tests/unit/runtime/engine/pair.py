"""Two engines over simulated rails, on virtual time. Afterwards nothing may be left on either."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from orbit.config import EngineConfig, NodeConfig, RendezvousConfig
from orbit.memory.range_locks import LOCKS
from orbit.protocol.remote_region import RemoteRegion
from orbit.runtime.engine.batch import Batch
from orbit.runtime.engine.core import EngineCore
from orbit.runtime.engine.region import EngineRegion
from orbit.runtime.engine.requests import TransferRequest
from orbit.testing.pattern import pattern
from orbit.testing.sim_railed_path import SimRailedPath
from orbit.testing.world import World, WorldNode

KIB = 1 << 10
MIB = 1 << 20
SIZE = MIB
NODE = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=30.0))


@dataclass(eq=False)
class End:
    node: WorldNode
    engine: EngineCore
    memory: bytearray
    region: EngineRegion

    @property
    def path(self) -> SimRailedPath:
        assert isinstance(self.node.rdma, SimRailedPath)
        return self.node.rdma

    @property
    def remote(self) -> RemoteRegion:
        return self.region.remote()

    def use(self, name: str) -> int:
        """Of a budget."""
        return self.engine.statistics().budgets[name][0]


@dataclass(eq=False)
class Pair:
    world: World
    source: End
    requester: End

    def request(self, op: str = "read", **changes: Any) -> TransferRequest:
        """All of both regions, by RDMA."""
        wanted = {
            "local": self.requester.region,
            "remote": self.source.remote,
            "transport": "rdma",
            **changes,
        }
        return TransferRequest(op, **wanted)

    def submit(self, *requests: Any, timeout: float | None = None) -> Batch:
        return self.requester.engine.submit(list(requests), timeout)


@contextlib.asynccontextmanager
async def engine_pair(
    config: EngineConfig | None = None,
    *,
    source: EngineConfig | None = None,
    rails: int = 2,
    locks_left: int = 0,
    close: bool = True,
    kept: bool = False,
) -> AsyncIterator[Pair]:
    """`source`: of the other engine, if it is another one. `close`: both engines close cleanly, at
    the end. `kept`: they cannot, and something is left in their nodes.
    """
    before = LOCKS.held
    world = World()
    try:
        ends = []
        nodes = [world.add_node(NODE, rails=rails, arena_bytes=8 * MIB) for _ in range(2)]
        world.introduce()
        for number, (node, made) in enumerate(zip(nodes, (source or config, config), strict=True)):
            engine = EngineCore(made or EngineConfig(), node.rendezvous.parts())
            memory = bytearray(pattern(SIZE, number))
            (region,) = await engine.register([memory], "readwrite")
            ends.append(End(node, engine, memory, region))
        yield Pair(world, ends[0], ends[1])
        if close and not kept:
            for end in reversed(ends):
                await end.engine.close(None)
                found = end.engine.statistics()
                left = {name: used for name, (used, _) in found.budgets.items() if used}
                assert set(left) <= {"max_endpoints"}
                assert (found.in_flight_bytes, found.regions, found.running) == (0, 0, 0)
    finally:
        await world.close()
    if not kept:
        world.check_nothing_left()
    assert LOCKS.held - before == locks_left
