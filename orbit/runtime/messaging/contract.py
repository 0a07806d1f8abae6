"""What the messenger, the dispatcher and streams owe each other.

The messenger owns links, calls and staged payloads; the dispatcher owns handlers, their lanes and
the drain gate; streams own items and their credit. Each sees the other two through the protocols
here only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import OrbitError
from ...events import Recorder
from ...model import PeerIdentity, WorkerId
from ...protocol.messaging.call_header import Wants
from ...transport.interface import Session
from ...transport.messages import MessageLink
from .routes import Route

if TYPE_CHECKING:
    from .results import SendResult

Payload = bytes | bytearray | memoryview


class Charge:
    """The bytes of one received message, which its link counts while they are held. Each method
    changes nothing the second time.
    """

    __slots__ = ("_held", "_link", "nbytes")

    def __init__(self, link: MessageLink, nbytes: int) -> None:
        self._link = link
        self._held = True
        self.nbytes = nbytes

    def release(self) -> None:
        """The application is done with the message, or waits for a peer on its behalf."""
        if self._held:
            self._held = False
            if not self._link.closed:
                self._link.consumed(self.nbytes)

    def renew(self) -> None:
        """Its answer is about to be queued, and holds it until it has left."""
        if not self._held:
            self._held = True
            self._link.renewed(self.nbytes)


CURRENT_CHARGE: ContextVar[Charge | None] = ContextVar("orbit_charge", default=None)
"""The message that the running handler works on. The dispatcher sets it where a handler may wait
(in the context of its task); a plain function that runs inline cannot wait and needs none.
"""


def release_current_charge() -> None:
    """Called before every wait for a peer, so that handlers which call each other can never wait
    for credit that they hold themselves.
    """
    charge = CURRENT_CHARGE.get()
    if charge is not None:
        charge.release()


class CallerGone(Exception):
    """The time of a call is up: its sender has an error already, and an answer that raced it would
    put another in its place.
    """


class Request(Protocol):
    """One received request, until exactly one of `answer`, `fail`, `reject_draining` and `drop`
    has settled it. Settling hands the reply to the link the request came by (or drops it when that
    has closed, counted), and never raises. The charge is released when the reply has left, or with
    the settling when there is none. A second settling does nothing.
    """

    @property
    def route(self) -> Route: ...

    @property
    def sender(self) -> PeerIdentity: ...

    @property
    def name(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The user's headers; orbit's own are not among them."""

    @property
    def wants(self) -> Wants: ...

    @property
    def payload(self) -> memoryview:
        """Empty while `staged` and not loaded."""

    @property
    def charge(self) -> Charge: ...

    @property
    def staged(self) -> bool:
        """The payload is still with the sender: `await load()` before the handler, in the request's
        place in its lane, so that order is kept.
        """

    @property
    def settled(self) -> bool: ...

    async def load(self) -> None:
        """Fetch a staged payload; at once when it is here. What is left of its call's time and
        `rendezvous.staged_fetch_timeout` bound it, both from now on. Raises RequestFailed: answer
        with its reason and detail; CallerGone: drop it.
        """

    def answer(self, payload: Payload | None = None) -> None:
        """The handler has finished. A response that is too long for the link is staged, or becomes
        an error reply `too_large`.
        """

    def fail(self, reason: str, detail: str = "") -> None:
        """Reasons as in RequestFailed. Nothing is sent when the sender wants nothing."""

    def reject_draining(self) -> None:
        """SHUTTING_DOWN with the request's header verbatim; the handler did not run."""

    def drop(self) -> None:
        """Given up without a word: the node closes, or the sender waits no more."""


class RequestSink(Protocol):
    """The dispatcher. Called from within a link's delivery: it may queue, spawn or run a plain
    handler, and must not raise.
    """

    def on_request(self, request: Request) -> None:
        """Take the drain guard, then look at the flag; then run, queue or refuse the request. The
        guard is given up when the request is settled.
        """


class StreamSink(Protocol):
    """Streams. Headers are those whose first byte is STREAM_SCHEMA; a PeerProtocolError that these
    raise closes the link.
    """

    def on_item(self, route: Route, header: bytes, payload: memoryview, charge: Charge) -> None:
        """A MESSAGE frame. Release the charge once the item stands in the stream's own buffer."""

    def on_event(self, route: Route, header: bytes, payload: memoryview) -> None:
        """An EVENT frame."""

    def on_route_lost(self, route: Route, error: OrbitError | None) -> None:
        """Its streams end. Every frame has had its verdict."""


class Caller(Protocol):
    """The messenger, as dispatcher, health checks and streams use it. Frames of streams go
    straight to `route.link.send`: their own credit bounds them.
    """

    @property
    def identity(self) -> PeerIdentity: ...

    @property
    def recorder(self) -> Recorder: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a background task of this node, which holds it until it ends."""

    def call(
        self,
        peer: object,
        name: str,
        payload: Payload = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> SendResult[memoryview]:
        """As Node.unary, names of orbit's own (`_...`) included. `result.route` is the route that
        carried it, once it is admitted.
        """

    def worker_id_of(self, peer: object) -> WorkerId:
        """Of a PeerIdentity, NodeAddress or worker id. Raises UsageError."""

    def route_to(self, worker_id: WorkerId) -> Route | None:
        """The open route that sends to that node use now; None: no message link is open."""

    def routes(self) -> Iterable[Route]:
        """Every open route, also those that only receive."""

    async def session_to(self, worker_id: WorkerId) -> Session:
        """The session to that node, dialed if need be. Raises as Peers.session."""

    async def part(self, route: Route, timeout_s: float) -> bool:
        """Close an idle route by an acknowledged goodbye. False, and it lives on, when it is not
        `quiet` or the peer is not. Sends wait meanwhile and open a link anew afterwards.
        """
