"""One opened device with its protection domain, and the order in which everything on it closes.

Owns context, domain, lanes, registrations and key history; hands out queue pairs and window
pools. Blocking verbs go through its offload threads. It knows no peers, no grants and no messages.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import replace

from ..errors import ClosedError, DeviceError, PathUnavailable
from ..model import Address, PathName, PathReason
from ..protocol.messages import RailHint
from .device_messaging import DeviceMessaging
from .device_regions import DeviceRegions
from .lane import LaneGroup
from .offload import Offload
from .provider import (
    DeviceLimits,
    NativeContext,
    NativeDomain,
    NativeRegion,
    PortFacts,
    Provider,
)
from .queue_pair import BulkQueuePair, FailedHandler, LocalEnd
from .quirks import Quirks, quirks_of
from .settings import RdmaPathConfig
from .turn import Turn
from .windows import DomainWindows, WindowPool

_OPEN_TIMEOUT_S = 30.0  # the first one loads the verbs library and its drivers


class DeviceContext:
    """Everything that lives in one protection domain. Made by `DeviceContext.open`."""

    def __init__(
        self,
        turn: Turn,
        context: NativeContext,
        domain: NativeDomain,
        limits: DeviceLimits,
        rail: RailHint,
        config: RdmaPathConfig,
        offload: Offload,
        pkey_index: int,
    ) -> None:
        self.turn = turn
        self.limits = limits
        self.rail = rail
        self.config = config
        self.offload = offload
        self.windows = DomainWindows(domain, config.window_key_indices_max)
        self.lanes = LaneGroup(
            turn, context, min(config.cq_depth, limits.max_cqe), config.effective_spin_us
        )
        self.regions = DeviceRegions(turn, domain, offload)
        self.queue_pairs = 0  # alive
        self.messaging = DeviceMessaging(context, domain, offload)
        self._pkey_index = pkey_index
        self._context = context
        self._domain = domain
        self._closing: asyncio.Lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        provider: Provider,
        rail: RailHint,
        config: RdmaPathConfig,
        offload: Offload,
        pkey_index: int = 0,
    ) -> DeviceContext:
        """Raises DeviceError, PathUnavailable (port_down), having closed what it opened."""

        def open_all() -> DeviceContext:
            context = provider.open(rail.device)
            try:
                port = context.port(rail.port)
                if not port.active:
                    raise PathUnavailable(
                        PathName.RDMA,
                        PathReason.PORT_DOWN,
                        f"{rail.device} port {rail.port} is {port.state}",
                    )
                limits = context.limits()
                current = replace(rail, mtu=port.mtu, lid=port.lid, link_layer=port.link_layer)
                granted = _clamped(config, limits, port)
                domain = context.allocate_domain()
            except BaseException:
                context.close()
                raise
            return cls(
                provider.turn, context, domain, limits, current, granted, offload, pkey_index
            )

        return await offload.run("opening a device", _OPEN_TIMEOUT_S, open_all)

    @property
    def name(self) -> str:
        return self.rail.device

    @property
    def quirks(self) -> Quirks:
        return quirks_of(self.limits.vendor_id)

    @property
    def closed(self) -> bool:
        return not self._context.native

    def local_end(self, psn: int, *, remote_read: bool, remote_write: bool = False) -> LocalEnd:
        """For a connection that is made now: the GID is looked up by value, since its index is
        given to another address when an interface is reconfigured. Raises DeviceError.
        """
        port, gid = self.rail.port, ipaddress.IPv6Address(self.rail.gid)
        indexes = [self.rail.gid_index, *range(self._context.port(port).gid_count)]
        for index in indexes:
            if ipaddress.IPv6Address(self._context.gid(port, index)) == gid:
                return LocalEnd(port, index, self._pkey_index, psn, remote_read, remote_write)
        raise DeviceError(self.name, "query_gid", 0, f"port {port} has lost its GID {gid}")

    def create_queue_pair(self, on_failed: FailedHandler, inline_bytes: int = 0) -> BulkQueuePair:
        """Not connected yet. Raises DeviceError, ClosedError."""
        self._check_open()
        entries = BulkQueuePair.completion_entries(self.config)
        lane = self.lanes.place(entries, asyncio.get_running_loop())
        try:
            native = self._domain.create_queue_pair(
                lane.cq, lane.cq, BulkQueuePair.asked_caps(self.config, inline_bytes)
            )
        except DeviceError:
            lane.repay(entries)
            raise
        self.queue_pairs += 1
        return BulkQueuePair(native, lane, self.turn, self.offload, self.config, on_failed)

    async def destroy_queue_pair(self, queue_pair: BulkQueuePair) -> None:
        """Drained and without a bound window. Raises DeviceError, DeadlineExceeded."""
        await queue_pair.close()
        self.queue_pairs -= 1

    def window_pool(self) -> WindowPool:
        """For one queue pair that exists already."""
        self._check_open()
        return self.windows.pool()

    @property
    def region_bytes_max(self) -> int:
        """The longest registration: the device's limit, or the lower one of the configuration."""
        limits = (self.limits.max_region_bytes, self.config.mr_bytes_max)
        return min((limit for limit in limits if limit), default=1 << 63)

    async def register(self, address: Address, length: int, access: int) -> NativeRegion:
        """Raises DeviceError, DeadlineExceeded, ClosedError. Cancelling the wait does not leak the
        registration: `close` undoes it.
        """
        self._check_open()
        return await self.regions.register(address, length, access)

    async def deregister(self, region: NativeRegion) -> None:
        """Raises DeviceError (a window is still bound in it); the region stays then."""
        await self.regions.deregister(region)

    async def close(self) -> None:
        """Queue pairs and their windows are gone by now. In order, once: parked windows, shared
        receive queues, completion queues and channels, registrations, domain, context.

        Raises DeviceError and keeps the rest; a further call continues there.
        """
        async with self._closing:
            if self.closed:
                return
            if self.queue_pairs:
                raise DeviceError(self.name, "close", 0, f"{self.queue_pairs} queue pairs left")
            self.messaging.check_no_queue_pairs()
            await self.regions.settle()
            self.windows.parked.close()
            self.messaging.close()
            self.lanes.close()
            await self.regions.close()
            await self._run_close(self._domain.close)
            await self._run_close(self._context.close)

    async def _run_close(self, close: Callable[[], None]) -> None:
        await self.offload.run("closing a device", self.config.drain_timeout_s, close)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"device {self.name}")


def _clamped(config: RdmaPathConfig, limits: DeviceLimits, port: PortFacts) -> RdmaPathConfig:
    """What this device can give: depths, one slot of each queue being kept for the drain, and the
    length of one READ.
    """
    return replace(
        config,
        piece_bytes=min(config.piece_bytes, port.max_message_bytes),
        send_depth=min(config.send_depth, limits.max_qp_wr - 1),
        recv_depth=min(config.recv_depth, limits.max_qp_wr - 1),
    )
