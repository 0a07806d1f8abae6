"""The seams of messaging: a packet wire below a link, a message link below the messenger, and the
transports that open links.

One link implementation (message_link.py) serves every wire: credits, segments, retention, ping and
goodbye are the same on all of them. Nothing here names a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..errors import NotAdmitted, OrbitError
from ..model import PathName, PathReason
from ..protocol.messaging.credits import Windows
from .interface import CallHandler, Session

# --- below a link ---------------------------------------------------------------------------------


class PacketClient(Protocol):
    """What a wire tells its link. All calls come from the event loop, never from inside `push`,
    `flush`, `close` or `abort`; `on_sent` alone may come from inside `flush`, of what was pushed
    before it.
    """

    def on_packet(self, packet: memoryview) -> None:
        """One packet, in order. The view is valid during the call only."""

    def on_pass_end(self) -> None:
        """The wire has delivered all that was at hand, and reposted the slabs. Work that was
        gathered during the pass (grants, replies) leaves now, as one batch.
        """

    def on_sent(self, count: int) -> None:
        """The `count` oldest pushed packets are with the peer (RC: acknowledged; TCP: taken by the
        kernel) and their buffers are free.
        """

    def on_room(self) -> None:
        """`room` has grown from 0."""

    def on_lost(self, error: OrbitError | None) -> None:
        """The wire is gone: once, None after a local close. No packet that was pushed and not
        reported as sent can be read from its buffer any more.
        """


class PacketWire(Protocol):
    """Ordered, reliable packets to one peer's link, during one link epoch."""

    @property
    def slab_bytes(self) -> int:
        """The largest packet that both ends take."""

    @property
    def room(self) -> int:
        """How many packets of frames may be pushed now. A wire that credits alone bound says so by
        a number that never runs out first. Control packets are pushed beyond it: credits allow one
        outstanding packet of each of the five kinds, and a wire keeps room for those apart.
        """

    def start(self, client: PacketClient) -> None:
        """Begin delivery."""

    def push(self, head: bytes, body: memoryview) -> None:
        """Take one packet, head then body. Bytes that the wire does not copy stay in use until
        `on_sent` or `on_lost`. Errors come by `on_lost`.
        """

    def flush(self) -> None:
        """Nothing follows for now: post what was pushed."""

    def close(self) -> None:
        """Flush within a bound, then end. Idempotent."""

    def abort(self, error: OrbitError | None = None) -> None:
        """End now. Idempotent."""

    async def wait_closed(self) -> None:
        """Until every resource is gone. Raises Unquiesced."""


# --- below the messenger --------------------------------------------------------------------------


