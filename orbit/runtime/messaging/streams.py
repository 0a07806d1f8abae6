"""The streams of one node: which there are, whose notes belong to which, and who may attach.

It opens receiving ends and attaches sending ones, and hands each note to its stream. What a stream
does with it is decided by the machines in orbit/protocol/streams.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, Final

from ...config import MessagingConfig
from ...errors import ClosedError, OrbitError, PeerProtocolError, StreamError, UsageError
from ...events import STAGED_REFUSALS_TOTAL
from ...model import PeerIdentity, WorkerId
from ...protocol.codec import decode, encode
from ...protocol.streams.ends import (
    ITEMS_DEFAULT,
    WINDOW_BYTES_DEFAULT,
    StreamEnd,
    StreamWindow,
    WindowBudget,
)
from ...protocol.streams.frames import (
    FROM_SENDER,
    ORDERED,
    AttachReply,
    AttachRequest,
    Note,
    NoteKind,
    parse_note,
)
from ...protocol.streams.handle import StreamHandle
from .contract import Caller, Charge, release_current_charge
from .routes import Route
from .statistics import StreamStatistics
from .stream_frames import ItemStore, StreamFrame
from .stream_objects import StreamInbox, StreamSender
from .stream_receiving import ItemTypes, ReceivingStream
from .stream_sending import SendingStream

ATTACHES_TOTAL: Final = "orbit_streaming_attaches_total"
ENDS_TOTAL: Final = "orbit_streaming_ends_total"
BACKPRESSURE_TOTAL: Final = "orbit_streaming_backpressure_total"
STRAY_NOTES_TOTAL: Final = "orbit_streaming_stray_notes_total"

ITEMS_MAX: Final = 1 << 16
_ATTACHMENT_MAX: Final = (1 << 32) - 1


class Streams:
    """Implements contract.StreamSink, and `attach_requested` for calls of AttachRequest.METHOD.

    `store` is the node's rendezvous, for items above the ceiling.
    """

    def __init__(self, caller: Caller, store: ItemStore, config: MessagingConfig) -> None:
        self.store = store
        self._caller = caller
        self._heartbeat_s = config.heartbeat_s
        self._inboxes: dict[int, ReceivingStream] = {}  # by stream id
        self._senders: dict[tuple[WorkerId, int, int], SendingStream] = {}
        self._budgets: dict[WorkerId, WindowBudget] = {}  # of peers that feed streams here
        self._last_attachment = 0
        self._idle: asyncio.Future[None] | None = None
        self._closed = False

    # --- users ------------------------------------------------------------------------------------

    def open(
        self, item_type: ItemTypes | None = None, capacity: int = ITEMS_DEFAULT
    ) -> StreamInbox[Any]:
        """A stream that this node receives. No I/O.

        `item_type` None: items are bytes. A type, or a tuple of types: items are msgpack values and
        each is checked to be one of them (`object` takes any); one that is not ends the stream.
        `capacity` is how many items may wait here unread. Raises UsageError.
        """
        self._check_open()
        if type(capacity) is not int or not 0 < capacity <= ITEMS_MAX:
            raise UsageError(f"capacity={capacity!r} is not a whole number from 1 to {ITEMS_MAX}")
        if item_type is not None:
            try:
                isinstance(None, item_type)
            except TypeError as error:
                raise UsageError(f"item_type={item_type!r} is no type") from error
        handle = StreamHandle(self._caller.identity.worker_id, secrets.randbits(63) + 1)
        stream = ReceivingStream(self, handle, capacity, item_type, self._heartbeat_s)
        self._inboxes[handle.stream_id] = stream
        return StreamInbox(stream)

    async def attach(
        self, handle: StreamHandle | bytes | str, *, timeout: float | None = None
    ) -> StreamSender:
        """Become the one producer of a stream, wherever it is received.

        Raises StreamError ("unknown": no such stream, or it has ended; "attached": it has a
        producer; "full": the receiver has no room for another stream of this node; "lost"), and
        what a call raises. A cancelled attach leaves no producer behind.
        """
        self._check_open()
        handle = _checked(handle)
        self._last_attachment = self._last_attachment % _ATTACHMENT_MAX + 1
        request = AttachRequest(handle.stream_id, self._last_attachment)
        route, reply = await self._call(handle, request, timeout)
        if reply.refused:
            self._count_attach(reply.refused)
            raise StreamError(reply.refused, reply.detail)
        if self._closed:
            self._give_up(route, request)
            raise ClosedError("the node")
        heartbeat_s = min(self._heartbeat_s, max(reply.heartbeat_ms, 1) / 1000)
        window = StreamWindow(reply.items, reply.window_bytes)
        stream = SendingStream(self, handle, request.attachment, route, window, heartbeat_s)
        self._senders[route.peer.worker_id, handle.stream_id, request.attachment] = stream
        self._count_attach("ok")
        return StreamSender(stream, typed=reply.typed)

    def statistics(self) -> StreamStatistics:
        inboxes, senders = self._inboxes.values(), self._senders.values()
        return StreamStatistics(
            inboxes=len(inboxes),
            senders=len(senders),
            buffered_items=sum(stream.machine.buffered for stream in inboxes),
            buffered_bytes=sum(stream.machine.buffered_bytes for stream in inboxes),
            promised_bytes=sum(budget.promised_bytes for budget in self._budgets.values()),
            waiting_sends=sum(stream.machine.waiting for stream in senders),
        )

    # --- peers ------------------------------------------------------------------------------------

    def attach_requested(self, producer: PeerIdentity, payload: bytes | memoryview) -> bytes:
        """Answer an attach call. Raises PeerProtocolError for what is none."""
        request = AttachRequest.from_wire(decode(payload))
        return encode(self._admit(producer, request).to_wire())

    def on_item(self, route: Route, header: bytes, payload: memoryview, charge: Charge) -> None:
        """See contract.StreamSink."""
        try:
            self.on_note(route, _parsed(header, ordered=True), payload)
        finally:
            charge.release()

    def on_event(self, route: Route, header: bytes, payload: memoryview) -> None:
        """See contract.StreamSink."""
        self.on_note(route, _parsed(header, ordered=False), payload)

    def on_note(self, route: Route, note: Note, payload: memoryview) -> None:
        """A note that came by `route`. Those of streams that are gone are counted, no more: they
        crossed the end. Raises PeerProtocolError.
        """
        peer = route.peer
        if note.kind not in FROM_SENDER:
            sender = self._senders.get((peer.worker_id, note.stream_id, note.attachment))
            if sender is not None and sender.route is route:
                sender.on_note(note)
            else:
                self._stray(note)
            return
        inbox = self._inboxes.get(note.stream_id)
        if inbox is not None and inbox.producer == peer and inbox.attachment == note.attachment:
            inbox.on_note(route, note, payload)
            return
        self._stray(note)
        if note.kind is NoteKind.HEARTBEAT:  # who beats for a stream that is gone has to hear of it
            reply = Note(NoteKind.CANCEL, note.stream_id, note.attachment)
            route.link.send(StreamFrame(self, reply))

    def on_route_lost(self, route: Route, error: OrbitError | None) -> None:
        """See contract.StreamSink."""
        text = "the link was closed" if error is None else str(error)
        for sender in [s for s in self._senders.values() if s.route is route]:
            sender.lost(text)
        left = {other.peer for other in self._caller.routes() if other is not route}
        for inbox in list(self._inboxes.values()):
            # A producer that attached and has said nothing yet has no route here, only a peer.
            unheard = inbox.route is None and inbox.producer == route.peer
            if inbox.machine.bound and (
                inbox.route is route or (unheard and route.peer not in left)
            ):
                inbox.lost(text)

    # --- the end ----------------------------------------------------------------------------------

    async def wait_idle(self) -> None:
        """Until no stream with a producer is left: what a drain waits for. Inboxes that nobody has
        attached to do not count.
        """
        while self._senders or any(inbox.machine.bound for inbox in self._inboxes.values()):
            if self._idle is None or self._idle.done():
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def close(self) -> None:
        """End every stream: receivers hear that their producers dropped, producers that the stream
        was cancelled, as far as the links still carry it. Idempotent.
        """
        self._closed = True
        for sender in list(self._senders.values()):
            sender.abandon(NoteKind.DROPPED)
            sender.lost("this node closes")
        for inbox in list(self._inboxes.values()):
            inbox.cancel()

    # --- what the ends ask ------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a background task of the node."""
        return self._caller.spawn(work, name)

    def sender_waits(self) -> None:
        """A send has found no room."""
        self._caller.recorder.counters.add(BACKPRESSURE_TOTAL)

    def sender_ended(self, stream: SendingStream, end: StreamEnd) -> None:
        """It is over; nothing of it is needed here any more."""
        key = (stream.route.peer.worker_id, stream.handle.stream_id, stream.attachment)
        self._senders.pop(key, None)
        self._ended("sender", end)

    def item_refused(self) -> None:
        """An item was larger than this node takes. Its stream ends, others go on."""
        self._caller.recorder.counters.add(STAGED_REFUSALS_TOTAL, what="item")

    def receiver_ended(self, stream: ReceivingStream, end: StreamEnd) -> None:
        """It was read to its end, or given up."""
        self._inboxes.pop(stream.handle.stream_id, None)
        if stream.producer is not None:
            peer = stream.producer.worker_id
            budget = self._budgets[peer]
            budget.take_back(stream.window_bytes)
            if not budget.promised_bytes:
                del self._budgets[peer]
        self._ended("receiver", end)

    def frame_failed(self, text: str) -> None:
        """Of a reply to a stray note: nobody waits for it."""

    # --- within -----------------------------------------------------------------------------------

    def _admit(self, producer: PeerIdentity, request: AttachRequest) -> AttachReply:
        inbox = self._inboxes.get(request.stream_id)
        if inbox is None or self._closed:
            return AttachReply(refused="unknown")
        if inbox.producer is not None:
            return AttachReply(refused="attached")
        budget = self._budgets.setdefault(producer.worker_id, WindowBudget())
        window_bytes = budget.promise(WINDOW_BYTES_DEFAULT)
        if not window_bytes:
            return AttachReply(
                refused="full", detail=f"{budget.promised_bytes} bytes are promised to this node"
            )
        inbox.attach(producer, request.attachment, window_bytes)
        return AttachReply(
            items=inbox.items,
            window_bytes=window_bytes,
            typed=inbox.typed,
            heartbeat_ms=max(1, int(self._heartbeat_s * 1000)),
        )

    async def _call(
        self, handle: StreamHandle, request: AttachRequest, timeout: float | None
    ) -> tuple[Route, AttachReply]:
        release_current_charge()
        result = self._caller.call(
            handle.worker_id, AttachRequest.METHOD, encode(request.to_wire()), timeout=timeout
        )
        try:
            payload = await result
        except BaseException:
            # The receiver may have taken this node for its producer, or may be about to: the note
            # follows the request in the same order.
            if not result.withdraw() and result.route is not None:
                self._give_up(result.route, request)
            raise
        if result.route is None or not result.route.usable:
            raise StreamError("lost", "the link was closed while the stream was attached")
        return result.route, AttachReply.from_wire(decode(payload))

    def _give_up(self, route: Route, request: AttachRequest) -> None:
        if route.usable:
            note = Note(NoteKind.DROPPED, request.stream_id, request.attachment)
            route.link.send(StreamFrame(self, note))

    def _ended(self, side: str, end: StreamEnd) -> None:
        self._caller.recorder.counters.add(ENDS_TOTAL, side=side, kind=end.kind.value)
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _stray(self, note: Note) -> None:
        self._caller.recorder.counters.add(STRAY_NOTES_TOTAL, kind=note.kind.name.lower())

    def _count_attach(self, outcome: str) -> None:
        self._caller.recorder.counters.add(ATTACHES_TOTAL, outcome=outcome)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the node")


def _parsed(header: bytes, *, ordered: bool) -> Note:
    """Items and ends come as messages, the rest as events: their order rests on it."""
    note = parse_note(header)
    if (note.kind in ORDERED) != ordered:
        raise PeerProtocolError(f"stream note {note.kind.name} in a frame of the wrong kind")
    return note


def _checked(handle: StreamHandle | bytes | str) -> StreamHandle:
    match handle:
        case StreamHandle():
            return handle
        case str():
            return StreamHandle.parse(handle)
        case bytes() | bytearray() | memoryview():
            return StreamHandle.from_bytes(handle)
    raise UsageError(f"not a stream handle: {type(handle).__name__}")
