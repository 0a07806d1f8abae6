"""The consumer's end of a transfer: memory that a pull fills or a push empties, made reachable for
the domains that take part in it.

Owns the choice for each piece, and what was taken for it until it is finished with: pinned memory
as it is, a copy through the pool below the crossover, a registration for the operation above it,
each of these two the other's way out. It posts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ..errors import BudgetExceeded, BusyError, DeviceError, PathFailed
from ..model import Direction, PathName, PathReason
from ..transport.copying import copy_bytes
from ..transport.interface import PinnedBuffer, Span, Target
from .arena_pool import ArenaPool
from .counters import PathCounters
from .domain import Domain
from .provider import NativeRegion
from .registration import Segment, TargetRegistration
from .requester import LocalMemory

Piece = Span | Target

_NO_ROOM = (BusyError, BudgetExceeded, DeviceError, TimeoutError)


Domains = Sequence[Domain]


class PreparedPiece:
    """One piece: by which keys each domain reaches it, and what was taken to make that so."""

    __slots__ = ("bounce", "registrations", "segments", "view")

    def __init__(
        self,
        view: memoryview,
        segments: Mapping[Domain, Sequence[Segment]],
        bounce: PinnedBuffer | None = None,
        registrations: Sequence[TargetRegistration] = (),
    ) -> None:
        self.view = view
        self.segments = segments
        self.bounce = bounce
        self.registrations = registrations


class PreparedMemory:
    """Memory that a transfer may reach. `discard` it in the end, but never while unquiesced."""

    def __init__(
        self,
        pool: ArenaPool,
        direction: Direction,
        pieces: Sequence[PreparedPiece],
        domains: Domains,
    ) -> None:
        self._pool = pool
        self._direction = direction
        self._pieces = pieces
        # Not `self`: a cycle would hold the caller's buffer until the garbage collector runs.
        self.memory = {
            domain: LocalMemory([s for piece in pieces for s in piece.segments[domain]], pieces)
            for domain in domains
        }

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
        await _close_all([made for piece in pieces for made in piece.registrations])


class Targets:
    """Prepares the consumer's memory on any of the path's domains."""

    def __init__(self, pool: ArenaPool, crossover_bytes: int, counters: PathCounters) -> None:
        self._pool = pool
        self._crossover_bytes = crossover_bytes
        self._counters = counters

    def prepare_nowait(
        self, domains: Domains, pieces: Sequence[Piece], direction: Direction
    ) -> PreparedMemory | None:
        """Pinned memory, or pieces of the pool where a copy is cheaper; None: `prepare` it."""
        prepared: list[PreparedPiece] = []
        for piece in pieces:
            ready = self._pinned(domains, piece)
            if ready is None and piece.view.nbytes < self._crossover_bytes:
                ready = self._bounced_nowait(domains, piece, direction)
            if ready is None:
                self._take_back(prepared)
                return None
            prepared.append(ready)
        self._count(prepared)
        return PreparedMemory(self._pool, direction, prepared, domains)

    async def prepare(
        self, domains: Domains, pieces: Sequence[Piece], direction: Direction
    ) -> PreparedMemory:
        """All pieces or none. Raises PathFailed (pool_exhausted) when no way is open for one."""
        prepared: list[PreparedPiece] = []
        try:
            for piece in pieces:
                ready = self._pinned(domains, piece)
                prepared.append(ready or await self._unpinned(domains, piece, direction))
        except BaseException:
            await PreparedMemory(self._pool, direction, prepared, ()).discard()
            raise
        self._count(prepared)
        return PreparedMemory(self._pool, direction, prepared, domains)

    async def _unpinned(
        self, domains: Domains, piece: Piece, direction: Direction
    ) -> PreparedPiece:
        first, second = self._copied, self._registered
        if piece.view.nbytes >= self._crossover_bytes:
            first, second = second, first
        try:
            return await first(domains, piece, direction)
        except _NO_ROOM:
            pass  # no room, or the locked-memory limit: the other way may still be open
        try:
            return await second(domains, piece, direction)
        except _NO_ROOM as error:
            raise PathFailed(PathName.RDMA, PathReason.POOL_EXHAUSTED, str(error)) from error

    def _pinned(self, domains: Domains, piece: Piece) -> PreparedPiece | None:
        pinned = piece.pinned
        segments = None if pinned is None else _segments(domains, pinned, piece.view.nbytes)
        return None if segments is None else PreparedPiece(piece.view, segments)

    def _bounced_nowait(
        self, domains: Domains, piece: Piece, direction: Direction
    ) -> PreparedPiece | None:
        try:
            buffer = self._pool.allocate_nowait(piece.view.nbytes)
        except (BusyError, BudgetExceeded):
            return None
        ready = self._bounced(domains, piece, buffer)
        if direction is Direction.WRITE:
            buffer.view[:] = piece.view
        return ready

    async def _copied(self, domains: Domains, piece: Piece, direction: Direction) -> PreparedPiece:
        buffer = await self._pool.allocate(piece.view.nbytes)
        ready = self._bounced(domains, piece, buffer)
        if direction is Direction.WRITE:
            try:
                await copy_bytes(piece.view, buffer.view)
            except BaseException:
                self._pool.free(buffer)
                raise
        return ready

    def _bounced(self, domains: Domains, piece: Piece, buffer: PinnedBuffer) -> PreparedPiece:
        segments = _segments(domains, buffer, piece.view.nbytes)
        if segments is None:
            self._pool.free(buffer)
            raise BusyError("the pool is not registered in every domain")
        return PreparedPiece(piece.view, segments, bounce=buffer)

    async def _registered(
        self, domains: Domains, piece: Piece, direction: Direction
    ) -> PreparedPiece:
        view = piece.view
        if view.readonly:
            raise BusyError("a read-only source is copied, never registered")
        made = await _all_or_none([self._pool.register_target(domain, view) for domain in domains])
        segments = {domain: one.segments for domain, one in zip(domains, made, strict=True)}
        return PreparedPiece(view, segments, registrations=made)

    def _take_back(self, pieces: Sequence[PreparedPiece]) -> None:
        for piece in pieces:
            if piece.bounce is not None:
                self._pool.free(piece.bounce)

    def _count(self, pieces: Sequence[PreparedPiece]) -> None:
        for piece in pieces:
            if piece.bounce is not None:
                self._counters.targets_copied += 1
            elif piece.registrations:
                self._counters.targets_registered += 1
            else:
                self._counters.targets_direct += 1


def region_of(pinned: PinnedBuffer, domain: Domain) -> NativeRegion | None:
    """Its registration in that domain; None where it has none that lives."""
    # A KeyHolder, or what has no keys at all. Every get comes here, and isinstance with a protocol
    # costs as much as all the rest.
    find: Callable[[Domain], NativeRegion | None] | None
    find = getattr(pinned.arena, "region", None)
    return None if find is None else find(domain)


def _segments(
    domains: Domains, pinned: PinnedBuffer, nbytes: int
) -> Mapping[Domain, Sequence[Segment]] | None:
    """None where it is not registered on one of them."""
    found: dict[Domain, Sequence[Segment]] = {}
    for domain in domains:
        region = region_of(pinned, domain)
        if region is None:
            return None
        found[domain] = (Segment(pinned.address, region.lkey, nbytes),)
    return found


async def _all_or_none(
    opening: Sequence[Coroutine[Any, Any, TargetRegistration]],
) -> list[TargetRegistration]:
    """Raises the first error, having closed what the others made."""
    if len(opening) == 1:
        return [await opening[0]]
    tasks = [asyncio.ensure_future(one) for one in opening]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()  # an operation that is not wanted any more undoes itself
        await asyncio.wait(tasks)
        made = [t.result() for t in tasks if not t.cancelled() and t.exception() is None]
        with contextlib.suppress(DeviceError, TimeoutError):  # retained, and its device tries again
            await _close_all(made)
        raise


async def _close_all(registrations: Sequence[TargetRegistration]) -> None:
    """Each of them, and then raises the first DeviceError."""
    first: BaseException | None = None
    for registration in registrations:
        try:
            await registration.close()
        except (DeviceError, TimeoutError) as error:
            first = first or error
    if first is not None:
        raise first
