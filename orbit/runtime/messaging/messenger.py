"""The messenger of one node: sends and calls on one side, received frames on the other.

It issues each send in the plain call, matches answers to calls, and hands requests to the
dispatcher and items to streams (contract.py). Which link a frame takes is the chooser's business,
how long it may wait the outbound side's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import NodeConfig
from ...errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    OutcomeUnknown,
    PeerLost,
    UsageError,
)
from ...events import (
    SEND_BACKPRESSURE_TOTAL,
    SLOTS_EXHAUSTED_TOTAL,
    MessageLinkClosed,
    MessageLinkOpened,
    Recorder,
    SendRejected,
)
from ...model import PathName, PeerIdentity, WorkerId
from ...protocol.address import NodeAddress
from ...protocol.messaging.call_header import (
    STREAM_SCHEMA,
    Wants,
    pack_call,
    pack_headers,
    pack_name,
    parse_event,
    parse_request,
)
from ...protocol.messaging.packets import PacketKind
from ...transport.interface import Session
from ...transport.messages import Counting, MessageLink, MessageTransport
from .call_watch import CallWatch
from .contract import Charge, Payload, RequestSink, StreamSink, release_current_charge
from .large_payloads import LargePayloads, PayloadStore
from .link_choice import LinkChooser, Missing, SessionTo
from .local_link import LocalLink
from .outbound import Outbound, OutboundSettings
from .payloads import payload_of, transport_of
from .pending import PendingCalls
from .replies import Replies
from .requests import ReceivedRequest
from .results import OnError, Sending, SendResult
from .routes import Route
from .statistics import LinkReport, MessagingStatistics, Traffic, total_traffic

_MESSAGE = int(PacketKind.MESSAGE)
_OUTCOMES = (int(PacketKind.RESPONSE), int(PacketKind.ACK))
_EVENT = int(PacketKind.EVENT)
_RESERVED = "_"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a messenger stands on. `priority` orders those of `transports` that sends may use
    unasked; `missing` says why a name is not among them.
    """

    identity: PeerIdentity
    config: NodeConfig
    transports: Sequence[MessageTransport]
    priority: Sequence[PathName]
    missing: Mapping[PathName, Missing]
    store: PayloadStore
    session_to: SessionTo
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    recorder: Recorder


@dataclass(frozen=True, slots=True)
class Sinks:
    """Who gets what arrives, and who hears of new routes."""

    requests: RequestSink
    streams: StreamSink
    on_opened: Callable[[Route], None]


