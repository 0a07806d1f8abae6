"""One opened device with its protection domains, and the order in which everything on it closes.

Owns context, domains and lanes; makes queue pairs, in the domain that new work goes to. Blocking
verbs go through its offload threads. It knows no peers, no grants and no messages.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ClosedError, ConfigError, DeviceError, OrbitError, PathUnavailable
from ..model import PathName, PathReason
from ..protocol.messages import RailHint
from .device_messaging import DeviceMessaging
from .domain import Domain
from .lane_group import LaneGroup, fitted
from .offload import Offload
from .poll_cpus import poll_cpus
from .provider import (
    DeviceLimits,
    NativeContext,
    NativeDomain,
    NativeObject,
    NativeQueuePair,
    PortFacts,
    Provider,
)
from .queue_pair import BulkQueuePair, FailedHandler, LocalEnd
from .quirks import Quirks, quirks_of
from .rail_pairs import is_gid
from .rail_state import RailPlace, RailState
from .settings import RdmaPathConfig
from .turn import Turn

_OPEN_TIMEOUT_S = 30.0  # the first one loads the verbs library and its drivers


class DeviceContext:
    """Everything that lives on one device. Made by `DeviceContext.open`.

    The protection domain for bulk work can be replaced: queue pairs, registrations and windows
    stay in the one they were made in, and completion queues, events and the rail's state are common
    to all. Messages have a domain of their own, since they use no keys up and never leave.
    """

    def __init__(
        self,
        turn: Turn,
        context: NativeContext,
        domains: tuple[NativeDomain, NativeDomain],
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
        self.lanes = LaneGroup(turn, context, config, lambda: poll_cpus(self.numa_node))
        self.key_count = 0  # window keys used up in domains that are gone
        self._context = context
        self.domain, messages = (self._made(native) for native in domains)  # bulk: new work
        self.messaging = DeviceMessaging(context, messages, offload)
        self._domains = [self.domain]  # for bulk, oldest first
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
                granted = _clamped(rail.device, config, limits, port)
                domains = _allocate_domains(context)
            except BaseException:
                context.close()
                raise
            state = RailState(context, current, place or RailPlace(), config, pkey_index)
            if not port.active:
                state.fence(f"port {rail.port} is {port.state}")
            return cls(provider.turn, context, domains, limits, state, granted, offload)

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
        return sum(len(domain.queue_pairs) for domain in self._domains)

    @property
    def quirks(self) -> Quirks:
        return quirks_of(self.limits.vendor_id)

    @property
    def closed(self) -> bool:
        return not self._context.native

    def local_end(self, psn: int, *, remote_read: bool, remote_write: bool = False) -> LocalEnd:
        """For a connection that is made now. Raises DeviceError."""
        end = self.state.local_end(psn, remote_read=remote_read, remote_write=remote_write)
        return replace(
            end,
            initiator_depth_max=self.limits.max_init_rd_atomic,
            responder_depth_max=self.limits.max_rd_atomic,
        )

    def create_queue_pair(
        self, on_failed: FailedHandler, inline_bytes: int = 0, *, trial: bool = False
    ) -> BulkQueuePair:
        """In `domain`, not connected yet. A `trial` is made on a paused rail, too, to see if it can
        be resumed. Raises PathUnavailable (the rail is paused), DeviceError, BudgetExceeded (no
        lane has room), ClosedError.
        """
        self._check_open()
        if not trial:
            self.state.check_active()
        lane = self.lanes.place(asyncio.get_running_loop())
        try:
            native = _queue_pair(self.domain.native, lane.cq, self.config, inline_bytes)
        except DeviceError:
            lane.repay(self.config.work_entries)
            raise
        made = BulkQueuePair(native, lane, self.turn, self.offload, self.config, on_failed)
        self.domain.queue_pairs.add(made)
        return made

    async def destroy_queue_pair(self, queue_pair: BulkQueuePair) -> None:
        """Drained and without a bound window. Raises DeviceError, DeadlineExceeded."""
        await queue_pair.close()
        for domain in self._domains:
            domain.forget(queue_pair)

    # --- protection domains ---

    @property
    def domains(self) -> tuple[Domain, ...]:
        """For bulk work, oldest first: all that are open."""
        return tuple(self._domains)

    @property
    def old_domains(self) -> tuple[Domain, ...]:
        """Those that new work does not go to any more."""
        return tuple(domain for domain in self._domains if domain.left)

    def open_domain(self) -> Domain:
        """One that nothing goes to before `enter`. Raises DeviceError, ClosedError."""
        self._check_open()
        domain = self._made(self._context.allocate_domain())
        self._domains.append(domain)
        return domain

    def enter(self, domain: Domain) -> None:
        """New work goes there from now on."""
        self.domain.left_at = asyncio.get_running_loop().time()
        self.domain = domain

    async def close_domain(self, domain: Domain) -> None:
        """One without queue pairs that is not the current one. Raises DeviceError, DeadlineExceeded
        and keeps it.
        """
        await domain.close()
        if domain in self._domains:
            self._domains.remove(domain)
            self.key_count += domain.windows.history.keys_used

    @property
    def region_bytes_max(self) -> int:
        """The longest registration: the device's limit, or the lower one of the configuration."""
        limits = (self.limits.max_region_bytes, self.config.mr_bytes_max)
        return min((limit for limit in limits if limit), default=1 << 63)

    async def close(self) -> None:
        """Queue pairs and their windows are gone by now. In order, once: shared receive
        queues, completion queues and channels, parked windows, registrations, domains, context.

        Raises DeviceError and keeps the rest; a further call continues there.
        """
        async with self._closing:
            if self.closed:
                return
            if self.queue_pairs:
                raise DeviceError(self.name, "close", 0, f"{self.queue_pairs} queue pairs left")
            self.messaging.check_no_queue_pairs()
            self.messaging.close()
            self.lanes.close()
            for domain in (*self._domains, self.messaging.domain):
                await domain.close()
            timeout_s = self.config.drain_timeout_s
            await self.offload.run("closing a device", timeout_s, self._context.close)

    def _made(self, native: NativeDomain) -> Domain:
        return Domain(
            self.name, native, self.turn, self.offload, self.config, self.region_bytes_max
        )

    def _fail_queue_pairs(self, cause: OrbitError) -> None:
        """Their owners drain and destroy them."""
        for domain in self._domains:
            for queue_pair in list(domain.queue_pairs):
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


