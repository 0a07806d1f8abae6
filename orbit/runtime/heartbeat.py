"""Pings over one session: those that somebody waits for, and those of a peer that owes an answer
and says nothing.

It sends through what it is given and knows no link; the session keeps the timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import DeadlineExceeded, OrbitError, PeerLost
from ..protocol.calls import ping_frame
from ..protocol.liveness import Liveness, Suspicion


class Heartbeat:
    """`send` queues one frame. All numbers of pings are this side's own."""

    def __init__(self, send: Callable[[bytes], None], silence_s: float, answer_s: float) -> None:
        self._send = send
        self._answer_s = answer_s
        self._liveness = Liveness(silence_s, answer_s)
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @property
    def deadline(self) -> float | None:
        """When `on_deadline` is due."""
        return self._liveness.deadline

    async def ping(self, timeout_s: float) -> float:
        """Seconds until the peer answered. Raises DeadlineExceeded, and what `close` is given."""
        started = self._loop.time()
        self._numbers += 1
        number = self._numbers
        answer = self._waiting[number] = self._loop.create_future()
        try:
            self._send(ping_frame(number))
            async with asyncio.timeout(timeout_s):
                await answer
        except TimeoutError:
            raise DeadlineExceeded("a ping", timeout_s) from None
        finally:
            del self._waiting[number]
        return self._loop.time() - started

    def on_frame(self) -> None:
        """The peer said something."""
        self._liveness.on_frame(self._loop.time())

    def on_pong(self, number: int) -> None:
        """Pongs that nobody waits for (any more) are the peer's answer all the same."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def watch(self, *, owed: bool) -> None:
        """Whether the peer owes an answer to a call."""
        self._liveness.watch(owed, self._loop.time())

    def on_deadline(self, now: float, peer: str) -> PeerLost | None:
        """Ask, or give the verdict."""
        match self._liveness.on_deadline(now):
            case Suspicion.PING:
                self._numbers += 1
                self._send(ping_frame(self._numbers))
            case Suspicion.LOST:
                return PeerLost(peer, f"no answer to a ping within {self._answer_s:g} s")
            case Suspicion.NONE:
                pass
        return None

    def close(self, error: OrbitError) -> None:
        """The session is over: so is every ping."""
        self._liveness.watch(False, 0.0)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error.with_traceback(None))