class Messenger:
    """Implements contract.Caller and transport.messages.LinkClient."""

    def __init__(self, around: Surroundings) -> None:
        self.identity = around.identity
        self.recorder = around.recorder
        self.spawn = around.spawn
        self._around = around
        self._large = LargePayloads(
            around.store, around.config.rendezvous, around.spawn, around.recorder.counters
        )
        self._chooser = LinkChooser(
            around.transports,
            around.priority,
            around.missing,
            around.session_to,
            around.recorder,
        )
        messaging = around.config.messaging
        watch = CallWatch(self, around.config.timeouts.no_progress_s, messaging.ping_timeout_s)
        self._pending = PendingCalls(messaging.outstanding_calls, watch)
        self._settings = OutboundSettings(
            pending=self._pending,
            open_route=self._open_route,
            stage=self._large.stage,
            keep=self._large.keep,
            unstage=self._large.unstage,
            spawn=around.spawn,
            on_failed=self._on_failed,
            on_stalled=self._on_stalled,
            payload_bytes_max=messaging.eager_max_bytes,
        )
        self._replies = Replies(self._pending, self._large, around.spawn, around.recorder.counters)
        self._outbounds: dict[WorkerId, Outbound] = {}
        self._routes: dict[MessageLink, Route] = {}
        self._sinks: Sinks | None = None
        self._closed_traffic: dict[PathName, Traffic] = {}
        self._closed = False

    def attach(self, sinks: Sinks) -> None:
        """Once, before the first session."""
        self._sinks = sinks
        for transport in self._around.transports:
            transport.watch(self, self._link_opened)

    # --- sends ------------------------------------------------------------------------------------

    def issue(
        self,
        peer: object,
        name: str,
        payload: object,
        wants: Wants,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        transport: object = None,
        wait: bool = False,
        on_error: OnError | None = None,
        decode: Callable[[memoryview], object] | None = None,
        reserved: bool = False,
    ) -> Sending:
        """One send, on its way or in its queue when this returns. Raises UsageError, ClosedError:
        nothing was issued.
        """
        if self._closed:
            raise ClosedError("the node")
        packed = pack_name(name)
        if not reserved and name[0] == _RESERVED:
            raise UsageError(f"handler name {name!r}: names with a leading _ are orbit's own")
        if headers and any(key[:1] == _RESERVED for key in headers):
            raise UsageError("headers with a leading _ are orbit's own")
        header_map = pack_headers(headers)
        if timeout is None:
            timeout = self._around.config.timeouts.call_s
        elif not 0 < timeout < float("inf"):
            raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0")
        wanted = None if transport is None else transport_of(transport)
        body = (
            payload
            if type(payload) is bytes
            else payload_of(payload, self._settings.payload_bytes_max)
        )
        outbound = self._outbound(
            peer.worker_id if type(peer) is PeerIdentity else self.worker_id_of(peer)
        )
        sending = Sending(outbound, _MESSAGE, b"", body)
        sending.wants = wants
        sending.wanted = wanted
        sending.on_error = on_error
        sending.decode = decode
        sending.timeout_s = timeout
        call_id = 0
        if wants:
            try:
                call_id = self._pending.begin(sending)
            except BudgetExceeded as error:
                self.recorder.counters.add(SLOTS_EXHAUSTED_TOTAL)
                sending.fail(error)
                return sending
        sending.header = pack_call(wants, call_id, packed, header_map)
        outbound.send(sending, wait=wait)
        if not sending.settled:
            self._pending.watch(sending)
        return sending

    def call(
        self,
        peer: object,
        name: str,
        payload: Payload = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> SendResult[memoryview]:
        """See contract.Caller."""
        sending = self.issue(
            peer, name, payload, Wants.RESPONSE, headers=headers, timeout=timeout, reserved=True
        )
        return SendResult(sending)

    async def capacity(self, peer: object, timeout: float | None) -> None:
        """See Node.capacity."""
        if self._closed:
            raise ClosedError("the node")
        outbound = self._outbound(self.worker_id_of(peer))
        timeout_s = self._around.config.timeouts.call_s if timeout is None else timeout
        release_current_charge()
        try:
            async with asyncio.timeout(timeout_s):
                await outbound.room()
        except TimeoutError:
            raise DeadlineExceeded(f"room for {outbound.worker_id:016x}", timeout_s) from None

    def wire_up(self, peer: PeerIdentity) -> None:
        """Open the link to that node ahead of the first send; nobody waits for it."""
        if not self._closed and peer.worker_id != self.identity.worker_id:
            self._outbound(peer.worker_id).wire_up()

    def worker_id_of(self, peer: object) -> WorkerId:
        """See contract.Caller."""
        if isinstance(peer, PeerIdentity | NodeAddress):
            return WorkerId(peer.worker_id)
        if type(peer) is int and 0 < peer < 1 << 64:
            return WorkerId(peer)
        raise UsageError(f"not a peer: {type(peer).__name__}", hint="pass what add_peer returned")

    # --- routes -----------------------------------------------------------------------------------

    def route_to(self, worker_id: WorkerId) -> Route | None:
        """See contract.Caller."""
        outbound = self._outbounds.get(worker_id)
        return None if outbound is None else outbound.route()

    def routes(self) -> Iterable[Route]:
        """See contract.Caller."""
        return list(self._routes.values())

    async def session_to(self, worker_id: WorkerId) -> Session:
        """See contract.Caller."""
        return await self._around.session_to(worker_id)

    async def part(self, route: Route, timeout_s: float) -> bool:
        """See contract.Caller."""
        if not route.quiet or route.parting or route.link.closed:
            return False
        route.parting = True
        try:
            return await route.link.goodbye(timeout_s)
        finally:
            route.parting = False
            outbound = self._outbounds.get(route.peer.worker_id)
            if outbound is not None:
                outbound.resume()

    def session_closed(self, session: Session, error: OrbitError) -> None:
        """The epoch is over: its links end now, each frame and call of it with its verdict."""
        self._chooser.forget(session)
        for route in [r for r in self._routes.values() if r.session is session]:
            route.link.abort(error)

    # --- LinkClient -------------------------------------------------------------------------------

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        """See LinkClient. Raises PeerProtocolError for what the link must be closed for."""
        route = self._routes.get(link)
        sinks = self._sinks
        if route is None or sinks is None:
            return
        schema = header[0] if header else 0
        if kind == _MESSAGE:
            if schema == STREAM_SCHEMA:
                sinks.streams.on_item(route, header, payload, Charge(link, charge))
            else:
                parsed = parse_request(header)
                held = Charge(link, charge)
                sinks.requests.on_request(
                    ReceivedRequest(
                        route, header, parsed, payload, held, self._large, self.recorder.counters
                    )
                )
        elif kind in _OUTCOMES:
            self._replies.on_outcome(route, kind, header, payload)
        elif kind == _EVENT:
            if schema == STREAM_SCHEMA:
                sinks.streams.on_event(route, header, payload)
            else:
                self._large.on_done(route, parse_event(header).id)
        else:
            self._replies.on_draining(route, header)

    def on_link_lost(self, link: MessageLink, error: OrbitError | None) -> None:
        """See LinkClient."""
        route = self._routes.pop(link, None)
        if route is None:
            return
        so_far = self._closed_traffic.get(route.transport) or Traffic(route.transport)
        self._closed_traffic[route.transport] = so_far.plus(link.statistics())
        cause = "" if error is None else PeerLost.cause_of(error)
        unknown = OutcomeUnknown(str(route.peer), cause or "the link was closed")
        for sending in self._pending.lose(route):
            if sending.fail(unknown):
                self._on_failed(route.peer.worker_id, unknown)
        self._large.route_lost(route, unknown)
        outbound = self._outbounds.get(route.peer.worker_id)
        if outbound is not None:
            outbound.drop_route(route, error)
        if self._sinks is not None:
            self._sinks.streams.on_route_lost(route, error)
        self.recorder.record(MessageLinkClosed(route.peer.worker_id, route.transport, cause))

    def may_close(self, link: MessageLink) -> bool:
        """See LinkClient."""
        route = self._routes.get(link)
        return route is None or route.quiet

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing more is sent, and what waits for an answer will get none. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for outbound in self._outbounds.values():
            outbound.close(ClosedError("the node"))
        self._pending.close()
        local = [r for r in self._routes.values() if r.session is None]
        for route in local:
            route.link.abort()

    def statistics(self) -> MessagingStatistics:
        """As of now."""
        links = tuple(
            LinkReport(r.peer.worker_id, r.transport, r.calls, r.serving, r.link.statistics())
            for r in self._routes.values()
        )
        bounds = [outbound.admission for outbound in self._outbounds.values()]
        return MessagingStatistics(
            pending_calls=len(self._pending.slots),
            late_replies=self._pending.slots.late,
            peers=len(self._outbounds),
            queued_frames=sum(bound.frames for bound in bounds),
            queued_bytes=sum(bound.nbytes for bound in bounds),
            waiting_sends=sum(bound.waiting for bound in bounds),
            staged_payloads=len(self._large),
            links=links,
            traffic=total_traffic(self._closed_traffic.values(), links),
            devices={
                name: count
                for transport in self._around.transports
                if isinstance(transport, Counting)
                for name, count in transport.counts().items()
            },
        )

    # --- within -----------------------------------------------------------------------------------

    def _outbound(self, worker_id: WorkerId) -> Outbound:
        outbound = self._outbounds.get(worker_id)
        if outbound is None:
            messaging = self._around.config.messaging
            outbound = self._outbounds[worker_id] = Outbound(
                worker_id, self._settings, messaging.queue_frames, messaging.queue_bytes
            )
        return outbound

    async def _open_route(self, worker_id: WorkerId, wanted: PathName | None) -> Route:
        if worker_id == self.identity.worker_id:
            return self._local_route()
        session, link = await self._chooser.open(worker_id, wanted, self)
        return self._register(session, link)

    def _local_route(self) -> Route:
        """The way to this node itself, by whatever transport was asked for."""
        for route in self._routes.values():
            if route.session is None and not route.link.closed:
                return route
        messaging = self._around.config.messaging
        link = LocalLink(self, messaging.eager_max_bytes, messaging.inbound_max_bytes)
        route = self._routes[link] = Route(self.identity, None, link)
        return route

    def _link_opened(self, session: Session, link: MessageLink) -> None:
        self._register(session, link)

    def _register(self, session: Session, link: MessageLink) -> Route:
        """The route of a link, whoever opened it."""
        route = self._routes.get(link)
        if route is None:
            route = Route(session.peer, session, link)
            if not link.closed:
                self._routes[link] = route
                self.recorder.record(MessageLinkOpened(session.peer.worker_id, link.transport))
                if self._sinks is not None:
                    self._sinks.on_opened(route)
        return route

    def _on_failed(self, worker_id: WorkerId, error: OrbitError) -> None:
        self.recorder.record(SendRejected(worker_id, error.code))

    def _on_stalled(self, worker_id: WorkerId) -> None:
        self.recorder.counters.add(SEND_BACKPRESSURE_TOTAL)
