"""One protection domain of a device: what keys, registrations and bulk queue pairs belong to, and
the order of its end.

A device has one for new bulk work, older ones that the last of their work has not left yet, and one
for messages. It makes no queue pair and knows neither peers nor grants.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..model import Address
from .device_regions import DeviceRegions
from .offload import Offload
from .provider import NativeDomain, NativeRegion
from .queue_pair import BulkQueuePair
from .settings import RdmaPathConfig
from .turn import Turn
from .windows import DomainWindows


class Domain:
    """All methods belong to one event loop."""

    def __init__(
        self,
        device: str,
        native: NativeDomain,
        turn: Turn,
        offload: Offload,
        config: RdmaPathConfig,
        region_bytes_max: int,
    ) -> None:
        self.native = native
        self.region_bytes_max = region_bytes_max  # of one registration
        self.windows = DomainWindows(native, config.window_key_indices_max)
        self.regions = DeviceRegions(turn, native, offload)
        self.queue_pairs: set[BulkQueuePair] = set()  # alive
        self.left_at = math.inf  # loop time: another one took its place, no new work goes here
        self.on_unused: Callable[[], None] | None = None  # it was left, and its last queue pair too
        self._device = device
        self._offload = offload
        self._timeout_s = config.drain_timeout_s

    def __str__(self) -> str:
        return f"protection domain of {self._device}"

    @property
    def left(self) -> bool:
        return self.left_at < math.inf

    @property
    def closed(self) -> bool:
        return not self.native.native

    def forget(self, queue_pair: BulkQueuePair) -> None:
        """It is destroyed."""
        self.queue_pairs.discard(queue_pair)
        if self.left and not self.queue_pairs and self.on_unused is not None:
            self.on_unused()

    async def register(self, address: Address, length: int, access: int) -> NativeRegion:
        """Raises DeviceError, DeadlineExceeded, ClosedError. Cancelling the wait does not leak the
        registration: `close` undoes it.
        """
        return await self.regions.register(address, length, access)

    async def deregister(self, region: NativeRegion) -> None:
        """Raises DeviceError (a window is still bound in it); the region stays then."""
        await self.regions.deregister(region)

    async def close(self) -> None:
        """Queue pairs and their windows are gone by now. In order, once: parked windows,
        registrations, the domain. Raises DeviceError, DeadlineExceeded and keeps the rest; a
        further call continues there.
        """
        if self.closed:
            return
        await self.regions.settle()
        self.windows.parked.close()
        await self.regions.close()
        await self._offload.run("closing a domain", self._timeout_s, self.native.close)
