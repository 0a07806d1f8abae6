"""Closes message links that nobody used for a while, by agreement with the peer.

One timer for all links of a node, and none while no link is open. A link is closed by an
acknowledged goodbye only, so that no message is lost on either side; the next send opens another.
"""

from __future__ import annotations

import asyncio
from typing import Final

from ...transport.timer import DeadlineTimer
from .contract import Caller
from .routes import Route

IDLE_CLOSES_TOTAL: Final = "orbit_transport_idle_closes_total"  # by outcome and transport
GOODBYE_TIMEOUT_S: Final = 0.5
_LOOK_AGAIN_S_MIN: Final = 0.05


class IdleSweep:
    """`idle_close_s` None: links stay open, and nothing here ever runs."""

    def __init__(self, caller: Caller, idle_close_s: float | None) -> None:
        self._caller = caller
        self._idle_close_s = idle_close_s
        self._timer: DeadlineTimer | None = None
        self._parting: set[Route] = set()
        self._closed = False

    def link_opened(self) -> None:
        """A message link is open, whoever opened it."""
        if self._idle_close_s is None or self._closed:
            return
        if self._timer is None:
            self._timer = DeadlineTimer(self._look)
        if not self._timer.armed:
            self._timer.arm(_after(self._idle_close_s))

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.arm(None)

    def _look(self) -> None:
        assert self._idle_close_s is not None
        assert self._timer is not None
        again_s: float | None = None
        for route in list(self._caller.routes()):
            if route.link.closed or route.session is None:  # None: the way to itself
                continue
            left_s = self._idle_close_s - (route.link.idle_s if route.quiet else 0.0)
            if left_s <= 0 and route not in self._parting:
                self._parting.add(route)
                self._caller.spawn(self._part(route), f"goodbye to {route.peer}")
            if left_s <= 0:
                left_s = self._idle_close_s  # in case that the peer says no
            again_s = left_s if again_s is None else min(again_s, left_s)
        if again_s is not None and not self._closed:
            self._timer.arm(_after(max(again_s, _LOOK_AGAIN_S_MIN)))

    async def _part(self, route: Route) -> None:
        try:
            closed = await self._caller.part(route, GOODBYE_TIMEOUT_S)
        finally:
            self._parting.discard(route)
        self._caller.recorder.counters.add(
            IDLE_CLOSES_TOTAL,
            outcome="closed" if closed else "refused",
            transport=route.transport.value,
        )


def _after(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
