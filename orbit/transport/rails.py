"""The seam of a path with several rails: which local port reaches which remote one, and grants that
are spread over the queue-pair arrays of several of them.

A route names a pair of rails and carries no authority; the array behind it is connected when it is
asked for. Nothing here names a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from ..model import Direction, LeaseId, PathReason
from ..protocol.messages import SliceRun
from .interface import Exposure, Session, Span


@dataclass(frozen=True, slots=True)
class RailFacts:
    """One local rail. `nic` is its place among all that discovery found, and never given to another
    one; `numa_node` -1: unknown. A paused rail (not `active`) keeps its registrations and carries
    nothing; `reason` (port_down, device_failed) and `detail` say why.
    """

    nic: int
    device: str
    port: int
    gid: str
    active: bool
    numa_node: int = -1
    link_layer: str = "ethernet"
    detail: str = ""
    numa_distances: tuple[tuple[int, int], ...] = ()  # node, and how far it is from this rail's
    pci_bridges: int = 0  # between it and the processor
    reason: PathReason = PathReason.OK


@dataclass(frozen=True, slots=True)
class RailRoute:
    """A local rail and the remote one that it would be used with towards one peer. Metadata: that
    the two reach each other is known only when an array between them is connected. `number` tells
    the routes of one session apart.
    """

    number: int
    rail: RailFacts
    remote_device: str
    remote_gid: str

    @property
    def same_name(self) -> bool:
        return self.rail.device == self.remote_device


@dataclass(frozen=True, slots=True)
class RailStatistics:
    """Of all rails together; the last three only grow. `endpoints`: queue pairs in both roles,
    those included that are being made, closed or retained.
    """

    rails: tuple[RailFacts, ...] = ()
    endpoints: int = 0
    endpoints_max: int = 0
    monitor_ticks: int = 0
    route_queries: int = 0
    route_recoveries: int = 0
    progress_recoveries: int = 0
    budgets: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name: in use, limit


@runtime_checkable
class RailedPath(Protocol):
    """What a path over several rails offers beside DataPath. Methods belong to one event loop."""

    def rails(self) -> tuple[RailFacts, ...]:
        """All local rails, paused ones included, by `nic`."""

    def routes(self, session: Session) -> tuple[RailRoute, ...]:
        """Pairs that could serve that peer now: one for each active local rail that has a
        compatible remote one, same-name pairs first, others in the order of `nic`. No I/O.
        """

    async def connect_route(
        self,
        session: Session,
        direction: Direction,
        route: RailRoute,
        *,
        deadline: float | None = None,
        private: bool = False,
    ) -> int:
        """Requester: the number of a connected array over that route, for `SliceRun.array`. Shared
        arrays are made once and used again; a `private` one is this caller's alone, until
        `close_array`. Waits at most until `deadline` (loop time) for a free endpoint and the dial,
        and giving up leaves both to who else waits. Raises PathUnavailable, BudgetExceeded (more
        than all endpoints), DeadlineExceeded.
        """

    async def close_array(self, session: Session, direction: Direction, array: int) -> None:
        """Requester: end a private array. Returns when its queue pairs are gone on both sides.
        Raises Unquiesced. Unknown ones return at once.
        """

    async def expose_runs(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        runs: Sequence[SliceRun],
        direction: Direction,
    ) -> Exposure:
        """Source: as DataPath.expose, with a grant for each run of bytes (cut where a piece of
        `span` ends), on the array that the run names. The runs cover `span` exactly. All or
        nothing. Raises PathUnavailable; then nothing was exposed. `retract` with `transferred`
        raises PathFailed of a READ, too, whose receipts did not all come.
        """

    def rail_statistics(self) -> RailStatistics:
        """As of now."""


def railed(path: object) -> RailedPath | None:
    """The path itself where it has rails. Asked once for each class: a Protocol of that many
    methods takes its time to answer.
    """
    kind = type(path)
    if kind not in _RAILED:
        _RAILED[kind] = isinstance(path, RailedPath)
    return cast(RailedPath, path) if _RAILED[kind] else None


_RAILED: dict[type, bool] = {}
