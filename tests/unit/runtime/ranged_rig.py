"""An owner with one region that peers reach by ranges, over paths whose rails say what they were
asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import DeadlineExceeded, PathFailed
from orbit.events import Recorder
from orbit.model import Deregistered, Direction, Handle, LeaseId, PathName, PathReason, WorkerId
from orbit.protocol.messages import (
    AcquireRequest,
    DetachRequest,
    EndReply,
    RdmaOffer,
    SliceRun,
)
from orbit.protocol.range_list import pack
from orbit.runtime.owner import Owner
from orbit.runtime.paths import Paths
from orbit.runtime.ranged import Source
from orbit.runtime.region import Region
from orbit.runtime.regions import Regions
from orbit.runtime.registering import Registering
from orbit.runtime.runner import TaskRunner
from orbit.testing.fabric import SimFabric, SimPath
from orbit.testing.sessions import StubSession
from orbit.testing.sim_memory import SimPinnedMemory
from orbit.transport.interface import Exposure, Session, Span
from orbit.transport.rails import RailFacts, RailRoute, RailStatistics

READ, WRITE = Direction.READ, Direction.WRITE
REGION_BYTES = 1 << 20


class RailsPath(SimPath):
    """Exposes runs as one exposure each; `missing` receipts make a retraction fail."""

    def __init__(self, fabric: SimFabric) -> None:
        super().__init__(fabric, PathName.RDMA)
        self.asked: list[tuple[tuple[int, ...], tuple[SliceRun, ...], Direction]] = []
        self.missing = False
        self.unproven: BaseException | None = None

    def rails(self) -> tuple[RailFacts, ...]:
        return ()

    def routes(self, session: Session) -> tuple[RailRoute, ...]:
        return ()

    async def connect_route(self, *args: Any, **named: Any) -> int:
        raise AssertionError("an owner connects nothing")

    async def close_array(self, *args: Any) -> None:
        raise AssertionError("an owner closes no array")

    def rail_statistics(self) -> RailStatistics:
        return RailStatistics()

    async def expose_runs(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        runs: Sequence[SliceRun],
        direction: Direction,
    ) -> Exposure:
        sizes = tuple(piece.view.nbytes for piece in span.pieces)
        self.asked.append((sizes, tuple(runs), direction))
        first = await self.expose(session, span, lease_id, runs[0].array, direction)
        rest = tuple((b"d%d" % n, b"g%d" % n) for n in range(1, len(runs)))
        return Exposure(descriptor=first.descriptor, grant=b"g0", rest=rest)

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        if self.unproven is not None:
            raise self.unproven
        self._fabric.remove(self, session.attempt, lease_id)
        if transferred and self.missing:
            raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, "1 of 2 receipts did not come")


class Room:
    """A budget of `free` bytes, in which nobody waits."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.deadlines: list[float] = []

    async def take(self, nbytes: int, deadline: float, /) -> Taken:
        self.deadlines.append(deadline)
        if nbytes > self.free:
            raise DeadlineExceeded("room", 1.0)
        self.free -= nbytes
        return Taken(self, nbytes)


class Taken:
    def __init__(self, room: Room, nbytes: int) -> None:
        self._room: Room | None = room
        self._nbytes = nbytes

    def give_back(self) -> None:
        room, self._room = self._room, None
        assert room is not None, "given back twice"
        room.free += self._nbytes


class RangedRig:
    """Within a running loop; `open` first. `session` and `other` are two peers."""

    region: Region
    handle: Handle

    def __init__(self, *, rdma: bool = True, limit_bytes: int = 1 << 48) -> None:
        fabric = SimFabric()
        self.fabric = fabric
        self.rdma = RailsPath(fabric)
        self.memory = SimPinnedMemory(limit_bytes=limit_bytes)
        memory = self.memory if rdma else None
        path = self.rdma if rdma else None
        self.paths = Paths(SimPath(fabric, PathName.TCP), path, PathReason.NO_DEVICE, memory=memory)
        self.recorder = Recorder()
        self.runner = TaskRunner()
        config = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=10.0))
        self.owner = Owner(WorkerId(1), self.paths, config.rendezvous, self.recorder, self.runner)
        self.regions = Regions(memory, self.runner, self.recorder, 30.0)
        self.registering = Registering(
            config, self.paths, self.owner, self.regions, self.runner, lambda: None
        )
        self.session: Any = StubSession(1, dialer=False)
        self.other: Any = StubSession(2, dialer=False)
        self.buffer = bytearray(REGION_BYTES)

    async def open(
        self, directions: Iterable[Direction] = Direction, source: Source | None = None
    ) -> RangedRig:
        self.region = await self.regions.open(self.buffer, own=True, peers=True)
        self.handle = self.registering.register_region(self.region, directions, source)
        return self

    async def close(self) -> None:
        """The region's end, after which nothing may be left."""
        self.registering.retire_region(self.handle)
        assert await self.region.unregister() is Deregistered.DRAINED
        assert self.free
        assert len(self.regions) == 0
        assert self.memory.registered_bytes == 0
        assert self.fabric.exposed_count == 0

    @property
    def free(self) -> bool:
        """Whether the buffer is its owner's alone."""
        try:
            self.buffer.append(0)
        except BufferError:
            return False
        self.buffer.pop()
        return True

    async def ask(self, request: Any, session: Any = None) -> Any:
        handler = self.owner.handlers()[request.METHOD]
        return await handler(session or self.session, request.to_wire())

    async def acquire(
        self,
        direction: Direction,
        *ranges: tuple[int, int],
        runs: Sequence[tuple[int, int]] = (),
        pieces_max: int = 64,
        session: Any = None,
        **named: Any,
    ) -> Any:
        """By RDMA when `runs` (array, nbytes) are given."""
        offer = None
        if runs:
            offer = RdmaOffer(
                ("verbs",), pieces_max=pieces_max, runs=tuple(SliceRun(*run) for run in runs)
            )
        told = {"nbytes": sum(nbytes for _, nbytes in ranges), **named}
        if len(ranges) == 1:
            told["offset"] = ranges[0][0]
        else:
            told["ranges"] = pack(ranges)
        request = AcquireRequest(
            self.handle,
            offer,
            skip_threshold=offer is not None,
            lease_ms=10_000,
            direction=int(direction),
            ranged=True,
            **told,
        )
        reply = await self.ask(request, session)
        return reply.rdma or reply.ready

    async def done(self, lease_id: int, *, transferred: bool = True, session: Any = None) -> bool:
        """DONE, and what the owner answers to it; every byte has moved if it was `transferred`."""
        if transferred:
            self._arrive(lease_id)
        reply = await self.ask(
            DetachRequest(self.handle, lease_id, transferred, confirm=True), session
        )
        assert isinstance(reply, EndReply)
        return reply.in_place

    def _arrive(self, lease_id: int) -> None:
        for exposed in self.fabric._exposed.values():
            exposed.whole |= exposed.lease_id == lease_id