class OutgoingFrame:
    """One frame on its way out; the messenger subclasses it. Exactly one of `done`, `failed` and
    `given_back` is called, once, after at most one `posted`; it may come from within `send`. None
    of them may send from within: they may queue.
    """

    __slots__ = ("header", "kind", "payload")

    def __init__(self, kind: int, header: bytes, payload: memoryview | bytes = b"") -> None:
        self.kind = kind
        self.header = header
        self.payload = payload  # the caller must not change it before `done` or `failed`

    @property
    def nbytes(self) -> int:
        return len(self.header) + len(self.payload)

    def posted(self) -> None:
        """Its last packet was handed to the wire: it left the queue (admission)."""

    def done(self) -> None:
        """The wire confirmed it. By RDMA the peer's memory has it; by TCP this host's kernel has,
        and it may yet be lost with the connection. Whether its handler runs is another matter.
        """

    def failed(self, error: OrbitError) -> None:
        """NotAdmitted: no byte of it left. UsageError: it can never be sent. Anything else: its
        fate is not known.
        """

    def given_back(self, error: NotAdmitted) -> None:
        """The link was closed by agreement before a byte of it left: the next link may take it.
        Unless overridden, a failure like any other.
        """
        self.failed(error)


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Counts of one link since it opened, and the device here that carries it, if one does."""

    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    packets_sent: int = 0
    packets_received: int = 0
    segmented_sent: int = 0
    grants_sent: int = 0
    credit_stalls: int = 0  # times that a frame had to wait for credit
    queued_frames: int = 0  # now
    queued_bytes: int = 0
    unconsumed_bytes: int = 0
    credits: int = 0  # message credits at hand
    rail: str = ""


class LinkClient(Protocol):
    """What a link tells the messenger."""

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        """A whole frame; header and payload are the receiver's own memory. `charge` bytes count as
        unconsumed until they are given to `link.consumed`, once.
        """

    def on_link_lost(self, link: MessageLink, error: OrbitError | None) -> None:
        """Once; None: closed by this side or by an agreed goodbye. Every frame had its verdict."""

    def may_close(self, link: MessageLink) -> bool:
        """Whether this side can spare the link: no call that went out by it waits for its answer,
        and no answer is owed by it. Asked before a goodbye is said or agreed to.
        """


class MessageLink(Protocol):
    """Frames to one peer, in order, under credits, during one link epoch."""

    @property
    def transport(self) -> PathName: ...

    @property
    def ceiling_bytes(self) -> int:
        """The longest payload that may be sent: the smaller of both sides' eager ceilings."""

    @property
    def closed(self) -> bool: ...

    def send(self, frame: OutgoingFrame) -> None:
        """Queue one frame behind all earlier ones of its window. Never blocks, never raises: the
        frame itself hears what becomes of it. Bounding the queue is the caller's business.
        """

    def withdraw(self, frame: OutgoingFrame) -> bool:
        """Take a frame out of the queue: True if no packet of it was pushed; it is the caller's
        again, without a verdict.
        """

    def consumed(self, charge: int) -> None:
        """Bytes of received messages that the application is done with."""

    def renewed(self, charge: int) -> None:
        """The answer to a message that was consumed early, for its handler's wait, stands in the
        queue: they count as unconsumed again, until they are given to `consumed` once more.
        """

    async def ping(self, timeout_s: float) -> float:
        """Seconds until the peer's link answered. Raises DeadlineExceeded, PeerLost, ClosedError.
        Concurrent callers share one ping.
        """

    async def goodbye(self, timeout_s: float) -> bool:
        """Close by agreement: True when both sides had nothing in flight and the link is closed.
        False, and the link lives on, when there is work on either side or no answer in time. (An
        answer that comes late still closes it, unless something was sent meanwhile.)
        """

    def abort(self, error: OrbitError | None = None) -> None:
        """End now; every frame without a verdict fails."""

    async def wait_closed(self) -> None: ...

    def statistics(self) -> LinkStatistics: ...

    @property
    def idle_s(self) -> float:
        """Seconds without a frame in either direction and with nothing in flight; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """What this node grants per peer, and takes."""

    windows: Windows = field(default_factory=Windows)
    slab_bytes: int = 8 << 10
    ceiling_bytes: int = 256 << 10
    inbound_bytes_max: int = 8 << 20


LinkOpened = Callable[[Session, MessageLink], None]
"""A peer opened a link to this node (or the transport's own `open` returned one)."""


class MessageTransport(Protocol):
    """Opens message links over one kind of network. One per node."""

    @property
    def name(self) -> PathName: ...

    def availability(self, session: Session) -> PathReason:
        """From facts at hand, without I/O. OK, or why not."""

    async def open(self, session: Session, client: LinkClient) -> MessageLink:
        """The link of that epoch, opened if there is none, *ready* included. Safe to call
        concurrently. Raises PathUnavailable(reason): nothing was sent.
        """

    def watch(self, client: LinkClient, on_opened: LinkOpened) -> None:
        """Once, before the first session: who hears of links that peers open."""

    def handlers(self) -> Mapping[str, CallHandler]:
        """Control calls that this transport answers itself."""

    async def close_session(self, session: Session) -> None:
        """The epoch is over: its link fails, its resources go. Raises Unquiesced."""

    async def close(self) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """A message transport that has devices to tell of."""

    def counts(self) -> Mapping[str, int]:
        """Counts and gauges of its devices, by name."""
