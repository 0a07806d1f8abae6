"""What a lease on a ranged slot holds of it: some byte ranges, locked from before they are exposed
until the end of access is proven, and the room that their source gives it.

Who may have how much room, and whether peers reach the memory itself or a private copy, is the
source's to say. It knows no slots, calls or paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InternalError, RangeBusy
from ..memory.range_locks import LOCKS, RangeLock
from ..model import Direction
from ..transport.interface import Span
from ..transport.pieces import check_range, cut_span, join_spans


class Hold(Protocol):
    """One lease's room at its source."""

    @property
    def span(self) -> Span:
        """What is exposed, of exactly the admitted size: the memory itself, or a private copy."""

    async def finish(self) -> None:
        """A peer has written all of `span`, and reaches it no more: have the bytes where they
        belong. Once at most. Raises PathFailed.
        """

    def give_back(self) -> None:
        """Nothing reaches `span` any more. Called once."""


class Source(Protocol):
    """Who gives room to the leases on one ranged slot."""

    async def admit(self, part: Span, direction: Direction, grants: int, deadline: float) -> Hold:
        """Room for one lease on those bytes of the slot, which devices will reach by so many grants
        (0: none of them does, they go over TCP); waits for it at most until `deadline` (loop time).
        Raises BudgetExceeded (more than all of it), DeadlineExceeded, BusyError; nothing is held
        then.
        """


class Room(Protocol):
    """Taken from a budget."""

    def give_back(self) -> None: ...


class Budget(Protocol):
    """Bytes that may be exposed at once."""

    async def take(self, nbytes: int, deadline: float, /) -> Room:
        """Waits its turn. Raises BudgetExceeded (more than all of it), DeadlineExceeded."""


class DirectSource:
    """Peers reach the memory itself, within a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    async def admit(self, part: Span, direction: Direction, grants: int, deadline: float) -> Hold:
        """See Source."""
        return _DirectHold(part, await self._budget.take(part.nbytes, deadline))


class _DirectHold:
    def __init__(self, span: Span, room: Room) -> None:
        self.span = span
        self._room = room

    async def finish(self) -> None:
        """They are where they belong."""

    def give_back(self) -> None:
        self._room.give_back()


@dataclass(frozen=True, slots=True, eq=False)
class RangedMemory:
    """What a ranged slot is beside its bytes. `address`: of the first of them, where the process
    has them: that is what locks are about. `directions`: what peers may do. `source` None: room
    without limit.
    """

    address: int
    directions: tuple[Direction, ...]
    source: Source | None = None


class RangedPart:
    """One lease's ranges of a ranged slot."""

    def __init__(
        self,
        memory: RangedMemory,
        whole: Span,
        ranges: Sequence[tuple[int, int]],
        direction: Direction,
    ) -> None:
        """`ranges`: offset and size of each, in payload order. Raises OutOfRange, RangeBusy; then
        nothing is locked.
        """
        self._source = memory.source
        self._direction = direction
        for offset, nbytes in ranges:
            check_range(offset, nbytes, whole.nbytes)
        absolute = [(memory.address + offset, nbytes) for offset, nbytes in ranges]
        what = "a peer's read" if direction is Direction.READ else "a peer's write"
        try:
            lock = LOCKS.lock_many(absolute, direction is Direction.READ, what)
        except RangeBusy as error:  # a peer is not told where our memory lies
            raise RangeBusy(error.holder, shared=error.shared) from None
        self._lock: RangeLock | None = lock
        # After the lock: the frames of a refusal must not hold views of the memory.
        self._span = join_spans([cut_span(whole, offset, nbytes) for offset, nbytes in ranges])
        self._hold: Hold | None = None

    @property
    def over(self) -> bool:
        """`end` was called."""
        return self._lock is None

    @property
    def span(self) -> Span:
        """What is exposed; after `admit` perhaps a private copy of it."""
        return self._span if self._hold is None else self._hold.span

    async def admit(self, grants: int, deadline: float) -> None:
        """Have room for it, or for none when it is over by then. Once. Raises as Source.admit."""
        if self._source is None:
            return
        if self._hold is not None:
            raise InternalError("a lease was given room twice")
        hold = await self._source.admit(self._span, self._direction, grants, deadline)
        if self.over:
            hold.give_back()
        else:
            self._hold = hold

    async def finish(self) -> None:
        """All was written, and nothing writes any more. Raises PathFailed."""
        if self._hold is not None:
            await self._hold.finish()

    def end(self) -> None:
        """Nothing reaches the ranges through that lease any more. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        hold, self._hold = self._hold, None
        self._span = Span(memoryview(b""))
        lock.release()
        if hold is not None:
            hold.give_back()
