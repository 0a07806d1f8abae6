"""Memory that one operation borrows: buffers, pieces of registered memory, slices of regions.

What is borrowed stays exported, allocated and registered until it is given back, and its owner may
want it back earlier: an unregister that ran out of time. It knows no path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..errors import ClosedError, InternalError, OrbitError, UsageError
from ..memory.buffer import BufferExport
from ..transport.copying import copy_now
from ..transport.interface import Span, Target
from ..transport.pieces import cut_target, join_spans, join_targets
from .region import RegionUse
from .region_guards import RegionSlice
from .sinks import PinnedWriter

Stop = Callable[[OrbitError], None]


class Borrowed:
    """A buffer, a PinnedWriter, a RegionSlice, or a list of these, whose bytes follow one another.

    `span` and `target` are all of them, in order; `target` needs `writable`.
    """

    def __init__(self, what: object, *, writable: bool) -> None:
        """Raises UsageError (no contiguous memory; read-only, if it is to be written; an empty
        list), ClosedError (a freed writer, a region that is being unregistered). Nothing is held
        then.
        """
        self._writable = writable
        self._wanted: OrbitError | None = None
        self._stop: Stop | None = None
        self._gives_back: list[Callable[[], None]] = []
        self._uses: list[RegionUse] = []
        self._span: Span | None = None
        self._target: Target | None = None
        items = what if isinstance(what, list | tuple) else [what]
        if not items:
            raise UsageError("no memory was given: the list is empty")
        try:
            pieces = [self._borrow(item) for item in items]
            self._span = join_spans([span for span, _ in pieces])
            if writable:
                self._target = join_targets([target for _, target in pieces])
            self.nbytes = self._span.nbytes
        except BaseException:
            self.give_back()
            raise

    @property
    def span(self) -> Span:
        """As a source."""
        if self._span is None:
            raise InternalError("borrowed memory was used after it was given back")
        return self._span

    @property
    def target(self) -> Target:
        """As a destination."""
        if self._target is None:
            raise InternalError("borrowed memory was used after it was given back")
        return self._target

    @property
    def uses(self) -> tuple[RegionUse, ...]:
        """Those of regions among it."""
        return tuple(self._uses)

    def watch(self, stop: Stop | None) -> None:
        """`stop` is called, from the event loop, when the memory is wanted back; at once when it
        was wanted before. The last one that is set counts.
        """
        self._stop = stop
        if stop is not None and self._wanted is not None:
            stop(self._wanted)

    def discard(self) -> None:
        """As `give_back`, of a transfer that failed."""
        self.give_back()

    def give_back(self) -> None:
        """Nothing of orbit's accesses it any more. Idempotent."""
        self._span = self._target = self._stop = None
        gives_back, self._gives_back = self._gives_back, []
        for give_back in gives_back:
            give_back()

    def keep(self, cause: str) -> None:
        """That nothing accesses it any more could not be proven: it is not given back. Whoever
        calls this keeps this object, too.
        """
        for use in self._uses:
            use.keep(cause)

    def _borrow(self, item: object) -> tuple[Span, Target]:
        if isinstance(item, RegionSlice):
            use = item.use(self._want)
            self._uses.append(use)
            self._gives_back.append(use.end)
            return use.span, use.target
        if isinstance(item, PinnedWriter):
            piece = item.lend()
            self._gives_back.append(item.take_back)
            return Span(piece.view, piece), Target(piece.view, piece)
        export = BufferExport(item, writable=self._writable)
        self._gives_back.append(lambda: _release(export))
        return Span(export.view), Target(export.view)

    def _want(self) -> None:
        self._wanted = ClosedError("the region")
        if self._stop is not None:
            self._stop(self._wanted)


def _release(export: BufferExport) -> None:
    # A path's slice of it goes away with the frame that holds it.
    with contextlib.suppress(BufferError):
        export.release()


class CallerSink:
    """For `get_into`: the front of the caller's memory, which is held until the fetch has ended."""

    takes_inline = True

    def __init__(self, dest: object) -> None:
        """Raises as Borrowed."""
        self._borrowed = Borrowed(dest, writable=True)
        self.capacity_bytes: int | None = self._borrowed.nbytes

    async def open(self, total_bytes: int) -> Target:
        return cut_target(self._borrowed.target, 0, total_bytes)

    def deliver(self, data: bytes) -> None:
        front = cut_target(self._borrowed.target, 0, len(data))
        copy_now(Span(memoryview(data)), front)

    def watch(self, stop: Stop | None) -> None:
        self._borrowed.watch(stop)

    def keep(self, cause: str) -> None:
        self._borrowed.keep(cause)

    def discard(self) -> None:
        self._borrowed.give_back()

    def release(self) -> None:
        """The memory is the caller's alone again."""
        self._borrowed.give_back()


class StopScope:
    """`async with StopScope() as scope`: the body is cancelled when `scope.stop(error)` is called,
    and then `error` is raised in place of the CancelledError.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancels = 0  # of the task by others, before
        self._error: OrbitError | None = None

    def stop(self, error: OrbitError) -> None:
        """From the event loop. Before the body begins: it does not begin."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        if self._task is None:
            raise InternalError("a stop scope needs a task")
        self._cancels = self._task.cancelling()
        if self._error is not None:
            raise self._error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None or not isinstance(error, asyncio.CancelledError):
            return
        if task.uncancel() <= self._cancels:  # else somebody else cancelled the task, too
            raise self._error from error
