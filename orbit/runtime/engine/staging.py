"""Private registered memory in place of a region's, at either end of a transfer.

A peer, or this side's own device, reaches a piece of the pool that is this transfer's alone; the
bytes are copied between it and the region, which no device knows. It knows no slots and no paths
but their names.
"""

from __future__ import annotations

import contextlib

from ...errors import PathFailed
from ...model import Direction, PathName, PathReason
from ...transport.copying import copy_pieces
from ...transport.interface import PinnedBuffer, PinnedMemory, Span, Target
from ..ranged import Hold
from .budgets import SharedBudget, Taken
from .local_memory import LocalMemory, Stop


class StagedMemory:
    """The local end of one parent with a private copy of the region's bytes between."""

    def __init__(self, inner: LocalMemory, memory: PinnedMemory, buffer: PinnedBuffer) -> None:
        """Takes both over: `give_back` gives back `buffer`, too."""
        self._inner = inner
        self._memory = memory
        self._buffer = buffer
        self.target = Target(buffer.view, buffer)
        self.span = Span(buffer.view, buffer)

    async def fill(self) -> None:
        """Before a WRITE: the region's bytes into the copy."""
        await copy_pieces(self._inner.span, self.target)

    async def empty(self) -> None:
        """After a READ: the copy's bytes into the region."""
        await copy_pieces(self.span, self._inner.target)

    def watch(self, stop: Stop | None) -> None:
        """See LocalMemory."""
        self._inner.watch(stop)

    def keep(self, cause: str) -> None:
        """The copy may still be reached, so it is never given back; the region is not."""
        self._inner.give_back()

    def discard(self) -> None:
        """See LocalMemory."""

    def give_back(self) -> None:
        """Nothing reaches the copy any more. Called once."""
        _free(self._memory, self._buffer)


class StagedSource:
    """What peers reach of a region: private copies. Over TCP nothing but this process touches
    either, so those bytes move from where they are.
    """

    def __init__(
        self, memory: PinnedMemory | None, staging: SharedBudget, direct: SharedBudget
    ) -> None:
        self._memory = memory
        self._staging = staging
        self._direct = direct

    async def admit(self, part: Span, direction: Direction, grants: int, deadline: float) -> Hold:
        """See ranged.Source."""
        if not grants or self._memory is None:
            return _InPlace(part, await self._direct.take(part.nbytes, deadline))
        room = await self._staging.take(part.nbytes, deadline)
        with contextlib.ExitStack() as holds:
            holds.callback(room.give_back)
            buffer = await self._memory.allocate(part.nbytes)
            holds.callback(_free, self._memory, buffer)
            hold = _PrivateCopy(part, buffer)
            if direction is Direction.READ:
                await copy_pieces(part, hold.span)
            hold.holds = holds.pop_all()
        return hold


class _InPlace:
    def __init__(self, span: Span, room: Taken) -> None:
        self.span = span
        self._room = room

    async def finish(self) -> None:
        """They are where they belong."""

    def give_back(self) -> None:
        self._room.give_back()


class _PrivateCopy:
    def __init__(self, part: Span, buffer: PinnedBuffer) -> None:
        self.span = Span(buffer.view, buffer)
        self.holds = contextlib.ExitStack()
        self._part = part

    async def finish(self) -> None:
        try:
            await copy_pieces(self.span, self._part)
        except TypeError as error:  # the region is read-only: a bug, of which the peer hears
            raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, str(error)) from error

    def give_back(self) -> None:
        self.holds.close()


def _free(memory: PinnedMemory, buffer: PinnedBuffer) -> None:
    with contextlib.suppress(BufferError):  # a slice of it in the frame of a finished move
        buffer.view.release()
    memory.free(buffer)
