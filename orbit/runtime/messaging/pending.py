"""Outstanding calls and sends with a deadline, under one event-loop timer.

The timer is armed lazily: it may fire before anything is due, so that a call which is answered in
time costs no timer at all. It knows no peer and no link.
"""

from __future__ import annotations

import asyncio

from ...errors import OutcomeUnknown
from ...protocol.messaging.response_slots import Deadlines, ResponseSlots
from .call_watch import CallWatch
from .results import Sending
from .routes import Route


class PendingCalls:
    """Each send's own outbound side is told when its time is up."""

    def __init__(self, capacity: int, watch: CallWatch) -> None:
        self._watch = watch
        self.slots: ResponseSlots[Sending, Route] = ResponseSlots(capacity)
        self._deadlines: Deadlines[Sending] = Deadlines(_live)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_until = float("inf")
        self._closed = False

    def begin(self, sending: Sending) -> int:
        """The id of a call, whose time begins. Raises BudgetExceeded."""
        call_id = sending.id = self.slots.take(sending)
        # Before its payload is staged, which must not go before the call itself is given up.
        sending.deadline = self._loop.time() + sending.timeout_s
        return call_id

    def bind(self, sending: Sending, route: Route) -> None:
        """The call is handed to that route."""
        sending.route = route
        if sending.id:
            self.slots.bind(sending.id, route)
            route.calls += 1
            self._watch.call_bound()

    def unbind(self, sending: Sending) -> None:
        """The route did not take it after all."""
        route, sending.route = sending.route, None
        if sending.id and route is not None:
            self.slots.bind(sending.id, None)
            route.calls -= 1

    def answered(self, call_id: int, route: Route) -> Sending | None:
        """The call that an answer ends; None for a late one."""
        sending = self.slots.complete(call_id, route)
        if sending is not None:
            route.calls -= 1
        return sending

    def forget(self, sending: Sending) -> None:
        """The send ended on this side."""
        if sending.id and self.slots.cancel(sending.id) and sending.route is not None:
            sending.route.calls -= 1

    def lose(self, route: Route) -> list[Sending]:
        """The calls that a dead route carried."""
        route.calls = 0
        return self.slots.fail_epoch(route)

    def watch(self, sending: Sending) -> None:
        """Its time is up after its timeout, unless it has ended."""
        deadline = sending.deadline
        if deadline is None:
            deadline = sending.deadline = self._loop.time() + sending.timeout_s
        self._deadlines.add(deadline, sending)
        if deadline < self._armed_until and not self._closed:
            self._arm(deadline)

    def close(self) -> None:
        """Fail every call: this node closes."""
        self._closed = True
        self._arm(None)
        self._watch.close()
        for sending in self.slots.fail_all():
            peer = "the peer" if sending.route is None else str(sending.route.peer)
            sending.fail(OutcomeUnknown(peer, "this node was closed"))

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_until = float("inf")
        if deadline is not None:
            self._armed_until = deadline
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        # A loop timer may come a clock tick early.
        now = max(self._loop.time(), self._armed_until)
        self._timer = None
        self._armed_until = float("inf")
        for sending in self._deadlines.due(now):
            sending.owner.expire(sending)
        following = self._deadlines.next
        if following is not None and following < self._armed_until:
            self._arm(following)


def _live(sending: Sending) -> bool:
    return not sending.settled
