"""The budget of queue pairs: who waits, in which order, and who has to go."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import pytest

from orbit.errors import BudgetExceeded, BusyError, DeadlineExceeded
from orbit.testing.clock import run_virtual
from orbit.verbs.endpoints import EndpointBudget, EndpointSlot


def forever() -> float:
    return math.inf


@dataclass(eq=False)
class Idle:
    """An array that nobody uses. Its queue pairs go when the test says so."""

    name: str
    slots: list[EndpointSlot]
    gone: list[str]
    evictable_at: float = 0.0
    evicted: bool = field(default=False)

    @property
    def endpoints(self) -> int:
        return len(self.slots)

    def evict(self) -> None:
        self.evicted = True
        self.gone.append(self.name)
        for slot in self.slots:
            slot.leave()

    def end(self) -> None:
        for slot in self.slots:
            slot.give_back()


class Cache:
    def __init__(self, budget: EndpointBudget) -> None:
        self.budget = budget
        self.arrays: list[Idle] = []
        self.gone: list[str] = []
        budget.add_idle(lambda: [array for array in self.arrays if not array.evicted])

    async def add(self, name: str, count: int, evictable_at: float = 0.0) -> Idle:
        array = Idle(name, await self.budget.take(count), self.gone, evictable_at)
        self.arrays.append(array)
        return array


def take(budget: EndpointBudget, count: int) -> asyncio.Task[list[EndpointSlot]]:
    return asyncio.ensure_future(budget.take(count, forever))


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_more_than_all_is_refused_at_once() -> None:
    async def main() -> None:
        budget = EndpointBudget(4)
        with pytest.raises(BudgetExceeded) as caught:
            await budget.take(5, forever)
        assert caught.value.knob == "rdma.max_endpoints"
        assert budget.in_use == budget.waiting == 0
        assert len(await budget.take(4, forever)) == budget.in_use == 4

    run_virtual(main())


def test_capacity_that_comes_back_wakes_in_order() -> None:
    async def main() -> None:
        budget, served = EndpointBudget(4), []
        held = await budget.take(4)
        waiting = [take(budget, count) for count in (3, 1, 2)]
        for number, task in enumerate(waiting):
            task.add_done_callback(lambda _, number=number: served.append(number))
        await turn()
        assert budget.waiting == 6
        held[0].give_back()
        await turn()
        assert served == []  # one slot is free, and the second would fit: nobody overtakes
        held[1].give_back()
        held[2].give_back()
        await turn()
        assert served == [0]
        held[3].give_back()
        await turn()
        assert served == [0, 1]
        for slot in waiting[0].result():
            slot.give_back()
        await turn()
        assert served == [0, 1, 2]
        assert budget.in_use == 3

    run_virtual(main())


def test_giving_up_lets_those_behind_go_on() -> None:
    async def main() -> None:
        loop, budget = asyncio.get_running_loop(), EndpointBudget(4)
        await budget.take(3)
        large = asyncio.ensure_future(budget.take(4, lambda: 5.0))
        small = take(budget, 1)
        await turn()
        assert not small.done()
        with pytest.raises(DeadlineExceeded):
            await large
        assert loop.time() == 5.0
        assert len(await small) == 1
        cancelled, behind = take(budget, 1), take(budget, 0)
        await turn()
        cancelled.cancel()
        assert await behind == []
        assert budget.in_use == 4
        assert budget.waiting == 0

    run_virtual(main())


def test_patience_may_grow() -> None:
    async def main() -> None:
        loop, budget, patience = asyncio.get_running_loop(), EndpointBudget(1), [1.0]
        (held,) = await budget.take(1)
        waiting = asyncio.ensure_future(budget.take(1, lambda: max(patience)))
        loop.call_at(0.5, patience.append, 3.0)
        loop.call_at(2.0, held.give_back)
        await waiting
        assert loop.time() == 2.0

    run_virtual(main())


def test_a_grant_that_is_cancelled_too_late_is_given_back() -> None:
    async def main() -> None:
        budget = EndpointBudget(2)
        held = await budget.take(2)
        waiting = take(budget, 2)
        await turn()
        for slot in held:
            slot.give_back()
        waiting.cancel()  # it has its slots, and has not run yet
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert budget.in_use == 0

    run_virtual(main())


def test_idle_arrays_go_the_longest_unused_first_and_no_more_than_needed() -> None:
    async def main() -> None:
        budget = EndpointBudget(6)
        cache = Cache(budget)
        newer, oldest, old = [
            await cache.add(name, 2, -age)
            for name, age in (("newer", 1), ("oldest", 3), ("old", 2))
        ]
        waiting = take(budget, 3)
        await turn()
        assert cache.gone == ["oldest", "old"]
        assert not waiting.done()  # they are counted until they are gone
        old.end()
        await turn()
        assert not waiting.done()
        oldest.end()
        assert len(await waiting) == 3
        assert budget.in_use == 5
        assert not newer.evicted

    run_virtual(main())


def test_nothing_goes_where_it_would_not_be_enough() -> None:
    async def main() -> None:
        budget = EndpointBudget(4)
        await budget.take(3)
        cache = Cache(budget)
        idle = await cache.add("idle", 1)
        waiting = take(budget, 3)
        with pytest.raises(BusyError):
            await budget.take(2)
        assert not idle.evicted
        waiting.cancel()
        await turn()
        assert budget.waiting == 0

    run_virtual(main())


def test_an_array_that_was_offered_just_now_goes_a_little_later() -> None:
    async def main() -> None:
        loop, budget = asyncio.get_running_loop(), EndpointBudget(2)
        cache = Cache(budget)
        fresh = await cache.add("fresh", 2, 1.5)
        waiting = take(budget, 2)
        await asyncio.sleep(1.0)
        assert not fresh.evicted
        await asyncio.sleep(0.6)
        assert fresh.evicted
        fresh.end()
        await waiting
        assert loop.time() == pytest.approx(1.6)

    run_virtual(main())


def test_who_does_not_wait_is_served_by_what_is_idle_or_refused() -> None:
    async def main() -> None:
        budget = EndpointBudget(2)
        cache = Cache(budget)
        idle = await cache.add("idle", 2)
        asking = asyncio.ensure_future(budget.take(2))
        await turn()
        assert idle.evicted
        assert not asking.done()
        with pytest.raises(BusyError):
            await budget.take(1)  # what is on its way out is promised
        idle.end()
        assert len(await asking) == 2
        with pytest.raises(BusyError):
            await budget.take(1)

    run_virtual(main())


def test_what_is_retained_stays_counted_and_somebody_else_goes() -> None:
    async def main() -> None:
        budget = EndpointBudget(4)
        cache = Cache(budget)
        stuck, other = await cache.add("stuck", 2, -2), await cache.add("other", 2, -1)
        waiting = take(budget, 2)
        await turn()
        assert cache.gone == ["stuck"]
        for slot in stuck.slots:
            slot.keep()
        await turn()
        assert cache.gone == ["stuck", "other"]
        other.end()
        await waiting
        assert budget.in_use == 4
        assert budget.leaving == 0

    run_virtual(main())


def test_a_slot_comes_back_once() -> None:
    async def main() -> None:
        budget = EndpointBudget(2)
        first, second = await budget.take(2)
        first.leave()
        first.leave()
        assert budget.leaving == 1
        for _ in range(2):
            first.give_back()
        first.keep()
        assert (budget.in_use, budget.leaving) == (1, 0)
        second.keep()  # it was not on its way out
        assert (budget.in_use, budget.leaving) == (1, 0)

    run_virtual(main())
