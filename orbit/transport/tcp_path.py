"""The TCP data path: bytes go from one side's memory straight to sockets, and into the other's.

Owner and consumer side in one DataPath. It holds what is exposed to which epoch, admits bulk
connections by their tokens, and keeps a small pool of connections to each owner. It takes no path
decision and knows no handles; how a connection is dialed and greeted is tcp_dial's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from ..errors import (
    InternalError,
    PathFailed,
    PathUnavailable,
    PeerError,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
)
from ..model import Direction, LeaseId, PathName, PathReason
from ..protocol.messages import BulkHello
from ..protocol.security import BulkGate, BulkTickets
from .in_flight import InFlight
from .interface import CallHandler, Exposure, Progress, PullReport, Session, Span, Target
from .tcp_bulk import ConnectionDied
from .tcp_bulk_consumer import BulkConsumer
from .tcp_bulk_owner import Arrival, BulkOwner, Exposed
from .tcp_dial import DialOptions, dial_bulk
from .tcp_pool import BulkPool
from .tcp_wire import Wire


@dataclass(frozen=True, slots=True)
class TcpPathOptions:
    """`no_progress_s` is refreshed by arriving bytes alone, however few. Two connections to a peer
    let a small pull pass a big one; more share the same link and only cost buffers."""

    no_progress_s: float = 10.0
    idle_s: float = 60.0
    connections_max: int = 2
    accepted_max: int = (
        8  # of one epoch, on the owner's side: twice what a peer of ours opens, twice
    )


@dataclass(slots=True, eq=False)
class _OwnerSide:
    """What one epoch may read from us and write, and the connections it does that over."""

    gate: BulkGate
    by_lease: dict[LeaseId, Exposed] = field(default_factory=dict)
    by_transfer: dict[int, Exposed] = field(default_factory=dict)
    connections: set[BulkOwner] = field(default_factory=set)


class TcpPath:
    """DataPath over TCP bulk connections. Always available; needs no registered memory."""

    name = PathName.TCP

    def __init__(
        self, dial_options: DialOptions | None = None, options: TcpPathOptions | None = None
    ) -> None:
        self._dial_options = dial_options or DialOptions()
        self._options = options or TcpPathOptions()
        self._owners: dict[bytes, _OwnerSide] = {}
        self._pools: dict[bytes, BulkPool] = {}
        self._transfers = 0
        self._moving = InFlight()  # pulls and pushes
        self._closed = False

    def availability(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        return PathReason.OK

    async def prepare(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        """Nothing: small payloads ride on the acquire answer, so a dial ahead could be in vain."""
        return PathReason.OK

    def handlers(self) -> Mapping[str, CallHandler]:
        return {}

    async def expose(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        array: int = 0,
        direction: Direction = Direction.READ,
    ) -> Exposure:
        if self._closed or session.closed:
            raise PathUnavailable(self.name, PathReason.DRAINING, "the session is closed")
        owner = self._owners.get(session.attempt)
        if owner is None:
            gate = BulkGate(session.key, session.attempt, from_dialer=not session.dialed)
            owner = _OwnerSide(gate)
            self._owners[session.attempt] = owner
        self._transfers += 1
        pieces = tuple(piece.view for piece in span.pieces)
        exposed = Exposed(self._transfers, pieces, direction)
        owner.by_lease[lease_id] = owner.by_transfer[exposed.transfer_id] = exposed
        return Exposure(transfer_id=exposed.transfer_id)

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        """The span is accessed only inside a callback of this loop, so that nothing does now. A
        transfer that is half through loses its connection: the rest of it may not move.
        """
        owner = self._owners.get(session.attempt)
        exposed = None if owner is None else owner.by_lease.pop(lease_id, None)
        if owner is None or exposed is None:
            return
        del owner.by_transfer[exposed.transfer_id]
        exposed.finish()
        for connection in tuple(owner.connections):
            if connection.exposed is exposed:
                connection.close()
        written = exposed.direction is Direction.WRITE
        if written and transferred and exposed.arrival is not Arrival.WHOLE:
            raise PathFailed(self.name, PathReason.GET_FAILED, "not every byte has arrived")

    def admit_bulk(self, hello: BulkHello) -> None:
        """Owner: check the first frame of an accepted bulk connection. Raises PeerRefused."""
        owner = self._owners.get(hello.attempt)
        if owner is None:
            raise PeerRefused("auth", "no such epoch")
        owner.gate.admit(hello)
        if len(owner.connections) >= self._options.accepted_max:
            raise PeerRefused("busy", "too many bulk connections")

    def serve_bulk(self, wire: Wire, hello: BulkHello) -> None:
        """Owner: answer the requests on an admitted connection from now on. Takes the wire over."""
        owner = self._owners.get(hello.attempt)
        if owner is None:  # the epoch ended while the welcome was on its way
            wire.close()
            return
        find, ended = owner.by_transfer.get, owner.connections.discard
        owner.connections.add(BulkOwner(wire, find, ended, self._options.no_progress_s))

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        pieces = [piece.view for piece in target.pieces]
        if not any(pieces):
            return PullReport()

        async def pull(end: BulkConsumer) -> None:
            await end.pull(exposure.transfer_id, pieces, self._options.no_progress_s, progress)

        return await self._transfer(session, "read", pull)

    async def push(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        source: Span,
        progress: Progress | None = None,
    ) -> PullReport:
        """Returns when the owner has every byte. `progress`: of those that this kernel took."""
        pieces = [piece.view for piece in source.pieces]
        if not any(pieces):
            return PullReport()

        async def push(end: BulkConsumer) -> None:
            await end.push(exposure.transfer_id, pieces, self._options.no_progress_s, progress)

        return await self._transfer(session, "write", push)

    async def _transfer(
        self, session: Session, phase: str, move: Callable[[BulkConsumer], Awaitable[None]]
    ) -> PullReport:
        moving = self._moving.begin()
        try:
            return await self._move(session, phase, move)
        finally:
            self._moving.end(moving)

    async def _move(
        self, session: Session, phase: str, move: Callable[[BulkConsumer], Awaitable[None]]
    ) -> PullReport:
        pool = self._pool(session)
        started, dials = time.perf_counter(), pool.dials
        for may_repeat in (True, False):
            reused = False
            try:
                async with pool.connection(fresh=not may_repeat) as (end, reused):
                    moving, wakeups = time.perf_counter(), end.wakeups
                    await move(end)
                    return PullReport(
                        {"connect": moving - started, phase: time.perf_counter() - moving},
                        {"wakeups": end.wakeups - wakeups, "dials": pool.dials - dials},
                    )
            except ConnectionDied as died:
                # An idle connection can die unseen. Asking again is safe while nothing was
                # answered: no byte of a push was sent either.
                if not (may_repeat and reused and not died.answered and not session.closed):
                    raise self._failure(session, str(died)) from died
            except PeerError as error:
                reason = PathReason.CONNECT_FAILED
                raise PathFailed(self.name, reason, str(error), hint=error.hint) from error
        raise InternalError("a transfer neither ended nor failed")

    def _failure(self, session: Session, cause: str) -> PeerLost | PathFailed:
        if session.closed:
            return PeerLost(str(session.peer), cause)
        return PathFailed(self.name, PathReason.GET_FAILED, f"bulk connection: {cause}")

    def _pool(self, session: Session) -> BulkPool:
        if self._closed or session.closed:
            raise PeerLost(str(session.peer), "the session is closed")
        pool = self._pools.get(session.attempt)
        if pool is None:
            tickets = BulkTickets(session.key, session.attempt, from_dialer=session.dialed)

            async def dial() -> Wire:
                if not session.peer_endpoints:
                    raise PeerUnreachable(str(session.peer), "address", "it advertises no endpoint")
                return await dial_bulk(
                    session.peer_endpoints, tickets.next_hello(), self._dial_options
                )

            pool = BulkPool(dial, self._options.connections_max, self._options.idle_s)
            self._pools[session.attempt] = pool
        return pool

    async def drain(self) -> None:
        sides = self._owners.values()
        waiting = [e.watch_finished() for side in sides for e in side.by_transfer.values()]
        if waiting:
            await asyncio.wait(waiting)
        await self._moving.wait()

    async def close_session(self, session: Session) -> None:
        self._close_attempt(session.attempt)

    async def close(self) -> None:
        self._closed = True
        for attempt in [*self._owners, *self._pools]:
            self._close_attempt(attempt)

    def _close_attempt(self, attempt: bytes) -> None:
        owner = self._owners.pop(attempt, None)
        if owner is not None:
            for exposed in owner.by_lease.values():
                exposed.finish()
            owner.by_lease.clear()
            owner.by_transfer.clear()
            for connection in tuple(owner.connections):
                connection.close()
        pool = self._pools.pop(attempt, None)
        if pool is not None:
            pool.close()
