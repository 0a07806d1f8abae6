"""Waiting for a budget in the event loop: the shell of WaitingBudget.

Whoever waits is served in order of arrival, each until its own deadline. What a budget counts is
its user's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ...errors import DeadlineExceeded
from ...memory.waiting_budget import BudgetUse, Ticket, TicketState, WaitingBudget
from ...transport.timer import DeadlineTimer


class Taken:
    """A part of a budget in use. Whoever holds it gives it back, once."""

    __slots__ = ("_shared", "_ticket")

    def __init__(self, shared: SharedBudget, ticket: Ticket) -> None:
        self._shared = shared
        self._ticket = ticket

    @property
    def amount(self) -> int:
        return self._ticket.amount

    def give_back(self) -> None:
        """Raises InternalError the second time."""
        self._shared._repay(self._ticket)


class SharedBudget:
    """`limit` in all, for the tasks of one event loop; `knob` names the value that raises it."""

    def __init__(self, name: str, limit: int, knob: str) -> None:
        self._budget = WaitingBudget(name, limit, knob)
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._on_due)
        self._waiters: dict[int, asyncio.Future[None]] = {}  # by number of the ticket

    @property
    def use(self) -> BudgetUse:
        """In use, limit, and how many wait."""
        return self._budget.use

    @property
    def name(self) -> str:
        return self._budget.name

    def check(self, amount: int) -> None:
        """Raises BudgetExceeded when no wait could help."""
        self._budget.check(amount)

    async def take(self, amount: int, deadline: float | None = None) -> Taken:
        """Waits until `deadline` (loop time) at most, behind all who came before. Raises
        BudgetExceeded at once when no wait could help, DeadlineExceeded. Cancelled: nothing is
        taken.
        """
        begun = self._loop.time()
        ticket = self._budget.request(amount, deadline)
        if ticket.granted:
            return Taken(self, ticket)
        waiter = self._waiters[ticket.number] = self._loop.create_future()
        self._timer.arm(self._budget.next_deadline)
        try:
            await waiter
        except asyncio.CancelledError:
            # It may have been granted, or have expired, in the same pass of the loop.
            if ticket.state is not TicketState.OVER:
                self._wake(self._budget.cancel(ticket))
            raise
        finally:
            self._waiters.pop(ticket.number, None)
            self._timer.arm(self._budget.next_deadline)
        if not ticket.granted:
            waited_s = max((deadline or begun) - begun, 0.0)
            raise DeadlineExceeded(f"waiting for {self._budget.name}", waited_s)
        return Taken(self, ticket)

    def _repay(self, ticket: Ticket) -> None:
        self._wake(self._budget.repay(ticket))

    def _on_due(self) -> None:
        due = self._budget.next_deadline
        now = self._loop.time() if due is None else max(self._loop.time(), due)
        expired, granted = self._budget.due(now)
        self._wake((*expired, *granted))
        self._timer.arm(self._budget.next_deadline)

    def _wake(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            waiter = self._waiters.get(ticket.number)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