def _allocate_domains(context: NativeContext) -> tuple[NativeDomain, NativeDomain]:
    """Both or none. Raises DeviceError."""
    first = context.allocate_domain()
    try:
        return first, context.allocate_domain()
    except BaseException:
        first.close()
        raise


def _clamped(
    name: str, config: RdmaPathConfig, limits: DeviceLimits, port: PortFacts
) -> RdmaPathConfig:
    """What this device can give: depths, one slot of each queue being kept for the drain, and the
    length of one READ. Raises DeviceError: it can give too little.
    """
    try:
        depths = replace(
            config,
            piece_bytes=min(config.piece_bytes, port.max_message_bytes),
            send_depth=min(config.send_depth, limits.max_qp_wr - 1),
            recv_depth=min(config.recv_depth, limits.max_qp_wr - 1),
        )
        send_depth, recv_depth, cq_depth = fitted(depths, limits.max_cqe)
        return replace(depths, send_depth=send_depth, recv_depth=recv_depth, cq_depth=cq_depth)
    except ConfigError as error:
        has = f"it has max_qp_wr {limits.max_qp_wr} and max_cqe {limits.max_cqe}: {error}"
        raise DeviceError(name, "query_device", 0, has) from error


def _queue_pair(
    domain: NativeDomain, cq: NativeObject, config: RdmaPathConfig, inline_bytes: int
) -> NativeQueuePair:
    """No device says how much inline room it has: one that refuses what was asked is asked for
    none. Raises DeviceError.
    """
    try:
        return domain.create_queue_pair(cq, cq, BulkQueuePair.asked_caps(config, inline_bytes))
    except DeviceError as error:
        if error.errno != errno.EINVAL or not inline_bytes:
            raise
    return domain.create_queue_pair(cq, cq, BulkQueuePair.asked_caps(config, 0))
