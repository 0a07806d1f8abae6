"""What goes to one peer: its admission bound, and a queue for the time in which no link is open.

An open link gets each admitted frame at once, in the plain call, without a task. While a link is
opened the frames stand here, in order; when it cannot be had, or its epoch ends, all of them fail
with one reason. Which link it is, is the chooser's business.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ...errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    PathUnavailable,
    PeerLost,
    UsageError,
)
from ...model import PathName, WorkerId
from ...protocol.messaging.admission import Admission
from .pending import PendingCalls
from .results import Sending, SendState
from .routes import Route

_CERTAIN = (NotAdmitted, UsageError, BudgetExceeded, OutcomeUnknown)


@dataclass(frozen=True, slots=True)
class OutboundSettings:
    """What the outbound sides of one node share. `open_route` finds or opens a link; `stage` takes
    a payload out of a frame that is too long for the route, and raises what keeps it from that;
    `keep` holds it while no route has the frame.
    """

    pending: PendingCalls
    open_route: Callable[[WorkerId, PathName | None], Awaitable[Route]]
    stage: Callable[[Route, Sending], None]
    keep: Callable[[Sending], None]
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    unstage: Callable[[Sending], None]
    on_failed: Callable[[WorkerId, OrbitError], None]
    on_stalled: Callable[[WorkerId], None]
    payload_bytes_max: int  # longer ones are staged, whatever the link


class Line:
    """The way by one transport (None: the first by priority that can be had). `returned`: frames
    that an agreed close gave back, older than those of the queue.
    """

    __slots__ = ("opening", "queue", "returned", "route", "wanted")

    def __init__(self, wanted: PathName | None) -> None:
        self.wanted = wanted
        self.route: Route | None = None
        self.queue: OrderedDict[Sending, None] = OrderedDict()
        self.returned: list[Sending] = []
        self.opening: asyncio.Task[None] | None = None


class RoomWaiter:
    """A task that waits until a send would be admitted."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future


