"""One peer as a shell: runs its connection machine, dials, admits, and wakes who waits.

It carries out what the machine decides and feeds back what came of it. It knows no listener, no
handshake and no calls; how a link is dialed and how a session begins is handed in.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ..errors import ClosedError, InternalError, OrbitError, PeerLost, UnknownPeer, UsageError
from ..model import Incarnation, WorkerId
from ..protocol.address import ENDPOINTS_MAX, NodeAddress
from ..protocol.bootstrap import ATTEMPT_BYTES, Epoch
from ..protocol.connection import (
    AbandonDial,
    Admit,
    Begin,
    Close,
    Connection,
    ConnectionEffect,
    ConnectionInput,
    ConnectionSettings,
    ConnectionState,
    DialFailed,
    DialSucceeded,
    EndReason,
    EndSession,
    Fail,
    LifeAdded,
    Offer,
    OfferGone,
    Ping,
    PingAnswered,
    Proven,
    Refuse,
    SessionLost,
    StartDial,
    TimedOut,
    Wake,
    Wanted,
    restarted_error,
)
from ..protocol.endpoint import Endpoint
from ..protocol.messages import Hello
from ..transport.interface import ControlLink
from ..transport.timer import DeadlineTimer
from .runner import TaskRunner
from .session import ControlSession

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True, eq=False)
class OpenedLink:
    """An epoch whose handshake is through, and its link, not started yet. `endpoints`: where the
    peer can be dialed, as far as is known.
    """

    epoch: Epoch
    link: ControlLink
    endpoints: tuple[tuple[str, int], ...] = ()


class IncomingLink(Protocol):
    """A peer that has dialed this node and proven itself, and waits for its welcome."""

    @property
    def epoch(self) -> Epoch: ...

    def admit(self) -> ControlLink:
        """Say welcome. The link is the caller's. Raises ClosedError when the dialer is gone."""

    def refuse(self, reason: str, detail: str = "") -> None:
        """Say no. Nothing when the dialer is gone."""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """It has to wait: `on_gone` is called, from the loop, if it leaves before the decision."""


Dial = Callable[[NodeAddress, StartDial], Awaitable[OpenedLink]]
"""Opens a link and runs the handshake. Raises PeerError. Cancelling it leaves nothing behind."""

BeginSession = Callable[[OpenedLink, bool], ControlSession]
"""Starts the session of a fresh epoch; True: this node dialed. Raises ClosedError."""


@dataclass(frozen=True, slots=True)
class PeerWays:
    """What all peers of a node share."""

    dial: Dial
    begin: BeginSession
    runner: TaskRunner
    rng: random.Random


