"""Simulated data paths: bytes move between the memories of one process, in chunks of virtual time.

A SimFabric joins the SimPath of every node, as a network joins their devices. A path carries the
name that it is given, so that a world has an `rdma` and a `tcp` one. Exposures end as real ones do:
after `retract` no byte is read or written any more, and a transfer that is under way fails.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import DeadlineExceeded, PathFailed, PathUnavailable, PeerLost, Unquiesced
from ..model import Direction, LeaseId, PathName, PathReason
from ..transport.in_flight import InFlight
from ..transport.interface import (
    CallHandler,
    Exposure,
    Progress,
    PullReport,
    Session,
    Span,
    Target,
)
from .faults import PathFaults
from .flights import Flight, Flights, LostReceipt
from .sim_rails import SimRail

if TYPE_CHECKING:
    from .sim_arrays import SimArrays

_DESCRIPTOR = struct.Struct(">4sQ")
_DESCRIPTOR_MAGIC = b"sim\x00"


@dataclass(slots=True, eq=False)
class SimExposed:
    owner: SimPath
    attempt: bytes
    lease_id: LeaseId
    span: Span
    direction: Direction
    pushed: bool = False  # some byte of a push has arrived: there is no second one
    whole: bool = False  # every byte of it has
    flight: Flight | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)  # moved whole, or retracted


class SimFabric:
    """What is exposed, by name of path, epoch and transfer. Ids start from 1, none twice. Paths
    with rails find each other by the addresses of these.
    """

    def __init__(self) -> None:
        self._exposed: dict[tuple[PathName, bytes, int], SimExposed] = {}
        self._ids = 0
        self._rails = 0
        self.rails: dict[str, tuple[SimArrays, SimRail]] = {}  # by GID, with who answers there
        self.stuck: list[SimExposed] = []  # whose end was not proven
        self.receipts_lost: list[LostReceipt] = []
        self.misuse: list[str] = []  # empty at the end of every test
        self.flights: Flights | None = None  # a world that wants conflicts noted puts one here

    @property
    def exposed_count(self) -> int:
        """Not retracted yet: 0 at the end of every test."""
        return len(self._exposed)

    def add(self, name: PathName, exposed: SimExposed) -> int:
        self._ids += 1
        self._exposed[name, exposed.attempt, self._ids] = exposed
        shared = exposed.direction is Direction.READ
        exposed.flight = self.begin_flight(exposed.span, f"exposed by {name}", shared=shared)
        return self._ids

    def new_rail(self, owner: SimArrays, nic: int, name: str) -> SimRail:
        """With an address that no other one has."""
        self._rails += 1
        rail = SimRail(nic, name, f"::ffff:10.0.{self._rails // 250}.{self._rails % 250 + 1}")
        self.rails[rail.gid] = owner, rail
        return rail

    def begin_flight(self, memory: Span | Target, what: str, *, shared: bool) -> Flight | None:
        """Note who uses that memory, where somebody wants it noted."""
        if self.flights is None:
            return None
        return self.flights.begin((p.view for p in memory.pieces), what, shared=shared)

    def end_flight(self, flight: Flight | None) -> None:
        if self.flights is not None and flight is not None:
            self.flights.end(flight)

    def find(self, name: PathName, attempt: bytes, transfer_id: int) -> SimExposed | None:
        return self._exposed.get((name, attempt, transfer_id))

    def of(self, owner: SimPath, attempt: bytes, lease_id: LeaseId) -> list[SimExposed]:
        """What that lease exposes."""
        wanted = owner, attempt, lease_id
        return [e for e in self._exposed.values() if (e.owner, e.attempt, e.lease_id) == wanted]

    def stick(self, owner: SimPath, attempt: bytes, lease_id: LeaseId) -> None:
        """Nobody finds it any more, but nobody has proven its end: its memory stays in use."""
        for key, exposed in list(self._exposed.items()):
            if (exposed.owner, exposed.attempt, exposed.lease_id) == (owner, attempt, lease_id):
                exposed.over.set()
                self.stuck.append(self._exposed.pop(key))

    def remove(
        self, owner: SimPath, attempt: bytes | None = None, lease_id: LeaseId | None = None
    ) -> list[SimExposed]:
        """Everything of `owner`, or of one epoch, or of one lease. What it was."""
        removed = []
        for key, exposed in list(self._exposed.items()):
            if (
                exposed.owner is owner
                and attempt in (None, exposed.attempt)
                and lease_id in (None, exposed.lease_id)
            ):
                exposed.over.set()
                removed.append(self._exposed.pop(key))
                self.end_flight(exposed.flight)
        return removed

    async def drain(self, owner: SimPath) -> None:
        """See DataPath.drain, of what that path exposes."""
        for exposed in [e for e in self._exposed.values() if e.owner is owner]:
            await exposed.over.wait()


class SimPath:
    """DataPath. `faults` may be changed at any time; `pulls`, `pushes` and `prepares` are for
    assertions.
    """

    def __init__(
        self,
        fabric: SimFabric,
        name: PathName = PathName.TCP,
        faults: PathFaults | None = None,
        no_progress_s: float = 10.0,
    ) -> None:
        self.name = name
        self.faults = faults or PathFaults()
        self.pulls = 0
        self.pushes = 0
        self.prepares = 0
        self._fabric = fabric
        self._no_progress_s = no_progress_s
        self._closed = False
        self._closed_attempts: set[bytes] = set()
        self._moving = InFlight()  # pulls and pushes

    def availability(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        return self.faults.availability

    async def prepare(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        self.prepares += 1
        await asyncio.sleep(self.faults.prepare_s)
        return self.faults.prepare

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
        await asyncio.sleep(0)
        if self.faults.expose is not PathReason.OK:
            raise PathUnavailable(self.name, self.faults.expose, "simulated")
        if self._over(session):
            raise PathUnavailable(self.name, PathReason.DRAINING, "the session is closed")
        exposed = SimExposed(
            self, session.attempt, lease_id, span, direction, whole=not span.nbytes
        )
        transfer_id = self._fabric.add(self.name, exposed)
        if self.name is PathName.RDMA:
            return Exposure(descriptor=pack_descriptor(transfer_id))
        return Exposure(transfer_id=transfer_id)

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        await asyncio.sleep(0)
        for exposed in self._fabric.remove(self, session.attempt, lease_id):
            if transferred and exposed.direction is Direction.WRITE and not exposed.whole:
                raise PathFailed(self.name, PathReason.GET_FAILED, "not every byte has arrived")

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        self.pulls += 1
        transfer_id = self._transfer_id(exposure)

        def move(done: int, count: int) -> None:
            exposed = self._exposed(session, transfer_id, Direction.READ)
            if target.nbytes > exposed.span.nbytes:
                raise PathFailed(self.name, PathReason.GET_FAILED, "the range is outside")
            copy_bytes(exposed.span, target, done, count)
            if done + count == exposed.span.nbytes:
                exposed.over.set()

        with self.using(target, shared=False):
            return await self._move("read", target.nbytes, move, progress)

    async def push(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        source: Span,
        progress: Progress | None = None,
    ) -> PullReport:
        self.pushes += 1
        transfer_id = self._transfer_id(exposure)

        def move(done: int, count: int) -> None:
            exposed = self._exposed(session, transfer_id, Direction.WRITE)
            if source.nbytes != exposed.span.nbytes:
                raise PathFailed(self.name, PathReason.GET_FAILED, "not of the granted size")
            if done == 0 and exposed.pushed:
                raise PathFailed(self.name, PathReason.GET_FAILED, "it was written already")
            exposed.pushed = True
            copy_bytes(source, exposed.span, done, count)
            exposed.whole = done + count == source.nbytes
            if exposed.whole:
                exposed.over.set()

        with self.using(source, shared=True):
            return await self._move("write", source.nbytes, move, progress)

    @contextmanager
    def using(self, memory: Span | Target, *, shared: bool) -> Iterator[None]:
        """A pull or push is on its way, from or to that memory of the consumer."""
        flight = self._fabric.begin_flight(memory, f"moved by {self.name}", shared=shared)
        moving = self._moving.begin()
        try:
            yield
        except Unquiesced:  # it is in use for good
            flight = None
            raise
        finally:
            self._moving.end(moving)
            self._fabric.end_flight(flight)

    async def _move(
        self,
        phase: str,
        nbytes: int,
        move: Callable[[int, int], None],
        progress: Progress | None,
    ) -> PullReport:
        fail_at, reason = self.faults.failures.pop(0) if self.faults.failures else (None, None)
        loop = asyncio.get_running_loop()
        started, done, chunks = loop.time(), 0, 0
        while done < nbytes or (fail_at == 0 and done == 0):
            count = min(self.faults.chunk_bytes, nbytes - done)
            await asyncio.sleep(count / self.faults.bytes_per_s)
            if fail_at is not None and reason is not None and done + count >= fail_at:
                raise PathFailed(self.name, reason, "simulated")
            if self.faults.stall_at_bytes is not None and done >= self.faults.stall_at_bytes:
                await asyncio.sleep(self._no_progress_s)
                raise DeadlineExceeded("progress of the simulated transfer", self._no_progress_s)
            move(done, count)
            done, chunks = done + count, chunks + 1
            if progress is not None:
                progress(done)
        return PullReport({phase: loop.time() - started}, {"chunks": chunks})

    async def drain(self) -> None:
        await self._fabric.drain(self)
        await self._moving.wait()

    async def close_session(self, session: Session) -> None:
        self._closed_attempts.add(session.attempt)
        self._fabric.remove(self, session.attempt)

    async def close(self) -> None:
        self._closed = True
        self._fabric.remove(self)

    def _over(self, session: Session) -> bool:
        return self._closed or session.closed or session.attempt in self._closed_attempts

    def _exposed(self, session: Session, transfer_id: int, direction: Direction) -> SimExposed:
        if self._over(session):
            raise PeerLost(str(session.peer), "the session is closed")
        exposed = self._fabric.find(self.name, session.attempt, transfer_id)
        if exposed is None:
            raise PathFailed(self.name, PathReason.GET_FAILED, "the owner knows no such transfer")
        if exposed.direction is not direction:
            raise PathFailed(self.name, PathReason.GET_FAILED, "a lease of the other direction")
        return exposed

    def _transfer_id(self, exposure: Exposure) -> int:
        if self.name is not PathName.RDMA:
            return exposure.transfer_id
        try:
            magic, transfer_id = _DESCRIPTOR.unpack(exposure.descriptor)
        except struct.error as error:
            raise PathFailed(self.name, PathReason.DECODE_ERROR, str(error)) from error
        if magic != _DESCRIPTOR_MAGIC:
            raise PathFailed(self.name, PathReason.DECODE_ERROR, "not a simulated descriptor")
        return int(transfer_id)


def pack_descriptor(transfer_id: int) -> bytes:
    """What stands for it in an answer over RDMA."""
    return _DESCRIPTOR.pack(_DESCRIPTOR_MAGIC, transfer_id)


def copy_bytes(source: Span, target: Span | Target, offset: int, nbytes: int) -> None:
    """Those bytes of the one to the same place in the other, whose borders may differ."""
    data = memoryview(b"".join(_parts(source.pieces, offset, nbytes)))
    at = 0
    for part in _parts(target.pieces, offset, nbytes):
        part[:] = data[at : at + len(part)]
        at += len(part)


def _parts(pieces: Sequence[Span | Target], offset: int, nbytes: int) -> Iterator[memoryview]:
    start = 0
    for piece in pieces:
        low, high = max(offset - start, 0), min(offset + nbytes - start, len(piece.view))
        if low < high:
            yield piece.view[low:high]
        start += len(piece.view)
