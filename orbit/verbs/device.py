"""One opened device with its protection domain, and the order in which everything on it closes.

Owns context, domain, lanes, registrations and key history; hands out queue pairs and window
pools. Blocking verbs go through its offload threads. It knows no peers, no grants and no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import ClosedError, DeviceError, OrbitError, PathUnavailable
from ..model import Address, PathName, PathReason
from ..protocol.messages import RailHint
from .device_messaging import DeviceMessaging
from .device_regions import DeviceRegions
from .lane_group import LaneGroup, fitted
from .offload import Offload
from .poll_cpus import poll_cpus
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
from .rail_pairs import is_gid
from .rail_state import RailPlace, RailState
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
        state: RailState,
        config: RdmaPathConfig,
        offload: Offload,
    ) -> None:
        self.turn = turn
        self.limits = limits
        self.state = state
        self.config = config
        self.offload = offload
        self.windows = DomainWindows(domain, config.window_key_indices_max)
        self.lanes = LaneGroup(turn, context, config, lambda: poll_cpus(self.numa_node))
        self.regions = DeviceRegions(turn, domain, offload)
        self.messaging = DeviceMessaging(context, domain, offload)
        self._queue_pairs: set[BulkQueuePair] = set()  # alive
        self._context = context
        self._domain = domain
        self._closing: asyncio.Lock = asyncio.Lock()
        state.watch(self._fail_queue_pairs)

    @classmethod
    async def open(
        cls,
        provider: Provider,
        rail: RailHint,
        config: RdmaPathConfig,
        offload: Offload,
        pkey_index: int = 0,
        place: RailPlace | None = None,
    ) -> DeviceContext:
        """One whose port is down but has an address is paused. Raises DeviceError, PathUnavailable
        (port_down: without an address), having closed what it opened.
        """

        def open_all() -> DeviceContext:
            context = provider.open(rail.device)
            try:
                port = context.port(rail.port)
                if not port.active and not is_gid(rail.gid):
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
            state = RailState(context, current, place or RailPlace(), config, pkey_index)
            if not port.active:
                state.fence(f"port {rail.port} is {port.state}")
            return cls(provider.turn, context, domain, limits, state, granted, offload)

        return await offload.run("opening a device", _OPEN_TIMEOUT_S, open_all)

    @property
    def name(self) -> str:
        return self.rail.device

    @property
    def rail(self) -> RailHint:
        """Its address as of now. That of a paused one may be another when it serves again."""
        return self.state.rail

    @property
    def nic(self) -> int:
        return self.state.place.nic

    @property
    def numa_node(self) -> int:
        return self.state.place.numa_node

    @property
    def active(self) -> bool:
        """Queue pairs can be made. A paused one has its registrations, and nothing more."""
        return not self.state.paused

    @property
    def paused(self) -> str:
        """Why it is not active."""
        return self.state.paused

    @property
    def queue_pairs(self) -> int:
        """Alive, for bulk work."""
        return len(self._queue_pairs)

    @property
    def quirks(self) -> Quirks:
        return quirks_of(self.limits.vendor_id)

    @property
    def closed(self) -> bool:
        return not self._context.native

    def local_end(self, psn: int, *, remote_read: bool, remote_write: bool = False) -> LocalEnd:
        """For a connection that is made now. Raises DeviceError."""
        return self.state.local_end(psn, remote_read=remote_read, remote_write=remote_write)

    def create_queue_pair(
        self, on_failed: FailedHandler, inline_bytes: int = 0, *, trial: bool = False
    ) -> BulkQueuePair:
        """Not connected yet. A `trial` is made on a paused rail, too, to see if it can be resumed.
        Raises PathUnavailable (the rail is paused), DeviceError, BudgetExceeded (no lane has room),
        ClosedError.
        """
        self._check_open()
        if not trial:
            self.state.check_active()
        lane = self.lanes.place(asyncio.get_running_loop())
        try:
            native = self._domain.create_queue_pair(
                lane.cq, lane.cq, BulkQueuePair.asked_caps(self.config, inline_bytes)
            )
        except DeviceError:
            lane.repay(self.config.work_entries)
            raise
        made = BulkQueuePair(native, lane, self.turn, self.offload, self.config, on_failed)
        self._queue_pairs.add(made)
        return made

    async def destroy_queue_pair(self, queue_pair: BulkQueuePair) -> None:
        """Drained and without a bound window. Raises DeviceError, DeadlineExceeded."""
        await queue_pair.close()
        self._queue_pairs.discard(queue_pair)

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

    def _fail_queue_pairs(self, cause: OrbitError) -> None:
        """Their owners drain and destroy them."""
        for queue_pair in list(self._queue_pairs):
            queue_pair.fail(cause)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"device {self.name}")


def find_device(devices: Sequence[DeviceContext], gid: str) -> DeviceContext | None:
    """The one whose rail has that address; else the one whose rail had it: a peer goes on calling
    it what it was called when their epoch began.
    """
    known = [device for device in devices if device.state.answers_to(gid)]
    return next((d for d in known if d.rail.gid == gid), known[0] if known else None)


def _clamped(config: RdmaPathConfig, limits: DeviceLimits, port: PortFacts) -> RdmaPathConfig:
    """What this device can give: depths, one slot of each queue being kept for the drain, and the
    length of one READ.
    """
    depths = replace(
        config,
        piece_bytes=min(config.piece_bytes, port.max_message_bytes),
        send_depth=min(config.send_depth, limits.max_qp_wr - 1),
        recv_depth=min(config.recv_depth, limits.max_qp_wr - 1),
    )
    send_depth, recv_depth, cq_depth = fitted(depths, limits.max_cqe)
    return replace(depths, send_depth=send_depth, recv_depth=recv_depth, cq_depth=cq_depth)
