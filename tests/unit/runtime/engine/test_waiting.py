"""Waiting for budgets and for the end of what lives: order, deadlines, and who gives up."""

from __future__ import annotations

import asyncio

import pytest

from orbit.errors import BudgetExceeded, DeadlineExceeded, InternalError, Unquiesced
from orbit.runtime.engine.budgets import SharedBudget, Taken
from orbit.runtime.engine.tally import Tally
from orbit.testing.clock import run_virtual


def test_who_waits_is_served_in_order() -> None:
    async def main() -> None:
        budget = SharedBudget("max_x", 10, "engine.max_x")
        first = await budget.take(10)
        order: list[int] = []

        async def wait(amount: int) -> Taken:
            taken = await budget.take(amount)
            order.append(amount)
            return taken

        tasks = [asyncio.ensure_future(wait(amount)) for amount in (8, 1, 2)]
        await asyncio.sleep(0)
        assert budget.use == (10, 10, 3)
        first.give_back()
        await asyncio.sleep(0)
        assert budget.use == (9, 10, 1)
        (await tasks[0]).give_back()
        await asyncio.sleep(0)
        assert order == [8, 1, 2]
        for task in tasks[1:]:
            (await task).give_back()
        assert budget.use == (0, 10, 0)
        with pytest.raises(InternalError):
            first.give_back()

    run_virtual(main())


def test_more_than_all_of_it_is_refused_at_once() -> None:
    async def main() -> None:
        budget = SharedBudget("max_x", 10, "engine.max_x")
        with pytest.raises(BudgetExceeded, match="max_x"):
            await budget.take(11)
        with pytest.raises(BudgetExceeded):
            budget.check(11)
        budget.check(10)

    run_virtual(main())


def test_a_deadline_makes_room_for_those_behind() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        budget = SharedBudget("max_x", 10, "engine.max_x")
        first = await budget.take(5)
        large = asyncio.ensure_future(budget.take(10, loop.time() + 3.0))
        small = asyncio.ensure_future(budget.take(5))
        with pytest.raises(DeadlineExceeded) as caught:
            await large
        assert caught.value.timeout_s == pytest.approx(3.0)
        (await small).give_back()
        first.give_back()
        assert budget.use == (0, 10, 0)

    run_virtual(main())


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_waiter_holds_nothing(granted: bool) -> None:
    async def main() -> None:
        budget = SharedBudget("max_x", 10, "engine.max_x")
        first = await budget.take(10)
        waiter = asyncio.ensure_future(budget.take(4))
        await asyncio.sleep(0)
        if granted:  # in the same pass of the loop
            first.give_back()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        if not granted:
            first.give_back()
        assert budget.use == (0, 10, 0)

    run_virtual(main())


def test_a_waiter_that_expires_and_is_cancelled_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        budget = SharedBudget("max_x", 10, "engine.max_x")
        first = await budget.take(10)
        waiter = asyncio.ensure_future(budget.take(4, loop.time() + 1.0))
        await asyncio.sleep(0)
        loop.call_at(loop.time() + 1.0, waiter.cancel)
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await waiter
        first.give_back()
        assert budget.use == (0, 10, 0)

    run_virtual(main())


def test_a_tally_waits_for_all_but_those_that_are_kept() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tally = Tally("what lives")
        await tally.wait_none(loop.time(), 0.0)
        tally.enter()
        tally.enter()
        with pytest.raises(DeadlineExceeded):
            await tally.wait_none(loop.time() + 2.0, 2.0)
        loop.call_later(1.0, tally.leave)
        loop.call_later(2.0, tally.keep, 100)
        with pytest.raises(Unquiesced) as caught:
            await tally.wait_none(loop.time() + 5.0, 5.0)
        assert caught.value.retained_bytes == 100
        assert tally.live == 1

    run_virtual(main())
