"""Where a fetch puts its bytes: fresh memory, the caller's own, or a piece of the arena.

A sink keeps its memory alive until it is told that nothing writes it any more. It knows no path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..errors import BusyError, ClosedError, OrbitError
from ..transport.interface import PinnedBuffer, PinnedMemory, Target
from .fresh_memory import fresh_memory
from .live import Live
from .paths import Paths


class Sink(Protocol):
    """One fetch's target. `open` may come twice (a fallback); the bytes of the first are then
    overwritten.
    """

    capacity_bytes: int | None  # None: made to measure
    takes_inline: bool  # whether `deliver` may be called

    async def open(self, total_bytes: int) -> Target:
        """Memory of exactly that size. Raises BudgetExceeded, BusyError."""

    def deliver(self, data: bytes) -> None:
        """The whole payload came with the answer."""

    def watch(self, stop: Callable[[OrbitError], None] | None) -> None:
        """`stop` is called when the memory is wanted back before the fetch has ended."""

    def keep(self, cause: str) -> None:
        """That nothing writes the memory any more could not be proven; who calls this keeps the
        sink, and never discards it.
        """

    def discard(self) -> None:
        """The fetch failed and nothing writes the memory any more. Idempotent."""


class FreshSink:
    """For `get`: memory that nobody else holds; what comes with the answer is not copied again."""

    capacity_bytes: int | None = None
    takes_inline = True

    def __init__(self) -> None:
        self._view = memoryview(b"")

    async def open(self, total_bytes: int) -> Target:
        if self._view.readonly or self._view.nbytes != total_bytes:
            self._view = fresh_memory(total_bytes)
        return Target(self._view)

    def deliver(self, data: bytes) -> None:
        self._view = memoryview(data)

    def watch(self, stop: Callable[[OrbitError], None] | None) -> None:
        """Nobody else knows of it."""

    def keep(self, cause: str) -> None:
        """The sink holds all that there is."""

    def discard(self) -> None:
        self._view = memoryview(b"")

    def result(self) -> memoryview:
        """The payload, read-only. Whoever holds the view keeps the memory."""
        return self._view.toreadonly()


class PinnedPayload(Live):
    """A fetched payload in registered memory. `view` is valid until `free`, which returns the
    space.
    """

    _instead = "send its bytes, or the handle that it was fetched by"

    __slots__ = ("_buffer", "_memory", "_view")

    def __init__(self, memory: PinnedMemory | None, buffer: PinnedBuffer | None) -> None:
        self._memory = memory
        self._buffer = buffer
        self._view: memoryview | None = (
            memoryview(b"") if buffer is None else buffer.view.toreadonly()
        )

    @property
    def view(self) -> memoryview:
        """Read-only bytes. Raises ClosedError after `free`."""
        if self._view is None:
            raise ClosedError("the pinned payload")
        return self._view

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def free(self) -> None:
        """Return the space to the arena. Views taken before show other bytes afterwards.
        Idempotent.
        """
        self._view = None
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._memory is not None:
            self._memory.free(buffer)

    def __enter__(self) -> PinnedPayload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


class PinnedWriter(Live):
    """A piece of registered memory to write into. `view` is valid until `free`, which returns the
    space, or until `register_data_pinned` takes the piece over.
    """

    _instead = "send a handle of it, as register_data_pinned makes one"

    __slots__ = ("_buffer", "_free_asked", "_lent", "_memory", "nbytes")

    def __init__(self, memory: PinnedMemory, buffer: PinnedBuffer) -> None:
        self._memory = memory
        self._buffer: PinnedBuffer | None = buffer
        self._lent = 0
        self._free_asked = False
        self.nbytes = buffer.view.nbytes

    @property
    def view(self) -> memoryview:
        """Writable bytes. Raises ClosedError after `free`."""
        return self.buffer.view

    @property
    def buffer(self) -> PinnedBuffer:
        """The registered piece. Raises ClosedError after `free`."""
        if self._buffer is None or self._free_asked:
            raise ClosedError("the pinned writer")
        return self._buffer

    def is_of(self, memory: PinnedMemory | None) -> bool:
        """Whether it is a piece of that memory."""
        return self._memory is memory

    def take(self) -> PinnedBuffer:
        """The piece, whose holder frees it from now on. Raises ClosedError, BusyError (in use)."""
        buffer = self.buffer
        if self._lent:
            raise BusyError("the pinned writer is in use by another call or handle")
        self._buffer = None
        return buffer

    def lend(self) -> PinnedBuffer:
        """The piece, for one use: until its `take_back` the space is not returned. Raises
        ClosedError.
        """
        buffer = self.buffer
        self._lent += 1
        return buffer

    def take_back(self) -> None:
        """One use has ended, once for each `lend`."""
        self._lent -= 1
        if self._free_asked:
            self._return_space()

    def free(self) -> None:
        """Return the space to the arena, as soon as no call or handle uses it. Idempotent."""
        self._free_asked = True
        self._return_space()

    def _return_space(self) -> None:
        if self._buffer is not None and not self._lent:
            buffer, self._buffer = self._buffer, None
            self._memory.free(buffer)

    def __enter__(self) -> PinnedWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


class PinnedSink:
    """For `get_pinned`: a piece of the arena, on either path."""

    capacity_bytes: int | None = None
    takes_inline = False  # the space may have to be waited for

    def __init__(self, paths: Paths) -> None:
        """Raises PathUnavailable where this node has no registered memory."""
        if paths.memory is None:
            raise paths.unavailable(paths.rdma_reason)
        self._memory = paths.memory
        self._buffer: PinnedBuffer | None = None

    async def open(self, total_bytes: int) -> Target:
        if self._buffer is None:
            self._buffer = await self._memory.allocate(total_bytes)
        return Target(self._buffer.view, self._buffer)

    def deliver(self, data: bytes) -> None:
        raise AssertionError("a pinned sink never asks for inline bytes")

    def watch(self, stop: Callable[[OrbitError], None] | None) -> None:
        """Nobody else knows of it."""

    def keep(self, cause: str) -> None:
        """The sink holds all that there is."""

    def discard(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.free(buffer)

    def result(self) -> PinnedPayload:
        buffer, self._buffer = self._buffer, None
        return PinnedPayload(self._memory, buffer)
