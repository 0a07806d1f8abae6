"""A budget that is waited for: first come, first served, each waiter until its own deadline.

Nobody overtakes: a small request waits behind a large one, or the large one would never have its
turn. Amounts are bytes, grants or whatever else is counted. It has no clock and wakes nobody; its
caller passes the time in and wakes whom it names.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple

from ..errors import BudgetExceeded, InternalError, UsageError


class TicketState(StrEnum):
    WAITING = "waiting"
    GRANTED = "granted"
    OVER = "over"  # repaid, cancelled or expired


class Ticket:
    """One request for a part of a budget. `deadline` None: it waits for ever."""

    __slots__ = ("amount", "deadline", "number", "state")

    def __init__(self, amount: int, deadline: float | None, number: int) -> None:
        self.amount = amount
        self.deadline = deadline
        self.number = number  # in order of arrival
        self.state = TicketState.WAITING

    @property
    def granted(self) -> bool:
        return self.state is TicketState.GRANTED


class BudgetUse(NamedTuple):
    in_use: int
    limit: int
    waiting: int  # requests


class Due(NamedTuple):
    """Both in order of arrival."""

    expired: tuple[Ticket, ...]
    granted: tuple[Ticket, ...]


class WaitingBudget:
    """`limit` in all; `knob` names the configuration value that raises it."""

    __slots__ = ("_deadlines", "_numbers", "_waiting", "in_use", "knob", "limit", "name")

    def __init__(self, name: str, limit: int, knob: str) -> None:
        if limit < 0:
            raise UsageError(f"{name}: a budget of {limit}")
        self.name = name
        self.limit = limit
        self.knob = knob
        self.in_use = 0
        self._numbers = 0
        self._waiting: OrderedDict[int, Ticket] = OrderedDict()  # by number
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name tickets that are over

    @property
    def use(self) -> BudgetUse:
        return BudgetUse(self.in_use, self.limit, len(self._waiting))

    @property
    def next_deadline(self) -> float | None:
        """When to call `due` at the latest; None: no need."""
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def check(self, amount: int) -> None:
        """Raises BudgetExceeded if no wait could ever help."""
        if amount > self.limit:
            raise BudgetExceeded(self.name, amount, self.limit, self.in_use, self.knob)

    def request(self, amount: int, deadline: float | None = None) -> Ticket:
        """A ticket, granted at once if there is room and nobody waits. Raises BudgetExceeded if no
        wait could ever help; nothing is queued then.
        """
        if amount < 0:
            raise InternalError(f"{self.name}: a request of {amount}")
        self.check(amount)
        self._numbers += 1
        ticket = Ticket(amount, deadline, self._numbers)
        self._waiting[ticket.number] = ticket
        if not self._grant() and deadline is not None:
            heapq.heappush(self._deadlines, (deadline, ticket.number))
        return ticket

    def repay(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """Give a granted amount back. Returns who has a grant now, in order. Raises InternalError
        for a ticket that is not granted, so also the second time.
        """
        if not ticket.granted:
            raise InternalError(f"{self.name}: {ticket.amount} repaid that is {ticket.state}")
        ticket.state = TicketState.OVER
        self.in_use -= ticket.amount
        return self._grant()

    def cancel(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """Give up a ticket, whether it still waits or was granted meanwhile (then it is repaid).
        Returns who has a grant now, in order. Raises InternalError for a ticket that is over.
        """
        if ticket.state is not TicketState.WAITING:
            return self.repay(ticket)
        self._leave(ticket)
        return self._grant()

    def due(self, now: float) -> Due:
        """Ends the tickets whose deadline is not after `now`; those behind them may have a grant
        then.
        """
        expired: list[Ticket] = []
        while (first := self.next_deadline) is not None and first <= now:
            ticket = self._waiting[heapq.heappop(self._deadlines)[1]]
            self._leave(ticket)
            expired.append(ticket)
        expired.sort(key=lambda ticket: ticket.number)
        return Due(tuple(expired), self._grant())

    def _leave(self, ticket: Ticket) -> None:
        if self._waiting.get(ticket.number) is not ticket:
            raise InternalError(f"{self.name}: a ticket of another budget")
        del self._waiting[ticket.number]
        ticket.state = TicketState.OVER

    def _grant(self) -> tuple[Ticket, ...]:
        granted: list[Ticket] = []
        while self._waiting:
            ticket = next(iter(self._waiting.values()))
            if ticket.amount > self.limit - self.in_use:
                break
            del self._waiting[ticket.number]
            ticket.state = TicketState.GRANTED
            self.in_use += ticket.amount
            granted.append(ticket)
        return tuple(granted)
