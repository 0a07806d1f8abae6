"""The seams that backends implement: ControlLink (frames to one peer), DataPath (bulk bytes),
PinnedMemory (what devices can reach) and RegisteredPath (a DataPath over that).

A Session is one epoch with one peer, as the layers above a link see it. Nothing here names a
backend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from ..errors import OrbitError
from ..model import Address, Direction, LeaseId, PathName, PathReason, PeerIdentity
from ..protocol.messages import Hello, Message
from .path_statistics import PathStatistics

Reply = TypeVar("Reply", bound=Message)
FrameHandler = Callable[[memoryview], None]
ClosedHandler = Callable[[BaseException | None], None]
LoopCallback = Callable[[], None]
Progress = Callable[[int], None]  # bytes of this transfer that have arrived so far


class ControlLink(Protocol):
    """Ordered, reliable frames to one peer. One reader, one writer, in one event loop.

    A frame here is one kind byte and its body, without a length prefix, in both directions:
    delimiting frames is the business of the link (TCP puts the u32 length in front).
    """

    @property
    def endpoint(self) -> str:
        """The other end as text, for messages."""

    @property
    def frames_stay(self) -> bool:
        """The views that `on_frame` gets stay valid for as long as somebody holds them."""

    def start(
        self,
        on_frame: FrameHandler,
        on_closed: ClosedHandler,
        on_pass_end: LoopCallback | None = None,
    ) -> None:
        """Begin delivery. `on_frame` gets a view that is valid only during the call, unless
        `frames_stay`. `on_closed` runs exactly once: None after a local close, else the typed
        error. `on_pass_end` follows the frames that were at hand together.
        """

    def send_nowait(self, frame: bytes) -> None:
        """Queue one frame. Raises ClosedError after close, BusyError when the write backlog is
        over its limit, UsageError when the frame is over the frame limit.
        """

    def send_gathered(self, frames: Sequence[tuple[bytes, memoryview]]) -> None:
        """Queue frames whose bytes lie in two pieces, all or none of them. The second piece is not
        copied: it stays in use until the link took it (`taken_bytes`), or its end was reported.
        Raises as `send_nowait`.
        """

    @property
    def accepted_bytes(self) -> int:
        """What all sends so far came to, on the stream."""

    @property
    def taken_bytes(self) -> int:
        """How much of `accepted_bytes` is out of this process's hands."""

    def watch_taken(self, on_taken: LoopCallback) -> None:
        """`on_taken` runs, from the loop, when `taken_bytes` grew otherwise than within a send."""

    def close(self) -> None:
        """Flush what is queued as far as the peer takes it within a second, then close.
        Idempotent.
        """

    def abort(self) -> None:
        """Close at once. Idempotent."""

    async def wait_closed(self) -> None:
        """Until the socket is gone."""


