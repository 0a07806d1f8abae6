"""SimPath over several simulated rails: what RailedPath says, with grants on arrays that can be
lost, and ends that are not proven.

Grants are parts of what one lease exposes. Where memory is given, what is exposed must be
registered in it, and each byte that moves through memory that is not registered any more is noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ..errors import PathFailed, PathUnavailable, PeerLost, Unquiesced
from ..model import Direction, LeaseId, PathName, PathReason
from ..protocol.messages import RailHint, SliceRun
from ..transport.interface import Exposure, Progress, PullReport, Session, Span, Target
from ..transport.pieces import cut_span, cut_target
from ..transport.rails import RailFacts, RailRoute, RailStatistics
from .fabric import SimFabric, SimPath, copy_bytes, pack_descriptor
from .faults import PathFaults, RailFaults
from .sim_arrays import SimArrays
from .sim_grants import (
    Fate,
    GrantPart,
    GrantTransfer,
    Memory,
    SimGrant,
    end_grants,
    parts_of,
    wait_receipts,
)
from .sim_memory import SimPinnedMemory, is_live

_GARBAGE = b"\x66"


class SimRailedPath(SimPath):
    """RailedPath. Rails of the same place in two nodes have the same name, unless `names` are
    given.
    """

    def __init__(
        self,
        fabric: SimFabric,
        names: Sequence[str] = ("sim_0", "sim_1"),
        faults: PathFaults | None = None,
        no_progress_s: float = 10.0,
        *,
        memory: SimPinnedMemory | None = None,
        endpoints_max: int = 64,
    ) -> None:
        super().__init__(fabric, PathName.RDMA, faults, no_progress_s)
        self.rail_faults = RailFaults()
        self.arrays = SimArrays(self.faults, self.rail_faults, endpoints_max)
        self.local = [fabric.new_rail(self.arrays, nic, name) for nic, name in enumerate(names)]
        self.recoveries = 0
        self._memory = memory

    # --- rails ------------------------------------------------------------------------------------

    @property
    def hints(self) -> tuple[RailHint, ...]:
        """What the node's hello says."""
        return tuple(rail.hint for rail in self.local)

    def rails(self) -> tuple[RailFacts, ...]:
        return tuple(rail.facts for rail in self.local)

    def rail_statistics(self) -> RailStatistics:
        endpoints = self.arrays.endpoints
        return RailStatistics(
            self.rails(),
            endpoints.in_use,
            endpoints.limit,
            route_recoveries=self.recoveries,
            budgets={"endpoints": (endpoints.in_use, endpoints.limit)},
        )

    def rail_down(self, nic: int, detail: str = "its port is down") -> None:
        """Fenced, with all that is on it."""
        rail = self.local[nic]
        rail.active, rail.detail = False, detail
        self.arrays.fail_rail(rail, detail)

    def rail_up(self, nic: int) -> None:
        """It carries new arrays again."""
        rail = self.local[nic]
        self.recoveries += not rail.active
        rail.active, rail.detail = True, ""

    def lose_arrays(self, cause: str = "they failed") -> None:
        """Those that this side serves, on every rail; its requesters hear of it later."""
        for rail in self.local:
            self.arrays.fail_served(rail, cause)

    def routes(self, session: Session) -> tuple[RailRoute, ...]:
        if self._over(session):
            return ()
        hints = [hint for hint in session.peer_hello.rails if hint.gid in self._fabric.rails]
        found = []
        for rail in (rail for rail in self.local if rail.active and hints):
            place = rail.nic % len(hints)
            hint = next((h for h in hints if h.device == rail.device), hints[place])
            found.append(RailRoute(rail.nic, rail.facts, hint.device, hint.gid))
        return tuple(sorted(found, key=lambda route: (not route.same_name, route.rail.nic)))

    async def connect_route(
        self,
        session: Session,
        direction: Direction,
        route: RailRoute,
        *,
        deadline: float | None = None,
        private: bool = False,
    ) -> int:
        near = self.local[route.rail.nic]
        source, far = self._fabric.rails.get(route.remote_gid, (None, None))
        if self._over(session) or source is None or far is None or not near.active:
            detail = near.detail or "there is no such route"
            raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, detail)
        attempt = session.attempt
        number = 0
        if not private:
            first = route in self.routes(session)[:1]
            number = self.arrays.number(attempt, direction, near, first=first)
        key = attempt, direction, number
        array = self.arrays.new(key, near, far, source, private=private)
        return (await self.arrays.connect(array, deadline)).key[2]

    async def close_array(self, session: Session, direction: Direction, array: int) -> None:
        await self.arrays.close_array((session.attempt, direction, array))

    # --- DataPath ---------------------------------------------------------------------------------

    def availability(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        if self.faults.availability is not PathReason.OK:
            return self.faults.availability
        if not any(rail.active for rail in self.local):
            return PathReason.PORT_DOWN
        return PathReason.OK if self.routes(session) else PathReason.PEER_WITHOUT

    async def prepare(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        self.prepares += 1
        reason = self.availability(session, direction)
        if self.faults.prepare is not PathReason.OK or reason is not PathReason.OK:
            await asyncio.sleep(self.faults.prepare_s)
            return reason if self.faults.prepare is PathReason.OK else self.faults.prepare
        if (session.attempt, direction, int(direction) - 1) in self.arrays.requested:
            return PathReason.OK
        try:
            await self.connect_route(session, direction, self.routes(session)[0])
        except PathUnavailable as error:
            return PathReason(error.reason)
        return PathReason.OK

    async def expose(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        array: int = 0,
        direction: Direction = Direction.READ,
    ) -> Exposure:
        if not span.nbytes:
            return await super().expose(session, span, lease_id, array, direction)
        run = SliceRun(array or int(direction) - 1, span.nbytes)
        exposure = await self.expose_runs(session, span, lease_id, (run,), direction)
        for exposed in self._fabric.of(self, session.attempt, lease_id):
            if isinstance(exposed, SimGrant):
                exposed.counted = direction is Direction.WRITE
        return exposure

    async def expose_runs(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        runs: Sequence[SliceRun],
        direction: Direction,
    ) -> Exposure:
        await asyncio.sleep(0)
        if self.faults.expose is not PathReason.OK:
            raise PathUnavailable(self.name, self.faults.expose, "simulated")
        if self._over(session):
            raise PathUnavailable(self.name, PathReason.DRAINING, "the session is closed")
        if sum(run.nbytes for run in runs) != span.nbytes or any(r.nbytes <= 0 for r in runs):
            raise PathUnavailable(self.name, PathReason.NO_OFFER, "the runs do not cover the span")
        grants, start = [], 0
        for run in runs:
            array = self.arrays.find_served((session.attempt, direction, run.array))
            for piece in cut_span(span, start, run.nbytes).pieces:
                self._check_exposable(piece)
                part = Span(piece.view, piece.pinned)  # without those that follow
                grants.append(
                    SimGrant(self, session.attempt, lease_id, part, direction, array=array)
                )
            start += run.nbytes
        descriptors = []
        for grant in grants:
            grant.array.grants += 1
            grant.array.last_used = asyncio.get_running_loop().time()
            descriptors.append((pack_descriptor(self._fabric.add(self.name, grant)), b""))
        return Exposure(descriptor=descriptors[0][0], rest=tuple(descriptors[1:]))

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        await asyncio.sleep(0)
        exposed = self._fabric.of(self, session.attempt, lease_id)
        grants = [grant for grant in exposed if isinstance(grant, SimGrant)]
        if transferred and any(grant.counted for grant in grants):
            await wait_receipts(grants, self.rail_faults.receipt_timeout_s)
        if grants and self.rail_faults.retracts_unproven:
            self.rail_faults.retracts_unproven -= 1
            self._fabric.stick(self, session.attempt, lease_id)
            if grants[0].direction is Direction.WRITE:
                self._haunt(grants[0].span, 0, _GARBAGE)
            raise Unquiesced("a window", sum(g.span.nbytes for g in grants), "simulated")
        end_grants(self._fabric.remove(self, session.attempt, lease_id))
        missing = [grant for grant in grants if grant.counted and not grant.whole]
        if transferred and missing:
            detail = f"{len(missing)} of {len(grants)} receipts did not come"
            raise PathFailed(self.name, PathReason.GET_FAILED, detail)

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        if not target.nbytes:
            return await super().pull(session, exposure, lease_id, target, progress)
        self.pulls += 1
        with self.using(target, shared=False):
            grants = self._find(session, exposure, Direction.READ, target.nbytes)
            parts = parts_of(grants, partial(cut_target, target))
            return await self._run(session, parts, "read", progress)

    async def push(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        source: Span,
        progress: Progress | None = None,
    ) -> PullReport:
        if not source.nbytes:
            return await super().push(session, exposure, lease_id, source, progress)
        self.pushes += 1
        with self.using(source, shared=True):
            grants = self._find(session, exposure, Direction.WRITE, source.nbytes)
            if any(grant.pushed for grant in grants):
                raise PathFailed(self.name, PathReason.GET_FAILED, "it was written already")
            parts = parts_of(grants, partial(cut_span, source))
            return await self._run(session, parts, "write", progress)

    async def close_session(self, session: Session) -> None:
        self._closed_attempts.add(session.attempt)
        end_grants(self._fabric.remove(self, session.attempt))
        await self.arrays.close(session.attempt)

    async def close(self) -> None:
        self._closed = True
        end_grants(self._fabric.remove(self))
        await self.arrays.close()
        for rail in self.local:
            self._fabric.rails.pop(rail.gid, None)

    # --- within -----------------------------------------------------------------------------------

    async def _run(
        self, session: Session, parts: list[GrantPart], phase: str, progress: Progress | None
    ) -> PullReport:
        loop = asyncio.get_running_loop()
        started = loop.time()
        transfer = GrantTransfer(
            parts,
            self.faults,
            Fate.drawn(self.faults, self.rail_faults),
            self._no_progress_s,
            partial(self._check, session),
            self._haunt,
            self._fabric.receipts_lost,
            progress,
        )
        await transfer.run()
        return PullReport({phase: loop.time() - started}, {"chunks": transfer.chunks})

    def _find(
        self, session: Session, exposure: Exposure, direction: Direction, nbytes: int
    ) -> list[SimGrant]:
        """The grants that an answer names, in payload order."""
        found = []
        for descriptor, _ in exposure.grants:
            transfer_id = self._transfer_id(Exposure(descriptor=descriptor))
            exposed = self._exposed(session, transfer_id, direction)
            if not isinstance(exposed, SimGrant):
                raise PathFailed(self.name, PathReason.DECODE_ERROR, "not a grant on an array")
            found.append(exposed)
        granted = sum(grant.span.nbytes for grant in found)
        if granted != nbytes:
            detail = f"{granted} bytes are granted for {nbytes}"
            raise PathFailed(self.name, PathReason.GET_FAILED, detail)
        return found

    def _check(self, session: Session, part: GrantPart) -> None:
        """Raises unless a chunk can move through that grant now."""
        grant = part.grant
        if self._over(session):
            raise PeerLost(str(session.peer), "the session is closed")
        if grant.over.is_set() or grant.array.broken:
            detail = grant.array.broken or "the owner knows no such grant"
            raise PathFailed(self.name, PathReason.GET_FAILED, detail)
        grant.pushed = grant.direction is Direction.WRITE
        self._note_dead(part.memory)
        if isinstance(grant.owner, SimRailedPath):
            grant.owner._note_dead(grant.span)

    def _note_dead(self, memory: Memory) -> None:
        for piece in memory.pieces:
            if self._memory is None or piece.pinned is None:
                continue
            if not is_live(self._memory, piece.pinned):
                self._fabric.misuse.append(f"{piece.view.nbytes} bytes are not registered any more")

    def _check_exposable(self, piece: Span) -> None:
        if self._memory is None:
            return
        if piece.pinned is None or not is_live(self._memory, piece.pinned, remote=True):
            raise PathUnavailable(self.name, PathReason.NOT_PINNED, "not registered for peers")

    def _haunt(self, memory: Memory, offset: int, late: bytes) -> None:
        """Those bytes arrive there when nobody expects them any more."""

        def arrive() -> None:
            self._note_dead(memory)
            copy_bytes(Span(memoryview(bytes(offset) + late)), memory, offset, len(late))

        asyncio.get_running_loop().call_later(self.rail_faults.ghost_s, arrive)
