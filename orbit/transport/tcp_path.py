"""The TCP data path: an owner's bytes go straight from its memory to sockets and into the target.

Owner and consumer side in one DataPath. It holds what is exposed to which epoch, admits bulk
connections by their tokens, and keeps a small pool of connections to each owner. It takes no path
decision and knows no handles; how a connection is dialed and greeted is tcp_dial's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from ..model import LeaseId, PathName, PathReason
from ..protocol.messages import BulkHello
from ..protocol.security import BulkGate, BulkTickets
from .interface import CallHandler, Exposure, Progress, PullReport, Session, Span, Target
from .tcp_bulk import ConnectionDied
from .tcp_bulk_writer import BulkWriter
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
class _Exposed:
    transfer_id: int
    view: memoryview


@dataclass(slots=True, eq=False)
class _OwnerSide:
    """What one epoch may read from us, and the connections it does that over."""

    gate: BulkGate
    by_lease: dict[LeaseId, _Exposed] = field(default_factory=dict)
    by_transfer: dict[int, _Exposed] = field(default_factory=dict)
    writers: set[BulkWriter] = field(default_factory=set)

    def find(self, transfer_id: int) -> memoryview | None:
        exposed = self.by_transfer.get(transfer_id)
        return None if exposed is None else exposed.view


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
        self._closed = False

    def availability(self, session: Session) -> PathReason:
        return PathReason.OK

    async def prepare(self, session: Session) -> PathReason:
        """Nothing: small payloads ride on the acquire answer, so a dial ahead could be in vain."""
        return PathReason.OK

    def handlers(self) -> Mapping[str, CallHandler]:
        return {}

    async def expose(
        self, session: Session, span: Span, lease_id: LeaseId, array: int = 0
    ) -> Exposure:
        if self._closed or session.closed:
            raise PathUnavailable(self.name, PathReason.DRAINING, "the session is closed")
        owner = self._owners.get(session.attempt)
        if owner is None:
            gate = BulkGate(session.key, session.attempt, from_dialer=not session.dialed)
            owner = _OwnerSide(gate)
            self._owners[session.attempt] = owner
        self._transfers += 1
        exposed = _Exposed(self._transfers, span.view)
        owner.by_lease[lease_id] = owner.by_transfer[exposed.transfer_id] = exposed
        return Exposure(transfer_id=exposed.transfer_id)

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        """A send reads the span only inside a callback of this loop, so that none is running now.
        One that is half through loses its connection: the rest of its answer may not be sent."""
        owner = self._owners.get(session.attempt)
        exposed = None if owner is None else owner.by_lease.pop(lease_id, None)
        if owner is None or exposed is None:
            return
        del owner.by_transfer[exposed.transfer_id]
        for writer in tuple(owner.writers):
            if writer.transfer_id == exposed.transfer_id:
                writer.close()

    def admit_bulk(self, hello: BulkHello) -> None:
        """Owner: check the first frame of an accepted bulk connection. Raises PeerRefused."""
        owner = self._owners.get(hello.attempt)
        if owner is None:
            raise PeerRefused("auth", "no such epoch")
        owner.gate.admit(hello)
        if len(owner.writers) >= self._options.accepted_max:
            raise PeerRefused("busy", "too many bulk connections")

    def serve_bulk(self, wire: Wire, hello: BulkHello) -> None:
        """Owner: answer the requests on an admitted connection from now on. Takes the wire over."""
        owner = self._owners.get(hello.attempt)
        if owner is None:  # the epoch ended while the welcome was on its way
            wire.close()
            return
        owner.writers.add(
            BulkWriter(wire, owner.find, owner.writers.discard, self._options.no_progress_s)
        )

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        if not target.view:
            return PullReport()
        pool = self._pool(session)
        started, dials = time.perf_counter(), pool.dials
        for may_repeat in (True, False):
            reused = False
            try:
                async with pool.connection(fresh=not may_repeat) as (reader, reused):
                    reading, wakeups = time.perf_counter(), reader.wakeups
                    await reader.pull(
                        exposure.transfer_id, target.view, self._options.no_progress_s, progress
                    )
                    return PullReport(
                        {"connect": reading - started, "read": time.perf_counter() - reading},
                        {"wakeups": reader.wakeups - wakeups, "dials": pool.dials - dials},
                    )
            except ConnectionDied as died:
                # An idle connection can die unseen. Reading again is safe while nothing was
                # answered.
                if not (may_repeat and reused and not died.answered and not session.closed):
                    raise self._failure(session, str(died)) from died
            except PeerError as error:
                raise PathFailed(self.name, PathReason.CONNECT_FAILED, str(error)) from error
        raise InternalError("a pull neither ended nor failed")

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

    async def close_session(self, session: Session) -> None:
        self._close_attempt(session.attempt)

    async def close(self) -> None:
        self._closed = True
        for attempt in [*self._owners, *self._pools]:
            self._close_attempt(attempt)

    def _close_attempt(self, attempt: bytes) -> None:
        owner = self._owners.pop(attempt, None)
        if owner is not None:
            owner.by_lease.clear()
            owner.by_transfer.clear()
            for writer in tuple(owner.writers):
                writer.close()
        pool = self._pools.pop(attempt, None)
        if pool is not None:
            pool.close()
