"""Background tasks: held, named, ended together, and their failures said once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orbit.runtime.runner import TaskRunner

Run = Callable[[Any], Any]


def test_drain_waits_for_tasks_that_tasks_start(run_async: Run) -> None:
    async def main() -> None:
        runner = TaskRunner()
        ended: list[str] = []

        async def inner() -> None:
            await asyncio.sleep(0)
            ended.append("inner")

        async def outer() -> None:
            await asyncio.sleep(0)
            runner.spawn(inner(), "inner")
            ended.append("outer")

        runner.spawn(outer(), "outer")
        assert await runner.drain(asyncio.get_running_loop().time() + 5)
        assert ended == ["outer", "inner"]
        assert len(runner) == 0

    run_async(main())


def test_drain_gives_up_at_its_deadline_and_cancel_ends_the_rest(run_async: Run) -> None:
    async def main() -> None:
        runner = TaskRunner()
        task = runner.spawn(asyncio.sleep(60), "sleeper")
        now = asyncio.get_running_loop().time()
        assert not await runner.drain(now)
        assert await runner.cancel(now + 5)
        assert task.cancelled()

    run_async(main())


def test_started_work_that_never_waits_makes_no_task(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ended: list[str] = []

        async def quick() -> None:
            ended.append("quick")

        async def fail() -> None:
            raise ValueError("boom")

        async def give_up() -> None:
            raise asyncio.CancelledError

        runner = TaskRunner()
        assert runner.start(quick(), "quick") is None
        assert ended == ["quick"]
        assert runner.start(fail(), "serve 7") is None
        assert runner.start(give_up(), "serve 8") is None
        assert len(runner) == 0

    run_async(main())
    assert [record.getMessage() for record in caplog.records] == ["orbit serve 7 failed"]


def test_started_work_that_waits_is_one_of_the_tasks(run_async: Run) -> None:
    async def main() -> None:
        begun, ended = [], []

        async def slow() -> None:
            begun.append(True)
            await asyncio.sleep(0)
            ended.append(True)

        runner = TaskRunner()
        task = runner.start(slow(), "slow")
        assert task is not None
        assert task.get_name() == "orbit slow"
        assert (begun, ended) == ([True], [])
        assert len(runner) == 1
        assert await runner.drain(asyncio.get_running_loop().time() + 5)
        assert ended == [True]

    run_async(main())


def test_a_failure_is_logged_once_with_the_task_name(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def fail() -> None:
            raise ValueError("boom")

        runner = TaskRunner()
        runner.spawn(fail(), "dial 7")
        assert await runner.drain(asyncio.get_running_loop().time() + 5)

    run_async(main())
    assert [record.getMessage() for record in caplog.records] == ["orbit dial 7 failed"]


def test_a_task_may_drain_the_others_without_waiting_for_itself(run_async: Run) -> None:
    async def main() -> None:
        runner = TaskRunner()

        async def closer() -> bool:
            return await runner.drain(asyncio.get_running_loop().time() + 5)

        runner.spawn(asyncio.sleep(0), "other")
        assert await runner.spawn(closer(), "closer")

    run_async(main())
