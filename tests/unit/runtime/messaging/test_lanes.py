"""Ordered lanes: order within a key, room between keys, bounds, reaping and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from orbit.runtime.messaging.handlers import OrderedConfig, Overflow
from orbit.runtime.messaging.lanes import Lanes
from orbit.runtime.runner import TaskRunner
from orbit.testing.clock import run_virtual
from orbit.testing.leftovers import nothing_left


class Rig:
    """Lanes with a diary: when which job began, ended or was dropped."""

    def __init__(self, **bounds: object) -> None:
        self.runner = TaskRunner()
        self.lanes = Lanes("work", OrderedConfig(**bounds), self.runner.spawn)  # type: ignore[arg-type]
        self.diary: list[str] = []
        self.running = 0
        self.running_most = 0

    def put(self, key: str, name: str, seconds: float = 0.0, *, plain: bool = False) -> bool:
        return self.lanes.submit(key, Job(self, f"{key}{name}", seconds, plain=plain))

    def ended(self) -> list[str]:
        return [entry[1:] for entry in self.diary if entry[0] == "-"]


class Job:
    def __init__(self, rig: Rig, name: str, seconds: float, *, plain: bool) -> None:
        self.rig = rig
        self.name = name
        self.seconds = seconds
        self.plain = plain
        self.then: Callable[[], object] = lambda: None

    def run_now(self) -> None:
        self.rig.diary.append(f"+{self.name}")
        self.then()
        self.rig.diary.append(f"-{self.name}")

    async def run(self) -> None:
        rig = self.rig
        rig.diary.append(f"+{self.name}")
        rig.running += 1
        rig.running_most = max(rig.running_most, rig.running)
        try:
            await asyncio.sleep(self.seconds)
            rig.diary.append(f"-{self.name}")
        except asyncio.CancelledError:
            rig.diary.append(f"!{self.name}")
            raise
        finally:
            rig.running -= 1

    def drop(self) -> None:
        self.rig.diary.append(f"x{self.name}")


def test_one_key_keeps_its_order_and_keys_run_beside_each_other() -> None:
    async def main() -> None:
        rig = Rig()
        for n in range(3):
            assert rig.put("a", str(n), 3.0 - n)
            assert rig.put("b", str(n), 1.0)
        await asyncio.sleep(10)
        assert [e for e in rig.ended() if e[0] == "a"] == ["a0", "a1", "a2"]
        assert [e for e in rig.ended() if e[0] == "b"] == ["b0", "b1", "b2"]
        assert rig.running_most == 2
        assert rig.diary.index("-b1") < rig.diary.index("-a0")
        rig.lanes.close()

    run_virtual(main())


def test_a_plain_job_runs_within_submit_when_its_lane_is_free() -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.put("a", "0", plain=True)
        assert rig.diary == ["+a0", "-a0"]
        assert not rig.runner._tasks
        assert rig.put("a", "1", 1.0)
        assert rig.put("a", "2", plain=True)  # behind a job that waits
        assert rig.ended() == ["a0"]
        await asyncio.sleep(2)
        assert rig.ended() == ["a0", "a1", "a2"]
        rig.lanes.close()

    run_virtual(main())


def test_a_plain_job_that_submits_to_its_own_lane_is_not_entered_again() -> None:
    async def main() -> None:
        rig = Rig()
        outer = Job(rig, "a0", 0.0, plain=True)
        outer.then = lambda: rig.put("a", "1", plain=True)
        assert rig.lanes.submit("a", outer)
        assert rig.diary == ["+a0", "-a0"]
        await asyncio.sleep(1)
        assert rig.ended() == ["a0", "a1"]
        rig.lanes.close()

    run_virtual(main())


@pytest.mark.parametrize("plain", [False, True])
def test_the_cap_holds_over_all_lanes_and_is_fair(plain: bool) -> None:
    async def main() -> None:
        rig = Rig(max_concurrent=2)
        for n in range(3):
            for key in "abc":
                assert rig.put(key, str(n), 1.0, plain=plain)
        await asyncio.sleep(30)
        assert rig.running_most <= 2
        for key in "abc":
            assert [e for e in rig.ended() if e[0] == key] == [f"{key}{n}" for n in range(3)]
        if not plain:  # nobody has its second turn before everybody had the first
            assert {e[0] for e in rig.ended()[:3]} == set("abc")
        assert rig.lanes.statistics().running == 0
        rig.lanes.close()

    run_virtual(main())


def test_the_depth_is_each_lanes_own_and_falls_when_the_handler_has_finished() -> None:
    async def main() -> None:
        rig = Rig(max_queue_depth=2, overflow=Overflow.REJECT)
        assert rig.put("a", "0", 1.0)
        await asyncio.sleep(0)
        assert rig.put("a", "1", 1.0)
        assert not rig.put("a", "2", 1.0)  # one runs, one waits
        assert rig.put("b", "0", 1.0)
        assert rig.lanes.statistics().depth == 3
        await asyncio.sleep(0.5)
        assert not rig.put("a", "3", 1.0)
        await asyncio.sleep(0.6)
        assert rig.put("a", "4", 1.0)
        await asyncio.sleep(5)
        assert [e for e in rig.ended() if e[0] == "a"] == ["a0", "a1", "a4"]
        assert rig.lanes.statistics().rejected == 2
        rig.lanes.close()

    run_virtual(main())


def test_overflow_that_warns_takes_the_job_and_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        rig = Rig(max_queue_depth=1)
        for n in range(4):
            assert rig.put("a", str(n), 1.0)
        await asyncio.sleep(10)
        assert len(rig.ended()) == 4
        rig.lanes.close()

    run_virtual(main())
    assert len(caplog.records) == 1


def test_idle_lanes_are_reaped_and_none_that_works() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rig = Rig(idle_lane_ttl_s=10.0)
        assert rig.put("a", "0", 1.0)
        assert rig.put("b", "0", 15.0)
        await asyncio.sleep(5)
        assert rig.lanes.statistics().lanes == 2
        await asyncio.sleep(7)
        assert rig.lanes.statistics().lanes == 1  # b works
        assert rig.put("b", "1", 1.0)
        await asyncio.sleep(12)
        found = rig.lanes.statistics()
        assert (found.lanes, found.reaped, found.created) == (1, 1, 2)
        await asyncio.sleep(5)
        assert rig.lanes.statistics().lanes == 0
        assert not rig.lanes._timer.armed
        assert rig.put("a", "1", plain=True)  # a reaped lane opens again
        assert rig.lanes.statistics().created == 3
        assert rig.ended() == ["a0", "b0", "b1", "a1"]
        assert loop.time() < 60
        rig.lanes.close()

    run_virtual(main())


def test_a_lane_that_found_work_in_time_is_not_reaped() -> None:
    async def main() -> None:
        rig = Rig(idle_lane_ttl_s=10.0)
        for n in range(8):
            assert rig.put("a", str(n), plain=True)
            await asyncio.sleep(9)
        found = rig.lanes.statistics()
        assert (found.created, found.reaped) == (1, 0)
        rig.lanes.close()

    run_virtual(main())


def test_time_in_the_queue_is_counted() -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.put("a", "0", 2.0)
        assert rig.put("a", "1", 2.0)
        await asyncio.sleep(10)
        assert rig.lanes.statistics().wait_seconds == pytest.approx(2.0)
        rig.lanes.close()

    run_virtual(main())


def test_dropping_ends_each_job_once_and_leaves_nothing() -> None:
    async def main() -> None:
        async with nothing_left():
            rig = Rig(max_concurrent=2)
            for key in "abc":
                for n in range(2):
                    assert rig.put(key, str(n), 100.0)
            await asyncio.sleep(1)
            assert rig.lanes.drop() == 6
            rig.lanes.close()
            await asyncio.sleep(0.1)
            assert rig.lanes.statistics().depth == 0
            assert rig.lanes.statistics().running == 0
            ends = sorted(e for e in rig.diary if e[0] != "+")
            assert ends == ["!a0", "!b0", "xa1", "xb1", "xc0", "xc1"]

    run_virtual(main())


def test_dropping_before_a_worker_began_is_no_loss() -> None:
    async def main() -> None:
        async with nothing_left():
            rig = Rig()
            assert rig.put("a", "0", 1.0)
            assert rig.lanes.drop() == 1
            rig.lanes.close()
            await asyncio.sleep(0.1)
            assert rig.diary == ["xa0"]
            assert rig.lanes.statistics().running == 0

    run_virtual(main())
