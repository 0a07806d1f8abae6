"""PacketWire over one message queue pair.

Owns the link's send slabs, one for each packet that may be on its way, and the chain of packets
that the next post takes. A packet is copied into its slab when it is pushed, so its source is free
at once; short ones go inline from there. It does not know what a packet says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import ClosedError, CompletionError, InternalError, OrbitError, PeerLost
from ...protocol.messaging.credits import CONTROL_SLABS
from ...transport.messages import PacketClient
from .. import records, status
from ..outcomes import take_exception
from ..records import pack_send
from .message_queue_pair import MessageQueuePair, ignore_packet
from .slabs import Slabs
from .wr_ids import send_id

logger = logging.getLogger("orbit.verbs")

# Statuses that are the peer's, or the road's to it, and no fault of this device.
_PEER_STATUSES = frozenset(
    {
        status.RETRY_EXC_ERR,
        status.RNR_RETRY_EXC_ERR,
        status.REM_INV_REQ_ERR,
        status.REM_ACCESS_ERR,
        status.REM_OP_ERR,
        status.WR_FLUSH_ERR,
    }
)
_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True)
class WireHooks:
    """What the transport hears of a wire, beside its link."""

    on_first: Callable[[], None]  # a first packet is about to be delivered: the link is ready
    on_lost: Callable[[OrbitError | None], None]  # after the link; None: closed by this side
    on_closed: Callable[[], None]  # the queue pair is gone, and all that belonged to it is free


class RcWire:
    """`slots` are this link's send slabs, `slab_bytes` the longest packet that both ends take."""

    def __init__(
        self,
        queue_pair: MessageQueuePair,
        slabs: Slabs,
        slots: tuple[int, ...],
        slab_bytes: int,
        peer: str,
        close_timeout_s: float,
        hooks: WireHooks,
    ) -> None:
        self._queue_pair = queue_pair
        self._slabs = slabs
        self._slots = slots
        self._slab_bytes = slab_bytes
        self._peer = peer
        self._close_timeout_s = close_timeout_s
        self._hooks = hooks
        self._client: PacketClient | None = None
        self._pushed = 0  # packets copied into slabs, ever
        self._chain: list[tuple[int, int]] = []  # (slab, length) of what the next post takes
        self._waiting: deque[bytes] = deque()  # control packets that found no free slab
        self._sent = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    @property
    def room(self) -> int:
        """Some slabs are kept apart, so that a control packet never waits for messages to be
        acknowledged.
        """
        return max(0, self._free - CONTROL_SLABS)

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def start(self, client: PacketClient) -> None:
        if self._client is not None:
            raise InternalError("a wire is started once")
        self._client = client
        self._queue_pair.attach(self)
        self._queue_pair.deliver = self._deliver_first

    def push(self, head: bytes, body: memoryview) -> None:
        if self._ending is not None:
            return
        if self._free <= 0 or self._waiting:
            self._waiting.append(head + bytes(body))
        else:
            self._load(head, body)

    def flush(self) -> None:
        chain = self._chain
        if not chain:
            return
        self._chain = []
        queue_pair, slabs = self._queue_pair, self._slabs
        serial, sequence = queue_pair.serial, queue_pair.posted
        inline, lkey = queue_pair.inline_bytes, slabs.lkey
        last = len(chain) - 1
        requests = [
            pack_send(
                send_id(serial, sequence + i),
                slabs.addresses[slab],
                lkey,
                length,
                # Asked for at the end of the chain alone: it completes what stands before it.
                (records.INLINE if length <= inline else 0) | (records.SIGNALED * (i == last)),
            )
            for i, (slab, length) in enumerate(chain)
        ]
        queue_pair.post(requests)

    def close(self) -> None:
        if self._ending is None:
            self.flush()
            self._queue_pair.deliver = ignore_packet
            self._end(None, flush_first=True)

    def abort(self, error: OrbitError | None = None) -> None:
        if self._ending is None:
            self._queue_pair.fail(error or _closed_here())
            self._end(error, flush_first=False)

    async def wait_closed(self) -> None:
        """Raises Unquiesced; a further call tries again."""
        if self._ending is None:
            return
        await asyncio.wait([self._ending])
        if self._ending.exception() is not None:
            await self._drain()

    # --- what the queue pair says -----------------------------------------------------------------

    def on_sent(self, count: int) -> None:
        was_full = self._free - count <= CONTROL_SLABS
        while self._waiting and self._free > 0:
            self._load(self._waiting.popleft(), _EMPTY)
        if self._client is None:
            return
        self._client.on_sent(count)
        if was_full and self.room > 0 and self._ending is None:
            self._client.on_room()
        self._sent.set()
        self.flush()  # of what had waited

    def on_pass_end(self) -> None:
        if self._client is not None and self._ending is None:
            self._client.on_pass_end()

    def on_failed(self, cause: OrbitError) -> None:
        self._sent.set()
        if self._ending is None:  # else this side ended it, and knows why
            self._end(_blame(self._peer, cause), flush_first=False)

    # --- within -----------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return len(self._slots) - (self._pushed - self._queue_pair.completed)

    def _load(self, head: bytes, body: memoryview) -> None:
        slab = self._slots[self._pushed % len(self._slots)]
        self._pushed += 1
        view, begin, nbytes = self._slabs.views[slab], len(head), len(head) + len(body)
        view[:begin] = head
        if nbytes > begin:
            view[begin:nbytes] = body
        self._chain.append((slab, nbytes))

    def _deliver_first(self, packet: memoryview) -> None:
        assert self._client is not None
        self._queue_pair.deliver = self._client.on_packet
        self._hooks.on_first()
        # Whoever heard of it may have ended the link.
        if self._ending is None:
            self._client.on_packet(packet)

    def _end(self, error: OrbitError | None, *, flush_first: bool) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._finish(error, flush_first))
        self._ending.add_done_callback(take_exception)

    async def _finish(self, error: OrbitError | None, flush_first: bool) -> None:
        if flush_first and not await self._wait_sent():
            logger.debug("%s: the last packets of a message link may be lost", self._peer)
        self._queue_pair.fail(error or _closed_here())
        try:
            if self._client is not None:
                self._client.on_lost(error)
            self._hooks.on_lost(error)
        except Exception:  # a client's bug must not keep the hardware busy
            logger.exception("the end of a message link could not be handled")
        await self._drain()

    async def _wait_sent(self) -> bool:
        """Whether the peer has everything, within the bound."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._close_timeout_s
        queue_pair = self._queue_pair
        while self._pushed > queue_pair.completed and queue_pair.ready:
            self._sent.clear()
            try:
                await asyncio.wait_for(self._sent.wait(), max(0.0, deadline - loop.time()))
            except TimeoutError:
                return False
        return queue_pair.ready

    async def _drain(self) -> None:
        await self._queue_pair.close(_closed_here())
        if not self._closed:
            self._closed = True
            self._hooks.on_closed()


def _closed_here() -> OrbitError:
    return ClosedError("the message link")


def _blame(peer: str, cause: OrbitError) -> OrbitError:
    """A completion error as the link's users understand it."""
    if isinstance(cause, CompletionError) and cause.status in _PEER_STATUSES:
        lost = PeerLost(peer, str(cause))
        lost.__cause__ = cause
        return lost
    return cause
