"""What one device holds for message links: slabs, the shared receive queue, the message lane.

Owns their opening at the first link, the promises of slabs to peers, and what the device's events
mean for the links on it. It knows no sessions and no packets.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import dataclass
from typing import Final

from ...errors import BudgetExceeded, DeviceError, OrbitError, PathUnavailable
from ...memory.budget import Budget, Charge
from ...model import PathName, PathReason
from ...protocol.messaging.credits import CONTROL_SLABS, SlabLedger, Windows
from ..async_events import AsyncEvent, AsyncEventKind
from ..completion_source import open_source
from ..device import DeviceContext
from ..provider import NativeContext
from .message_lane import MessageLane
from .message_queue_pair import MessageQueuePair
from .receive_queue import ReceiveQueue
from .settings import RdmaMessagesConfig
from .slabs import SendSlabs, Slabs, stride_of

logger = logging.getLogger("orbit.verbs")

LINK_SLABS_MIN: Final = 2 + CONTROL_SLABS  # one message, one reply, each control kind

_QUEUE_PAIR_ENDS: Final = frozenset(
    {AsyncEventKind.QP_FATAL, AsyncEventKind.QP_REQ_ERR, AsyncEventKind.QP_ACCESS_ERR}
)


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """What one link has of its rail until its queue pair is gone."""

    windows: Windows  # granted to the peer
    send_slabs: tuple[int, ...]


@dataclass(slots=True)
class RailParts:
    received: Slabs
    receives: ReceiveQueue
    sending: SendSlabs
    lane: MessageLane
    ledger: SlabLedger
    charge: Charge


class MessageRail:
    """All methods belong to one event loop."""

    def __init__(self, device: DeviceContext, config: RdmaMessagesConfig, budget: Budget) -> None:
        self.device = device
        self._config = config
        self._budget = budget
        self._parts: RailParts | None = None
        self._opening = asyncio.Lock()
        self._reserved: set[Reservation] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._port_up = True
        self._dead = False  # the device said that it is beyond use
        # From the start: a port may go down before there is a link.
        device.messaging.events.watch(self._on_event)
        device.state.watch(self._on_fenced, self._on_resumed)

    @property
    def parts(self) -> RailParts | None:
        """None before the first link."""
        return self._parts

    @property
    def registered_bytes(self) -> int:
        parts = self._parts
        return 0 if parts is None else parts.received.nbytes + parts.sending.slabs.nbytes

    def availability(self) -> PathReason:
        if self._closed:
            return PathReason.DRAINING
        if self._dead:
            return PathReason.DEVICE_FAILED
        return self.device.state.reason if self._port_up else PathReason.PORT_DOWN

    async def ensure(self) -> None:
        """Open what is not open yet; what broke is replaced once its last link is gone. Raises
        PathUnavailable.
        """
        async with self._opening:
            reason = self.availability()
            if reason is not PathReason.OK:
                raise _unavailable(reason, self.device.name)
            parts = self._parts
            if parts is not None and parts.lane.broken is not None:
                if self._reserved:
                    raise _unavailable(PathReason.DEVICE_FAILED, str(parts.lane.broken))
                await self._close_parts()
            if self._parts is None:
                self._parts = await self._open()

    def reserve(self, allowed: Windows) -> Reservation:
        """Receive slabs for what this side grants, send slabs for what the peer allows. Raises
        PathUnavailable(no_slabs).
        """
        parts = self._open_parts()
        windows = parts.ledger.promise(self._config.limits.windows)
        if windows is None:
            raise _unavailable(PathReason.NO_SLABS, f"{self.device.name}: the receive queue")
        wanted = min(allowed.slabs, self._config.link_slabs_max)
        slabs = parts.sending.take(wanted, LINK_SLABS_MIN)
        if not slabs:
            parts.ledger.take_back(windows)
            raise _unavailable(PathReason.NO_SLABS, f"{self.device.name}: the send slabs")
        reservation = Reservation(windows, slabs)
        self._reserved.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Its queue pair is destroyed and its completions are drained."""
        if self._parts is None or reservation not in self._reserved:
            return
        self._reserved.discard(reservation)
        self._parts.ledger.take_back(reservation.windows)
        self._parts.sending.give_back(reservation.send_slabs)

    def create_queue_pair(self, reservation: Reservation) -> MessageQueuePair:
        """Raises DeviceError."""
        parts = self._open_parts()
        return MessageQueuePair.open(
            self.device,
            parts.lane,
            parts.receives.shared,
            len(reservation.send_slabs),
            self._config,
        )

    @property
    def send_slabs(self) -> Slabs:
        return self._open_parts().sending.slabs

    def poll(self) -> None:
        """Dispatch what has arrived."""
        if self._parts is not None:
            self._parts.lane.poll()

    async def close(self) -> None:
        """Every link is gone. Raises DeviceError and keeps the rest; a further call continues."""
        async with self._opening:
            self._closed = True
            self.device.messaging.events.unwatch(self._on_event)
            self.device.state.unwatch(self._on_fenced)
            if self._tasks:
                await asyncio.wait(set(self._tasks))
            if self._parts is not None:
                await self._close_parts()

    # --- opening and closing ----------------------------------------------------------------------

    async def _open(self) -> RailParts:
        config = self._config
        count, send_count, depth = self._sizes()
        slab_bytes = config.limits.slab_bytes
        try:
            charge = self._budget.charge((count + send_count) * stride_of(slab_bytes))
        except BudgetExceeded as error:
            raise _unavailable(PathReason.BUDGET, str(error)) from error
        opened: list[Slabs] = []
        try:
            for number in (count, send_count):
                opened.append(await Slabs.open(self.device, number, slab_bytes))
            received, sending = opened
            return await self._open_queues(received, sending, charge, depth)
        except (DeviceError, TimeoutError) as error:
            await self._undo(opened, charge)
            memory = isinstance(error, DeviceError) and error.errno == errno.ENOMEM
            reason = PathReason.BUDGET if memory else PathReason.DEVICE_FAILED
            raise _unavailable(reason, str(error)) from error

    async def _open_queues(
        self, received: Slabs, sending: Slabs, charge: Charge, depth: int
    ) -> RailParts:
        device, config = self.device, self._config
        shared = device.messaging.create_shared_receive(received.count)
        receives = ReceiveQueue(device.turn, shared, received, device.offload)
        loop = asyncio.get_running_loop()

        def make(context: NativeContext) -> MessageLane:
            spins = config.effective_spin_us > 0
            source = open_source(device.turn, context, depth, polling=config.polling, spins=spins)
            return MessageLane(source, receives, config, loop)

        lane = device.messaging.open_lane(make)
        receives.fill()
        await receives.arm()
        lane.start()
        logger.info(
            "%s: %d receive slabs of %d bytes for messages; a dead peer is noticed after %.2f s",
            device.name,
            received.count,
            received.slab_bytes,
            config.detection_s,
        )
        return RailParts(
            received, receives, SendSlabs(sending), lane, SlabLedger(received.count), charge
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Receive slabs, send slabs and completion entries: one for every receive, send and drain
        marker at the same time, since an overrun loses completions silently.
        """
        limits, config = self.device.limits, self._config
        count = min(config.receive_slabs, limits.max_shared_receives or config.receive_slabs)
        count = min(count, limits.max_cqe // 2)
        send_count = min(config.send_slabs, (limits.max_cqe - count) * 3 // 4)
        return count, send_count, count + send_count + send_count // LINK_SLABS_MIN + 1

    async def _close_parts(self) -> None:
        parts = self._parts
        if parts is None:
            return
        parts.lane.poll()  # what is left is late, and counted
        self.device.messaging.close_queues()
        await parts.received.close()
        await parts.sending.slabs.close()
        parts.charge.repay()
        self._parts = None

    async def _undo(self, opened: list[Slabs], charge: Charge) -> None:
        try:
            self.device.messaging.close_queues()
            for slabs in opened:
                await slabs.close()
        except (DeviceError, TimeoutError) as error:
            # Still the device's, which tries again when it closes; the charge stays as well.
            logger.warning("%s: undoing message queues: %s", self.device.name, error)
            return
        charge.repay()

    def _open_parts(self) -> RailParts:
        if self._parts is None:
            raise _unavailable(PathReason.DRAINING, self.device.name)
        return self._parts

    # --- events -----------------------------------------------------------------------------------

    def _on_event(self, event: AsyncEvent) -> None:
        parts = self._parts
        kind = event.kind
        if kind is AsyncEventKind.DEVICE_FATAL:
            self._dead = True
            self._fail_all(f"event {kind}")
        elif kind in (AsyncEventKind.PORT_ERR, AsyncEventKind.PORT_ACTIVE):
            if event.port == self.device.rail.port:
                self._port_up = kind is AsyncEventKind.PORT_ACTIVE
                if not self._port_up:
                    self._fail_all(f"event {kind}, port {event.port}")
        elif parts is None:
            return
        elif kind is AsyncEventKind.SRQ_LIMIT_REACHED:
            if event.native == parts.receives.native:
                task = asyncio.get_running_loop().create_task(parts.receives.limit_reached())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        elif kind is AsyncEventKind.CQ_ERR or kind is AsyncEventKind.SRQ_ERR:
            if event.native in (parts.lane.source.cq.native, parts.receives.native):
                parts.lane.fail_links(self._error(f"event {kind}"))
        else:
            self._on_queue_pair_event(parts, event)

    def _on_queue_pair_event(self, parts: RailParts, event: AsyncEvent) -> None:
        end = parts.lane.find(event.qp_num)
        if end is None:
            return
        if event.kind is AsyncEventKind.QP_LAST_WQE_REACHED:
            end.on_last_receive()
        elif event.kind in _QUEUE_PAIR_ENDS:
            end.fail(self._error(f"event {event.kind}, queue pair {event.qp_num}"))

    def _on_resumed(self) -> None:
        self._port_up = True  # whether or not an event said so

    def _fail_all(self, detail: str) -> None:
        self._on_fenced(self._error(detail))

    def _on_fenced(self, cause: OrbitError) -> None:
        if self._parts is not None:
            for end in self._parts.lane.ends:
                end.fail(cause)

    def _error(self, detail: str) -> OrbitError:
        return DeviceError(self.device.name, "messages", 0, detail)


def _unavailable(reason: PathReason, detail: str) -> PathUnavailable:
    return PathUnavailable(PathName.RDMA, reason, detail)
