"""How many bulk queue pairs this node may have: in both roles, on all devices, all peers together.

Owns the count, the order of those who wait, and who has to go for them: idle arrays, the longest
unused first. A slot is taken before its queue pair is made and comes back when that is destroyed;
of a queue pair whose end is not proven it never does. It knows no device and no array.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from ..errors import BudgetExceeded, BusyError, DeadlineExceeded
from ..transport.timer import DeadlineTimer

KNOB = "rdma.max_endpoints"

Patience = Callable[[], float]  # until when somebody waits, by the loop's clock; it may grow


class IdleArray(Protocol):
    """Queue pairs that could go without anybody noticing."""

    @property
    def endpoints(self) -> int:
        """Slots that come back when it goes."""

    @property
    def evictable_at(self) -> float:
        """Since when it may go, or from when on; by the loop's clock."""

    def evict(self) -> None:
        """End it. Its slots are `leaving` when this returns."""


Idle = Callable[[], Iterable[IdleArray]]


class _State(enum.Enum):
    HELD = enum.auto()
    LEAVING = enum.auto()
    GONE = enum.auto()


class EndpointSlot:
    """Room for one queue pair."""

    __slots__ = ("_budget", "_state")

    def __init__(self, budget: EndpointBudget) -> None:
        self._budget = budget
        self._state = _State.HELD

    def leave(self) -> None:
        """The queue pair is on its way out. Idempotent."""
        if self._state is _State.HELD:
            self._state = _State.LEAVING
            self._budget.leaving += 1

    def keep(self) -> None:
        """Its end could not be proven: the slot stays taken, for good."""
        if self._state is _State.LEAVING:
            self._state = _State.HELD
            self._budget.leaving -= 1
            self._budget.look_again()

    def give_back(self) -> None:
        """The queue pair is destroyed, or was never made. Idempotent."""
        if self._state is _State.GONE:
            return
        if self._state is _State.LEAVING:
            self._budget.leaving -= 1
        self._state = _State.GONE
        self._budget.in_use -= 1
        self._budget.look_again()

    def idle(self) -> None:
        """The queue pair has nothing to do any more: who waits may want its array to go."""
        self._budget.look_again()


class _Ticket:
    __slots__ = ("count", "granted", "waits")

    def __init__(self, count: int, *, waits: bool) -> None:
        self.count = count
        self.waits = waits
        self.granted: asyncio.Future[list[EndpointSlot]] = (
            asyncio.get_running_loop().create_future()
        )


class EndpointBudget:
    """All methods belong to one event loop. Nobody is served before who came earlier."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0  # those included that are being made, are on their way out, or are retained
        self.leaving = 0
        self._queue: deque[_Ticket] = deque()
        self._idle: list[Idle] = []
        self._timer: DeadlineTimer | None = None
        self._looking = False

    @property
    def waiting(self) -> int:
        """Queue pairs that are waited for."""
        return sum(ticket.count for ticket in self._queue)

    def add_idle(self, idle: Idle) -> None:
        """`idle` tells which arrays could go now."""
        self._idle.append(idle)

    async def take(self, count: int, patience: Patience | None = None) -> list[EndpointSlot]:
        """Slots for that many queue pairs, all at once. With patience: in turn, until then. Without
        it: now, or when those are gone that are on their way out. Raises BudgetExceeded (more than
        there ever are), BusyError (without patience), DeadlineExceeded.
        """
        if count > self.limit:
            raise BudgetExceeded("queue pairs", count, self.limit, self.in_use, KNOB)
        ticket = _Ticket(count, waits=patience is not None)
        self._queue.append(ticket)
        self.look_again()
        try:
            await self._wait(ticket, patience)
            return ticket.granted.result()
        except BaseException:
            self._withdraw(ticket)
            raise

    def look_again(self) -> None:
        """Something changed: hand out what is free, and make room for who is next."""
        if not self._queue or self._looking:
            return
        self._looking = True
        try:
            self._hand_out()
            again_at = self._make_room()
        finally:
            self._looking = False
        if self._timer is None:
            self._timer = DeadlineTimer(self.look_again)
        self._timer.arm(again_at)

    async def _wait(self, ticket: _Ticket, patience: Patience | None) -> None:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while not ticket.granted.done():
            until = math.inf if patience is None else patience()
            left_s = None if until == math.inf else until - loop.time()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded(f"room for {ticket.count} queue pairs", until - began)
            await asyncio.wait([ticket.granted], timeout=left_s)

    def _withdraw(self, ticket: _Ticket) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
        elif ticket.granted.done() and ticket.granted.exception() is None:
            for slot in ticket.granted.result():
                slot.give_back()
        self.look_again()

    def _hand_out(self) -> None:
        while self._queue and self.in_use + self._queue[0].count <= self.limit:
            ticket = self._queue.popleft()
            self.in_use += ticket.count
            ticket.granted.set_result([EndpointSlot(self) for _ in range(ticket.count)])

    def _make_room(self) -> float | None:
        """Send away what has to go for those who wait, in their order, and refuse those who do not.
        When looking again may find more that could go.
        """
        soon = self.limit - self.in_use + self.leaving
        again_at: float | None = None
        for ticket in list(self._queue):
            if again_at is None and soon < ticket.count:
                freed, again_at = self._evict(ticket.count - soon)
                soon += freed
            if soon >= ticket.count:
                soon -= ticket.count
                continue
            soon = 0  # nobody overtakes it
            again_at = math.inf if again_at is None else again_at
            if not ticket.waits:
                self._queue.remove(ticket)
                ticket.granted.set_exception(BusyError(f"{self.in_use} queue pairs in use"))
        return None if again_at == math.inf else again_at

    def _evict(self, needed: int) -> tuple[int, float | None]:
        """How many slots are on their way out now: enough, or none. Then also when more could."""
        now = asyncio.get_running_loop().time()
        idle = sorted((a for idle in self._idle for a in idle()), key=lambda a: a.evictable_at)
        ready = [array for array in idle if array.evictable_at <= now]
        if sum(array.endpoints for array in ready) < needed:
            return 0, min((a.evictable_at for a in idle[len(ready) :]), default=math.inf)
        freed = 0
        for array in ready:
            if freed >= needed:
                break
            freed += array.endpoints
            array.evict()
        return freed, None
