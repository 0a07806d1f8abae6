"""Several pieces of work at a time: in order, bounded, and all or nothing."""

from __future__ import annotations

import asyncio

import pytest

from orbit.runtime.gathering import gather_all
from orbit.testing.clock import run_virtual


def test_results_come_in_order_and_at_most_so_many_at_a_time() -> None:
    running, most = 0, 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0 - number / 20)  # later ones are faster
        running -= 1
        return number * number

    async def main() -> None:
        assert await gather_all(10, 3, work, _never) == [n * n for n in range(10)]
        assert most == 3
        assert await gather_all(0, 3, work, _never) == []

    run_virtual(main())


def test_the_first_error_ends_all_of_it() -> None:
    undone: list[int] = []
    begun: list[int] = []
    cancelled: list[int] = []

    async def work(number: int) -> int:
        begun.append(number)
        try:
            await asyncio.sleep(number)
        except asyncio.CancelledError:
            cancelled.append(number)
            await asyncio.sleep(5)  # takes its time, and is waited for
            raise
        if number == 2:
            raise ValueError("the third")
        return number

    async def main() -> None:
        with pytest.raises(ValueError, match="the third"):
            await gather_all(100, 4, work, undone.append)
        assert asyncio.get_running_loop().time() >= 7
        assert sorted(undone) == [0, 1]
        assert sorted(begun) == [0, 1, 2, 3, 4, 5]
        assert sorted(cancelled) == [3, 4, 5]

    run_virtual(main())


def test_a_result_that_comes_with_the_error_is_undone_too() -> None:
    undone: list[int] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(1 if number == 0 else 9)
        except asyncio.CancelledError:
            return number  # too late to be stopped
        raise ValueError("the first")

    async def main() -> None:
        with pytest.raises(ValueError, match="the first"):
            await gather_all(2, 2, work, undone.append)
        assert undone == [1]

    run_virtual(main())


def test_a_cancelled_caller_waits_for_all_of_it_however_often() -> None:
    undone: list[int] = []
    ended: list[int] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(number)
        except asyncio.CancelledError:
            await asyncio.sleep(3)
            ended.append(number)
            raise
        return number

    async def main() -> None:
        task = asyncio.ensure_future(gather_all(4, 4, work, undone.append))
        await asyncio.sleep(1.5)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.5)
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(undone) == [0, 1]
        assert sorted(ended) == [2, 3]

    run_virtual(main())


def _never(result: int) -> None:
    raise AssertionError(f"{result} was undone")
