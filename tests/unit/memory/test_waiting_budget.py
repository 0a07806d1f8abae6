"""A budget that is waited for: in order, to each deadline, never over the limit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbit.errors import BudgetExceeded, InternalError, UsageError
from orbit.memory.waiting_budget import BudgetUse, Ticket, TicketState, WaitingBudget

LIMIT = 10


def budget(limit: int = LIMIT) -> WaitingBudget:
    return WaitingBudget("grants", limit, "engine.max_grants")


def test_what_fits_is_granted_at_once() -> None:
    pool = budget()
    assert pool.request(4).granted
    assert pool.request(6).granted
    assert pool.use == BudgetUse(10, 10, 0)
    assert not pool.request(1).granted
    assert pool.use == BudgetUse(10, 10, 1)


def test_more_than_the_total_is_refused_at_once() -> None:
    pool = budget()
    pool.request(3)
    with pytest.raises(BudgetExceeded) as caught:
        pool.request(11, deadline=99.0)
    assert (caught.value.requested, caught.value.limit, caught.value.charged) == (11, 10, 3)
    assert "engine.max_grants" in caught.value.hint
    assert pool.use == BudgetUse(3, 10, 0)


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    pool = budget()
    first = pool.request(9)
    large, small = pool.request(5), pool.request(1)
    assert not small.granted  # though it would fit
    assert pool.repay(first) == (large, small)


def test_returned_capacity_goes_on_in_order() -> None:
    pool = budget()
    one, two = pool.request(5), pool.request(5)
    waiting = [pool.request(amount) for amount in (4, 3, 2, 8)]
    assert pool.repay(one) == (waiting[0],)
    assert pool.repay(two) == (waiting[1], waiting[2])
    assert not waiting[3].granted
    assert pool.use == BudgetUse(9, 10, 1)


def test_giving_up_lets_those_behind_in() -> None:
    pool = budget()
    pool.request(8)
    large, small = pool.request(5), pool.request(2)
    assert pool.cancel(large) == (small,)
    assert large.state is TicketState.OVER
    assert pool.in_use == 10


def test_giving_up_what_was_granted_meanwhile_repays_it() -> None:
    pool = budget()
    first = pool.request(10)
    waiter, behind = pool.request(7), pool.request(8)
    assert pool.repay(first) == (waiter,)
    assert pool.cancel(waiter) == (behind,)
    assert pool.in_use == 8


def test_each_waits_to_its_own_deadline() -> None:
    pool = budget()
    held = pool.request(10, deadline=1.0)  # a deadline is of the wait alone
    late, early, ever = pool.request(9, 30.0), pool.request(9, 20.0), pool.request(1)
    assert pool.next_deadline == 20.0
    assert pool.due(19.9) == ((), ())
    assert pool.due(20.0) == ((early,), ())
    assert held.granted
    assert pool.next_deadline == 30.0
    assert pool.repay(held) == (late, ever)
    assert pool.next_deadline is None
    assert pool.due(1e9) == ((), ())


def test_an_expired_one_lets_those_behind_in() -> None:
    pool = budget()
    pool.request(5)
    large, small, larger = pool.request(9, 2.0), pool.request(2), pool.request(7, 1.0)
    assert pool.due(3.0) == ((large, larger), (small,))
    assert pool.use == BudgetUse(7, 10, 0)


def test_a_ticket_ends_once() -> None:
    pool = budget()
    ticket, waiter = pool.request(10), pool.request(1, 5.0)
    with pytest.raises(InternalError):
        pool.repay(waiter)
    pool.due(5.0)
    pool.repay(ticket)
    for over in (ticket, waiter):
        for end in (pool.repay, pool.cancel):
            with pytest.raises(InternalError):
                end(over)
    assert pool.use == BudgetUse(0, 10, 0)


def test_a_ticket_of_another_budget_is_refused() -> None:
    pool, other = budget(0), budget()
    other.request(10)
    foreign = other.request(1)
    with pytest.raises(InternalError):
        pool.cancel(foreign)
    assert foreign.state is TicketState.WAITING


def test_nothing_is_asked_for_in_order_too() -> None:
    pool = budget(0)
    assert pool.request(0).granted
    full = budget()
    full.request(10)
    full.request(1)
    assert not full.request(0).granted


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(UsageError):
        budget(-1)
    with pytest.raises(InternalError):
        budget().request(-1)


class AgainstAQueue(RuleBasedStateMachine):
    """The model: a plain list of waiting tickets and one of granted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.budget = budget()
        self.waiting: list[Ticket] = []
        self.granted: list[Ticket] = []

    def expect_grants(self) -> tuple[Ticket, ...]:
        """What the model grants now, from the head of the queue."""
        found = []
        while self.waiting:
            if sum(t.amount for t in self.granted) + self.waiting[0].amount > LIMIT:
                break
            found.append(self.waiting.pop(0))
            self.granted.append(found[-1])
        return tuple(found)

    @rule(amount=st.integers(0, LIMIT), wait=st.none() | st.integers(0, 20))
    def request(self, amount: int, wait: int | None) -> None:
        deadline = None if wait is None else self.now + wait
        ticket = self.budget.request(amount, deadline)
        self.waiting.append(ticket)
        self.expect_grants()

    @rule(amount=st.integers(LIMIT + 1, 99))
    def too_much(self, amount: int) -> None:
        with pytest.raises(BudgetExceeded):
            self.budget.request(amount)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), gives_up=st.booleans())
    def repay(self, data: st.DataObject, gives_up: bool) -> None:
        ticket = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        newly = self.budget.cancel(ticket) if gives_up else self.budget.repay(ticket)
        assert newly == self.expect_grants()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.budget.cancel(ticket) == self.expect_grants()

    @rule(passed=st.integers(0, 15))
    def time_passes(self, passed: int) -> None:
        self.now += passed
        expired = [t for t in self.waiting if t.deadline is not None and t.deadline <= self.now]
        self.waiting = [t for t in self.waiting if t not in expired]
        assert self.budget.due(self.now) == (tuple(expired), self.expect_grants())

    @invariant()
    def as_the_model_has_it(self) -> None:
        in_use = sum(t.amount for t in self.granted)
        assert self.budget.use == BudgetUse(in_use, LIMIT, len(self.waiting))
        assert in_use <= LIMIT
        assert all(t.granted for t in self.granted)
        assert all(t.state is TicketState.WAITING for t in self.waiting)
        deadlines = [t.deadline for t in self.waiting if t.deadline is not None]
        assert self.budget.next_deadline == min(deadlines, default=None)


AgainstAQueue.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAQueue = AgainstAQueue.TestCase
