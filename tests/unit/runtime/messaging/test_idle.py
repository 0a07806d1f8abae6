"""The sweep over idle links, and that it costs nothing without one."""

from __future__ import annotations

import asyncio

from orbit.runtime.messaging.idle import IDLE_CLOSES_TOTAL, IdleSweep
from orbit.testing.clock import run_virtual
from orbit.testing.leftovers import nothing_left
from tests.unit.runtime.messaging.callers import FakeCaller


def test_an_idle_link_is_closed_and_one_in_use_is_not() -> None:
    async def main() -> None:
        async with nothing_left():
            caller = FakeCaller()
            sweep = IdleSweep(caller, 10.0)
            idle, _ = caller.add_route(2)
            called, _ = caller.add_route(3)
            called.calls = 1
            held, _ = caller.add_route(4)
            held.holds = 1
            busy, busy_link = caller.add_route(5)
            for _ in range(4):
                sweep.link_opened()
            for _ in range(5):
                await asyncio.sleep(5)
                busy_link.last_frame_at = asyncio.get_running_loop().time()
            assert [route for route, _ in caller.parted] == [idle]
            counters = caller.recorder.counters
            assert counters.value(IDLE_CLOSES_TOTAL, outcome="closed", transport="tcp") == 1
            called.calls = 0
            await asyncio.sleep(12)
            assert [route for route, _ in caller.parted][:2] == [idle, called]
            held.link.closed = busy.link.closed = True  # type: ignore[misc]
            sweep.close()

    run_virtual(main())


def test_a_refused_goodbye_is_counted_and_tried_again_later() -> None:
    async def main() -> None:
        caller = FakeCaller()
        sweep = IdleSweep(caller, 10.0)
        _, link = caller.add_route(2)
        link.goodbye_answer = False
        sweep.link_opened()
        await asyncio.sleep(35)
        assert [at for _, at in caller.parted] == [10.0, 20.0, 30.0]
        assert caller.recorder.counters.value(IDLE_CLOSES_TOTAL, outcome="refused") == 3
        sweep.close()
        await asyncio.sleep(100)
        assert len(caller.parted) == 3

    run_virtual(main())


def test_no_timer_without_an_open_link_or_without_the_setting() -> None:
    async def main() -> None:
        caller = FakeCaller()
        sweep = IdleSweep(caller, 10.0)
        _, link = caller.add_route(2)
        sweep.link_opened()
        assert sweep._timer is not None
        assert sweep._timer.armed
        await asyncio.sleep(21)
        assert link.closed
        assert not sweep._timer.armed
        caller.add_route(2)
        sweep.link_opened()
        assert sweep._timer.armed
        sweep.close()
        never = IdleSweep(caller, None)
        never.link_opened()
        assert never._timer is None

    run_virtual(main())
