"""Budgets: never over the limit, repaid exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import BudgetExceeded, InternalError, UsageError
from orbit.memory.budget import Budget, Charge


def budget(limit: int = 100) -> Budget:
    return Budget("registered bytes", limit, "registered_bytes_budget")


def test_the_limit_itself_fits_and_one_more_does_not() -> None:
    pool = budget()
    charge = pool.charge(100)
    with pytest.raises(BudgetExceeded) as caught:
        pool.charge(1)
    assert (caught.value.requested, caught.value.charged, caught.value.limit) == (1, 100, 100)
    assert "registered_bytes_budget" in caught.value.hint
    assert pool.charged_bytes == 100
    charge.repay()
    assert pool.charge(100).live


def test_a_charge_is_repaid_once() -> None:
    pool = budget()
    charge = pool.charge(10)
    pool.repay(charge)
    assert not charge.live
    with pytest.raises(InternalError):
        pool.repay(charge)
    assert pool.charged_bytes == 0


def test_parts_of_a_charge_are_repaid_apart() -> None:
    pool = budget()
    whole = pool.charge(60)
    parts = [whole.split(20), whole.split(30)]
    assert (whole.nbytes, pool.charged_bytes) == (10, 60)
    parts[0].repay()
    whole.repay()
    assert pool.charged_bytes == 30
    with pytest.raises(InternalError):
        parts[1].split(31)
    parts[1].repay()
    assert pool.charged_bytes == 0
    with pytest.raises(InternalError):
        whole.split(0)


def test_a_charge_shrinks_to_what_was_taken() -> None:
    pool = budget()
    charge = pool.charge(10)
    charge.shrink(4)
    assert pool.charged_bytes == 4
    for wrong in (5, -1):
        with pytest.raises(InternalError):
            charge.shrink(wrong)
    charge.repay()
    assert pool.free_bytes == 100
    with pytest.raises(InternalError):
        charge.shrink(0)


def test_no_bytes_are_always_there() -> None:
    assert budget(0).charge(0).live


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(UsageError):
        budget(-1)
    with pytest.raises(InternalError):
        budget().charge(-1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60))))
def test_the_sum_of_live_charges_is_what_is_charged(steps: list[tuple[bool, int]]) -> None:
    pool = budget()
    live: list[Charge] = []
    for take, amount in steps:
        if take:
            try:
                live.append(pool.charge(amount))
            except BudgetExceeded:
                assert sum(charge.nbytes for charge in live) + amount > 100
        elif live:
            live.pop(amount % len(live)).repay()
        assert pool.charged_bytes == sum(charge.nbytes for charge in live) <= 100
