"""What a caller has of a region: the guard that owns its end, slices of it to pass on, and watches
that only look.

How one region lives is region.py's, which of them a node has is regions.py's.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..errors import ClosedError, UsageError
from ..model import Deregistered
from ..transport.pieces import check_range
from .live import Live
from .region import Region, RegionHost, RegionUse

_log = logging.getLogger("orbit")


class RegionSlice(Live):
    """A range of a live region, as a source, a destination or a piece of a payload. It holds
    nothing: use checks that the region still is there.
    """

    _instead = "send a handle of the range, as register_data_in_region makes one"

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
        return self.guard._region.use(self.offset, self.nbytes, stop)

    def __repr__(self) -> str:
        return f"<RegionSlice {self.nbytes} bytes from byte {self.offset}>"


class RegionWatch(Live):
    """Sees what a guard sees, and does not own the region's end."""

    _instead = "send a handle of its data, as register_data_in_region makes one"

    __slots__ = ("_region",)

    def __init__(self, region: Region) -> None:
        self._region = region

    @property
    def live(self) -> bool:
        """Whether the region may be used."""
        return self._region.live

    async def deregistered(self) -> Deregistered:
        """See RegionGuard.deregistered."""
        return await self._region.deregistered()

    def __repr__(self) -> str:
        return f"<RegionWatch {self._region.nbytes} bytes, {self._region.state}>"


class RegionGuard(Live):
    """Owns one registration. `async with` unregisters at the end; a guard that is dropped starts
    that in the background, with a warning.
    """

    _instead = "send a handle of its data, as register_data_in_region makes one"

    __slots__ = ("__weakref__", "_drop_timeout_s", "_external", "_region")

    def __init__(self, region: Region, drop_timeout_s: float, *, external: bool) -> None:
        self._region = region
        self._drop_timeout_s = drop_timeout_s
        self._external = external

    @property
    def nbytes(self) -> int:
        """As registered by the caller."""
        return self._region.nbytes

    @property
    def registered(self) -> bool:
        """Whether devices can reach it: False on a node without RDMA, and after its end."""
        return self._region.memory.registered

    @property
    def effective_range(self) -> range:
        """The addresses that were pinned: whole pages. On a node without RDMA nothing is pinned,
        and these are the region's own.
        """
        return self._region.memory.effective_range

    def slice(self, offset: int = 0, nbytes: int | None = None) -> RegionSlice:
        """`nbytes` (None: the rest) from byte `offset` of the region. Raises OutOfRange."""
        size = self.nbytes - offset if nbytes is None else nbytes
        check_range(offset, max(size, 0) if nbytes is None else size, self.nbytes)
        return RegionSlice(self, offset, size)

    async def deregistered(self) -> Deregistered:
        """The single release signal: resolves when every device has confirmed, or at the end of a
        node's close. Never, when that cannot be proven: the memory is kept then, and listed.
        """
        return await self._region.deregistered()

    def unregister(self, timeout: float | None = None) -> asyncio.Future[Deregistered]:
        """Gate, wait for what uses it (at most `timeout` seconds, then end that by force),
        deregister. Also without awaiting it: the call itself starts it. Called again, it joins the
        first, and the sooner timeout holds; after a failure it tries again.

        Raises Unquiesced (from the await): a use's end, or a device's, could not be proven.
        """
        return self._region.unregister(_deadline(timeout))

    def unregister_owned(
        self, timeout: float | None = None
    ) -> asyncio.Future[tuple[Deregistered, object]]:
        """As `unregister`, and the buffer. Raises UsageError for external memory, ClosedError when
        the region has ended already and lets go of the buffer.
        """
        source = self._region.source
        if self._external:
            raise UsageError("this region has no buffer: its memory was registered by address")
        if source is None:
            raise ClosedError("the region")
        both: asyncio.Future[tuple[Deregistered, object]] = (
            asyncio.get_running_loop().create_future()
        )

        def ended(waiter: asyncio.Future[Deregistered]) -> None:
            if both.done():
                return
            error = None if waiter.cancelled() else waiter.exception()
            if waiter.cancelled():
                both.cancel()
            elif error is not None:
                both.set_exception(error)
                both.exception()  # it was logged; nobody has to wait for it
            else:
                both.set_result((waiter.result(), source))

        self.unregister(timeout).add_done_callback(ended)
        return both

    def watch(self) -> RegionWatch:
        """An observer that may outlive the guard."""
        return RegionWatch(self._region)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.unregister()

    def __del__(self) -> None:
        # Anywhere: in any thread, within a garbage collection, after the loop is gone.
        region = getattr(self, "_region", None)
        if region is None or not region.live or sys.is_finalizing():
            return
        region.drop(self._drop_timeout_s)
        text = f"a region of {region.nbytes} bytes, registered at {region.site}, was dropped"
        _log.warning("%s; it is unregistered in the background", text)
        # Last: where warnings are errors this raises.
        warnings.warn(f"{text}: unregister it", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<RegionGuard {self.nbytes} bytes, {self._region.state}>"


def host_of(guard: RegionGuard) -> RegionHost:
    """The node that a region belongs to, as its regions know it."""
    return guard._region.host


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not 0 <= timeout < float("inf"):
        raise UsageError(f"timeout={timeout!r} is not a number of seconds, 0 or more")
    return asyncio.get_running_loop().time() + timeout
