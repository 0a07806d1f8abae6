"""One message queue pair: its life, what it posted, and the proof that the device is done with it.

Owns the count of its sends, which complete in order, and the drain: the error state, the flush of
every send, the event of the last receive where the device raises it, then an empty queue. Receives
belong to the shared queue and come back by completions alone; a flush never returns them. It does
not know what a packet is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Protocol

from ...errors import (
    ClosedError,
    DeadlineExceeded,
    DeviceError,
    OrbitError,
    Unquiesced,
)
from .. import records
from ..device import DeviceContext
from ..outcomes import take_exception
from ..provider import NativeQueuePair, NativeSharedReceive, QueuePairCaps
from ..queue_pair import (
    Connecting,
    LocalEnd,
    QueuePairState,
    RemoteEnd,
    completion_error,
    connect_steps,
)
from ..records import Completion, QueuePairAttributes, pack_send
from .message_lane import MessageLane
from .settings import RdmaMessagesConfig
from .wr_ids import MARKER, SEQUENCE_MASK, marker_id


class QueuePairClient(Protocol):
    """Who uses the queue pair. Called from the lane, or from the loop; never from within a post."""

    def on_sent(self, count: int) -> None:
        """The `count` oldest sends are with the peer."""

    def on_pass_end(self) -> None: ...

    def on_failed(self, cause: OrbitError) -> None:
        """Once, at the first failure: nothing is sent or delivered any more."""


class MessageQueuePair:
    """Made by `open`, on its device's lane. `deliver` is where packets go; its client sets it."""

    def __init__(
        self,
        native: NativeQueuePair,
        device: DeviceContext,
        lane: MessageLane,
        config: RdmaMessagesConfig,
        *,
        awaits_last_receive: bool,
    ) -> None:
        self._native = native
        self._device = device
        self._lane = lane
        self._config = config
        self._client: QueuePairClient | None = None
        self._connecting = Connecting()
        self._draining: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()  # something completed while draining
        self._drain_state = _DrainState(awaits_last_receive)
        self.deliver: Callable[[memoryview], None] = ignore_packet
        self.serial = lane.next_serial()
        self.touched = False
        self.posted = 0  # sends, ever
        self.completed = 0
        self.state = QueuePairState.IDLE

    @classmethod
    def open(
        cls,
        device: DeviceContext,
        lane: MessageLane,
        shared: NativeSharedReceive,
        send_slots: int,
        config: RdmaMessagesConfig,
    ) -> MessageQueuePair:
        """Not connected yet, and known to its lane. Raises DeviceError."""
        caps = _asked_caps(send_slots, config.inline_bytes)
        try:
            native = device.messaging.create_queue_pair(lane.source.cq, caps, shared)
        except DeviceError as error:
            if error.errno != errno.EINVAL or not config.inline_bytes:
                raise
            # More inline room than the device has at this depth: every packet goes by its slab.
            caps = _asked_caps(send_slots, 0)
            native = device.messaging.create_queue_pair(lane.source.cq, caps, shared)
        last = device.quirks.last_wqe_event
        self = cls(native, device, lane, config, awaits_last_receive=last)
        lane.add(self)
        return self

    @property
    def qp_num(self) -> int:
        return self._native.qp_num

    @property
    def inline_bytes(self) -> int:
        """Granted by the device; 0 when it has none."""
        return self._native.caps.inline_bytes

    @property
    def ready(self) -> bool:
        return self.state is QueuePairState.READY

    @property
    def outstanding(self) -> int:
        return self.posted - self.completed

    @property
    def lane(self) -> MessageLane:
        return self._lane

    @property
    def cause(self) -> OrbitError | None:
        """The first failure."""
        return self._drain_state.cause

    def attach(self, client: QueuePairClient) -> None:
        self._client = client

    async def connect(self, local: LocalEnd, remote: RemoteEnd, timeout_s: float) -> None:
        """INIT, RTR, RTS. Raises DeviceError, DeadlineExceeded, ClosedError (it failed meanwhile);
        the queue pair has failed then.
        """
        steps = connect_steps(local, remote, self._config)

        try:
            await self._connecting.run(
                "connecting a message queue pair",
                self._device.offload,
                self._native,
                steps,
                timeout_s,
            )
        except (DeviceError, DeadlineExceeded) as error:
            self.fail(error)
            raise
        if self.state is not QueuePairState.IDLE:
            raise ClosedError(f"message queue pair {self.qp_num}")
        self.state = QueuePairState.READY

    def post(self, requests: Sequence[bytes]) -> None:
        """One chain of sends, numbered from `posted`, the last of them signaled. A refusal fails
        the queue pair: what was accepted still completes, and nobody can tell how much that is.
        """
        if self.state is not QueuePairState.READY:
            return
        result = self._device.turn.post_send(self._native.native, requests)
        if result.errno == 0:
            self.posted += len(requests)
            self._lane.expect()
            return
        if result.accepted is None:
            self._drain_state.count_unknown = True
        else:
            self.posted += result.accepted
        self.fail(DeviceError(f"queue pair {self.qp_num}", "post_send", result.errno))

    def fail(self, cause: OrbitError) -> None:
        """No new work from now on. The first cause stays, and is told once, from the loop."""
        if self.state in (QueuePairState.IDLE, QueuePairState.READY):
            self.state = QueuePairState.FAILED
            self._drain_state.cause = cause
            self.deliver = ignore_packet
            asyncio.get_running_loop().call_soon(self._tell, cause)

    # --- what the lane says -----------------------------------------------------------------------

    def on_send_completion(self, completion: Completion) -> None:
        self._progress.set()
        if completion.wr_id & MARKER:
            self._drain_state.marker_flushed = True
            return
        ahead = (completion.wr_id - self.completed) & SEQUENCE_MASK
        if ahead >= self.outstanding:
            # Doubled; or of a chain whose accepted part is not known, and then the marker decides.
            self._lane.counters.unknown += not self._drain_state.count_unknown
            return
        # In order: whatever was posted before it is done, also where it asked for no completion.
        good = ahead + (completion.status == 0)
        self.completed += ahead + 1
        if good and self.state is QueuePairState.READY and self._client is not None:
            self._client.on_sent(good)
        if completion.status != 0:
            self.fail(completion_error(completion, self.qp_num, "SEND"))

    def on_receive_error(self, completion: Completion) -> None:
        self._progress.set()
        self.fail(completion_error(completion, self.qp_num, "RECV"))

    def on_pass_end(self) -> None:
        if self.state is QueuePairState.READY and self._client is not None:
            self._client.on_pass_end()

    def on_last_receive(self) -> None:
        """The device will take no further slab for this queue pair."""
        self._drain_state.last_receive = True
        self._progress.set()

    # --- the end ----------------------------------------------------------------------------------

    async def close(self, cause: OrbitError) -> None:
        """Drain, then destroy. Any number of callers; cancelling one changes nothing. Raises
        Unquiesced: a further call tries again.
        """
        self.fail(cause)
        if self.state is QueuePairState.CLOSED:
            return
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._close())
            self._draining.add_done_callback(take_exception)
        await asyncio.shield(self._draining)

    async def _close(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        try:
            await self._connecting.settle(deadline, self._config.drain_timeout_s)
            # Before it was ready nothing was posted, and no packet was taken.
            if self._connecting.succeeded and self.state is QueuePairState.FAILED:
                await self._to_error_state(deadline)
                await self._wait_flushed(deadline)
            self._lane.poll()  # packets that came before the error state: their slabs go back
            self.state = QueuePairState.DRAINED
            await self._device.messaging.destroy_queue_pair(
                self._native, self._config.drain_timeout_s
            )
        except (DeviceError, DeadlineExceeded) as error:
            self._draining = None  # a later call may find the device better
            raise Unquiesced(f"message queue pair {self.qp_num}", 0, str(error)) from error
        self._lane.remove(self)
        self.state = QueuePairState.CLOSED

    async def _to_error_state(self, deadline: float) -> None:
        """ERR, and a marker whose flush comes behind every send. One that is refused never flushes:
        then the sends' own completions are the only proof.
        """
        attributes = QueuePairAttributes(state=records.STATE_ERR)
        await self._device.offload.run(
            "moving a message queue pair to the error state",
            deadline - asyncio.get_running_loop().time(),
            lambda: self._native.modify(attributes),
        )
        marker = pack_send(marker_id(self.serial), 0, 0, 0)
        result = self._device.turn.post_send(self._native.native, [marker])
        self._drain_state.marker_posted = result.errno == 0

    async def _wait_flushed(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while not self._flushed:
            self._progress.clear()
            self._lane.poll()
            if self._progress.is_set():
                continue
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"the flush of {self.outstanding} sends", self._config.drain_timeout_s
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), left_s)

    @property
    def _flushed(self) -> bool:
        """The marker is the last of its queue pair in the completion queue: what came before it,
        packets included, has been dispatched once it is.
        """
        drain = self._drain_state
        sent = not (drain.marker_posted or drain.count_unknown or self.outstanding)
        return (drain.marker_flushed or sent) and drain.last_receive

    def _tell(self, cause: OrbitError) -> None:
        if self._client is not None:
            self._client.on_failed(cause)


class _DrainState:
    """What the end of a queue pair waits for."""

    __slots__ = ("cause", "count_unknown", "last_receive", "marker_flushed", "marker_posted")

    def __init__(self, awaits_last_receive: bool) -> None:
        self.cause: OrbitError | None = None
        self.marker_posted = False
        self.marker_flushed = False
        self.last_receive = not awaits_last_receive
        self.count_unknown = False  # a refused post did not say how much of it was accepted


def _asked_caps(send_slots: int, inline_bytes: int) -> QueuePairCaps:
    """One slot more than is used: the drain's marker needs room."""
    return QueuePairCaps(send_slots + 1, 0, inline_bytes)


def ignore_packet(packet: memoryview) -> None:
    """The link is over, or not started: the slab goes back, the packet nowhere."""
