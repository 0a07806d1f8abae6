"""Regions: memory of the caller's that is registered in place, and the guards of their lives.

A region is gated, drained and deregistered in this order, and `deregistered` is the only signal
that its memory is the caller's again. How memory is registered is the PinnedMemory's business.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..model import Deregistered
from ..transport.interface import Span, Target


class RegionUse:
    """One use of a range: while it is not ended, the region is not deregistered, unless by force.
    `span` and `target` are the range's bytes, in one piece for each registration that it lies in.
    """

    span: Span
    target: Target

    def end(self) -> None:
        """Nothing of orbit's accesses the range for this use any more. Idempotent."""
        raise NotImplementedError


class RegionSlice:
    """A range of a live region, as a source, a destination or a piece of a payload. It holds
    nothing: use checks that the region still is there.
    """

    __slots__ = ("guard", "nbytes", "offset")

    def __init__(self, guard: RegionGuard, offset: int, nbytes: int) -> None:
        self.guard = guard
        self.offset = offset
        self.nbytes = nbytes

    def use(self, stop: Callable[[], None]) -> RegionUse:
        """Begin a use. `stop` is called, once, from the event loop, when an unregister ran out of
        time: it must bring the use to its end soon, by force. Raises ClosedError (being
        unregistered).
        """
        raise NotImplementedError


class RegionWatch:
    """Sees what a guard sees, and does not own the region's end."""

    @property
    def live(self) -> bool:
        """Whether the region may be used."""
        raise NotImplementedError

    async def deregistered(self) -> Deregistered:
        """See RegionGuard.deregistered."""
        raise NotImplementedError


class RegionGuard:
    """Owns one registration. `async with` unregisters at the end; a guard that is dropped starts
    that in the background, with a warning.
    """

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def registered(self) -> bool:
        """Whether devices can reach it: False on a node without RDMA."""
        raise NotImplementedError

    @property
    def effective_range(self) -> range:
        """The addresses that were pinned: whole pages."""
        raise NotImplementedError

    def slice(self, offset: int = 0, nbytes: int | None = None) -> RegionSlice:
        """`nbytes` (None: the rest) from byte `offset` of the region. Raises OutOfRange."""
        raise NotImplementedError

    async def deregistered(self) -> Deregistered:
        """The single release signal: resolves when every device has confirmed, or at the end of a
        node's close. Never, when that cannot be proven: the memory is kept then, and listed.
        """
        raise NotImplementedError

    async def unregister(self, timeout: float | None = None) -> Deregistered:
        """Gate, wait for what uses it (at most `timeout` seconds, then end that by force),
        deregister. Also without awaiting it: the call itself starts it. Raises Unquiesced.
        """
        raise NotImplementedError

    async def unregister_owned(self, timeout: float | None = None) -> tuple[Deregistered, object]:
        """As `unregister`, and the buffer. Raises UsageError for external memory."""
        raise NotImplementedError

    def watch(self) -> RegionWatch:
        """An observer that may outlive the guard."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.unregister()


class Regions:
    """Every region of one node."""

    async def register_owned(self, buffer: object) -> RegionGuard:
        """See Node.register_owned."""
        raise NotImplementedError

    async def register_external_memory(
        self, address: int, nbytes: int, keep: object
    ) -> RegionGuard:
        """See Node.register_external_memory."""
        raise NotImplementedError
