"""The TCP message link: packets as frames of the epoch's control connection.

`TcpPacketWire` is one link's wire, `TcpMessages` opens links and routes what arrives. A link needs
no opening: both hellos have said what each side grants, so the first packet opens it on the other
side. One that ends otherwise than by an agreed goodbye takes its epoch along, since nothing else
could tell the peer which packets belong to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from typing import Final

from ..errors import (
    BusyError,
    ClosedError,
    OrbitError,
    PathUnavailable,
    PeerLost,
    PeerProtocolError,
)
from ..model import PathName, PathReason
from ..protocol.framing import FrameKind
from ..protocol.messages import Limits
from ..protocol.messaging.credits import Windows
from ..protocol.messaging.packets import FIXED_BYTES, HEADER_BYTES_MAX, LENGTH_BYTES
from ..protocol.messaging.segments import Assembler
from .interface import CallHandler, Session
from .message_link import LinkTerms, PacketLink
from .messages import LinkClient, LinkLimits, LinkOpened, MessageLink, PacketClient

# Packets wait in the link's backlog up to this, so that a control call is not stuck behind more.
BACKLOG_BYTES_MAX: Final = 256 << 10
# No frame is segmented here: a stream has no slabs.
_SLAB_EXTRA_BYTES: Final = HEADER_BYTES_MAX + FIXED_BYTES + LENGTH_BYTES
# Packets that follow each other faster than this are a burst: one system call for several of them
# costs less than it delays the second. Far below the round trip to another process.
BURST_S: Final = 20e-6
_GATHERED_MAX: Final = 16  # a longer wait would leave the peer idle
_GATHERED_BYTES_MAX: Final = 32 << 10  # a call for more than this is no dearer for each byte
# What one read brought counts as several passes, so that credit and answers leave while the rest is
# still worked on, and neither end waits for the other.
_PASS_PACKETS_MAX: Final = 16
_KIND: Final = bytes((FrameKind.PACKET,))
_CREDITS_MAX: Final = 1 << 16


class TcpPacketWire:
    """PacketWire on one session. `on_detached` runs when packets are no longer its own."""

    def __init__(
        self, session: Session, slab_bytes: int, on_detached: Callable[[TcpPacketWire], None]
    ) -> None:
        self.session = session
        self.slab_bytes = slab_bytes
        self._link = session.link
        self._on_detached = on_detached
        self._client: PacketClient | None = None
        self._gathered: list[tuple[bytes, memoryview]] = []
        self._gathered_bytes = 0
        self._batches: deque[tuple[int, int]] = deque()  # where each ends on the stream; packets
        self._left_at = float("-inf")  # when packets were last handed to the link
        self._leaving = False  # what is gathered leaves at the end of the loop's pass
        self.delivered = 0  # packets, since the last pass ended
        self._closed = False  # nothing is sent any more
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def room(self) -> int:
        if self._closed:
            return 0
        waiting = self._link.accepted_bytes - self._link.taken_bytes + self._gathered_bytes
        return 1 if waiting < BACKLOG_BYTES_MAX else 0

    def start(self, client: PacketClient) -> None:
        self._client = client

    def push(self, head: bytes, body: memoryview) -> None:
        self._gathered.append((_KIND + head, body))
        self._gathered_bytes += len(head) + len(body)

    def flush(self) -> None:
        """The first packet leaves at once; those close behind it leave together, at the end of the
        loop's pass or as soon as they are worth a system call.
        """
        few = len(self._gathered) < _GATHERED_MAX and self._gathered_bytes < _GATHERED_BYTES_MAX
        if few and self._leaving:
            return
        now = self._loop.time()
        if few and now - self._left_at < BURST_S:
            self._leaving = True
            self._loop.call_soon(self._leave_late)
            return
        self._left_at = now
        self._leave()

    def _leave_late(self) -> None:
        self._leaving = False
        self._left_at = self._loop.time()
        self._leave()

    def _leave(self) -> None:
        frames, self._gathered = self._gathered, []
        self._gathered_bytes = 0
        if not frames or self._closed:
            return
        try:
            self._link.send_gathered(frames)
        except ClosedError:  # the session is about to report its end
            self._closed = True
            return
        except BusyError as error:  # it reads neither packets nor calls
            self.abort(PeerLost(str(self.session.peer), str(error)))
            return
        self._batches.append((self._link.accepted_bytes, len(frames)))
        self._confirm()

    def close(self) -> None:
        """The session lives on. What is still in its backlog leaves; no frame is among it."""
        if self._closed:
            return
        self._leave()
        self._closed = True
        self._on_detached(self)
        self._loop.call_soon(self.on_lost, None)

    def abort(self, error: OrbitError | None = None) -> None:
        self._closed = True
        self.session.abort(error or ClosedError(f"the message link to {self.session.peer}"))

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)

    # --- what the session tells -------------------------------------------------------------------

    def on_pass_end(self) -> None:
        if self._client is not None and self.delivered:
            self.delivered = 0
            self._left_at = float("-inf")  # what this pass brought about is no burst
            self._client.on_pass_end()

    def on_taken(self) -> None:
        self._confirm()
        if self._client is not None and self.room:
            self._client.on_room()

    def on_lost(self, error: OrbitError | None) -> None:
        if self._gone.done():
            return
        self._closed = True
        self._batches.clear()
        self._gathered.clear()
        self._gone.set_result(None)
        if self._client is not None:
            self._client.on_lost(error)

    def _confirm(self) -> None:
        if self._client is None or self._gone.done():
            return
        taken, count = self._link.taken_bytes, 0
        while self._batches and self._batches[0][0] <= taken:
            count += self._batches.popleft()[1]
        if count:
            self._client.on_sent(count)


class TcpMessages:
    """MessageTransport and PacketRoute. What a node grants stands in the hello that it sent."""

    name = PathName.TCP

    def __init__(self, inbound_bytes_max: int) -> None:
        self._inbound_bytes_max = inbound_bytes_max
        self._client: LinkClient | None = None
        self._on_opened: LinkOpened | None = None
        self._open: dict[Session, tuple[TcpPacketWire, PacketLink]] = {}
        self._closed = False

    def availability(self, session: Session) -> PathReason:
        if not session.local_hello.limits.message_credits:
            return PathReason.NOT_CONFIGURED
        return PathReason.OK if _takes(session.peer_hello.limits) else PathReason.PEER_WITHOUT

    async def open(self, session: Session, client: LinkClient) -> MessageLink:
        reason = self.availability(session)
        if reason is not PathReason.OK:
            raise PathUnavailable(self.name, reason)
        if self._closed or session.closed:
            raise PathUnavailable(self.name, PathReason.CONNECT_FAILED, "the connection is closed")
        found = self._open.get(session)
        return self._begin(session, client)[1] if found is None else found[1]

    def watch(self, client: LinkClient, on_opened: LinkOpened) -> None:
        self._client, self._on_opened = client, on_opened

    def handlers(self) -> Mapping[str, CallHandler]:
        return {}

    async def close_session(self, session: Session) -> None:
        found = self._open.get(session)
        if found is not None:
            found[1].abort()
            await found[1].wait_closed()

    async def close(self) -> None:
        self._closed = True
        links = [link for _, link in self._open.values()]
        for link in links:
            link.abort()
        for link in links:
            await link.wait_closed()

    # --- PacketRoute ------------------------------------------------------------------------------

    def on_packet(self, session: Session, packet: memoryview) -> None:
        found = self._open.get(session)
        if found is None:
            found = self._accept(session)
        wire, link = found
        wire.delivered += 1
        link.on_packet(packet)
        if wire.delivered >= _PASS_PACKETS_MAX:
            wire.on_pass_end()

    def on_pass_end(self, session: Session) -> None:
        if (found := self._open.get(session)) is not None:
            found[0].on_pass_end()

    def on_taken(self, session: Session) -> None:
        if (found := self._open.get(session)) is not None:
            found[0].on_taken()

    def on_closed(self, session: Session, error: OrbitError | None) -> None:
        found = self._open.pop(session, None)
        if found is not None:
            found[0].on_lost(error)

    # --- within -----------------------------------------------------------------------------------

    def _accept(self, session: Session) -> tuple[TcpPacketWire, PacketLink]:
        if self._client is None or self.availability(session) is not PathReason.OK:
            raise PeerProtocolError("a message packet, though no message link was agreed on")
        begun = self._begin(session, self._client)
        if self._on_opened is not None:
            self._on_opened(session, begun[1])
        return begun

    def _begin(self, session: Session, client: LinkClient) -> tuple[TcpPacketWire, PacketLink]:
        own = self._limits(session.local_hello.limits)
        other = self._limits(session.peer_hello.limits)
        terms = LinkTerms.between(self.name, str(session.peer), own, other)
        wire = TcpPacketWire(session, terms.ceiling_bytes + _SLAB_EXTRA_BYTES, self._detach)
        assembler = Assembler(terms.ceiling_bytes, in_place=session.link.frames_stay)
        begun = wire, PacketLink(wire, client, terms, assembler)
        self._open[session] = begun
        return begun

    def _limits(self, said: Limits) -> LinkLimits:
        return LinkLimits(
            windows=Windows(said.message_credits, said.reserve_credits),
            ceiling_bytes=said.eager_ceiling_bytes,
            inbound_bytes_max=self._inbound_bytes_max,
        )

    def _detach(self, wire: TcpPacketWire) -> None:
        found = self._open.get(wire.session)
        if found is not None and found[0] is wire:
            del self._open[wire.session]


def _takes(limits: Limits) -> bool:
    """A peer that announces nonsense is one that takes no messages."""
    credits, replies = limits.message_credits, limits.reserve_credits
    return 0 < credits <= _CREDITS_MAX and ceil(credits / 4) <= replies <= _CREDITS_MAX
