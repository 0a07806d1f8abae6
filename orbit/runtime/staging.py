"""What an owner stages under a handle: held memory (buffers, ranges of regions, pinned writers), a
copy on the heap, or a copy in the arena.

It decides where a pinned registration goes and says why when that is not the arena. It knows no
slots, leases or peers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ..errors import BudgetExceeded, BusyError, DeviceError, InternalError, UsageError
from ..memory.buffer import BufferExport
from ..model import PathReason
from ..transport.copying import copy_bytes
from ..transport.interface import PinnedBuffer, PinnedMemory, Span
from ..transport.pieces import join_spans
from .borrowed import Borrowed
from .fresh_memory import fresh_memory
from .region import Region, RegionUse
from .region_guards import RegionSlice, host_of
from .sinks import PinnedWriter

_OF_SEVERAL = (list, tuple, RegionSlice, PinnedWriter)
_NOTHING = Span(memoryview(b""))  # marks what was freed; never handed out otherwise


class Stop:
    """Says that memory under a payload is wanted back: at once, or when somebody cares."""

    __slots__ = ("_act", "given")

    def __init__(self) -> None:
        self.given = False
        self._act: Callable[[], None] | None = None

    def __call__(self) -> None:
        self.given = True
        if self._act is not None:
            self._act()

    def then(self, act: Callable[[], None]) -> None:
        """From now on `act` is what it does."""
        self._act = act
        if self.given:
            act()


class Staged:
    """The bytes of one slot, held until `free`. With `memory` they are a piece of it; `give_back`
    ends whatever else holds them. `uses` are those of regions; `stop` asks for the end.
    """

    __slots__ = ("_give_back", "_memory", "_uses", "nbytes", "span", "stop")

    def __init__(
        self,
        span: Span,
        *,
        memory: PinnedMemory | None = None,
        give_back: Callable[[], object] | None = None,
        uses: Sequence[RegionUse] = (),
        stop: Stop | None = None,
    ) -> None:
        self.span = span
        self.nbytes = span.nbytes
        self.stop = stop
        self._memory = memory
        self._give_back = give_back
        self._uses = tuple(uses)

    @property
    def pinned(self) -> bool:
        """Whether all of it can be reached by devices, and no region of it is about to go."""
        return self.span.all_pinned and self.live

    @property
    def live(self) -> bool:
        """No region of it is about to go."""
        return all(use.live for use in self._uses)

    @property
    def plain(self) -> bool:
        """Neither registered memory nor a region: the end of those does not concern it."""
        return not self._uses and all(piece.pinned is None for piece in self.span.pieces)

    @property
    def freed(self) -> bool:
        return self.span is _NOTHING

    def free(self) -> None:
        """Give the memory back. The caller has proven that nothing reads it any more."""
        if self.freed:
            raise InternalError("staged memory was freed twice")
        span, self.span = self.span, _NOTHING
        if self._memory is not None:
            if span.pinned is None:
                raise InternalError("no pinned bytes for their pool")
            _release(span.view)
            self._memory.free(span.pinned)
        give_back, self._give_back, self._uses = self._give_back, None, ()
        if give_back is not None:
            give_back()

    def keep(self, cause: str) -> None:
        """In place of `free`, when what the caller had to prove could not be proven: regions under
        it are never given back. Whoever keeps this object keeps the rest.
        """
        for use in self._uses:
            use.keep(cause)


class Holding:
    """Memory of several kinds, held piece by piece for one payload. As a context manager it gives
    everything back at its end, unless `staged` took it over.
    """

    def __init__(self, memory: PinnedMemory | None, *, writable: bool = False) -> None:
        """`writable`: the memory is to be written into. `memory` is this node's: what another one
        registered is plain memory here.
        """
        self.stop = Stop()
        self._memory = memory
        self._writable = writable
        self._spans: list[Span] = []
        self._uses: list[RegionUse] = []
        self._holds = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._holds.close()
        self._spans.clear()  # the frames of a traceback may keep this object for a while

    @property
    def span(self) -> Span:
        """All of it; an empty payload is plain memory. Raises UsageError for none."""
        span = join_spans(self._spans)
        return span if span.nbytes else Span(memoryview(b""))

    def add(self, source: object) -> None:
        """Hold a buffer, a PinnedWriter, a RegionSlice, or a list of these. Raises as Borrowed."""
        items = source if isinstance(source, list | tuple) else [source]
        if not items:
            raise UsageError("no memory was given: the list is empty")
        for item in items:
            borrowed = Borrowed([item], writable=self._writable)
            self._holds.callback(borrowed.give_back)
            borrowed.watch(lambda _: self.stop())
            self._uses += borrowed.uses
            pieces = borrowed.target.pieces if self._writable else borrowed.span.pieces
            for piece in pieces:
                self._add_piece(piece.view, piece.pinned if self._is_mine(item) else None)

    def add_region(self, region: Region) -> None:
        """Hold all of a region that has no guard: its registration ends with the payload."""
        use = region.use(0, region.nbytes, self.stop)
        self._holds.callback(region.unregister)
        self._holds.callback(use.end)  # before that: what is held last is let go first
        self._uses.append(use)
        for piece in use.target.pieces:
            self._add_piece(piece.view, piece.pinned)

    def staged(self) -> Staged:
        """What is held, from now on until its `free`."""
        span = self.span
        return Staged(span, give_back=self._holds.pop_all().close, uses=self._uses, stop=self.stop)

    def _is_mine(self, item: object) -> bool:
        match item:
            case PinnedWriter():
                return item.is_of(self._memory)
            case RegionSlice():
                return host_of(item.guard).memory is self._memory
            case _:
                return True

    def _add_piece(self, held: memoryview, pinned: PinnedBuffer | None) -> None:
        # A view of its own, which can be ended whoever still holds the span.
        view = memoryview(held) if self._writable else held.toreadonly()
        self._holds.callback(_release, view)
        self._spans.append(Span(view, pinned))


@dataclass(frozen=True, slots=True)
class PinnedStaging:
    """Why a pinned registration did (OK) or did not land in registered memory."""

    staged: Staged
    reason: PathReason


def stage_held(source: object, memory: PinnedMemory | None = None) -> Staged:
    """Serve the caller's own memory, without a copy: it must not change while it is registered.
    Ranges of regions, and writers of `memory` (this node's), keep their registration.

    Read-only sources are fine. Raises UsageError for memory that is not contiguous, ClosedError for
    a region that is being unregistered.
    """
    if isinstance(source, _OF_SEVERAL):
        with Holding(memory) as holding:
            holding.add(source)
            return holding.staged()
    export = BufferExport(source)  # most payloads, at a fraction of the cost
    view = export.view.toreadonly()
    return Staged(Span(view), give_back=functools.partial(_end_export, export, view))


async def copy_to_heap(span: Span) -> Staged:
    """A private copy in plain memory. `span` is read until this returns or raises. Raises
    BudgetExceeded: this process has no memory left.
    """
    copy = fresh_memory(span.nbytes)
    await _copy_pieces(span, copy)
    return Staged(Span(copy.toreadonly()))


async def stage_pinned(
    source: object, memory: PinnedMemory | None, refused: PathReason
) -> PinnedStaging:
    """Copy `source` into registered memory, or, where that cannot be had, into plain memory with
    the reason. A PinnedWriter of `memory` is taken over instead.

    `refused` is why `memory` is None or may not be used; OK otherwise. Fails only for a source that
    is no contiguous buffer (UsageError) or is gone (ClosedError). The source must not change until
    this returns; then it is the caller's again.
    """
    if isinstance(source, PinnedWriter) and memory is not None and source.is_of(memory):
        return PinnedStaging(_in_arena(source.take(), memory), PathReason.OK)
    with Holding(memory) as holding:
        holding.add(source)
        span = holding.span
        if not span.nbytes:
            return PinnedStaging(Staged(Span(memoryview(b""))), PathReason.NOT_PINNED)
        if memory is None or refused is not PathReason.OK:
            return PinnedStaging(await copy_to_heap(span), refused)
        piece_or_why = await _allocate(memory, span.nbytes)
        if isinstance(piece_or_why, PathReason):
            return PinnedStaging(await copy_to_heap(span), piece_or_why)
        try:
            await _copy_pieces(span, piece_or_why.view)
        except BaseException:
            memory.free(piece_or_why)  # nobody was told of it
            raise
        return PinnedStaging(_in_arena(piece_or_why, memory), PathReason.OK)


async def _allocate(memory: PinnedMemory, nbytes: int) -> PinnedBuffer | PathReason:
    try:
        return await memory.allocate(nbytes)
    except BudgetExceeded:
        return PathReason.BUDGET
    except (BusyError, DeviceError):
        return PathReason.POOL_EXHAUSTED


async def _copy_pieces(span: Span, target: memoryview) -> None:
    offset = 0
    for piece in span.pieces:
        await copy_bytes(piece.view, target[offset : offset + piece.view.nbytes])
        offset += piece.view.nbytes


def _in_arena(buffer: PinnedBuffer, memory: PinnedMemory) -> Staged:
    return Staged(Span(buffer.view.toreadonly(), buffer), memory=memory)


def _end_export(export: BufferExport, view: memoryview) -> None:
    _release(view)
    with contextlib.suppress(BufferError):
        export.release()


def _release(view: memoryview) -> None:
    # Somebody may still hold a slice that is read no more; the buffer's export then ends with the
    # last one.
    with contextlib.suppress(BufferError):
        view.release()
