"""Work that begins before it has a task: its first part, its rest, and its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orbit.transport.begun import Begun, begin

Run = Callable[[Any], Any]


def test_work_without_a_wait_ends_within_the_call(run_async: Run) -> None:
    async def work() -> int:
        return 7

    async def failing() -> None:
        raise ValueError("boom")

    async def main() -> None:
        assert begin(work()) == 7
        with pytest.raises(ValueError, match="boom"):
            begin(failing())

    run_async(main())


def test_the_rest_waits_for_what_the_beginning_waited_for(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        seen: list[object] = []

        async def work() -> int:
            seen.append("begun")
            found = await answer
            await asyncio.sleep(0)
            seen.append(asyncio.current_task())
            return found

        rest = begin(work())
        assert isinstance(rest, Begun)
        assert seen == ["begun"]
        task = loop.create_task(rest)
        loop.call_soon(answer.set_result, 3)
        assert await task == 3
        assert seen == ["begun", task]

    run_async(main())


def test_an_answer_that_comes_before_the_task_runs_is_not_lost(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()

        async def work() -> int:
            return await answer

        rest = begin(work())
        answer.set_result(4)
        assert isinstance(rest, Begun)
        assert await loop.create_task(rest) == 4

    run_async(main())


def test_a_task_that_is_cancelled_before_it_runs_still_ends_the_work(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended: list[str] = []

        async def work() -> None:
            try:
                await loop.create_future()
            except asyncio.CancelledError:
                ended.append("cancelled")
                await asyncio.sleep(0)
                ended.append("cleaned up")
                raise

        rest = begin(work())
        assert isinstance(rest, Begun)
        task = loop.create_task(rest)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled", "cleaned up"]

    run_async(main())


def test_a_yield_without_a_future_is_a_wait_too(run_async: Run) -> None:
    async def main() -> None:
        async def work() -> str:
            await asyncio.sleep(0)
            async with asyncio.timeout(60):  # in the task by now
                await asyncio.sleep(0)
            return "done"

        rest = begin(work())
        assert isinstance(rest, Begun)
        assert await asyncio.get_running_loop().create_task(rest) == "done"

    run_async(main())


def test_what_needs_a_task_fails_rather_than_taking_its_callers(run_async: Run) -> None:
    async def timed() -> None:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    async def main() -> None:
        caller = asyncio.current_task()
        with pytest.raises(RuntimeError, match="inside a task"):
            begin(timed())
        assert asyncio.current_task() is caller

    run_async(main())


def test_closing_the_rest_closes_the_work(run_async: Run) -> None:
    async def main() -> None:
        closed: list[bool] = []

        async def work() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                closed.append(True)

        rest = begin(work())
        assert isinstance(rest, Begun)
        rest.close()
        assert closed == [True]

    run_async(main())
