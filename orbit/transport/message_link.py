"""MessageLink over any PacketWire: frames under credits, whole or in segments, ping and goodbye.

It joins the machines (credits, segments, farewell) with the sending end (message_outbox) and tells
the client what arrives. It knows neither what a frame means nor what a wire is made of.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from ..errors import (
    ClosedError,
    InternalError,
    NotAdmitted,
    OrbitError,
    PeerError,
    PeerLost,
    PeerProtocolError,
    UsageError,
)
from ..model import PathName
from ..protocol.messaging.credits import CreditBook, Windows
from ..protocol.messaging.packets import (
    CONTROL_KINDS,
    HEADER_BYTES_MAX,
    NOTHING_RETURNED,
    Packet,
    PacketKind,
    Window,
    parse_packet,
)
from ..protocol.messaging.segments import Assembler
from .message_outbox import Outbox
from .message_parting import Parting
from .message_ping import Pings
from .messages import LinkClient, LinkLimits, LinkStatistics, OutgoingFrame, PacketWire

# What a received message costs beside its bytes: a peer that sends empty ones is bounded as well.
MESSAGE_OVERHEAD_BYTES: Final = 512

_FIRST_CONTROL = int(min(CONTROL_KINDS))
_FRAME_KIND_MAX = int(PacketKind.SHUTTING_DOWN)
_MESSAGE = int(PacketKind.MESSAGE)
_PING = int(PacketKind.PING)

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """What both ends of a link hold to. `granted` is what this side grants, `allowed` the other.
    `rail`: the device here that the wire is on, if it is on one.
    """

    transport: PathName
    peer: str  # for messages
    granted: Windows
    allowed: Windows
    ceiling_bytes: int
    inbound_bytes_max: int
    rail: str = ""

    @classmethod
    def between(
        cls,
        transport: PathName,
        peer: str,
        own: LinkLimits,
        other: LinkLimits,
        rail: str = "",
    ) -> LinkTerms:
        """From what each side said. `other.inbound_bytes_max` is the peer's own business."""
        return cls(
            transport=transport,
            peer=peer,
            granted=own.windows,
            allowed=other.windows,
            ceiling_bytes=min(own.ceiling_bytes, other.ceiling_bytes),
            inbound_bytes_max=own.inbound_bytes_max,
            rail=rail,
        )


@dataclass(slots=True)
class _Traffic:
    """Counts of what arrived, and when the last frame passed in either direction: the end of the
    pass that brought it, or its confirmation.
    """

    active_at: float
    fresh: bool = False  # a frame has arrived in this pass
    frames: int = 0
    nbytes: int = 0
    packets: int = 0


