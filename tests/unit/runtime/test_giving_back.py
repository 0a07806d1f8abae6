"""Coroutines that give something back although nobody awaits them, exactly once."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable

import pytest

from orbit.errors import InternalError, UnknownHandle
from orbit.runtime.giving_back import GivingBack
from orbit.runtime.runner import TaskRunner
from orbit.testing.waiting import until


class Till:
    """What is given back, and by whom."""

    def __init__(self) -> None:
        self.runner = TaskRunner(asyncio.get_running_loop())
        self.begun = 0
        self.ended = 0
        self.fails = False

    def give(self) -> GivingBack:
        return GivingBack(self._work(), lambda work: self.runner.spawn_unwatched(work, "give"))

    async def _work(self) -> None:
        self.begun += 1
        await asyncio.sleep(0)
        if self.fails:
            raise UnknownHandle("it is gone")
        self.ended += 1


AWAITED: dict[str, Callable[[GivingBack], Awaitable[object]]] = {
    "plainly": lambda given: given,
    "as a task": asyncio.ensure_future,
    "in a group": asyncio.gather,
    "within a time": lambda given: asyncio.wait_for(given, 5),
}


@pytest.mark.parametrize("how", AWAITED)
def test_it_is_a_coroutine_like_another(how: str) -> None:
    async def main() -> None:
        till = Till()
        await AWAITED[how](till.give())
        assert (till.begun, till.ended) == (1, 1)
        till.fails = True
        with pytest.raises(UnknownHandle):
            await AWAITED[how](till.give())
        gc.collect()
        await asyncio.sleep(0.01)
        assert (till.begun, till.ended, len(till.runner)) == (2, 1, 0)

    asyncio.run(main())


def test_without_an_await_it_is_done_all_the_same() -> None:
    async def main() -> None:
        till = Till()
        for _ in range(100):
            till.give()
        assert till.begun == 0  # nothing runs within the call
        await until(lambda: till.ended == 100)
        kept = till.give()
        await asyncio.sleep(0.01)
        assert till.begun == 100  # somebody may still await it
        del kept
        await until(lambda: till.ended == 101 and not len(till.runner))

    asyncio.run(main())


def test_dropped_in_another_thread() -> None:
    async def main() -> None:
        till = Till()
        held = [till.give() for _ in range(10)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        await until(lambda: till.ended == 10)

    asyncio.run(main())


def test_errors_of_what_nobody_awaits_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        till = Till()
        till.fails = True
        till.give()
        await until(lambda: till.begun == 1 and not len(till.runner))

    asyncio.run(main())
    assert not caplog.records


def test_closed_or_too_late_nothing_happens() -> None:
    async def main() -> tuple[Till, GivingBack]:
        till = Till()
        till.give().close()
        await asyncio.sleep(0.01)
        assert till.begun == 0
        return till, till.give()

    till, late = asyncio.run(main())
    del late  # its loop is closed
    assert till.begun == 0


def test_cancelled_before_it_began() -> None:
    """The task has taken it over: it is the task's to say."""

    async def main() -> None:
        till = Till()
        task = asyncio.ensure_future(till.give())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert till.begun == 0

    asyncio.run(main())


def test_a_runner_without_a_loop_says_so() -> None:
    async def work() -> None:
        """Never begun."""

    unwanted = work()
    with pytest.raises(InternalError):
        TaskRunner().spawn_unwatched(unwanted, "nothing")
    unwanted.close()