class Peer:
    """`address` None: known only because it dialed us, and it advertises no endpoint. `added`: by
    the user, so it is never forgotten.
    """

    def __init__(self, settings: ConnectionSettings, ways: PeerWays) -> None:
        self.worker_id: WorkerId = settings.peer
        self.address: NodeAddress | None = None
        self.added = False
        self.session: ControlSession | None = None
        self._settings = settings
        self._ways = ways
        self._machine = Connection(settings)
        self._sessions: dict[bytes, ControlSession] = {}  # by attempt, until they are over
        self._incoming: dict[bytes, IncomingLink] = {}  # not decided yet
        self._opened: OpenedLink | None = None  # dialed just now, about to begin
        self._dialing: asyncio.Task[None] | None = None
        self._waiters: dict[asyncio.Future[ControlSession | OrbitError], None] = {}  # oldest first
        self._inputs: deque[Callable[[], None]] = deque()
        self._timer = DeadlineTimer(self._on_deadline)
        self._busy = False

    @property
    def idle(self) -> bool:
        """Nothing is open, and nothing is on its way."""
        return self._machine.state is ConnectionState.IDLE and not self._sessions

    async def reach(self) -> ControlSession:
        """The session, dialed if need be. Cancelling one caller leaves the dial to the others."""
        if self.session is not None:
            return self.session
        if self._machine.state is ConnectionState.CLOSED:
            raise ClosedError("the node")
        if self.address is None and self._machine.state is ConnectionState.IDLE:
            raise UnknownPeer(self.worker_id)
        waiter: asyncio.Future[ControlSession | OrbitError]
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            if self._machine.state is ConnectionState.IDLE:
                self._enter(lambda: self._step(Wanted(_fresh_attempt())))
            outcome = await waiter
        finally:
            self._waiters.pop(waiter, None)
        if isinstance(outcome, OrbitError):
            raise outcome.with_traceback(None)
        return outcome

    # --- inputs -----------------------------------------------------------------------------------

    def add(self, address: NodeAddress) -> None:
        """The user says where it is, and which life of it."""
        self.added = True
        self.address = address
        self._enter(lambda: self._step(LifeAdded(address.incarnation)))

    def offer(self, incoming: IncomingLink) -> None:
        """It has dialed us."""
        hello = incoming.epoch.peer_hello
        attempt = incoming.epoch.attempt
        if attempt in self._incoming or attempt in self._sessions:
            incoming.refuse("busy", "an attempt of that name is there already")
            return
        self._incoming[attempt] = incoming
        peer = incoming.epoch.peer
        offer = Offer(attempt, peer.incarnation, hello.dial_number, hello.previous)
        self._enter(lambda: self._step(Proven(offer)))
        if attempt in self._incoming:  # it has to wait
            incoming.watch(lambda: self._enter(lambda: self._on_offer_gone(attempt)))

    def session_closed(self, session: ControlSession) -> None:
        """One of its sessions, current or not, is over."""
        self._enter(lambda: self._on_session_over(session.attempt))

    def close(self) -> None:
        """No more dials; who waits is told."""
        self._enter(lambda: self._step(Close()))

    def _on_offer_gone(self, attempt: bytes) -> None:
        self._incoming.pop(attempt, None)
        parked = self._machine.parked
        if parked is not None and parked.attempt == attempt:
            self._step(OfferGone())

    def _on_session_over(self, attempt: bytes) -> None:
        self._sessions.pop(attempt, None)
        current = self._machine.current
        if current is None or current.attempt != attempt:
            return
        self.session = None
        self._step(SessionLost())
        waiting = any(not waiter.done() for waiter in self._waiters)
        if waiting and self._machine.state is ConnectionState.IDLE:
            # Gone before anybody was told of it: for who waits it never was.
            self._step(Wanted(_fresh_attempt()))

    def _on_deadline(self) -> None:
        self._enter(self._on_time)

    def _on_time(self) -> None:
        if self._machine.deadline is not None:
            self._step(TimedOut())

    # --- the machine ------------------------------------------------------------------------------

    def _enter(self, deed: Callable[[], None]) -> None:
        """One input after the other: what a step causes, down to a user's event sink, may bring the
        next one.
        """
        self._inputs.append(deed)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inputs:
                self._inputs.popleft()()
        finally:
            self._busy = False
        self._timer.arm(self._machine.deadline)

    def _step(self, event: ConnectionInput) -> None:
        if isinstance(event, Wanted) and self._machine.state is not ConnectionState.IDLE:
            return  # something came in between
        for effect in self._machine.step(event, asyncio.get_running_loop().time()):
            self._carry_out(effect)

    def _carry_out(self, effect: ConnectionEffect) -> None:
        match effect:
            case StartDial():
                name = f"dial {self.worker_id:016x}"
                self._dialing = self._ways.runner.spawn(self._dial(effect), name)
            case AbandonDial():
                if self._dialing is not None:
                    self._dialing.cancel()
            case Begin():
                opened, self._opened = self._opened, None
                assert opened is not None
                self._begin(opened, dialed=True)
            case Admit(attempt):
                self._admit(self._incoming.pop(attempt))
            case Refuse(attempt, reason, detail):
                self._incoming.pop(attempt).refuse(reason, detail)
            case EndSession(attempt, reason):
                self._end(attempt, reason)
            case Ping(attempt):
                self._ways.runner.spawn(self._check(self._sessions.get(attempt)), "check")
            case Wake():
                if self.session is not None:
                    self._wake(self.session)
            case Fail(error):
                self._wake(error)

    def _wake(self, outcome: ControlSession | OrbitError) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(outcome)

    def _admit(self, incoming: IncomingLink) -> None:
        epoch = incoming.epoch
        self._learn(epoch.peer_hello)
        try:
            link = incoming.admit()
        except ClosedError:
            self.session = None
            self._enter(lambda: self._on_session_over(epoch.attempt))
            return
        known = () if self.address is None else self.address.endpoints
        endpoints = dict.fromkeys((*known, *_dialable(epoch.peer_hello.endpoints)))
        self._begin(OpenedLink(epoch, link, tuple(e.pair for e in endpoints)), dialed=False)

    def _begin(self, opened: OpenedLink, *, dialed: bool) -> None:
        attempt = opened.epoch.attempt
        self.session = None
        try:
            self.session = self._sessions[attempt] = self._ways.begin(opened, dialed)
        except ClosedError as error:
            _log.info("a link with %s is dropped: %s", opened.epoch.peer, error)
            self._wake(error)
            self._enter(lambda: self._on_session_over(attempt))

    def _end(self, attempt: bytes, reason: EndReason) -> None:
        session = self._sessions.get(attempt)
        if session is self.session:
            self.session = None
        if session is None:
            return
        if reason is EndReason.RESTARTED:
            session.abort(restarted_error(self.worker_id, session.peer.incarnation))
        else:
            session.abort(PeerLost(str(session.peer), "superseded by a newer connection"))

    def _learn(self, hello: Hello) -> None:
        """Where a peer that dialed us can be dialed. An address of the same life stays."""
        known = self.address
        if known is not None and known.incarnation == hello.incarnation:
            return
        told = _dialable(hello.endpoints)
        endpoints = told or (() if known is None else known.endpoints)
        self.address = None
        if endpoints:
            # A restart at the same endpoint needs no new ticket.
            life = Incarnation(hello.incarnation)
            self.address = NodeAddress(self.worker_id, life, endpoints, hello.rails)

    # --- tasks ------------------------------------------------------------------------------------

    async def _dial(self, start: StartDial) -> None:
        address = self.address
        error: OrbitError
        try:
            if address is None:
                raise UnknownPeer(self.worker_id)
            opened = await self._ways.dial(address, start)
        except OrbitError as failure:
            error = failure
        except Exception as failure:
            _log.exception("a dial failed")
            error = InternalError(f"a dial failed: {failure!r}")
        else:
            self._enter(lambda: self._on_dialed(start, opened))
            return
        self._enter(lambda: self._on_dial_failed(start, error))

    def _on_dialed(self, start: StartDial, opened: OpenedLink) -> None:
        if self._machine.dialing is not start:
            opened.link.abort()
            return
        self._opened = opened
        self._step(DialSucceeded(opened.epoch.peer.incarnation))

    def _on_dial_failed(self, start: StartDial, error: OrbitError) -> None:
        if self._machine.dialing is start:
            spread = self._ways.rng.uniform(0.5, 1.0)
            self._step(DialFailed(error, _fresh_attempt(), spread))

    async def _check(self, session: ControlSession | None) -> None:
        if session is None:
            return
        try:
            await session.ping(self._settings.check_s)
        except OrbitError:
            return  # the deadline decides, or the end of the session
        self._enter(lambda: self._on_pong(session))

    def _on_pong(self, session: ControlSession) -> None:
        if self._machine.state is ConnectionState.CHECKING and session is self.session:
            self._step(PingAnswered())


def _fresh_attempt() -> bytes:
    return secrets.token_bytes(ATTEMPT_BYTES)


def _dialable(endpoints: tuple[str, ...]) -> tuple[Endpoint, ...]:
    found = []
    for text in endpoints[:ENDPOINTS_MAX]:
        try:
            endpoint = Endpoint.parse(text)
        except UsageError:
            continue  # a newer peer may name what this one does not understand
        if endpoint.port and not endpoint.is_wildcard:
            found.append(endpoint)
    return tuple(found)
