"""The handle API of one node, over whatever links and paths it is given.

It joins the owner, the consumer, the peers and their sessions, checks what callers pass, and owns
the order in which all of it ends. It knows no socket and no device, so a simulated world runs it as
it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import NodeConfig
from ..errors import ClosedError, UsageError
from ..events import DurationCounts, Recorder
from ..model import PathReason, PeerIdentity, WorkerId
from ..protocol.address import NodeAddress
from ..protocol.slots import SlotStatistics
from ..transport.interface import MemoryStatistics, RegisteredPath
from ..transport.path_statistics import PathStatistics
from .consumer import Consumer
from .engine.ground import NodeParts
from .getting import Getting
from .giving_back import GivingBack
from .messaging.dispatch import DispatchStatistics
from .messaging.statistics import MessagingStatistics, StreamStatistics
from .node_ending import Closing, MemorySweep
from .owner import Owner
from .paths import Paths
from .payload_store import PayloadStore
from .peer import Dial, IncomingLink, PeerWays
from .peers import Peers, PeersSettings
from .regions import Regions
from .registering import Registering
from .retained import Retained, retained
from .runner import TaskRunner
from .session import ControlSession
from .sessions import Sessions, SessionService, SessionTimeouts

# How long a session that somebody wants to displace has to prove that it lives.
CHECK_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """A node's state as one frozen value. `retained` is the whole process's; `counters` are keyed
    as an exporter prints them. `rdma`: of the RDMA path, None where there is none.
    """

    slots: SlotStatistics
    leases_held: int  # as a consumer
    sessions: int
    tasks: int
    registered_bytes: int
    rdma_reason: PathReason  # OK, or why this node has no RDMA path
    rdma_detail: str
    retained: tuple[Retained, ...]
    counters: Mapping[str, int]
    messaging: MessagingStatistics = field(default_factory=MessagingStatistics)
    dispatch: DispatchStatistics = field(default_factory=DispatchStatistics)
    streams: StreamStatistics = field(default_factory=StreamStatistics)
    memory: MemoryStatistics = field(default_factory=MemoryStatistics)
    rdma: PathStatistics | None = None
    rdma_get_seconds: DurationCounts = field(default_factory=DurationCounts)


class Rendezvous:
    """`dial` opens a link to an address and runs the handshake. `config` is resolved already."""

    def __init__(
        self,
        identity: PeerIdentity,
        config: NodeConfig,
        paths: Paths,
        dial: Dial,
        recorder: Recorder,
    ) -> None:
        self.identity = identity
        self._config = config
        self._paths = paths
        self._recorder = recorder
        self._runner = TaskRunner(asyncio.get_running_loop())
        self._sessions = Sessions(
            paths,
            recorder,
            self._runner,
            SessionTimeouts(
                config.timeouts.call_s,
                config.timeouts.no_progress_s,
                config.messaging.ping_timeout_s,
            ),
        )
        rng = random.Random(identity.incarnation)
        ways = PeerWays(dial, self._sessions.begin, self._runner, rng)
        self._peers = Peers(identity, ways, _peers_settings(config))
        worker_id = identity.worker_id
        self._owner = Owner(worker_id, paths, config.rendezvous, recorder, self._runner)
        self._consumer = Consumer(
            worker_id,
            self._peers.session,
            self._owner,
            paths,
            config.rendezvous,
            recorder,
            self._runner,
        )
        self.regions = Regions(paths.memory, self._runner, recorder, config.rdma.drop_dereg_timeout)
        self.owner = Registering(
            config, paths, self._owner, self.regions, self._runner, self._check_open
        )
        self.consumer = Getting(config, paths, self._consumer, self._check_open)
        self.payloads = PayloadStore(
            config.rendezvous, paths, self._owner, self.consumer, self._check_open
        )
        handlers = {**paths.handlers(), **self._owner.handlers()}
        self._sessions.watch(handlers, self._consumer, self._owner, self._peers)
        shutdown_s = config.rdma.shutdown_timeout
        self.sweep = MemorySweep(self._owner, self.regions, paths, shutdown_s)
        self._closing: Closing | None = None

    def carry(self, service: SessionService) -> None:
        """Once, before the first session: what else rides on this node's sessions."""
        self._sessions.carry(service)

    def parts(self) -> NodeParts:
        """What a transfer engine stands on. Raises ClosedError."""
        self._check_open()
        return NodeParts(
            self.identity,
            self._paths,
            self.regions,
            self.owner,
            self._consumer.context,
            self._sessions,
            self._peers.session,
            self._consumer.watched,
            kill_switch=not self._config.rendezvous.enabled,
        )

    # --- links and peers --------------------------------------------------------------------------

    async def session_to(self, worker_id: WorkerId) -> ControlSession:
        """See Peers.session."""
        return await self._peers.session(worker_id)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a background task that the close of this node waits for."""
        return self._runner.spawn(work, name)

    def give_back(self, work: Coroutine[Any, Any, None]) -> GivingBack:
        """`work`, which is carried out whether or not somebody awaits it."""
        return GivingBack(work, self._give_back_unwatched)

    def accept(self, incoming: IncomingLink) -> None:
        """A peer has dialed this node and proven itself."""
        self._peers.offer(incoming)

    def add_peer(self, address: NodeAddress | bytes | str) -> PeerIdentity:
        """See Node.add_peer."""
        self._check_open()
        if isinstance(address, str):
            address = NodeAddress.parse(address)
        elif isinstance(address, bytes | bytearray | memoryview):
            address = NodeAddress.from_bytes(address)
        elif not isinstance(address, NodeAddress):
            raise UsageError(f"not a node address: {type(address).__name__}")
        return self._peers.add(address)

    def statistics(self) -> NodeStatistics:
        """See Node.statistics."""
        memory, rdma = self._paths.memory, self._paths.rdma
        return NodeStatistics(
            slots=self._owner.statistics(),
            leases_held=self._consumer.leases_held,
            sessions=len(self._sessions),
            tasks=len(self._runner),
            registered_bytes=0 if memory is None else memory.registered_bytes,
            rdma_reason=self._paths.rdma_reason,
            rdma_detail=self._paths.rdma_detail,
            retained=retained(),
            counters=self._recorder.counters.snapshot(),
            memory=MemoryStatistics() if memory is None else memory.statistics(),
            rdma=rdma.statistics() if isinstance(rdma, RegisteredPath) else None,
            rdma_get_seconds=self._recorder.rdma_get_seconds.snapshot(),
        )

    # --- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """End everything, in order, within the close timeout. Concurrent callers share it."""
        if self._closing is None:
            self._peers.close()
            self._owner.gate()
            self.regions.gate()
            self._closing = Closing(
                self.sweep,
                self._owner,
                self._sessions,
                self._runner,
                self.regions,
                self._paths,
                self._recorder,
            )
        loop = asyncio.get_running_loop()
        await self._closing.run(loop.time() + self._config.timeouts.close_s)

    # --- within -----------------------------------------------------------------------------------

    def _give_back_unwatched(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.spawn_unwatched(work, "give back")

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ClosedError("the node")


def _peers_settings(config: NodeConfig) -> PeersSettings:
    # An attempt that waits has its own handshake deadline: a third of it leaves time to go on.
    park_s = config.timeouts.handshake_s / 3
    return PeersSettings(config.secret is not None, park_s, min(CHECK_MAX_S, park_s))
