"""The one timer of a machine follows its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from orbit.transport.timer import DeadlineTimer

Run = Callable[[Any], Any]


def test_it_fires_once_at_the_last_deadline_armed(run_async: Run) -> None:
    async def main() -> None:
        fired: list[float] = []
        loop = asyncio.get_running_loop()
        timer = DeadlineTimer(lambda: fired.append(loop.time()))
        start = loop.time()
        timer.arm(start + 60)
        timer.arm(start + 0.01)
        assert timer.armed
        await asyncio.sleep(0.03)
        assert len(fired) == 1
        assert fired[0] >= start + 0.01 - 0.001
        assert not timer.armed

    run_async(main())


def test_none_disarms_and_it_can_be_armed_again_from_its_own_callback(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        fired: list[int] = []

        def fire() -> None:
            fired.append(1)
            timer.arm(loop.time() if len(fired) < 3 else None)

        timer = DeadlineTimer(fire)
        timer.arm(loop.time())
        timer.arm(None)
        await asyncio.sleep(0.005)
        assert fired == []
        timer.arm(loop.time())
        await asyncio.sleep(0.02)
        assert fired == [1, 1, 1]
        assert not timer.armed

    run_async(main())
