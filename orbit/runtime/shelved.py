"""What the shelf keeps of one slot, and how one lease reaches it until that is provably over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import InternalError, UnknownHandle, Unquiesced
from ..model import Direction, Handle, LeaseId, PathName
from ..protocol.messages import SliceRun
from ..transport.interface import DataPath, Exposure, Session, Span
from ..transport.pieces import cut_span
from ..transport.rails import railed
from .options import Put
from .put_queue import PutQueue
from .ranged import RangedMemory, RangedPart
from .staging import Staged


@dataclass(slots=True, eq=False)
class Memory:
    """Where a payload lies. `users` may reach it this moment; once `replaced`, it goes with the
    last of them.
    """

    staged: Staged
    users: set[LeaseId] = field(default_factory=set)
    replaced: bool = False

    def enter(self, lease_id: LeaseId) -> None:
        """That lease may reach it from now on."""
        self.users.add(lease_id)

    def leave(self, lease_id: LeaseId) -> None:
        """That lease reaches it no more. Idempotent."""
        if lease_id in self.users:
            self.users.discard(lease_id)
            self._free_if_over()

    def replace(self) -> None:
        """The payload was copied elsewhere, for leases to come."""
        self.replaced = True
        self._free_if_over()

    def _free_if_over(self) -> None:
        if self.replaced and not self.users:
            self.staged.free()


@dataclass(slots=True, eq=False)
class Shelved:
    """One slot. `puts`: it is a destination; `ranged`: it is reached by ranges. `freed`: who waits
    for its memory; `kept`: why it can never be had.
    """

    handle: Handle
    memory: Memory
    puts: PutQueue | None = None
    ranged: RangedMemory | None = None
    freed: asyncio.Future[None] | None = None
    kept: Unquiesced | None = None

    @property
    def span(self) -> Span:
        """All of the payload, where it lies now."""
        return self.memory.staged.span

    def wake(self, error: Unquiesced | None) -> None:
        """Tell who waits for the memory."""
        freed, self.freed = self.freed, None
        if freed is None or freed.done():
            return
        if error is None:
            freed.set_result(None)
        else:
            freed.set_exception(error)
            freed.exception()  # its waiter may have been cancelled


class Access:
    """One lease's way to its payload: an exposure on a path, a copy within this node, or nothing
    beyond the bytes that rode on the answer.

    `put` is what a lease to write reports once its bytes are in place. `verdict` is the end: True
    when they are, False for everything else that is provably over; else an error.
    """

    def __init__(self, slot: Shelved, lease_id: LeaseId, direction: Direction) -> None:
        self.slot = slot
        self.lease_id = lease_id
        self.direction = direction
        self.put: Put | None = None
        self._loop = asyncio.get_running_loop()
        self.verdict: asyncio.Future[bool] = self._loop.create_future()
        self._range: tuple[int, int] | None = None
        self._part: RangedPart | None = None
        self._memory: Memory | None = None  # what it entered
        self._path: DataPath | None = None
        self._session: Session | None = None
        self._settled: asyncio.Future[None] | None = None  # expose has returned or raised
        self._live = False  # it returned
        self._checked = False  # its receipts are looked at, whatever the direction
        self._copying: asyncio.Future[None] | None = None

    @property
    def span(self) -> Span:
        """What the lease is for, where it lies now."""
        if self._part is not None:
            return self._part.span
        whole = self.slot.span
        return whole if self._range is None else cut_span(whole, *self._range)

    @property
    def pinned(self) -> bool:
        """Whether a device can reach all of it."""
        return self.slot.memory.staged.live and self.span.all_pinned

    @property
    def idle(self) -> bool:
        """Nothing reaches the payload through it, so its end needs no proof."""
        return self._memory is None

    @property
    def memory(self) -> Memory:
        """What it reaches, or would."""
        return self._memory or self.slot.memory

    def is_on(self, path: PathName) -> bool:
        """It is exposed there, or being so, or its retraction has no verdict yet."""
        return not self.idle and self._path is not None and self._path.name is path

    @property
    def says_whole(self) -> bool:
        """Its path tells a transfer that did not arrive whole from one whose end is not proven."""
        return self._checked or self.direction is Direction.WRITE

    @property
    def is_stale(self) -> bool:
        """It reaches memory that the payload was moved out of."""
        return self._memory is not None and self._memory.replaced

    def restrict(self, offset: int, nbytes: int) -> None:
        """Only those bytes of the payload. Raises OutOfRange."""
        cut_span(self.slot.span, offset, nbytes)
        self._range = (offset, nbytes)

    def lock(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Only those ranges of a ranged slot, in that order, which are locked from now on. Raises
        OutOfRange, RangeBusy, UsageError (to be written, and they overlap), UnknownHandle (the
        memory is about to go).
        """
        ranged, staged = self.slot.ranged, self.slot.memory.staged
        if ranged is None or self._part is not None:
            raise InternalError(f"lease {self.lease_id} has no ranges to lock")
        if not staged.live:
            raise UnknownHandle(str(self.slot.handle))
        self._part = RangedPart(ranged, staged.span, ranges, self.direction)

    async def admit(self, grants: int, deadline: float) -> None:
        """Have the source's room for what is locked, which so many grants will be about. Raises as
        Source.admit.
        """
        if self._part is not None:
            await self._part.admit(grants, deadline)

    async def expose(
        self, path: DataPath, session: Session, array: int = 0, runs: Sequence[SliceRun] = ()
    ) -> Exposure:
        """Noted before the first await: a lease which ends meanwhile waits for the outcome. `runs`
        cover it exactly, and `path` is a RailedPath. Raises PathUnavailable; nothing was exposed
        then.
        """
        if not self.idle:
            raise InternalError(f"lease {self.lease_id} is exposed already")
        self._enter()
        self._path, self._session = path, session
        settled = self._settled = self._loop.create_future()
        try:
            exposure = await self._expose(path, session, array, runs)
            self._live = True
            return exposure
        finally:
            if not self._live:
                self.leave()
            settled.set_result(None)

    def begin_copy(self) -> Span:
        """This node itself reads or writes the payload, until `copied`."""
        self._enter()
        self._copying = self._loop.create_future()
        return self.span

    def copied(self) -> None:
        """The copy is over. Idempotent."""
        if self._copying is not None and not self._copying.done():
            self._copying.set_result(None)
            self.leave()

    async def end(self, *, transferred: bool) -> None:
        """Returns when nothing reaches the payload any more. Raises as DataPath.retract."""
        # Shielded: cancelling this task must not cancel what others set.
        if self._copying is not None:
            await asyncio.shield(self._copying)
        if self._settled is not None:
            await asyncio.shield(self._settled)
        if self._live and self._path is not None and self._session is not None:
            await self._path.retract(self._session, self.lease_id, transferred=transferred)

    async def finish(self) -> None:
        """Every byte was written, and nothing writes any more. Raises PathFailed."""
        if self._part is not None and self.direction is Direction.WRITE:
            await self._part.finish()

    async def take_back(self) -> None:
        """As `end`; the lease goes on, as one without an exposure. Raises Unquiesced: it is as it
        was then.
        """
        await self.end(transferred=False)
        self._live = False
        self.leave()

    def leave(self) -> None:
        """Its end is proven. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.leave(self.lease_id)

    def unlock(self) -> None:
        """The lease is over, and `leave` was called. Idempotent."""
        if self._part is not None:
            self._part.end()

    async def _expose(
        self, path: DataPath, session: Session, array: int, runs: Sequence[SliceRun]
    ) -> Exposure:
        if not runs:
            return await path.expose(session, self.span, self.lease_id, array, self.direction)
        rails = railed(path)
        if rails is None:
            raise InternalError(f"the {path.name} path has no rails")
        self._checked = True
        return await rails.expose_runs(session, self.span, self.lease_id, runs, self.direction)

    def _enter(self) -> None:
        self._memory = self.slot.memory
        self._memory.enter(self.lease_id)
