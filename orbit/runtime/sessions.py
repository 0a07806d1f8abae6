"""The open epochs of one node, dialed and accepted: how each begins, and what follows its end.

An epoch that is over loses its fetches, its leases and its paths' resources, in that order. Nothing
here knows how links are made or what is said over them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..errors import ClosedError, OrbitError, PeerRestarted, Unquiesced
from ..events import MemoryRetained, Recorder, SessionClosed, SessionOpened
from ..protocol.bootstrap import Epoch
from ..transport.interface import CallHandler, ControlLink, DataPath, Session
from .paths import Paths
from .retained import retain
from .runner import TaskRunner
from .session import ControlSession, SessionSettings

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True, eq=False)
class OpenedLink:
    """An epoch whose handshake is through, and its link, not started yet. `endpoint` is what was
    dialed, or where the peer dialed from.
    """

    epoch: Epoch
    link: ControlLink
    endpoint: tuple[str, int]


class FetchSide(Protocol):
    """The consumer, as far as the end of an epoch concerns it."""

    def session_closed(self, session: ControlSession) -> None:
        """End its fetches."""


class LeaseSide(Protocol):
    """The owner, likewise."""

    async def end_session(self, session: Session) -> None:
        """End its leases; return when each retraction has its verdict."""


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
        call_timeout_s: float,
        *,
        authenticated: bool,
    ) -> None:
        self._paths = paths
        self._recorder = recorder
        self._runner = runner
        self._call_timeout_s = call_timeout_s
        self._authenticated = authenticated
        self._handlers: Mapping[str, CallHandler] = {}
        self._fetches: FetchSide | None = None
        self._leases: LeaseSide | None = None
        self._open: dict[bytes, ControlSession] = {}  # by attempt
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def watch(
        self, handlers: Mapping[str, CallHandler], fetches: FetchSide, leases: LeaseSide
    ) -> None:
        """Once, before the first session."""
        self._handlers, self._fetches, self._leases = handlers, fetches, leases

    def begin(self, opened: OpenedLink, *, dialed: bool) -> ControlSession:
        """Start the session of a fresh epoch. Raises ClosedError; the link is gone then."""
        epoch = opened.epoch
        if self._closed or epoch.attempt in self._open:
            # An attempt names one epoch on both sides; a second one would share its tokens.
            opened.link.abort()
            raise ClosedError("the node" if self._closed else "an epoch of that name")
        if self._authenticated:
            self._end_older_lives(epoch)
        settings = SessionSettings(
            self._handlers, self._runner.spawn, self._on_closed, self._call_timeout_s
        )
        session = ControlSession(epoch, opened.link, opened.endpoint, settings, dialed=dialed)
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

    def _end_older_lives(self, epoch: Epoch) -> None:
        # Whoever proved the secret speaks for that worker id, so its older life is over. Without a
        # secret anybody could say so, and a live peer is left alone.
        for session in list(self._open.values()):
            same = session.peer.worker_id == epoch.peer.worker_id
            if same and session.peer.incarnation != epoch.peer.incarnation:
                session.abort(PeerRestarted(f"{epoch.peer}: a newer process took its place"))

    def _on_closed(self, session: ControlSession) -> None:
        self._open.pop(session.attempt, None)
        cause = "" if session.cause is None else str(session.cause)
        self._recorder.record(SessionClosed(session.peer.worker_id, session.dialed, cause))
        if self._fetches is not None:
            self._fetches.session_closed(session)
        task = self._runner.spawn(self._clean_up(session), f"end of {session.peer}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _clean_up(self, session: ControlSession) -> None:
        if self._leases is not None:
            await self._leases.end_session(session)
        await session.wait_served()
        for path in self._paths:
            try:
                await path.close_session(session)
            except Unquiesced as error:
                keep_path(path, error, self._recorder)
            except OrbitError as error:
                _log.warning("ending %s on %s: %s", path.name, session.peer, error)
