"""What the RDMA path offers over several rails: RailedPath, on top of the parts of a path.

It passes on to the arrays of either role and holds nothing of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PathUnavailable
from ..model import Direction, LeaseId, PathName, PathReason
from ..protocol.messages import SliceRun
from ..transport.interface import Exposure, Session, Span
from ..transport.rails import RailFacts, RailRoute, RailStatistics
from .arena_pool import ArenaPool
from .bulk_context import BulkContext
from .device import DeviceContext
from .exposures import Exposures
from .lane_group import total
from .monitor import Monitor
from .rail_routes import facts_of
from .requesting import Requesting
from .source_arrays import SourceArrays
from .source_runs import parts_of_runs


class PathRails:
    """Half of RdmaPath, which makes the parts."""

    memory: ArenaPool
    _devices: tuple[DeviceContext, ...]
    _context: BulkContext
    _monitor: Monitor
    _sources: SourceArrays
    _exposures: Exposures
    _requests: Requesting
    _gated: bool

    def rails(self) -> tuple[RailFacts, ...]:
        return facts_of(self._devices)

    def routes(self, session: Session) -> tuple[RailRoute, ...]:
        return () if self._gated else self._requests.arrays.routes(session)

    async def connect_route(
        self,
        session: Session,
        direction: Direction,
        route: RailRoute,
        *,
        deadline: float | None = None,
        private: bool = False,
    ) -> int:
        if self._gated:
            raise PathUnavailable(PathName.RDMA, PathReason.DRAINING)
        return await self._requests.arrays.connect_route(
            session, direction, route, deadline, private=private
        )

    async def close_array(self, session: Session, direction: Direction, array: int) -> None:
        await self._requests.arrays.close_array(session, direction, array)

    async def expose_runs(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        runs: Sequence[SliceRun],
        direction: Direction,
    ) -> Exposure:
        if self._gated:
            raise PathUnavailable(PathName.RDMA, PathReason.DRAINING)
        parts = parts_of_runs(span, runs)
        if not parts:
            return Exposure()  # nothing to move, so no authority
        return await self._exposures.expose(session, parts, lease_id, direction, whole=True)

    def rail_statistics(self) -> RailStatistics:
        endpoints, budget = self._context.endpoints, self.memory.budget
        lanes, config = total(device.lanes for device in self._devices), self._context.config
        seen = self._monitor.statistics()
        return RailStatistics(
            rails=self.rails(),
            endpoints=endpoints.in_use,
            endpoints_max=endpoints.limit,
            monitor_ticks=seen.ticks,
            route_queries=seen.queries,
            route_recoveries=seen.recoveries,
            progress_recoveries=lanes.recoveries,
            budgets={
                "endpoints": (endpoints.in_use, endpoints.limit),
                "completion_entries": (lanes.entries, lanes.entries_max),
                "send_work": (lanes.sends, endpoints.limit * config.send_depth),
                "receive_work": (lanes.receives, endpoints.limit * config.recv_depth),
                "registered_bytes": (budget.charged_bytes, budget.limit_bytes),
            },
        )
