"""Blocking calls into a loop that runs in its own thread."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time

import pytest

from orbit.errors import ClosedError, DeadlineExceeded, UsageError
from orbit.loop_thread import LoopThread


@pytest.fixture
def thread() -> object:
    thread = LoopThread("thing")
    yield thread
    thread.stop()
    assert not [t for t in threading.enumerate() if t.name == "orbit thing"]


def test_values_errors_and_awaitables(thread: LoopThread) -> None:
    async def slow(value: int) -> int:
        await asyncio.sleep(0.001)
        if value < 0:
            raise DeadlineExceeded("it", 1.0)  # a TimeoutError of its own
        return value

    assert thread.call(lambda: 3) == 3
    assert thread.call(lambda: slow(4)) == 4
    with pytest.raises(DeadlineExceeded):
        thread.call(lambda: slow(-1))
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)


def test_calls_from_many_threads(thread: LoopThread) -> None:
    async def echo(value: int) -> int:
        await asyncio.sleep(0)
        return value

    found: list[object] = []

    def work(base: int) -> None:
        for n in range(50):
            found.append(thread.call(lambda n=n: echo(base + n)))  # type: ignore[misc]

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(found) == sorted(1000 * n + m for n in range(8) for m in range(50))


def test_a_timeout_leaves_the_work_alone(thread: LoopThread) -> None:
    ended = threading.Event()

    async def slow() -> None:
        await asyncio.sleep(0.05)
        ended.set()

    with pytest.raises(TimeoutError):
        thread.call(slow, 0.01)
    assert ended.wait(5)


def test_the_callers_context_goes_along(thread: LoopThread) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")

    async def look() -> str:
        await asyncio.sleep(0)
        return variable.get()

    variable.set("mine")
    assert thread.call(look) == "mine"
    assert thread.call(variable.get) == "mine"


def test_the_loops_own_thread_would_wait_for_itself(thread: LoopThread) -> None:
    with pytest.raises(UsageError, match="itself"):
        thread.call(lambda: thread.call(lambda: 1))


def test_an_interrupt_cancels_and_waits_for_the_end(thread: LoopThread) -> None:
    began, ended = threading.Event(), threading.Event()

    async def slow() -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.02)
            ended.set()

    def interrupt() -> None:
        began.wait(5)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        thread.call(slow)
    assert ended.is_set()
    interrupter.join()
    assert thread.call(lambda: 1) == 1


def test_what_ends_the_program_reaches_those_who_wait_and_the_loop_goes_on(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    async def slow() -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(SystemExit) as caught:
        thread.call(slow)
    assert caught.value.code == 3
    assert ended.is_set()
    assert not caplog.records
    thread.call(lambda: asyncio.get_running_loop().call_soon(sys.exit, 4))
    assert thread.call(lambda: 1) == 1
    assert thread.call(lambda: asyncio.sleep(0, 2)) == 2
    assert ["nobody waits" in record.getMessage() for record in caplog.records] == [True]


def test_a_stopped_loop_is_closed_to_those_who_wait_and_who_come() -> None:
    thread = LoopThread("thing")
    began = threading.Event()
    outcomes: list[BaseException] = []

    async def slow() -> None:
        began.set()
        await asyncio.sleep(600)

    def wait() -> None:
        try:
            thread.call(slow)
        except BaseException as error:
            outcomes.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert began.wait(5)
    thread.stop()
    thread.stop()
    waiter.join(5)
    assert [type(error) for error in outcomes] == [ClosedError]
    with pytest.raises(ClosedError):
        thread.call(lambda: 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # threads are what it is about
def test_a_fork_has_no_loop(thread: LoopThread) -> None:
    # The child only looks and leaves: no test framework runs in it.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            thread.call(lambda: 1)
        except ClosedError:
            thread.stop()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 10
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(status) == 0
    assert thread.call(lambda: 1) == 1
