"""Signals end a command's coroutine as a cancellation, and say so afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from orbit.cli.failures import Stopped
from orbit.cli.running import run


def test_the_result_comes_back() -> None:
    async def work() -> int:
        return 7

    assert run(work()) == 7


def test_an_error_comes_back() -> None:
    async def work() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        run(work())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_unwinds_first(number: signal.Signals) -> None:
    unwound = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            unwound.append(True)

    with pytest.raises(Stopped) as caught:
        run(work())
    assert caught.value.number == number
    assert unwound == [True]


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> None:
        pass

    run(work())
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_cancellation_without_a_signal_stays_one() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(work())
