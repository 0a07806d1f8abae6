"""The handle API of one node, over whatever links and paths it is given.

It joins the owner, the consumer, the peers and their sessions, checks what callers pass, and owns
the order in which all of it ends. It knows no socket and no device, so a simulated world runs it as
it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import NodeConfig
from ..errors import ClosedError, Unquiesced, UsageError
from ..events import Recorder
from ..model import PathReason, PeerIdentity, WorkerId
from ..protocol.address import NodeAddress
from ..protocol.slots import SlotStatistics
from .consumer import Consumer
from .getting import Getting
from .messaging.dispatch import DispatchStatistics
from .messaging.statistics import MessagingStatistics, StreamStatistics
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
from .sessions import Sessions, SessionService, SessionTimeouts, keep_path

_log = logging.getLogger("orbit")

# How long a session that somebody wants to displace has to prove that it lives.
CHECK_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """A node's state as one frozen value. `retained` is the whole process's; `counters` are keyed
    as an exporter prints them.
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
        self._runner = TaskRunner()
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
        self.regions = Regions()
        self.owner = Registering(config, paths, self._owner, self.regions, self._check_open)
        self.consumer = Getting(config, paths, self._consumer, self._check_open)
        self.payloads = PayloadStore(self.owner, self.consumer)
        handlers = {**paths.handlers(), **self._owner.handlers()}
        self._sessions.watch(handlers, self._consumer, self._owner, self._peers)
        self._service: SessionService | None = None
        self._closing: asyncio.Task[None] | None = None

    def carry(self, service: SessionService) -> None:
        """Once, before the first session: what else rides on this node's sessions."""
        self._service = service
        self._sessions.carry(service)

    # --- links and peers --------------------------------------------------------------------------

    async def session_to(self, worker_id: WorkerId) -> ControlSession:
        """See Peers.session."""
        return await self._peers.session(worker_id)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a background task that the close of this node waits for."""
        return self._runner.spawn(work, name)

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
        memory = self._paths.memory
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
        )

    # --- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """End everything, in order, within the close timeout. Concurrent callers share it."""
        if self._closing is None:
            self._peers.close()
            self._owner.gate()
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.timeouts.close_s
        # Leases first, while their sessions live: a lease that ends with its receipt costs no queue
        # pair. Then the epochs with their fetches; then what still runs is told to stop.
        steps = [self._owner.close, self._sessions.close]
        if self._service is not None:
            steps.append(self._service.close)
        for step in steps:
            try:
                async with asyncio.timeout_at(deadline):
                    await step()
            except TimeoutError:
                _log.warning("closing: %s ran out of time", step.__qualname__)
        if not await self._runner.drain(deadline):
            await self._runner.cancel(loop.time() + 1.0)
        for path in self._paths:
            try:
                # Even late, each path gets a moment: an orderly end beats what the kernel does.
                async with asyncio.timeout_at(max(deadline, loop.time() + 1.0)):
                    await path.close()
            except Unquiesced as error:
                keep_path(path, error, self._recorder)
            except TimeoutError:
                late = Unquiesced(f"the {path.name} path", 0, "closing it ran out of time")
                keep_path(path, late, self._recorder)

    # --- within -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ClosedError("the node")


def _peers_settings(config: NodeConfig) -> PeersSettings:
    # An attempt that waits has its own handshake deadline: a third of it leaves time to go on.
    park_s = config.timeouts.handshake_s / 3
    return PeersSettings(config.secret is not None, park_s, min(CHECK_MAX_S, park_s))
