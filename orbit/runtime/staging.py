"""What an owner stages under a handle: a held buffer, a copy on the heap, or a copy in the arena.

It decides where a pinned registration goes and says why when that is not the arena. It knows no
slots, leases or peers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..errors import BudgetExceeded, BusyError, InternalError
from ..memory.buffer import BufferExport
from ..model import PathReason
from ..transport.interface import PinnedBuffer, PinnedMemory, Span
from .copying import copy_bytes


class Staged:
    """The bytes of one slot, held until `free`."""

    __slots__ = ("_export", "_memory", "nbytes", "span")

    def __init__(
        self,
        span: Span,
        *,
        export: BufferExport | None = None,
        memory: PinnedMemory | None = None,
    ) -> None:
        self.span = span
        self.nbytes = span.view.nbytes
        self._export = export
        self._memory = memory

    @property
    def pinned(self) -> bool:
        return self.span.pinned is not None

    @property
    def freed(self) -> bool:
        return self.span is _NOTHING

    def free(self) -> None:
        """Give the memory back. The caller has proven that nothing reads it any more."""
        if self.freed:
            raise InternalError("staged memory was freed twice")
        span, self.span = self.span, _NOTHING
        # Somebody may still hold a slice that is read no more; the buffer's export then ends with
        # the last one.
        with contextlib.suppress(BufferError):
            span.view.release()
        if span.pinned is not None:
            if self._memory is None:
                raise InternalError("pinned bytes without their pool")
            self._memory.free(span.pinned)
        elif self._export is not None:
            with contextlib.suppress(BufferError):
                self._export.release()
        self._export = None


_NOTHING = Span(memoryview(b""))  # marks what was freed; never handed out otherwise


@dataclass(frozen=True, slots=True)
class PinnedStaging:
    """Why a pinned registration did (OK) or did not land in registered memory."""

    staged: Staged
    reason: PathReason


def stage_held(source: object) -> Staged:
    """Serve the caller's own memory, without a copy: it must not change while it is registered.

    Read-only sources are fine. Raises UsageError for memory that is not one contiguous piece.
    """
    export = BufferExport(source)
    return Staged(Span(export.view.toreadonly()), export=export)


def stage_copied(export: BufferExport) -> Staged:
    """A private copy in plain memory."""
    return Staged(Span(memoryview(bytes(export.view))))


async def stage_pinned(
    source: object, memory: PinnedMemory | None, refused: PathReason
) -> PinnedStaging:
    """Copy `source` into registered memory, or, where that cannot be had, into plain memory with
    the reason.

    `refused` is why `memory` is None or may not be used; OK otherwise. Fails only for a source that
    is no contiguous buffer (UsageError). The source must not change until this returns; then it is
    the caller's again.
    """
    with BufferExport(source) as export:
        if export.nbytes == 0:
            return PinnedStaging(Staged(Span(memoryview(b""))), PathReason.NOT_PINNED)
        if memory is None or refused is not PathReason.OK:
            return PinnedStaging(stage_copied(export), refused)
        reason = await memory.ensure()
        if reason is not PathReason.OK:
            return PinnedStaging(stage_copied(export), reason)
        buffer, reason = _allocate(memory, export.nbytes)
        if buffer is None:
            return PinnedStaging(stage_copied(export), reason)
        try:
            await copy_bytes(export.view, buffer.view)
        except BaseException:
            memory.free(buffer)  # nobody was told of it
            raise
        span = Span(buffer.view.toreadonly(), buffer)
        return PinnedStaging(Staged(span, memory=memory), PathReason.OK)


def _allocate(memory: PinnedMemory, nbytes: int) -> tuple[PinnedBuffer | None, PathReason]:
    try:
        return memory.allocate_nowait(nbytes), PathReason.OK
    except BudgetExceeded:
        return None, PathReason.BUDGET
    except BusyError:
        return None, PathReason.POOL_EXHAUSTED
