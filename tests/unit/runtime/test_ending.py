"""Steps under a deadline: their order, what a failure or a late one does, and the two lists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from orbit.errors import Unquiesced
from orbit.runtime.ending import Ending, Outcome, Step
from orbit.testing.clock import run_virtual

Work = Callable[[], Awaitable[None]]


def after(seconds: float, done: list[str], name: str) -> Work:
    async def work() -> None:
        await asyncio.sleep(seconds)
        done.append(name)

    return work


def outcomes(ending: Ending) -> list[tuple[str, Outcome]]:
    return [(report.name, report.outcome) for report in ending.reports]


def test_steps_run_one_after_another_and_once() -> None:
    async def main() -> None:
        loop, done = asyncio.get_running_loop(), list[str]()
        ending = Ending("test", [Step("a", after(2, done, "a")), Step("b", after(1, done, "b"))])
        assert not ending.started
        begun = loop.time()
        callers = [asyncio.create_task(ending.run(begun + 60)) for _ in range(3)]
        await asyncio.sleep(0.5)
        callers[0].cancel()  # whoever gives up leaves it to the others
        await asyncio.gather(*callers[1:])
        assert done == ["a", "b"]
        assert loop.time() - begun == pytest.approx(3)
        assert [report.seconds for report in ending.reports] == pytest.approx([2, 1])
        await ending.run(0)
        assert done == ["a", "b"]

    run_virtual(main())


def test_a_failed_step_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise Unquiesced("a thing", 4096, "nobody knows")

    async def main() -> None:
        done: list[str] = []
        ending = Ending("test", [Step("bad", fails), Step("good", after(1, done, "good"))])
        await ending.run(float("inf"))
        assert done == ["good"]
        assert outcomes(ending) == [("bad", Outcome.FAILED), ("good", Outcome.DONE)]

    run_virtual(main())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "bad" in caplog.text


def test_what_does_not_end_in_time_is_cut_short() -> None:
    async def main() -> None:
        loop, done = asyncio.get_running_loop(), list[str]()
        ending = Ending(
            "test",
            [
                Step("for ever", after(3600, done, "for ever")),
                Step("none left", after(0.1, done, "none left")),
                Step("a moment", after(0.5, done, "a moment"), at_least_s=1.0),
                Step("too long for a moment", after(5, done, "too long"), at_least_s=1.0),
                Step("patient", after(7, done, "patient"), patient=True),
            ],
        )
        begun = loop.time()
        await ending.run(begun + 10)
        assert done == ["a moment", "patient"]
        late, fine = Outcome.LATE, Outcome.DONE
        assert [outcome for _, outcome in outcomes(ending)] == [late, late, fine, late, fine]
        assert loop.time() - begun == pytest.approx(10 + 0.5 + 1 + 7)

    run_virtual(main())


def test_a_step_may_have_a_limit_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop, done = asyncio.get_running_loop(), list[str]()
        steps = [
            Step("long", after(50, done, "long"), at_most_s=3),
            Step("late", after(50, done, "late"), at_most_s=30),
        ]
        ending = Ending("test", steps)
        begun = loop.time()
        await ending.run(begun + 10)
        assert not done
        assert outcomes(ending) == [("long", Outcome.ENOUGH), ("late", Outcome.LATE)]
        assert loop.time() - begun == pytest.approx(10)

    run_virtual(main())
    assert "late" in caplog.text
    assert "long" not in caplog.text


def test_the_soonest_deadline_holds() -> None:
    async def main() -> None:
        loop, done = asyncio.get_running_loop(), list[str]()
        ending = Ending("test", [Step("a", after(3600, done, "a")), Step("b", after(0, done, "b"))])
        begun = loop.time()
        ending.bring_forward(begun + 50)  # before it was started
        running = asyncio.create_task(ending.run(begun + 100))
        await asyncio.sleep(1)
        ending.bring_forward(begun + 70)  # not sooner
        ending.bring_forward(begun + 20)
        assert ending.deadline == begun + 20
        await running
        assert loop.time() - begun == pytest.approx(20)
        assert outcomes(ending)[0] == ("a", Outcome.LATE)

    run_virtual(main())


def test_a_step_that_holds_on_is_waited_for() -> None:
    """Told to stop, it may still have something to prove."""

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), list[str]()

        async def holds_on() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(2)
                done.append("proven")
                raise

        begun = loop.time()
        ending = Ending("test", [Step("holds on", holds_on)])
        await ending.run(begun + 1)
        assert done == ["proven"]
        assert loop.time() - begun == pytest.approx(3)

    run_virtual(main())
