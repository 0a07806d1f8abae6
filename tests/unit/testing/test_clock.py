"""The virtual clock jumps, keeps order, and says when nothing can happen any more."""

from __future__ import annotations

import asyncio
import time

import pytest

from orbit.errors import InternalError
from orbit.testing.clock import run_virtual


def test_an_hour_takes_no_time() -> None:
    async def body() -> float:
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time() - started

    real = time.monotonic()
    assert run_virtual(body()) == pytest.approx(3600)
    assert time.monotonic() - real < 60


def test_timers_fire_in_order() -> None:
    async def body() -> list[int]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        for delay in (5, 1, 3, 2, 4):
            loop.call_later(delay, order.append, delay)
        await asyncio.sleep(10)
        return order

    assert run_virtual(body()) == [1, 2, 3, 4, 5]


def test_timeouts_work() -> None:
    async def body() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.sleep(101)

    run_virtual(body())


def test_a_stuck_world_is_reported() -> None:
    async def body() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(InternalError, match="stuck"):
        run_virtual(body())


def test_threads_may_still_answer() -> None:
    async def body() -> int:
        return await asyncio.to_thread(lambda: 42)

    assert run_virtual(body()) == 42
