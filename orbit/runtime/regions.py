"""The regions of one node: memory of the caller's that is registered in place.

A region is gated, drained and deregistered in this order, and `deregistered` is the only signal
that its memory is the caller's again. How memory is registered is the PinnedMemory's business, how
one region lives is region.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..errors import ClosedError, OrbitError, RegisterOwnedError, UsageError
from ..events import Recorder
from ..memory.buffer import BufferExport, view_of_address
from ..protocol.region_life import RegionState
from ..transport.interface import PinnedMemory
from .call_site import caller_site
from .region import Region, RegionHost, end_regions
from .region_guards import RegionGuard, host_of
from .runner import TaskRunner


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

    async def open(
        self,
        buffer: object,
        source: object | None = None,
        *,
        own: bool = False,
        peers: bool = True,
    ) -> Region:
        """A region without a guard: its caller unregisters it. It holds `buffer`'s export, and
        `source` (None: the buffer itself). `own` and `peers`: see Region.register. Raises
        UsageError, BudgetExceeded, DeviceError, ClosedError, Unquiesced.
        """
        export = BufferExport(buffer, writable=True)
        if not export.nbytes:
            export.release()
            raise UsageError("a region has at least one byte")
        region = Region(self._host, export, buffer if source is None else source, caller_site())
        # Noted first, and the gate looked at second: a drain that begins now waits for this one.
        self._regions.add(region)
        if self._gated:
            region.refuse()
            raise ClosedError("the node")
        await region.register(own=own, peers=peers)
        return region

    async def open_many(self, buffers: Iterable[object], *, own: bool, peers: bool) -> list[Region]:
        """As `open`, of all of them or none: what was registered is ended again before an error is
        raised. Raises Unquiesced (from what failed) when that could not be proven; such a region
        stays registered, charged and listed.
        """
        opened: list[Region] = []
        try:
            for buffer in buffers:
                opened.append(await self.open(buffer, own=own, peers=peers))
        except BaseException as error:
            await end_regions(opened, error)
            raise
        return opened

    def owns(self, guard: RegionGuard) -> bool:
        """Whether it is one of this node's."""
        return host_of(guard) is self._host

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
