"""A world of nodes on simulated links, paths and time: the other composition root.

Every node runs the real runtime and the real machines; only sockets, devices and the clock are
simulated. One seed replays one run. Meant for VirtualLoop (`run_virtual`), where timeouts cost
nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ..config import NodeConfig
from ..errors import PeerUnreachable
from ..events import Event, Recorder
from ..model import Incarnation, PathName, PathReason, PeerIdentity, WorkerId
from ..protocol.address import NodeAddress
from ..protocol.connection import StartDial
from ..protocol.endpoint import Endpoint
from ..protocol.messages import Hello, Limits, RailHint
from ..runtime.paths import Paths
from ..runtime.peer import OpenedLink
from ..runtime.rendezvous import Rendezvous
from .fabric import SimFabric, SimPath
from .faults import LinkFaults, PathFaults
from .handshake import SimHandshake
from .network import SimLink, SimNetwork
from .sim_memory import SimPinnedMemory
from .sim_railed_path import SimRailedPath


@dataclass(eq=False)
class WorldNode:
    """One node. `rdma` None: a host without (simulated) devices. `events` is all that it reported.
    `rails` and `limits` are what its hello says.
    """

    identity: PeerIdentity
    rendezvous: Rendezvous
    tcp: SimPath
    rdma: SimPath | None
    memory: SimPinnedMemory | None
    address: NodeAddress
    secret: bytes | None
    recorder: Recorder
    events: list[Event] = field(default_factory=list)
    links: list[SimLink] = field(default_factory=list)
    rails: tuple[RailHint, ...] = ()
    limits: Limits = field(default_factory=Limits)
    dead: bool = False

    def count(self, series: str, **labels: str) -> int:
        """Of this node's counters."""
        return self.recorder.counters.value(series, **labels)


class World:
    """`async with World(seed) as world`: nodes are closed at the end, and nothing may be left."""

    def __init__(self, seed: int = 0, faults: LinkFaults | None = None) -> None:
        self.network = SimNetwork(seed, faults)
        self.random = self.network.random
        self.fabric = SimFabric()
        self.nodes: list[WorldNode] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
        if error is None:
            self.check_nothing_left()

    def add_node(
        self,
        config: NodeConfig | None = None,
        *,
        rdma: bool = True,
        rdma_faults: PathFaults | None = None,
        arena_bytes: int = 1 << 20,
        identity: PeerIdentity | None = None,
        paths: Paths | None = None,
        rails: int = 0,
    ) -> WorldNode:
        """A node with a TCP path and, with `rdma`, an RDMA one and an arena; or with the `paths`
        that are given. `config` is used as it is (the environment is not read). `rails`: the RDMA
        path lies over so many; 0: over none that anybody sees.
        """
        config = config or NodeConfig()
        number = len(self.nodes) + 1
        identity = identity or PeerIdentity(
            WorkerId(number), Incarnation(self.random.getrandbits(64))
        )
        simulated = rdma and paths is None
        tcp = SimPath(self.fabric, PathName.TCP)
        memory = SimPinnedMemory(arena_bytes) if simulated else None
        rdma_path = self._rdma_path(config, rails, rdma_faults, memory) if simulated else None
        reason = PathReason.OK if rdma else PathReason.NO_DEVICE
        paths = paths or Paths(tcp, rdma_path, reason, "", memory)
        events: list[Event] = []
        recorder = Recorder(events.append)

        async def dial(address: NodeAddress, start: StartDial) -> OpenedLink:
            return await self._dial(node, address, start)

        rendezvous = Rendezvous(identity, config, paths, dial, recorder)
        address = NodeAddress(
            identity.worker_id, identity.incarnation, (Endpoint(f"node-{number}", number),)
        )
        secret = config.secret.encode() if isinstance(config.secret, str) else config.secret
        node = WorldNode(
            identity, rendezvous, tcp, rdma_path, memory, address, secret, recorder, events
        )
        if isinstance(rdma_path, SimRailedPath):
            node.rails = rdma_path.hints
        self.nodes.append(node)
        return node

    def _rdma_path(
        self,
        config: NodeConfig,
        rails: int,
        faults: PathFaults | None,
        memory: SimPinnedMemory | None,
    ) -> SimPath:
        if not rails:
            return SimPath(self.fabric, PathName.RDMA, faults)
        names = [f"sim_{nic}" for nic in range(rails)]
        endpoints_max = config.rdma.max_endpoints
        return SimRailedPath(self.fabric, names, faults, memory=memory, endpoints_max=endpoints_max)

    def introduce(self) -> None:
        """Everybody learns everybody's address."""
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.rendezvous.add_peer(other.address)

    def kill(self, node: WorldNode) -> None:
        """As SIGKILL: its connections end without a word, and nobody answers at its address."""
        node.dead = True
        for link in node.links:
            self.network.cut(link, "killed")

    async def close(self) -> None:
        """Close every node, at once."""
        await asyncio.gather(*(node.rendezvous.close() for node in self.nodes))

    def check_nothing_left(self) -> None:
        """No exposure, no slot, no lease, no piece of an arena, no task."""
        assert self.fabric.exposed_count == 0, f"seed {self.network.seed}: exposures are left"
        assert not self.fabric.misuse, f"seed {self.network.seed}: {self.fabric.misuse}"
        for node in self.nodes:
            found = node.rendezvous.statistics()
            left = (found.slots.slots, found.slots.leases_held, found.sessions, found.tasks)
            where = f"seed {self.network.seed}, node {node.identity}: {found}"
            assert left == (0, 0, 0, 0), where
            assert node.memory is None or node.memory.allocated_count == 0, where

    async def _dial(self, dialer: WorldNode, address: NodeAddress, start: StartDial) -> OpenedLink:
        await asyncio.sleep(self.network.delay_s(self.network.faults))
        name = str(address.endpoints[0])
        target = self._at(address)
        if target is None:
            raise PeerUnreachable(name, "refused")
        near, far = self.network.link_pair(str(dialer.identity), name)
        handshake = SimHandshake(
            self._hello(dialer, address.worker_id, start),
            self._hello(target),
            (dialer.secret, target.secret),
            address.identity,
            far,
        )
        incoming = handshake.prove()
        dialer.links.append(near)
        target.links.append(far)
        # Each step takes its time, so that attempts of both sides can cross.
        await asyncio.sleep(self.network.delay_s(self.network.faults))
        if target.dead:
            raise PeerUnreachable(name, "silent", "it died")
        target.rendezvous.accept(incoming)
        epoch = await handshake.wait_welcome(self.network.delay_s(self.network.faults))
        return OpenedLink(epoch, near, (address.endpoints[0].pair,))

    def _at(self, address: NodeAddress) -> WorldNode | None:
        """Who answers there: the last node that was given this endpoint and lives."""
        for node in reversed(self.nodes):
            if node.address.endpoints == address.endpoints and not node.dead:
                return node
        return None

    def _hello(self, node: WorldNode, target: int = 0, start: StartDial | None = None) -> Hello:
        return Hello(
            version_min=1,
            version_max=1,
            worker_id=node.identity.worker_id,
            incarnation=node.identity.incarnation,
            target=target,
            attempt=self.random.randbytes(16) if start is None else start.attempt,
            nonce=self.random.randbytes(16),
            rails=node.rails,
            limits=node.limits,
            endpoints=tuple(map(str, node.address.endpoints)),
            dial_number=0 if start is None else start.number,
            previous=b"" if start is None else start.previous,
        )