class Outbound:
    """Implements results.SendingOwner."""

    def __init__(
        self, worker_id: WorkerId, settings: OutboundSettings, frames_max: int, bytes_max: int
    ) -> None:
        self.worker_id = worker_id
        self.peer = f"{worker_id:016x}"
        self.admission: Admission[Sending | RoomWaiter] = Admission(frames_max, bytes_max)
        self._settings = settings
        wanted = (None, PathName.RDMA, PathName.TCP)
        self._lines: dict[PathName | None, Line] = {name: Line(name) for name in wanted}
        self._pumping = False
        self._loop = asyncio.get_running_loop()

    # --- the caller's side ------------------------------------------------------------------------

    def send(self, sending: Sending, *, wait: bool) -> None:
        """Issue it now. At the bound it waits in line, or fails as full."""
        nbytes = len(sending.header) + len(sending.payload)
        if self.admission.admit(nbytes):
            sending.charged = nbytes
            self._put(sending)
            return
        self._settings.on_stalled(self.worker_id)
        if not wait:
            self._give_up(sending, self.admission.refusal(self.peer, nbytes))
            return
        try:
            self.admission.wait(sending, nbytes)
        except BudgetExceeded as error:
            self._give_up(sending, error)

    async def room(self) -> None:
        """Until a send would be admitted."""
        if not self.admission.waiting and self.admission.frames < self.admission.frames_max:
            return
        waiter = RoomWaiter(self._loop.create_future())
        self.admission.look(waiter)
        try:
            await waiter.future
        finally:
            self.admission.withdraw(waiter)

    def withdraw(self, sending: Sending) -> bool:
        """See SendResult.withdraw."""
        if not self._take_back(sending):
            return False
        sending.fail(NotAdmitted(self.peer, "withdrawn"), tell=False)
        self._end(sending)
        return True

    def expire(self, sending: Sending) -> None:
        """Its time is up. What the peer already fetches is bounded by the life of its route."""
        if sending.staged and sending.admitted and not sending.id:
            return
        what = f"a message to {self.peer}"
        error = DeadlineExceeded(what, sending.timeout_s)
        if self._take_back(sending):
            error.__cause__ = NotAdmitted(self.peer, "its time was up")
        self._give_up(sending, error)

    def wire_up(self) -> None:
        """Open the link ahead of the first send; nobody waits for it."""
        self._open(self._lines[None])

    # --- verdicts ---------------------------------------------------------------------------------

    def on_posted(self, sending: Sending) -> None:
        charged, sending.charged = sending.charged, None
        if charged is not None and self.admission.release(charged):
            self._pump_soon()

    def on_given_back(self, sending: Sending) -> None:
        """The link was closed by agreement before it left: the next one takes it."""
        if sending.settled:
            return
        self._settings.pending.unbind(sending)
        if sending.staged:
            self._settings.keep(sending)
        self._lines[sending.wanted].returned.append(sending)
        self._loop.call_soon(self.resume)

    def on_failed(self, sending: Sending, error: OrbitError) -> None:
        if not isinstance(error, _CERTAIN):
            known = OutcomeUnknown(self.peer, PeerLost.cause_of(error))
            known.__cause__ = error
            error = known
        self._give_up(sending, error)

    # --- links ------------------------------------------------------------------------------------

    def route(self) -> Route | None:
        """What plain sends use now."""
        route = self._lines[None].route
        return None if route is None or route.link.closed else route

    def resume(self) -> None:
        """A parting route has stayed after all, or is gone: what was held back goes on."""
        for line in self._lines.values():
            if line.returned:
                line.queue = OrderedDict.fromkeys([*line.returned, *line.queue])
                line.returned.clear()
            if line.queue and line.opening is None:
                self._drain(line)

    def drop_route(self, route: Route, error: OrbitError | None) -> None:
        """That link has ended. Whoever stood in line for it fails with its reason; what is queued
        here was issued since, and gets another link.
        """
        for line in self._lines.values():
            if line.route is route:
                line.route = None
                if error is not None:
                    self._fail_waiting(line, _not_admitted(self.peer, error))
        self.resume()

    def close(self, error: OrbitError) -> None:
        """Fail all that has not left."""
        for line in self._lines.values():
            if line.opening is not None:
                line.opening.cancel()
            self._fail_line(line, error)
        for ticket in self.admission.fail_all():
            if isinstance(ticket, Sending):
                self._give_up(ticket, _not_admitted(self.peer, error))
            elif not ticket.future.done():
                ticket.future.set_exception(error)

    # --- within -----------------------------------------------------------------------------------

    def _put(self, sending: Sending) -> None:
        line = self._lines[sending.wanted]
        route = line.route
        if route is not None and not line.queue and not route.parting and not route.link.closed:
            self._hand_over(route, sending)
            return
        line.queue[sending] = None
        if route is None:  # a closed one is about to say so, and what it gives back goes first
            self._open(line)

    def _hand_over(self, route: Route, sending: Sending) -> None:
        settings = self._settings
        limit = route.link.ceiling_bytes
        if sending.staged or len(sending.payload) > min(limit, settings.payload_bytes_max):
            try:
                settings.stage(route, sending)
            except OrbitError as error:
                self._give_up(sending, error)
                return
        settings.pending.bind(sending, route)
        route.link.send(sending)

    def _open(self, line: Line) -> None:
        if line.opening is None:
            work = self._opened(line)
            line.opening = self._settings.spawn(work, f"link to {self.peer}")

    async def _opened(self, line: Line) -> None:
        try:
            route = await self._settings.open_route(self.worker_id, line.wanted)
        except asyncio.CancelledError:
            self._fail_line(line, ClosedError("the node"))
            raise
        except OrbitError as error:
            self._fail_line(line, error)
        else:
            if route.link.closed:
                self._fail_line(line, NotAdmitted(str(route.peer), "the link has ended"))
            else:
                line.route = route
        finally:
            line.opening = None
        self._drain(line)

    def _drain(self, line: Line) -> None:
        route = line.route
        if route is None:
            if line.queue:
                self._open(line)
            return
        while line.queue and route.usable:
            sending, _ = line.queue.popitem(last=False)
            self._hand_over(route, sending)

    def _fail_line(self, line: Line, error: OrbitError) -> None:
        """All that was issued for it has one reason, what stands in line for admission included."""
        known = error if isinstance(error, PathUnavailable) else _not_admitted(self.peer, error)
        while line.queue:
            sending, _ = line.queue.popitem(last=False)
            self._give_up(sending, known)
        self._fail_waiting(line, known)

    def _fail_waiting(self, line: Line, error: OrbitError) -> None:
        for ticket in self.admission.tickets():
            if isinstance(ticket, Sending) and ticket.wanted is line.wanted:
                self.admission.withdraw(ticket)
                self._give_up(ticket, error)

    def _take_back(self, sending: Sending) -> bool:
        """True when no byte of it left, and it stands in no queue any more."""
        if sending.state is not SendState.PENDING:
            return False
        if self.admission.withdraw(sending):
            self._pump_soon()
            return True
        for line in self._lines.values():
            if sending in line.queue:
                del line.queue[sending]
                return True
        route = sending.route
        return route is not None and route.link.withdraw(sending)

    def _end(self, sending: Sending) -> None:
        """It holds nothing any more: no place in the bound, no slot, and, when nobody can have
        heard of it, no staged payload.
        """
        self.on_posted(sending)
        self._settings.pending.forget(sending)
        if sending.staged and not sending.admitted:
            self._settings.unstage(sending)

    def _give_up(self, sending: Sending, error: OrbitError) -> None:
        ended = sending.fail(error)  # first: taking back what it staged would give another reason
        self._end(sending)
        if ended:
            self._settings.on_failed(self.worker_id, error)

    def _pump_soon(self) -> None:
        # Not at once: a verdict may come from within the link, which takes no frames then.
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while (ticket := self.admission.next_ready()) is not None:
            if isinstance(ticket, Sending):
                ticket.charged = ticket.nbytes
                self._put(ticket)
            elif not ticket.future.done():
                ticket.future.set_result(None)


def _not_admitted(peer: str, error: OrbitError) -> NotAdmitted:
    if isinstance(error, NotAdmitted):
        return error
    known = NotAdmitted(peer, str(error), hint=error.hint)
    known.__cause__ = error
    return known
