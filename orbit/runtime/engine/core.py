"""One transfer engine over one node: regions, peers, batches, and the order of its end.

It joins the parts of this folder and knows no backend, so a simulated world runs it as it is. Who
opens and closes the node is orbit/engine.py's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...config import EngineConfig
from ...errors import ClosedError, DeadlineExceeded, UsageError
from ...model import PeerIdentity, RegionAccess
from ...protocol.engine_messages import ENGINE_PROTOCOL, EngineHelloReply, EngineHelloRequest
from ...transport.rails import RailedPath, RailStatistics
from ..retained import Retained, retained
from ..usage import checked_timeout
from .batch import Batch
from .ground import Budgets, Ground, NodeParts
from .jobs import Request, RequestJob
from .peers import EnginePeer, PeerFacts, answering
from .planning import RailPlanner
from .region import EngineRegion
from .registry import RegionRegistry
from .requests import RangeRequest, TransferRequest, TransferState
from .tally import Tally


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """An engine as of now. `budgets`: in use and limit, by knob, those of its role as a source
    apart; `waiting`: requests that wait for one of them. `outcomes`: requests that are over, by
    state; `in_flight_bytes`: charged to rails; `rail_bytes`: of each rail that was used, by its
    `nic`, the bytes in flight and all that were ever planned onto it. `rails` None: this node has
    none.
    """

    regions: int
    running: int  # requests
    budgets: Mapping[str, tuple[int, int]]
    waiting: Mapping[str, int]
    outcomes: Mapping[str, int]
    in_flight_bytes: int = 0
    bytes_moved: int = 0
    rails: RailStatistics | None = field(default=None)
    rail_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class EngineCore:
    """For the event loop that made it."""

    def __init__(self, config: EngineConfig, node: NodeParts) -> None:
        """Raises UsageError: there is an engine on that node already."""
        rdma = node.paths.rdma
        path = rdma if isinstance(rdma, RailedPath) else None
        planner = None if path is None else RailPlanner(config, path)
        loop = asyncio.get_running_loop()
        self._ground = Ground(
            config, node, Budgets(config), Tally("an engine's transfers"), planner, loop
        )
        self.regions = RegionRegistry(self._ground, _devices_of(path, node))
        self._peers = PeerFacts()
        self._batches: set[Batch] = set()
        self._outcomes: dict[TransferState, int] = dict.fromkeys(TransferState, 0)
        self._bytes_moved = 0
        self._gated = False
        self._retained_before = frozenset(retained())
        says = EngineHelloReply(
            ENGINE_PROTOCOL,
            config.host_memory,
            config.max_grants,
            max(config.read_slices_max, config.write_slices_max),
        )
        node.sessions.serve(EngineHelloRequest.METHOD, answering(says))

    # --- work -------------------------------------------------------------------------------------

    async def register(
        self, buffers: Iterable[object], access: RegionAccess | str
    ) -> list[EngineRegion]:
        """See RegionRegistry.register."""
        return await self.regions.register(buffers, access)

    async def peer(self, identity: PeerIdentity) -> EnginePeer:
        """See TransferEngine.open_peer."""
        self._check_open()
        session = await self._ground.node.session_to(identity.worker_id)
        facts = await self._peers.of(session)
        planner = self._ground.planner
        routes = () if planner is None else planner.path.routes(session)
        return EnginePeer(session.peer, facts.host_memory, tuple(routes))

    def submit(self, requests: Sequence[Request] | Request, timeout: float | None) -> Batch:
        """See TransferEngine.submit."""
        self._check_open()
        checked_timeout(timeout)
        wanted = [requests] if isinstance(requests, Request) else list(requests)
        for request in wanted:
            if not isinstance(request, TransferRequest | RangeRequest):
                raise UsageError(f"not a transfer request: {type(request).__name__}")
        jobs = [self._job(request, timeout) for request in wanted]
        batch = Batch(jobs, self._ground.node.context.runner, self._batch_ended)
        if not batch.done:
            self._batches.add(batch)
        return batch

    def statistics(self) -> EngineStatistics:
        """See TransferEngine.statistics."""
        shared, planner = self._ground.budgets.all, self._ground.planner
        rails = None if planner is None else planner.path.rail_statistics()
        budgets = {budget.name: budget.use[:2] for budget in shared}
        for budget in self.regions.budgets:
            budgets[budget.name] = budget.charged_bytes, budget.limit_bytes
        if rails is not None:
            budgets["max_endpoints"] = rails.endpoints, rails.endpoints_max
        return EngineStatistics(
            regions=len(self.regions),
            running=sum(batch.running for batch in self._batches),
            budgets=budgets,
            waiting={budget.name: budget.use.waiting for budget in shared},
            outcomes={state.value: count for state, count in self._outcomes.items()},
            in_flight_bytes=0 if planner is None else planner.load.total_bytes,
            bytes_moved=self._bytes_moved,
            rails=rails,
            rail_bytes={} if planner is None else planner.load.by_nic(),
        )

    def retained(self) -> tuple[Retained, ...]:
        """See TransferEngine.retained."""
        return tuple(entry for entry in retained() if entry not in self._retained_before)

    # --- the end ----------------------------------------------------------------------------------

    def cancel_all(self) -> None:
        """Give up every batch that is not over."""
        for batch in list(self._batches):
            batch.cancel()

    async def close_requester(self, timeout: float | None) -> None:
        """See TransferEngine.close_requester."""
        self._gated = True
        await self._close_requester(*self._window(timeout))

    async def close_source(self, timeout: float | None) -> None:
        """See TransferEngine.close_source."""
        self.regions.hide_all()
        await self.regions.reached.wait_none(*self._window(timeout))

    async def close(self, timeout: float | None) -> None:
        """See TransferEngine.close."""
        deadline, timeout_s = self._window(timeout)
        self._gated = True
        self.regions.gate()
        self.regions.hide_all()
        await self._close_requester(deadline, timeout_s)
        await self.regions.reached.wait_none(deadline, timeout_s)
        await self.regions.unregister_all(deadline)
        self._ground.node.sessions.stop_serving(EngineHelloRequest.METHOD)

    # --- within -----------------------------------------------------------------------------------

    def _job(self, request: Request, timeout: float | None) -> RequestJob:
        limits = [limit for limit in (request.timeout, timeout) if limit is not None]
        timeout_s = min(limits, default=0.0)
        deadline = self._ground.loop.time() + timeout_s if limits else None
        return RequestJob(self._ground, self._peers, self.regions, request, deadline, timeout_s)

    def _batch_ended(self, batch: Batch) -> None:
        self._batches.discard(batch)
        for result in batch.results():
            self._outcomes[result.state] += 1
            self._bytes_moved += result.nbytes

    async def _close_requester(self, deadline: float, timeout_s: float) -> None:
        waiting = [asyncio.ensure_future(batch.wait()) for batch in self._batches]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=deadline - self._ground.loop.time())
            for task in late:
                task.cancel()
            if late:
                raise DeadlineExceeded("the end of an engine's requests", timeout_s)
        await self._ground.parents.wait_none(deadline, timeout_s)

    def _window(self, timeout: float | None) -> tuple[float, float]:
        """Until when (loop time), and how long that is."""
        checked_timeout(timeout)
        timeout_s = self._ground.config.teardown_timeout if timeout is None else timeout
        return self._ground.loop.time() + timeout_s, timeout_s

    def _check_open(self) -> None:
        if self._gated:
            raise ClosedError("the engine")


def _devices_of(path: RailedPath | None, node: NodeParts) -> int:
    """On how many a registration is made; a path that does not say has one."""
    if node.paths.memory is None:
        return 0
    return 1 if path is None else max(1, len({rail.device for rail in path.rails()}))
