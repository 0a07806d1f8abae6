"""A node's way to itself: the message link without a wire.

Frames are delivered from the event loop, in order, in memory of their own, so that a handler cannot
tell where a call came from. What no handler has finished is bounded as on any other link.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from ...errors import ClosedError, NotAdmitted, OrbitError
from ...model import PathName
from ...protocol.messaging.packets import PacketKind
from ...transport.messages import LinkClient, LinkStatistics, OutgoingFrame

# What a message costs beside its payload and header, as on every link.
_FRAME_CHARGE_BYTES = 512


class LocalLink:
    """Implements transport.messages.MessageLink; both its ends are `client`."""

    transport = PathName.LOCAL

    def __init__(self, client: LinkClient, ceiling_bytes: int, inbound_bytes_max: int) -> None:
        self._client = client
        self._ceiling_bytes = ceiling_bytes
        self._inbound_bytes_max = inbound_bytes_max
        self._messages: OrderedDict[OutgoingFrame, None] = OrderedDict()
        self._replies: OrderedDict[OutgoingFrame, None] = OrderedDict()
        self._unconsumed_bytes = 0
        self._frames = 0
        self._bytes = 0
        self._scheduled = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._touched_at = self._loop.time()

    @property
    def ceiling_bytes(self) -> int:
        return self._ceiling_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, frame: OutgoingFrame) -> None:
        if self._closed:
            frame.failed(NotAdmitted("this node", "it is closed"))
            return
        queue = self._messages if frame.kind == PacketKind.MESSAGE else self._replies
        queue[frame] = None
        self._schedule()

    def withdraw(self, frame: OutgoingFrame) -> bool:
        for queue in (self._messages, self._replies):
            if frame in queue:
                del queue[frame]
                return True
        return False

    def consumed(self, charge: int) -> None:
        self._unconsumed_bytes -= charge
        self._schedule()

    def renewed(self, charge: int) -> None:
        self._unconsumed_bytes += charge

    async def ping(self, timeout_s: float) -> float:
        if self._closed:
            raise ClosedError("the link of this node to itself")
        return 0.0

    async def goodbye(self, timeout_s: float) -> bool:
        return False  # it costs nothing to keep

    def abort(self, error: OrbitError | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        known = NotAdmitted("this node", "it is closed" if error is None else str(error))
        for queue in (self._replies, self._messages):
            while queue:
                frame, _ = queue.popitem(last=False)
                frame.failed(known)
        self._loop.call_soon(self._client.on_link_lost, self, error)

    async def wait_closed(self) -> None:
        return

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            frames_sent=self._frames,
            frames_received=self._frames,
            bytes_sent=self._bytes,
            bytes_received=self._bytes,
            queued_frames=len(self._messages) + len(self._replies),
            unconsumed_bytes=self._unconsumed_bytes,
        )

    @property
    def idle_s(self) -> float:
        if self._messages or self._replies or self._unconsumed_bytes:
            return 0.0
        return self._loop.time() - self._touched_at

    def _schedule(self) -> None:
        if not self._scheduled and (self._messages or self._replies):
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        # What is sent meanwhile waits for the next turn of the loop, so that nobody starves.
        self._scheduled = False
        for queue in (self._replies, self._messages):
            for _ in range(len(queue)):
                withheld = queue is self._messages and (
                    self._unconsumed_bytes >= self._inbound_bytes_max
                )
                if self._closed or withheld or not queue:
                    break
                frame, _ = queue.popitem(last=False)
                self._pass_on(frame)
        if self._replies or self._unconsumed_bytes < self._inbound_bytes_max:
            self._schedule()

    def _pass_on(self, frame: OutgoingFrame) -> None:
        self._frames += 1
        self._bytes += frame.nbytes
        self._touched_at = self._loop.time()
        charge = 0
        if frame.kind == PacketKind.MESSAGE:
            charge = frame.nbytes + _FRAME_CHARGE_BYTES
            self._unconsumed_bytes += charge
        payload = memoryview(bytes(frame.payload))
        frame.posted()
        frame.done()
        self._client.on_frame(self, frame.kind, frame.header, payload, charge)