class PacketLink:
    """Implements MessageLink and PacketClient. Starts the wire; from then on the client hears.
    `assembler`: other than the usual one, where a wire's packets allow it.
    """

    def __init__(
        self,
        wire: PacketWire,
        client: LinkClient,
        terms: LinkTerms,
        assembler: Assembler | None = None,
    ) -> None:
        self._wire = wire
        self._client = client
        self._terms = terms
        self._loop = asyncio.get_running_loop()
        self._book = CreditBook(terms.granted, terms.allowed, terms.inbound_bytes_max)
        self._assembler = assembler or Assembler(terms.ceiling_bytes)
        self._outbox = Outbox(wire, self._book, wire.slab_bytes, self._on_pushed)
        self._parting = Parting(self._book, self._outbox, self._spare)
        self._pings = Pings(terms.peer)
        self._traffic = _Traffic(self._loop.time())
        self._in_pass = False
        self.ceiling_bytes = terms.ceiling_bytes
        self.closed = False
        self._cause: OrbitError | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        wire.start(self)

    # --- MessageLink ------------------------------------------------------------------------------

    @property
    def transport(self) -> PathName:
        return self._terms.transport

    def send(self, frame: OutgoingFrame) -> None:
        if self.closed:
            error = NotAdmitted(self._terms.peer, self._end_as_text())
            (frame.given_back if self._parting.agreed else frame.failed)(error)
            return
        if not (
            0 <= frame.kind <= _FRAME_KIND_MAX
            and len(frame.payload) <= self.ceiling_bytes
            and len(frame.header) <= HEADER_BYTES_MAX
        ):
            frame.failed(UsageError(_problem_of(frame, self.ceiling_bytes)))
            return
        outbox = self._outbox
        if outbox.queue(frame) and not self._in_pass and not self._parting.silent:
            outbox.pump()

    def withdraw(self, frame: OutgoingFrame) -> bool:
        return self._outbox.withdraw(frame)

    def consumed(self, charge: int) -> None:
        if self.closed:
            return
        self._book.on_consumed(charge)
        if not self._in_pass and not self._parting.silent:
            self._outbox.return_credit()

    def renewed(self, charge: int) -> None:
        if not self.closed:
            self._book.on_renewed(charge)

    async def ping(self, timeout_s: float) -> float:
        if self.closed:
            raise _end_as_error(self._terms.peer, self._cause)
        if not self._pings.out:
            self._outbox.want(PacketKind.PING)
            self._pump()
        return await self._pings.wait(timeout_s)

    async def goodbye(self, timeout_s: float) -> bool:
        if self.closed:
            return self._parting.agreed
        try:
            async with asyncio.timeout(timeout_s):
                return await self._parting.part(lambda: self.ping(timeout_s))
        except TimeoutError:
            return False
        except (PeerError, ClosedError):
            return self._parting.agreed

    def abort(self, error: OrbitError | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self._cause = error
        self._wire.abort(error)

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)
        await self._wire.wait_closed()

    def statistics(self) -> LinkStatistics:
        outbox, sent, traffic = self._outbox, self._outbox.counts, self._traffic
        return LinkStatistics(
            frames_sent=sent.frames,
            frames_received=traffic.frames,
            bytes_sent=sent.nbytes,
            bytes_received=traffic.nbytes,
            packets_sent=sent.packets,
            packets_received=traffic.packets,
            segmented_sent=sent.segmented,
            grants_sent=sent.grants,
            credit_stalls=sent.stalls,
            queued_frames=outbox.queued_frames,
            queued_bytes=outbox.queued_bytes,
            unconsumed_bytes=self._book.unconsumed_bytes,
            credits=self._book.available(Window.MESSAGES),
            rail=self._terms.rail,
        )

    @property
    def idle_s(self) -> float:
        busy = self._book.unconsumed_bytes or self._assembler.open_bytes or not self._outbox.empty
        return 0.0 if busy else self._loop.time() - self._traffic.active_at

    # --- PacketClient -----------------------------------------------------------------------------

    def on_packet(self, packet: memoryview) -> None:
        if self.closed:
            return
        self._in_pass = True
        traffic = self._traffic
        traffic.packets += 1
        traffic.nbytes += len(packet)
        try:
            self._receive(parse_packet(packet), traffic)
        except PeerProtocolError as error:
            self.abort(error)
        except Exception as error:  # a bug of the client must not leave a link that delivers half
            _log.exception("%s: a frame handler failed", self._terms.peer)
            self.abort(InternalError(f"a frame handler failed: {error!r}"))

    def on_pass_end(self) -> None:
        self._in_pass = False
        if self._traffic.fresh:
            self._traffic.fresh = False
            self._traffic.active_at = self._loop.time()
        if self.closed or self._parting.silent:
            return
        self._outbox.end_pass()

    def on_sent(self, count: int) -> None:
        if self._outbox.on_sent(count):
            self._traffic.active_at = self._loop.time()

    def on_room(self) -> None:
        if not self._in_pass:
            self._pump()

    def on_lost(self, error: OrbitError | None) -> None:
        if self._gone.done():
            return
        self.closed = True
        agreed = self._parting.agreed
        self._cause = None if agreed else self._cause or error
        self._outbox.fail(self._terms.peer, self._end_as_text(), agreed=agreed)
        self._pings.fail(_end_as_error(self._terms.peer, self._cause))
        self._parting.settle(agreed)
        self._gone.set_result(None)
        self._client.on_link_lost(self, self._cause)

    # --- within -----------------------------------------------------------------------------------

    def _pump(self) -> None:
        if not self.closed and not self._parting.silent:
            self._outbox.pump()

    def _on_pushed(self, kind: int | None) -> None:
        if kind is None:
            self._parting.on_frame_sent()
        elif kind == _PING:
            self._pings.on_sent()

    def _receive(self, packet: Packet, traffic: _Traffic) -> None:
        kind, book, returned = packet.kind, self._book, packet.returned
        if returned is not NOTHING_RETURNED:
            book.on_returned(returned)
        if not self._parting.open:
            self._parting.on_received(kind)
        if kind >= _FIRST_CONTROL:
            if packet.body:
                raise PeerProtocolError(f"a body in control packet {kind}")
            book.on_packet(kind, 0)
            self._on_control(kind)
            return
        frame = self._assembler.add(packet)
        if frame is None:
            book.on_packet(kind, 0)
            return
        _, header, payload = frame
        charge = 0
        if kind == _MESSAGE:
            charge = len(header) + len(payload) + MESSAGE_OVERHEAD_BYTES
        book.on_packet(kind, charge)
        traffic.frames += 1
        traffic.fresh = True
        self._client.on_frame(self, kind, header, payload, charge)

    def _on_control(self, kind: int) -> None:
        match kind:
            case PacketKind.PING:
                self._outbox.want(PacketKind.PONG)
            case PacketKind.PONG:
                self._pings.on_answer()
            case PacketKind.GOODBYE:
                self._parting.on_goodbye()
            case PacketKind.GOODBYE_ACK:
                self._parting.on_answer()
                if self._parting.agreed:
                    self.closed = True
                    self._wire.close()

    def _spare(self) -> bool:
        """Nothing on this side needs the link, as far as this side knows."""
        unread = self._book.unconsumed_bytes or self._assembler.open_bytes
        return not (unread or self._outbox.queued_frames) and self._client.may_close(self)

    def _end_as_text(self) -> str:
        if self._parting.agreed:
            return "the link was closed by agreement"
        return "the link was closed" if self._cause is None else PeerLost.cause_of(self._cause)


def _problem_of(frame: OutgoingFrame, payload_bytes_max: int) -> str:
    """Why the frame can never be sent."""
    if not 0 <= frame.kind <= _FRAME_KIND_MAX:
        return f"frame kind {frame.kind}"
    if len(frame.payload) > payload_bytes_max:
        return f"a payload of {len(frame.payload)} bytes; limit {payload_bytes_max}"
    return f"a header of {len(frame.header)} bytes; limit {HEADER_BYTES_MAX}"


def _end_as_error(peer: str, cause: OrbitError | None) -> OrbitError:
    """What those hear who waited for a link that ended."""
    if cause is None:
        return ClosedError(f"the message link to {peer}")
    return cause if isinstance(cause, PeerLost) else PeerLost(peer, str(cause))
