"""The gate and the shutdown over it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from orbit import UsageError
from orbit.runtime.messaging.draining import DrainGate, GracefulShutdown, ShutdownPolicy
from orbit.testing.clock import run_virtual


class Rig:
    """A shutdown whose steps are written down."""

    def __init__(self) -> None:
        self.gate = DrainGate()
        self.steps: list[str] = []
        self.no_streams = asyncio.Event()
        self.no_streams.set()
        self.sweep_s = 0.0
        self.hurried = asyncio.Event()
        self.shutdown = GracefulShutdown(
            self.gate, self.streams_idle, self.drop, self.close, sweep=self
        )

    async def sweep(self) -> None:
        assert self.gate.draining
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.hurried.wait(), self.sweep_s)
        self.steps.append("sweep")

    def bring_forward(self, deadline: float) -> None:
        asyncio.get_running_loop().call_at(deadline, self.hurried.set)

    async def streams_idle(self) -> None:
        await self.no_streams.wait()

    def drop(self) -> int:
        dropped = self.gate.guards
        self.steps.append(f"drop {dropped}")
        for _ in range(dropped):
            self.gate.leave()
        return dropped

    async def close(self) -> None:
        assert self.gate.draining
        self.steps.append("close")
        await asyncio.sleep(0.1)


def test_a_shut_gate_turns_away_and_holds_no_guard_for_it() -> None:
    gate = DrainGate()
    assert gate.enter()
    gate.shut()
    gate.shut()
    assert gate.draining
    assert not gate.enter()
    assert (gate.guards, gate.turned_away) == (1, 1)
    gate.leave()
    assert gate.guards == 0


def test_a_waiter_is_woken_by_the_last_guard_and_not_by_one_before() -> None:
    async def main() -> None:
        gate = DrainGate()
        assert gate.enter()
        assert gate.enter()
        waiters = [gate.watch_idle(), gate.watch_idle()]
        gate.leave()
        assert not any(w.done() for w in waiters)
        waiters[0].cancel()
        gate.leave()
        assert waiters[1].done()
        assert gate.watch_idle().done()  # nothing is held: at once

    run_virtual(main())


def test_a_request_that_is_turned_away_does_not_wake_a_waiter_too_soon() -> None:
    async def main() -> None:
        gate = DrainGate()
        assert gate.enter()
        gate.shut()
        waiter = gate.watch_idle()
        assert not gate.enter()
        assert not waiter.done()
        gate.leave()
        assert waiter.done()

    run_virtual(main())


def test_waiting_for_ever_closes_after_the_last_guard() -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.gate.enter()
        running = asyncio.create_task(rig.shutdown.run(ShutdownPolicy.wait_forever()))
        await asyncio.sleep(3600)
        assert rig.steps == ["sweep"]
        rig.gate.leave()
        await running
        assert rig.steps == ["sweep", "close"]
        await rig.shutdown.run(ShutdownPolicy.timeout(0))  # idempotent
        assert rig.steps == ["sweep", "close"]

    run_virtual(main())


def test_streams_hold_the_shutdown_up_until_its_time_is_over() -> None:
    async def main() -> None:
        for ends in (True, False):
            rig = Rig()
            rig.no_streams.clear()
            running = asyncio.create_task(rig.shutdown.run(ShutdownPolicy.timeout(60)))
            await asyncio.sleep(30)
            assert rig.steps == ["sweep"]
            if ends:
                rig.no_streams.set()
            await running
            expected = ["close"] if ends else ["drop 0", "close"]
            assert rig.steps == ["sweep", *expected]

    run_virtual(main())


def test_a_timeout_drops_what_is_left() -> None:
    async def main() -> None:
        rig = Rig()
        for _ in range(3):
            assert rig.gate.enter()
        loop = asyncio.get_running_loop()
        await rig.shutdown.run(ShutdownPolicy.timeout(2.0))
        assert rig.steps == ["sweep", "drop 3", "close"]
        assert (rig.gate.guards, rig.shutdown.dropped) == (0, 3)
        assert loop.time() == pytest.approx(2.1)

    run_virtual(main())


def test_the_soonest_deadline_of_all_callers_holds() -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.gate.enter()
        loop = asyncio.get_running_loop()
        policies = [
            ShutdownPolicy.wait_forever(),
            ShutdownPolicy.timeout(50),
            ShutdownPolicy.timeout(5),
            ShutdownPolicy.timeout(70),
        ]
        await asyncio.gather(*(rig.shutdown.run(policy) for policy in policies))
        assert rig.steps == ["sweep", "drop 1", "close"]
        assert loop.time() == pytest.approx(5.1)

    run_virtual(main())


def test_the_sweep_goes_first_and_shares_the_deadline() -> None:
    async def main() -> None:
        rig = Rig()
        rig.sweep_s = 3600
        assert rig.gate.enter()
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(rig.shutdown.run(ShutdownPolicy.timeout(100)))
        await asyncio.sleep(1)
        await rig.shutdown.run(ShutdownPolicy.timeout(9))
        await first
        assert rig.steps == ["sweep", "drop 1", "close"]
        assert loop.time() == pytest.approx(10.1)

    run_virtual(main())


def test_handlers_that_end_during_the_sweep_need_no_more_time() -> None:
    async def main() -> None:
        rig = Rig()
        rig.sweep_s = 20
        assert rig.gate.enter()
        loop = asyncio.get_running_loop()
        loop.call_at(10, rig.gate.leave)
        await rig.shutdown.run(ShutdownPolicy.timeout(30))
        assert rig.steps == ["sweep", "close"]
        assert loop.time() == pytest.approx(20.1)

    run_virtual(main())


def test_cancelling_a_caller_leaves_the_shutdown_to_the_others() -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.gate.enter()
        first = asyncio.create_task(rig.shutdown.run(ShutdownPolicy.wait_forever()))
        second = asyncio.create_task(rig.shutdown.run(ShutdownPolicy.wait_forever()))
        await asyncio.sleep(1)
        first.cancel()
        await asyncio.sleep(1)
        assert first.cancelled()
        assert not second.done()
        rig.gate.leave()
        await second
        assert rig.steps == ["sweep", "close"]

    run_virtual(main())


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_policy_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(UsageError):
        ShutdownPolicy.timeout(seconds)
