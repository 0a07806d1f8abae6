"""Which rail carries which slice: of the rails that the mask allows, the best tier; there, the one
with the fewest bytes in flight; among equals, same-name pairs, then those behind the fewest PCI
bridges, and then each in its turn.

Decisions over facts that the caller gathers. It connects nothing, and what it charges is a count of
bytes per NIC, not memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from ..errors import InternalError, PathUnavailable
from ..model import PathName, PathReason

TIER_SAME_NODE = 0
TIER_OTHER_NODE = 1  # without distances; with them, the nearest of the other nodes
TIER_UNKNOWN = 2  # at least; always behind every tier that is known


def tier_of(
    numa_node: int, preferred: int | None, distances: Mapping[int, int] | None = None
) -> int:
    """The tier of a rail on `numa_node` (-1: unknown) for memory on `preferred`; lower is better.

    Without a preference all rails are equal. `distances`: of each node from the preferred one, as
    the system gives them; nodes of one distance are one tier.
    """
    if preferred is None or numa_node == preferred:
        return TIER_SAME_NODE
    if distances is None:
        return TIER_OTHER_NODE if numa_node >= 0 else TIER_UNKNOWN
    farther = sorted({d for node, d in distances.items() if node not in (preferred, -1)})
    if numa_node < 0 or numa_node not in distances:
        return max(TIER_UNKNOWN, TIER_OTHER_NODE + len(farther))
    return TIER_OTHER_NODE + farther.index(distances[numa_node])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route that could carry slices. `number` names it to the caller; `nic` is the id of its
    local NIC, which is charged, and which bit of a device mask means it.
    """

    number: int
    nic: int
    device: str
    tier: int = TIER_SAME_NODE
    same_name: bool = False
    bridges: int = 0  # between the NIC and the processor


class PlannedRun(NamedTuple):
    """Bytes that lie together in payload order and go over one route."""

    number: int  # of the candidate
    nbytes: int
    slices: tuple[int, ...]  # bytes of each slice of it


@dataclass(frozen=True, slots=True)
class Plan:
    """`runs` cover the payload in order. `charges`: (nic, bytes) to charge while they are on their
    way, one for each NIC in use. `reasons`: a sentence per candidate, chosen or not.
    """

    runs: tuple[PlannedRun, ...]
    charges: tuple[tuple[int, int], ...]
    reasons: tuple[str, ...]


class RailLoad:
    """Bytes in flight per NIC, of all transfers together."""

    __slots__ = ("_charged", "_ever")

    def __init__(self) -> None:
        self._charged: dict[int, int] = {}
        self._ever: dict[int, int] = {}

    def charged(self, nic: int) -> int:
        """Bytes in flight on that NIC."""
        return self._charged.get(nic, 0)

    @property
    def total_bytes(self) -> int:
        return sum(self._charged.values())

    def by_nic(self) -> dict[int, tuple[int, int]]:
        """Bytes in flight, and all that were ever charged, of each NIC that was used."""
        return {nic: (self.charged(nic), ever) for nic, ever in self._ever.items()}

    def charge(self, nic: int, nbytes: int) -> None:
        """Count `nbytes` until as many are repaid."""
        if nbytes < 0:
            raise InternalError(f"a charge of {nbytes} bytes on NIC {nic}")
        if nbytes:
            self._charged[nic] = self.charged(nic) + nbytes
            self._ever[nic] = self._ever.get(nic, 0) + nbytes

    def repay(self, nic: int, nbytes: int) -> None:
        """Raises InternalError, and changes nothing, for more than is charged."""
        rest = self.charged(nic) - nbytes
        if nbytes < 0 or rest < 0:
            raise InternalError(
                f"{nbytes} bytes repaid on NIC {nic}, where {self.charged(nic)} are charged"
            )
        if rest:
            self._charged[nic] = rest
        else:
            self._charged.pop(nic, None)


