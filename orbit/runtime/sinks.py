"""Where a fetch puts its bytes: fresh memory, the caller's buffer, or a piece of the arena.

A sink keeps its memory alive until it is told that nothing writes it any more. It knows no path.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from ..errors import BusyError, ClosedError
from ..memory.buffer import BufferExport
from ..model import PathReason
from ..transport.interface import PinnedBuffer, PinnedMemory, Target
from .fresh_memory import fresh_memory
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

    def discard(self) -> None:
        """The fetch failed and nothing writes the memory any more."""


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

    def discard(self) -> None:
        self._view = memoryview(b"")

    def result(self) -> memoryview:
        """The payload, read-only. Whoever holds the view keeps the memory."""
        return self._view.toreadonly()


class CallerSink:
    """For `get_into`: the front of the caller's buffer, whose export is held until the fetch has
    ended.
    """

    takes_inline = True

    def __init__(self, dest: object) -> None:
        """Raises UsageError for memory that is read-only or not contiguous."""
        self._export = BufferExport(dest, writable=True)
        self.capacity_bytes: int | None = self._export.nbytes

    async def open(self, total_bytes: int) -> Target:
        return Target(self._export.view[:total_bytes])

    def deliver(self, data: bytes) -> None:
        self._export.view[: len(data)] = data

    def discard(self) -> None:
        self.release()

    def release(self) -> None:
        """The buffer is the caller's alone again."""
        # A path's slice of it goes away with the frame that holds it.
        with contextlib.suppress(BufferError):
            self._export.release()


class PinnedPayload:
    """A fetched payload in registered memory. `view` is valid until `free`, which returns the
    space.
    """

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


class PinnedWriter:
    """A piece of registered memory to write into. `view` is valid until `free`, which returns the
    space, or until `register_data_pinned` takes the piece over.
    """

    __slots__ = ("_buffer", "_memory", "nbytes")

    def __init__(self, memory: PinnedMemory, buffer: PinnedBuffer) -> None:
        self._memory = memory
        self._buffer: PinnedBuffer | None = buffer
        self.nbytes = buffer.view.nbytes

    @property
    def view(self) -> memoryview:
        """Writable bytes. Raises ClosedError after `free`."""
        return self.buffer.view

    @property
    def buffer(self) -> PinnedBuffer:
        """The registered piece. Raises ClosedError after `free`."""
        if self._buffer is None:
            raise ClosedError("the pinned writer")
        return self._buffer

    def take(self) -> PinnedBuffer:
        """The piece, whose holder frees it from now on. Raises ClosedError."""
        buffer, self._buffer = self.buffer, None
        return buffer

    def free(self) -> None:
        """Return the space to the arena. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
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
            reason = await self._memory.ensure()
            if reason is not PathReason.OK:
                raise BusyError(f"no registered memory can be had ({reason})")
            self._buffer = self._memory.allocate_nowait(total_bytes)
        return Target(self._buffer.view, self._buffer)

    def deliver(self, data: bytes) -> None:
        raise AssertionError("a pinned sink never asks for inline bytes")

    def discard(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.free(buffer)

    def result(self) -> PinnedPayload:
        buffer, self._buffer = self._buffer, None
        return PinnedPayload(self._memory, buffer)
