"""Whether peers that owe answers are still there, asked after a silence.

A frozen or vanished peer closes no connection, and a queue pair that only waits hears nothing.
While calls are outstanding, a route over which nothing arrived for a while is asked over its
session; no answer ends the session, and with it the calls. No timer without calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from ...errors import DeadlineExceeded, OrbitError, PeerLost
from ...transport.timer import DeadlineTimer
from .routes import Route


class Watched(Protocol):
    """The messenger, as far as the watch looks at it."""

    def routes(self) -> Iterable[Route]: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> object: ...


class CallWatch:
    """`silence_s`: how long a peer that owes an answer may say nothing; it is asked between one and
    two of them after it fell silent, and has `answer_s` to reply.
    """

    def __init__(self, watched: Watched, silence_s: float, answer_s: float) -> None:
        self._watched = watched
        self._silence_s = silence_s
        self._answer_s = answer_s
        self._timer: DeadlineTimer | None = None
        self._heard: dict[Route, int] = {}  # frames received at the last look
        self._asking: set[Route] = set()
        self._closed = False

    def call_bound(self) -> None:
        """A call went out. Cheap: at most one timer runs."""
        if self._timer is None:
            self._timer = DeadlineTimer(self._look)
        if not self._timer.armed and not self._closed:
            self._timer.arm(asyncio.get_running_loop().time() + self._silence_s)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.arm(None)

    def _look(self) -> None:
        assert self._timer is not None
        owing = [r for r in self._watched.routes() if r.calls and r.session is not None]
        heard = {route: route.link.statistics().frames_received for route in owing}
        for route, frames in heard.items():
            if self._heard.get(route) == frames and route not in self._asking:
                self._asking.add(route)
                self._watched.spawn(self._ask(route), f"ask {route.peer}")
        self._heard = heard
        if owing and not self._closed:
            self._timer.arm(asyncio.get_running_loop().time() + self._silence_s)

    async def _ask(self, route: Route) -> None:
        session = route.session
        assert session is not None
        try:
            await session.ping(self._answer_s)
        except DeadlineExceeded:
            cause = f"no answer to a ping within {self._answer_s:g} s"
            session.abort(PeerLost(str(route.peer), cause))
        except OrbitError:
            pass  # it has ended already
        finally:
            self._asking.discard(route)
