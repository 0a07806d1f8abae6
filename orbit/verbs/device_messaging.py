"""What exists on one device for messages alone, and the order of its end.

Owns shared receive queues, message lanes, the count of message queue pairs and the device's events,
for the device that closes all of it in its own order. It knows no peers and no packets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ..errors import ClosedError, DeviceError
from .device_events import DeviceEvents
from .domain import Domain
from .offload import Offload
from .provider import (
    NativeContext,
    NativeObject,
    NativeQueuePair,
    NativeSharedReceive,
    QueuePairCaps,
)


class ClosableLane(Protocol):
    def close(self) -> None:
        """End what polls, destroy the queue and its channel. A further call continues."""


L = TypeVar("L", bound=ClosableLane)


class DeviceMessaging:
    """Makers raise DeviceError, and ClosedError once the device has closed."""

    def __init__(self, context: NativeContext, domain: Domain, offload: Offload) -> None:
        self.domain = domain
        self._context = context
        self._offload = offload
        self._shared: list[NativeSharedReceive] = []
        self._lanes: list[ClosableLane] = []
        self._closed = False
        self.events = DeviceEvents(context)
        self.queue_pairs = 0  # alive

    def create_shared_receive(self, depth: int) -> NativeSharedReceive:
        self._check_open()
        shared = self.domain.native.create_shared_receive(depth)
        self._shared.append(shared)
        return shared

    def open_lane(self, make: Callable[[NativeContext], L]) -> L:
        """A completion queue of messages' own, with what polls it."""
        self._check_open()
        lane = make(self._context)
        self._lanes.append(lane)
        return lane

    def create_queue_pair(
        self, cq: NativeObject, caps: QueuePairCaps, shared: NativeSharedReceive
    ) -> NativeQueuePair:
        """Not connected yet; without receives of its own."""
        self._check_open()
        native = self.domain.native.create_queue_pair(cq, cq, caps, shared)
        self.queue_pairs += 1
        return native

    async def destroy_queue_pair(self, native: NativeQueuePair, timeout_s: float) -> None:
        """Drained. Raises DeviceError, DeadlineExceeded; it stays then."""
        await self._offload.run("destroying a message queue pair", timeout_s, native.close)
        self.queue_pairs -= 1

    def check_no_queue_pairs(self) -> None:
        """Raises DeviceError while there are any."""
        if self.queue_pairs:
            name, count = self._context.device, self.queue_pairs
            raise DeviceError(name, "close", 0, f"{count} message queue pairs left")

    def close_queues(self) -> None:
        """Shared receive queues, then their lanes; new ones may be made afterwards. Raises
        DeviceError and keeps the rest; a further call continues there.
        """
        self.check_no_queue_pairs()
        while self._shared:
            self._shared[-1].close()
            self._shared.pop()
        while self._lanes:
            self._lanes[-1].close()
            self._lanes.pop()

    def close(self) -> None:
        """As `close_queues`, for good."""
        self._closed = True
        self.close_queues()
        self.events.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"device {self._context.device}")
