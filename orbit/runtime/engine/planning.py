"""Which slices of a parent go over which rails, and the arrays behind these.

Geometry and choice are `protocol.slices` and `protocol.rail_selection`; here they meet the routes
that a path has to one peer. It moves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...config import EngineConfig
from ...errors import DeadlineExceeded, PathUnavailable
from ...model import Direction, PathName, PathReason
from ...protocol.messages import SliceRun
from ...protocol.rail_selection import Candidate, Plan, RailLoad, Selector, tier_of
from ...protocol.slices import cut, slices_max
from ...transport.interface import Session
from ...transport.rails import RailedPath, RailRoute
from .array_room import ArrayRoom, grants_at_once

# Who holds a private array waits no longer for another: with few endpoints two parents, or those of
# two nodes, would wait for each other for ever.
_HOLD_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RailPlan:
    """`runs` of the plan name routes by number; `routes` are those in use."""

    plan: Plan
    routes: tuple[RailRoute, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(route.rail.device for route in self.routes))


class RailPlanner:
    """All parents of one engine, so that they see each other's load."""

    def __init__(self, config: EngineConfig, path: RailedPath) -> None:
        self.path = path
        self.load = RailLoad()
        self.room = ArrayRoom()
        self._config = config
        self._selector = Selector(self.load)

    def slices_max(self, direction: Direction, peer: Sequence[int] = ()) -> int:
        """Slices that one parent may have. `peer`: limits that the other side told, 0: none."""
        config = self._config
        return slices_max(
            direction,
            grants_max=config.max_grants,
            read_max=config.read_slices_max,
            write_max=config.write_slices_max,
            peer=peer,
        )

    def sizes(self, ranges: Sequence[int], count_max: int) -> tuple[int, ...]:
        """Bytes of the slices of a parent over ranges of these sizes. A single range is cut; of
        several, each is one slice, as it has a grant of its own.
        """
        if len(ranges) > 1:
            return tuple(ranges)
        geometry = cut(ranges[0], block_bytes=self._config.block_bytes, count_max=count_max)
        return geometry.sizes()

    def plan(self, session: Session, sizes: Sequence[int]) -> RailPlan:
        """Over the routes that there are now. The bytes are charged to their rails: `repay` them
        when they have moved. Raises PathUnavailable.
        """
        routes = {route.number: route for route in self.path.routes(session)}
        if not routes:
            raise PathUnavailable(
                PathName.RDMA, PathReason.PORT_DOWN, f"no active rail reaches {session.peer}"
            )
        preferred = self._config.preferred_numa_node
        rails = [route.rail for route in routes.values()]
        # Distances are as long there as back.
        distances = {
            rail.numa_node: far
            for rail in rails
            for node, far in rail.numa_distances
            if node == preferred
        }
        candidates = [
            Candidate(
                route.number,
                route.rail.nic,
                route.rail.device,
                tier_of(route.rail.numa_node, preferred, distances or None),
                route.same_name,
                route.rail.pci_bridges,
            )
            for route in routes.values()
        ]
        at_once = grants_at_once(session)
        parts = min(self._config.num_lanes, at_once) if at_once else self._config.num_lanes
        plan = self._selector.plan(sizes, candidates, self._config.device_mask, parts=parts)
        for nic, nbytes in plan.charges:
            self.load.charge(nic, nbytes)
        used = dict.fromkeys(run.number for run in plan.runs)
        return RailPlan(plan, tuple(routes[number] for number in used))

    def repay(self, plan: RailPlan) -> None:
        """Once per plan."""
        for nic, nbytes in plan.plan.charges:
            self.load.repay(nic, nbytes)

    async def connect(
        self,
        session: Session,
        direction: Direction,
        plan: RailPlan,
        deadline: float | None,
        *,
        private: list[int] | None = None,
    ) -> tuple[SliceRun, ...]:
        """The plan's runs on connected arrays. `private`: they are to be the caller's alone, and
        are noted there as soon as they exist; a rail that has no room for another one before long
        leaves its runs to the others. Raises as RailedPath.connect_route.
        """
        arrays: dict[int, int] = {}
        for route in plan.routes:
            limit = deadline
            if private:
                soon = asyncio.get_running_loop().time() + _HOLD_S
                limit = soon if deadline is None else min(deadline, soon)
            try:
                array = await self.path.connect_route(
                    session, direction, route, deadline=limit, private=private is not None
                )
            except DeadlineExceeded:
                if limit == deadline:
                    raise
                continue
            arrays[route.number] = array
            if private is not None:
                private.append(array)
        if not arrays:
            raise DeadlineExceeded("room for private queue pairs", _HOLD_S)
        other = next(iter(arrays.values()))
        return tuple(SliceRun(arrays.get(run.number, other), run.nbytes) for run in plan.plan.runs)
