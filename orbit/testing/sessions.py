"""Two ends of one epoch without a control connection: what a data path needs to be tested alone.

Identities, attempt and key are fixed by a number, so that a failing run can be repeated. Calls go
straight to the other end's path handlers, as plain maps.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import TypeVar

from ..errors import OrbitError, PeerLost, PeerRefused, UsageError
from ..model import Incarnation, PeerIdentity, WorkerId
from ..protocol.messages import Hello, Message
from ..transport.interface import CallHandler, ControlLink

Reply = TypeVar("Reply", bound=Message)


class StubSession:
    """Implements Session. `connect` two of them, give each the handlers of its own path."""

    def __init__(self, number: int, *, dialer: bool, endpoint: tuple[str, int] = ("", 0)) -> None:
        own, other = (1, 2) if dialer else (2, 1)
        self.peer = PeerIdentity(WorkerId(other), Incarnation(100 + other))
        self.attempt = hashlib.sha256(b"attempt %d" % number).digest()[:16]
        self.key = hashlib.sha256(b"key %d" % number).digest()
        self.local_hello = make_hello(own, other, self.attempt)
        self.peer_hello = make_hello(other, own, self.attempt)
        self.peer_endpoints: tuple[tuple[str, int], ...] = (endpoint,)
        self.dialed = dialer
        self.closed = False
        self.backlog_bytes = 0
        self.handlers: Mapping[str, CallHandler] = {}
        self._other: StubSession | None = None

    def connect(self, other: StubSession) -> None:
        """Make calls of either reach the handlers of the other."""
        self._other, other._other = other, self

    @property
    def link(self) -> ControlLink:
        raise UsageError("a stub session has no control link")

    def abort(self, cause: OrbitError) -> None:
        """As `close`: nobody asks a stub for the cause."""
        self.close()

    def close(self) -> None:
        """The epoch is over, for both ends."""
        self.closed = True
        if self._other is not None:
            self._other.closed = True

    async def call(
        self, request: Message, reply: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        method: str = getattr(request, "METHOD", "")
        await asyncio.sleep(0)  # no real call answers before its caller gave way once
        if self.closed or self._other is None:
            raise PeerLost(str(self.peer), "closed")
        handler = self._other.handlers.get(method)
        if handler is None:
            raise PeerRefused("unknown_method", method)
        answer = await handler(self._other, request.to_wire())
        return reply.from_wire({} if answer is None else answer.to_wire())

    async def ping(self, timeout_s: float) -> float:
        if self.closed:
            raise PeerLost(str(self.peer), "closed")
        return 0.0

    def notify(self, request: Message) -> None:
        """Nobody listens to notifications of a path."""


def make_hello(worker_id: int, target: int, attempt: bytes, *, nonce: bytes = bytes(16)) -> Hello:
    """A valid hello without rails."""
    return Hello(
        version_min=1,
        version_max=1,
        worker_id=worker_id,
        incarnation=100 + worker_id,
        target=target,
        attempt=attempt,
        nonce=nonce,
    )
