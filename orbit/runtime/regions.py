"""Regions: memory of the caller's that is registered in place, and the guards of their lives.

A region is gated, drained and deregistered in this order, and `deregistered` is the only signal
that its memory is the caller's again. How memory is registered is the PinnedMemory's business, how
one region lives is region.py's.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from ..errors import ClosedError, OrbitError, RegisterOwnedError, UsageError
from ..events import Recorder
from ..memory.buffer import BufferExport, view_of_address
from ..model import Deregistered
from ..protocol.region_life import RegionState
from ..transport.interface import PinnedMemory
from ..transport.pieces import check_range
from .live import Live
from .region import Region, RegionHost, RegionUse
from .runner import TaskRunner

__all__ = ["RegionGuard", "RegionSlice", "RegionUse", "RegionWatch", "Regions"]

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


def memory_of(part: RegionSlice) -> PinnedMemory | None:
    """Where that region is registered; None for one of a node without RDMA."""
    return part.guard._region.host.memory


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
        return self._region.registered

    @property
    def effective_range(self) -> range:
        """The addresses that were pinned: whole pages. On a node without RDMA nothing is pinned,
        and these are the region's own.
        """
        return self._region.effective_range

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


class Regions:
    """Every region of one node. `memory` None: they all work, unregistered."""

    def __init__(
        self,
        memory: PinnedMemory | None,
        runner: TaskRunner,
        recorder: Recorder,
        drop_timeout_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._host = RegionHost(memory, runner, recorder, loop, self._on_change)
        self._drop_timeout_s = drop_timeout_s
        self._regions: set[Region] = set()  # until they are released
        self._gated = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Those that are not released."""
        return len(self._regions)

    async def register_owned(self, buffer: object) -> RegionGuard:
        """See Node.register_owned."""
        try:
            region = await self.open(buffer)
        except UsageError:
            raise
        except OrbitError as error:
            raise RegisterOwnedError(error, buffer) from error
        return RegionGuard(region, self._drop_timeout_s, external=False)

    async def register_external_memory(
        self, address: int, nbytes: int, keep: object
    ) -> RegionGuard:
        """See Node.register_external_memory."""
        region = await self.open(view_of_address(address, nbytes), keep)
        return RegionGuard(region, self._drop_timeout_s, external=True)

    async def open(self, buffer: object, source: object | None = None) -> Region:
        """A region without a guard: its caller unregisters it. It holds `buffer`'s export, and
        `source` (None: the buffer itself). Raises UsageError, BudgetExceeded, DeviceError,
        ClosedError.
        """
        export = BufferExport(buffer, writable=True)
        if not export.nbytes:
            export.release()
            raise UsageError("a region has at least one byte")
        region = Region(self._host, export, buffer if source is None else source, _site())
        # Noted first, and the gate looked at second: a drain that begins now waits for this one.
        self._regions.add(region)
        if self._gated:
            region.refuse()
            raise ClosedError("the node")
        await region.register()
        return region

    def owns(self, guard: RegionGuard) -> bool:
        """Whether it is one of this node's."""
        return guard._region.host is self._host

    # --- the end of the node ----------------------------------------------------------------------

    def gate(self) -> None:
        """From now on nothing is registered. Idempotent."""
        self._gated = True

    async def drain(self) -> None:
        """After `gate`: until registrations in progress have ended and nothing uses a region. Cut
        it short by cancelling it.
        """
        while any(r.in_use or r.state is RegionState.REGISTERING for r in self._regions):
            await self._next_change()

    async def deregister_all(self) -> None:
        """End every region, what still uses it by force. Returns when each has its verdict; what
        could not be proven is kept and logged.
        """
        self._gated = True
        now = asyncio.get_running_loop().time()
        while True:
            ending = [r for r in self._regions if r.state in _UNENDED]
            if ending:
                await asyncio.wait([region.unregister(now) for region in ending])
            elif any(region.state is RegionState.REGISTERING for region in self._regions):
                await self._next_change()
            else:
                return

    async def latch_all(self) -> None:
        """When links and devices are closed: what no device holds is released; the rest is kept,
        and its `deregistered` never resolves. Idempotent.
        """
        for region in list(self._regions):
            region.give_up_uses("it was in use when the node closed")
            if region.state is not RegionState.REGISTERING:
                await asyncio.wait([region.unregister(0.0)])

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _on_change(self, region: Region) -> None:
        if region.state is RegionState.RELEASED:
            self._regions.discard(region)
        self._changed.set()


_UNENDED = frozenset(
    {RegionState.LIVE, RegionState.GATED, RegionState.DRAINING, RegionState.UNMAPPING}
)


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not 0 <= timeout < float("inf"):
        raise UsageError(f"timeout={timeout!r} is not a number of seconds, 0 or more")
    return asyncio.get_running_loop().time() + timeout


def _site() -> str:
    """The nearest caller outside this package and event loops, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in ("orbit", "asyncio", "threading"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
