"""The open epochs of one node, dialed and accepted: how each begins, and what follows its end.
Which of them is the connection to a peer is `peer.py`'s business.

An epoch that is over loses its fetches, its leases and its paths' resources, in that order. Nothing
here knows how links are made or what is said over them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..errors import ClosedError, OrbitError, Unquiesced, UsageError
from ..events import MemoryRetained, Recorder, SessionClosed, SessionOpened
from ..transport.interface import CallHandler, DataPath, PacketRoute, Session
from .paths import Paths
from .peer import OpenedLink
from .retained import retain
from .runner import TaskRunner
from .session import ControlSession, SessionSettings

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True)
class SessionTimeouts:
    """`silence_s`: how long a peer that owes an answer may say nothing before it is pinged."""

    call_s: float = 30.0
    silence_s: float = 10.0
    ping_s: float = 2.0


class FetchSide(Protocol):
    """The consumer, as far as the end of an epoch concerns it."""

    def session_closed(self, session: ControlSession) -> None:
        """End its fetches."""


class ConnectionSide(Protocol):
    """The peers, likewise."""

    def session_closed(self, session: ControlSession) -> None:
        """It is nobody's connection any more."""


class LeaseSide(Protocol):
    """The owner, likewise."""

    async def end_session(self, session: Session) -> None:
        """End its leases; return when each retraction has its verdict."""


class SessionService(Protocol):
    """What else rides on a node's sessions: its messages."""

    packets: PacketRoute | None

    def handlers(self) -> Mapping[str, CallHandler]:
        """Control calls that it answers."""

    def session_closed(self, session: ControlSession) -> None:
        """The epoch is over."""

    async def end_session(self, session: Session) -> None:
        """Return when its resources of that epoch are gone."""

    async def close(self) -> None:
        """No session is left."""


def keep_path(path: DataPath, error: Unquiesced, recorder: Recorder) -> None:
    """A path could not prove that its hardware is quiet: it must outlive its node, with all that it
    holds.
    """
    retain(error, path)
    recorder.record(MemoryRetained(error.what, error.retained_bytes, error.cause))


class Sessions:
    """Begins epochs and cleans up after them. `watch` names who is told of an end."""

    def __init__(
        self,
        paths: Paths,
        recorder: Recorder,
        runner: TaskRunner,
        timeouts: SessionTimeouts,
    ) -> None:
        self._paths = paths
        self._recorder = recorder
        self._runner = runner
        self._timeouts = timeouts
        self._handlers: dict[str, CallHandler] = {}  # of all sessions, open ones included
        self._fetches: FetchSide | None = None
        self._leases: LeaseSide | None = None
        self._connections: ConnectionSide | None = None
        self._service: SessionService | None = None
        self._open: dict[bytes, ControlSession] = {}  # by attempt
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def watch(
        self,
        handlers: Mapping[str, CallHandler],
        fetches: FetchSide,
        leases: LeaseSide,
        connections: ConnectionSide,
    ) -> None:
        """Once, before the first session."""
        self._handlers.update(handlers)
        self._fetches, self._leases = fetches, leases
        self._connections = connections

    @property
    def service(self) -> SessionService | None:
        """What `carry` was given."""
        return self._service

    def carry(self, service: SessionService) -> None:
        """Once, before the first session and after `watch`."""
        self._service = service
        self._handlers.update(service.handlers())

    def serve(self, method: str, handler: CallHandler) -> None:
        """From now on, also on sessions that are open. Raises UsageError: it is served already."""
        if method in self._handlers:
            raise UsageError(f"{method} is served already")
        self._handlers[method] = handler

    def stop_serving(self, method: str) -> None:
        """Undo `serve`. Idempotent."""
        self._handlers.pop(method, None)

    def begin(self, opened: OpenedLink, dialed: bool) -> ControlSession:
        """Start the session of a fresh epoch. Raises ClosedError; the link is gone then."""
        epoch = opened.epoch
        if self._closed or epoch.attempt in self._open:
            # An attempt names one epoch on both sides; a second one would share its tokens.
            opened.link.abort()
            raise ClosedError("the node" if self._closed else "an epoch of that name")
        settings = SessionSettings(
            self._handlers,
            self._runner.start,
            self._on_closed,
            self._timeouts.call_s,
            packets=None if self._service is None else self._service.packets,
            silence_s=self._timeouts.silence_s,
            ping_timeout_s=self._timeouts.ping_s,
        )
        session = ControlSession(epoch, opened.link, opened.endpoints, settings, dialed=dialed)
        self._open[epoch.attempt] = session
        self._recorder.record(SessionOpened(epoch.peer.worker_id, dialed))
        session.start()
        return session

    async def close(self) -> None:
        """Say goodbye to everybody. Returns when every epoch has been cleaned up after."""
        self._closed = True
        sessions = list(self._open.values())
        for session in sessions:
            session.close()
        await asyncio.gather(*(session.wait_closed() for session in sessions))
        while self._ending:
            await asyncio.wait(set(self._ending))

    def _on_closed(self, session: ControlSession) -> None:
        self._open.pop(session.attempt, None)
        cause = "" if session.cause is None else str(session.cause)
        self._recorder.record(SessionClosed(session.peer.worker_id, session.dialed, cause))
        if self._connections is not None:
            self._connections.session_closed(session)
        if self._fetches is not None:
            self._fetches.session_closed(session)
        if self._service is not None:
            self._service.session_closed(session)
        task = self._runner.spawn(self._clean_up(session), f"end of {session.peer}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _clean_up(self, session: ControlSession) -> None:
        if self._leases is not None:
            await self._leases.end_session(session)
        await session.wait_served()
        if self._service is not None:
            await self._service.end_session(session)
        for path in self._paths:
            try:
                await path.close_session(session)
            except Unquiesced as error:
                keep_path(path, error, self._recorder)
            except OrbitError as error:
                _log.warning("ending %s on %s: %s", path.name, session.peer, error)
