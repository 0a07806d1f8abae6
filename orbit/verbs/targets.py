"""The consumer's end of a transfer: memory that a pull fills or a push empties, made reachable for
one device.

Owns the choice for each piece, and what was taken for it until it is finished with: pinned memory
as it is, a copy through the pool below the crossover, a registration for the operation above it,
each of these two the other's way out. It posts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import BudgetExceeded, BusyError, DeviceError, PathFailed
from ..model import Direction, PathName, PathReason
from ..transport.copying import copy_bytes
from ..transport.interface import PinnedBuffer, Span, Target
from .arena_pool import ArenaPool
from .counters import PathCounters
from .device import DeviceContext
from .provider import NativeRegion
from .registration import Segment, TargetRegistration
from .requester import LocalMemory

Piece = Span | Target

_NO_ROOM = (BusyError, BudgetExceeded, DeviceError, TimeoutError)


class PreparedPiece:
    """One piece: where a device reaches it, and what was taken to make that so."""

    __slots__ = ("bounce", "registration", "segments", "view")

    def __init__(
        self,
        view: memoryview,
        segments: Sequence[Segment],
        bounce: PinnedBuffer | None = None,
        registration: TargetRegistration | None = None,
    ) -> None:
        self.view = view
        self.segments = segments
        self.bounce = bounce
        self.registration = registration


class PreparedMemory:
    """Memory that a transfer may reach. `discard` it in the end, but never while unquiesced."""

    def __init__(
        self, pool: ArenaPool, direction: Direction, pieces: Sequence[PreparedPiece]
    ) -> None:
        self._pool = pool
        self._direction = direction
        self._pieces = pieces
        # Not `self`: a cycle would hold the caller's buffer until the garbage collector runs.
        segments = [segment for piece in pieces for segment in piece.segments]
        self.memory = LocalMemory(segments, pieces)

    @property
    def copies(self) -> bool:
        """`deliver` copies something."""
        reads = self._direction is Direction.READ
        return reads and any(piece.bounce is not None for piece in self._pieces)

    async def deliver(self) -> None:
        """The bytes have moved: bring those of a pull to their target."""
        if self.copies:
            for piece in self._pieces:
                if piece.bounce is not None:
                    await copy_bytes(piece.bounce.view, piece.view)

    async def discard(self) -> None:
        """Nothing can reach the memory any more. Raises DeviceError."""
        pieces, self._pieces = self._pieces, ()
        for piece in pieces:
            if piece.bounce is not None:
                self._pool.free(piece.bounce)
        for piece in pieces:
            if piece.registration is not None:
                await piece.registration.close()


class Targets:
    """Prepares the consumer's memory on any of the path's devices."""

    def __init__(self, pool: ArenaPool, crossover_bytes: int, counters: PathCounters) -> None:
        self._pool = pool
        self._crossover_bytes = crossover_bytes
        self._counters = counters

    def prepare_nowait(
        self, device: DeviceContext, pieces: Sequence[Piece], direction: Direction
    ) -> PreparedMemory | None:
        """Pinned memory, or pieces of the pool where a copy is cheaper; None: `prepare` it."""
        prepared: list[PreparedPiece] = []
        for piece in pieces:
            ready = self._pinned(device, piece)
            if ready is None and piece.view.nbytes < self._crossover_bytes:
                ready = self._bounced_nowait(device, piece, direction)
            if ready is None:
                self._take_back(prepared)
                return None
            prepared.append(ready)
        self._count(prepared)
        return PreparedMemory(self._pool, direction, prepared)

    async def prepare(
        self, device: DeviceContext, pieces: Sequence[Piece], direction: Direction
    ) -> PreparedMemory:
        """All pieces or none. Raises PathFailed (pool_exhausted) when no way is open for one."""
        prepared: list[PreparedPiece] = []
        try:
            for piece in pieces:
                ready = self._pinned(device, piece)
                prepared.append(ready or await self._unpinned(device, piece, direction))
        except BaseException:
            await PreparedMemory(self._pool, direction, prepared).discard()
            raise
        self._count(prepared)
        return PreparedMemory(self._pool, direction, prepared)

    async def _unpinned(
        self, device: DeviceContext, piece: Piece, direction: Direction
    ) -> PreparedPiece:
        first, second = self._copied, self._registered
        if piece.view.nbytes >= self._crossover_bytes:
            first, second = second, first
        try:
            return await first(device, piece, direction)
        except _NO_ROOM:
            pass  # no room, or the locked-memory limit: the other way may still be open
        try:
            return await second(device, piece, direction)
        except _NO_ROOM as error:
            raise PathFailed(PathName.RDMA, PathReason.POOL_EXHAUSTED, str(error)) from error

    def _pinned(self, device: DeviceContext, piece: Piece) -> PreparedPiece | None:
        pinned = piece.pinned
        region = None if pinned is None else region_of(pinned, device)
        if pinned is None or region is None:
            return None
        segment = Segment(pinned.address, region.lkey, piece.view.nbytes)
        return PreparedPiece(piece.view, [segment])

    def _bounced_nowait(
        self, device: DeviceContext, piece: Piece, direction: Direction
    ) -> PreparedPiece | None:
        try:
            buffer = self._pool.allocate_nowait(piece.view.nbytes)
        except (BusyError, BudgetExceeded):
            return None
        ready = self._bounced(device, piece, buffer)
        if direction is Direction.WRITE:
            buffer.view[:] = piece.view
        return ready

    async def _copied(
        self, device: DeviceContext, piece: Piece, direction: Direction
    ) -> PreparedPiece:
        buffer = await self._pool.allocate(piece.view.nbytes)
        ready = self._bounced(device, piece, buffer)
        if direction is Direction.WRITE:
            try:
                await copy_bytes(piece.view, buffer.view)
            except BaseException:
                self._pool.free(buffer)
                raise
        return ready

    def _bounced(self, device: DeviceContext, piece: Piece, buffer: PinnedBuffer) -> PreparedPiece:
        region = region_of(buffer, device)
        if region is None:
            self._pool.free(buffer)
            raise BusyError(f"the pool is not registered on {device.name}")
        segment = Segment(buffer.address, region.lkey, piece.view.nbytes)
        return PreparedPiece(piece.view, [segment], bounce=buffer)

    async def _registered(
        self, device: DeviceContext, piece: Piece, direction: Direction
    ) -> PreparedPiece:
        view = piece.view
        if view.readonly:
            raise BusyError("a read-only source is copied, never registered")
        registration = await self._pool.register_target(device, view)
        return PreparedPiece(view, registration.segments, registration=registration)

    def _take_back(self, pieces: Sequence[PreparedPiece]) -> None:
        for piece in pieces:
            if piece.bounce is not None:
                self._pool.free(piece.bounce)

    def _count(self, pieces: Sequence[PreparedPiece]) -> None:
        for piece in pieces:
            if piece.bounce is not None:
                self._counters.targets_copied += 1
            elif piece.registration is not None:
                self._counters.targets_registered += 1
            else:
                self._counters.targets_direct += 1


def region_of(pinned: PinnedBuffer, device: DeviceContext) -> NativeRegion | None:
    """Its registration on that device; None where it has none that lives."""
    # A KeyHolder, or what has no keys at all. Every get comes here, and isinstance with a protocol
    # costs as much as all the rest.
    find: Callable[[DeviceContext], NativeRegion | None] | None
    find = getattr(pinned.arena, "region", None)
    return None if find is None else find(device)