class Session(Protocol):
    """One epoch with one peer: identities, keys, and calls over its control link."""

    @property
    def peer(self) -> PeerIdentity: ...

    @property
    def attempt(self) -> bytes:
        """16 bytes that name this epoch on both sides."""

    @property
    def key(self) -> bytes:
        """32 bytes derived from the secret and both hellos; equal on both sides, never sent."""

    @property
    def local_hello(self) -> Hello: ...

    @property
    def peer_hello(self) -> Hello: ...

    @property
    def peer_endpoints(self) -> Sequence[tuple[str, int]]:
        """Where the peer can be dialed, for bulk connections; empty when nobody knows."""

    @property
    def dialed(self) -> bool:
        """This side opened the connection."""

    @property
    def closed(self) -> bool: ...

    @property
    def link(self) -> ControlLink:
        """What carries it: for the packets of the TCP message link, which ride beside the calls."""

    @property
    def backlog_bytes(self) -> int:
        """What was sent over the link and has not left this process yet."""

    async def ping(self, timeout_s: float) -> float:
        """Seconds until the peer's event loop answered. Raises DeadlineExceeded, PeerError,
        ClosedError.
        """

    def abort(self, cause: OrbitError) -> None:
        """End the epoch at once because of `cause`. Idempotent."""

    async def call(
        self, request: Message, reply: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        """One call. Raises PeerRefused (the peer answered no), PeerLost, DeadlineExceeded."""

    def notify(self, request: Message) -> None:
        """Fire and forget. Silently nothing once the session is closed."""


class PacketRoute(Protocol):
    """Who takes the FrameKind.PACKET frames of a node's sessions: one for all of them."""

    def on_packet(self, session: Session, packet: memoryview) -> None:
        """One packet; the view is valid during the call. A PeerProtocolError ends the epoch."""

    def on_pass_end(self, session: Session) -> None:
        """The frames that were at hand together have all been delivered."""

    def on_taken(self, session: Session) -> None:
        """The link's `taken_bytes` grew."""

    def on_closed(self, session: Session, error: OrbitError | None) -> None:
        """The epoch is over, once; None after a local close."""


CallHandler = Callable[[Session, object], Awaitable[Message | None]]
"""A handler gets the session and the raw body map; it returns the reply, or None for a
notification. It begins within the delivery of the frame, and is no task before its first wait.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBuffer:
    """A piece of registered memory. The holder of `token` may free it; a peer with a descriptor
    may not.
    """

    view: memoryview  # writable, unsigned bytes, exactly the requested length
    address: Address
    arena: object  # what RDMA paths look the registration up by
    token: object


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredRange:
    """Memory of somebody else, registered in place: `parts` in address order, one for each piece
    that the devices' limits allow, each with keys of its own. `first_page` and `page_bytes` are
    what the kernel pinned: whole pages. The holder deregisters it.
    """

    parts: tuple[PinnedBuffer, ...]
    first_page: Address
    page_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Registered memory as of now. Bytes count once per device, as the budget does."""

    registered_bytes: int = 0
    budget_bytes: int = 0
    arena_bytes: int = 0  # of arenas, once
    arena_bytes_used: int = 0
    arenas: int = 0
    regions: int = 0  # external registrations that live
    registrations: Mapping[str, int] = field(default_factory=dict)  # ever, by kind: arena, external


@runtime_checkable
class PinnedMemory(Protocol):
    """A pool of registered arenas, and the registrations of memory that others own. One budget for
    both, charged in whole pages before anything is registered.
    """

    async def ensure(self) -> PathReason:
        """Map and register the first arena if there is none. OK, or why it cannot be had."""

    def allocate_nowait(self, nbytes: int) -> PinnedBuffer:
        """A piece of an arena that is mapped already. Raises BudgetExceeded (the registered-bytes
        budget), BusyError (no room now, or nothing is mapped).
        """

    async def allocate(self, nbytes: int) -> PinnedBuffer:
        """As `allocate_nowait`, but maps another arena where there is no room: a larger pooled one,
        or for a large piece one of its own. Raises BudgetExceeded, BusyError (the device or the
        system refuses; or gated).
        """

    def free(self, buffer: PinnedBuffer) -> None:
        """Return the space. The caller has proven that nothing accesses it any more."""

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        """Register writable memory in place, all of it or nothing, on every device, paused ones
        included. `remote` False: a view that only this side's own work requests reach; no window
        can be bound in it. The caller keeps the memory valid until `deregister` has returned.
        Raises UsageError (no bytes, read-only), BudgetExceeded, DeviceError, ClosedError (gated).
        Cancelled: rolled back.
        """

    async def deregister(self, registered: RegisteredRange) -> None:
        """The caller has proven that nothing accesses it any more. Raises DeviceError when a device
        refuses: what is left stays registered and charged, and calling again goes on.
        """

    def gate(self) -> None:
        """From now on nothing is registered and no piece is given out. Idempotent."""

    async def drain(self) -> None:
        """After `gate`: until registrations that had begun have ended."""

    @property
    def registered_bytes(self) -> int: ...

    def statistics(self) -> MemoryStatistics: ...


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """What an owner exposes for one lease, or a consumer pushes: bytes, and their registered memory
    when they are pinned. `rest`: the pieces that follow, in payload order (none of which has a
    rest): several ranges, or one that lies in several registrations.
    """

    view: memoryview
    pinned: PinnedBuffer | None = None
    rest: tuple[Span, ...] = ()

    @property
    def pieces(self) -> tuple[Span, ...]:
        return (self, *self.rest)

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return self.view.nbytes + sum(piece.view.nbytes for piece in self.rest)

    @property
    def all_pinned(self) -> bool:
        return all(piece.pinned is not None for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Exposure:
    """What travels to the consumer. TCP: `transfer_id` only. RDMA: descriptor and grant record, and
    in `rest` those of the pieces that follow.
    """

    transfer_id: int = 0
    descriptor: bytes = b""
    grant: bytes = b""
    rest: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def grants(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((self.descriptor, self.grant), *self.rest)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a pull writes: a writable, contiguous byte view, and its registered memory when it is
    pinned. `rest`: the pieces that follow, in payload order. Their borders are not the source's.
    """

    view: memoryview
    pinned: PinnedBuffer | None = None
    rest: tuple[Target, ...] = ()

    @property
    def pieces(self) -> tuple[Target, ...]:
        return (self, *self.rest)

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return self.view.nbytes + sum(piece.view.nbytes for piece in self.rest)


@dataclass(frozen=True, slots=True)
class PullReport:
    """How a pull went: seconds by phase (read, copy, register ...), counters that do not depend on
    the machine, and the local devices that moved the bytes.
    """

    phases: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    rails: tuple[str, ...] = ()


class DataPath(Protocol):
    """Moves the bytes of one lease from an owner's span into a consumer's target, or from a
    consumer's source into an owner's span. Direction says which; what follows is told for READ.
    """

    name: PathName

    def availability(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        """Whether this path could serve that peer, from facts at hand. No I/O. OK, or why not."""

    async def prepare(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        """Consumer: make ready what `pull` (`push`) needs (a dial, queue pairs). OK, or why not.
        Safe to call concurrently.
        """

    async def expose(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        array: int = 0,
        direction: Direction = Direction.READ,
    ) -> Exposure:
        """Owner: give `session` the authority to read (write) exactly `span`, once, under
        `lease_id`. All pieces or none. Raises PathUnavailable(reason); then nothing was exposed.
        """

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        """Owner: the lease ended. Returns when nothing can read (write) the span any more; unknown
        leases return at once. `transferred` false: the consumer said that its pull failed, or it
        was lost. `transferred` true after a push: returns when every byte is in the span, too.
        Raises PathFailed when the consumer said `transferred` of a push that did not arrive whole,
        Unquiesced.
        """

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        """Consumer: fill `target`. Returns or raises only when nothing can write the target any
        more; cancelling it does not shorten that. Raises PathFailed(reason), PeerLost,
        DeadlineExceeded (no progress), Unquiesced.
        """

    async def push(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        source: Span,
        progress: Progress | None = None,
    ) -> PullReport:
        """Consumer: write `source` (of exactly the granted size) into what the owner exposed for
        it. Returns when the bytes have left for good: the source is the caller's again, and a
        detach or release that says `transferred` completes it. Raises as `pull`.
        """

    def handlers(self) -> Mapping[str, CallHandler]:
        """Control calls that this path answers itself."""

    async def drain(self) -> None:
        """Until what was on its way when this was called is over: each exposure has been read or
        written whole, or was retracted, and each pull and push has returned. An exposure that was
        read counts as over, whoever still holds its lease.
        """

    async def close_session(self, session: Session) -> None:
        """The epoch is over: retract everything of it, and return when its resources are gone.
        Raises Unquiesced.
        """

    async def close(self) -> None:
        """Everything of every session, then the path's own resources. Raises Unquiesced."""


@runtime_checkable
class RegisteredPath(Protocol):
    """What a path over registered memory offers beside DataPath: its transfers and registrations
    can end while the node's messages still use the devices.
    """

    def statistics(self) -> PathStatistics:
        """Its counts and its hardware, as of now."""

    def gate(self) -> None:
        """From now on it is not available, and exposes nothing. Idempotent."""

    async def end_transfers(self) -> None:
        """After `gate`: end by force what is on its way, and every authority with it. Returns when
        that is proven. Raises Unquiesced.
        """

    async def release_memory(self) -> None:
        """After `end_transfers`: deregister all that is registered for bulk transfers. Raises
        Unquiesced; then the rest stays registered and charged.
        """