class Selector:
    """Chooses over `load`, which callers charge and repay. Its only own state is whose turn it is
    among equals, so that two of them with one history decide alike.
    """

    __slots__ = ("_last", "load")

    def __init__(self, load: RailLoad | None = None) -> None:
        self.load = RailLoad() if load is None else load
        self._last = (-1, -1)  # (nic, number) of the last choice

    def choose(self, candidates: Sequence[Candidate], mask: int | None = None) -> Candidate:
        """The route of one slice. Bit i of `mask` (None: all) allows NIC i. Charges nothing. Raises
        PathUnavailable.
        """
        return self._next(_eligible(candidates, mask), {})

    def plan(
        self,
        sizes: Sequence[int],
        candidates: Sequence[Candidate],
        mask: int | None = None,
        *,
        parts: int = 1,
        ordered: bool = False,
    ) -> Plan:
        """Slices of `sizes` bytes, one by one to the route that `choose` would name if those before
        were in flight; then laid out so that the slices of a route lie together, routes in the
        order of `candidates`. Slices that lie together on one route are split into up to `parts`
        runs, one for each queue pair behind it. Charges nothing. Raises PathUnavailable.

        `ordered`: the slices are ranges that lie apart, and each stays where it is. Otherwise the
        border of a run could fall into one of them, which would take a grant more.
        """
        eligible = _eligible(candidates, mask)
        planned: dict[int, int] = {}
        taken: dict[int, list[int]] = {candidate.number: [] for candidate in candidates}
        chosen: list[tuple[int, int]] = []  # number of the route, and bytes
        for size in sizes:
            best = self._next(eligible, planned)
            planned[best.nic] = planned.get(best.nic, 0) + size
            taken[best.number].append(size)
            chosen.append((best.number, size))
        if not ordered:
            chosen = [(number, size) for number, slices in taken.items() for size in slices]
        runs = [
            PlannedRun(number, sum(part), part)
            for number, together in groupby(chosen, key=itemgetter(0))
            for part in _split([size for _, size in together], parts)
        ]
        reasons = [self._reason(c, taken[c.number], eligible, mask) for c in candidates]
        return Plan(tuple(runs), tuple(planned.items()), tuple(reasons))

    def _next(self, eligible: Sequence[Candidate], planned: Mapping[int, int]) -> Candidate:
        def rank(candidate: Candidate) -> tuple[int, bool, int]:
            nic = candidate.nic
            charged = self.load.charged(nic) + planned.get(nic, 0)
            return charged, not candidate.same_name, candidate.bridges

        best = min(map(rank, eligible))
        equal = sorted((c for c in eligible if rank(c) == best), key=_place)
        chosen = next((c for c in equal if _place(c) > self._last), equal[0])
        self._last = _place(chosen)
        return chosen

    def _reason(
        self,
        candidate: Candidate,
        slices: Sequence[int],
        eligible: Sequence[Candidate],
        mask: int | None,
    ) -> str:
        who = f"{candidate.device} (NIC {candidate.nic}, tier {candidate.tier})"
        before = self.load.charged(candidate.nic)
        if slices:
            return (
                f"{who}: chosen for {len(slices)} slices, {sum(slices)} bytes; "
                f"{before} bytes were in flight"
            )
        if mask is not None and not _allows(mask, candidate.nic):
            return f"{who}: not in the device mask {mask:#x}"
        if candidate not in eligible:
            return f"{who}: there is a rail of tier {eligible[0].tier}"
        least = min(self.load.charged(other.nic) for other in eligible)
        if before > least:
            return f"{who}: {before} bytes were in flight, {least} on another rail"
        return f"{who}: no better than what was chosen, or its turn is later"


def _eligible(candidates: Sequence[Candidate], mask: int | None) -> list[Candidate]:
    """Those of the best tier that the mask allows. Raises PathUnavailable."""
    if not candidates:
        raise PathUnavailable(
            PathName.RDMA, PathReason.PORT_DOWN, "no active rail reaches the peer"
        )
    allowed = [c for c in candidates if mask is None or _allows(mask, c.nic)]
    if not allowed:
        raise PathUnavailable(
            PathName.RDMA,
            PathReason.NO_DEVICE,
            f"the device mask {mask:#x} allows none of {len(candidates)} rails",
            hint="widen device_mask",
        )
    best = min(c.tier for c in allowed)
    return [c for c in allowed if c.tier == best]


def _allows(mask: int, nic: int) -> bool:
    return bool(mask >> nic & 1)


def _place(candidate: Candidate) -> tuple[int, int]:
    return candidate.nic, candidate.number


def _split(slices: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """As even as whole slices allow, none empty."""
    count = min(max(parts, 1), len(slices))
    borders = [len(slices) * i // count for i in range(count + 1)] if count else []
    return [tuple(slices[low:high]) for low, high in pairwise(borders)]
