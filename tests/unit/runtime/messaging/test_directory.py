"""Asking for handlers, and waiting for one where it will be registered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orbit.errors import DeadlineExceeded, RequestFailed, UsageError
from orbit.events import Counters
from orbit.protocol.codec import encode
from orbit.runtime.messaging.directory import Directory
from orbit.runtime.messaging.dispatch import Dispatcher
from orbit.testing.clock import run_virtual
from orbit.testing.waiting import until
from tests.unit.runtime.messaging.callers import FakeCaller
from tests.unit.runtime.messaging.requests import FakeRequest


class Rig:
    """The asking side's directory, and a peer's dispatcher at the other end of its calls."""

    def __init__(self) -> None:
        self.peer = Dispatcher(None, Counters())
        Directory(self.peer)
        self.caller = FakeCaller()
        self.caller.answer = self.answer
        self.directory = Directory(Dispatcher(None, Counters()))
        self.calls = 0

    async def answer(self, name: str, payload: bytes) -> bytes:
        self.calls += 1
        request = FakeRequest(name, payload)
        self.peer.on_request(request)
        await until(lambda: request.settled, 100.0)
        how, what = request.outcome
        if how != "answer":
            raise RequestFailed(str(what).partition(":")[0])
        assert isinstance(what, bytes)
        return what

    def wait(self, name: str, timeout_s: float) -> Any:
        return self.directory.wait_for_handler(self.caller, 2, name, timeout_s)


def run(body: Callable[[Rig], Any]) -> None:
    async def main() -> None:
        await body(Rig())

    run_virtual(main())


def test_the_list_has_the_users_names() -> None:
    async def body(rig: Rig) -> None:
        assert await rig.directory.list_handlers(rig.caller, 2, 1.0) == []
        rig.peer.add("b", lambda message: None)
        rig.peer.add("a", lambda message: None)
        assert await rig.directory.list_handlers(rig.caller, 2, 1.0) == ["a", "b"]

    run(body)


def test_a_list_that_is_none_is_refused() -> None:
    async def body(rig: Rig) -> None:
        async def odd(name: str, payload: bytes) -> bytes:
            return encode({"a": 1})

        rig.caller.answer = odd
        with pytest.raises(RequestFailed, match="list"):
            await rig.directory.list_handlers(rig.caller, 2, 1.0)

    run(body)


def test_waiting_ends_with_the_registration() -> None:
    async def body(rig: Rig) -> None:
        waits = [asyncio.create_task(rig.wait("late", 100.0)) for _ in range(3)]
        await asyncio.sleep(12)
        assert not any(wait.done() for wait in waits)
        assert rig.calls <= 9  # held, not polled
        rig.peer.add("late", lambda message: None)
        await asyncio.sleep(0.1)
        assert all(wait.done() for wait in waits)
        assert rig.peer.registry._waiters == {}
        await rig.wait("late", 1.0)

    run(body)


def test_waiting_in_vain_ends_in_time() -> None:
    async def body(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        for timeout_s in (0.2, 7.0):
            begin = loop.time()
            with pytest.raises(DeadlineExceeded):
                await rig.wait("never", timeout_s)
            assert loop.time() - begin == pytest.approx(timeout_s, abs=0.1)
        await asyncio.sleep(10)
        assert rig.peer.registry._waiters == {}
        assert rig.peer.gate.guards == 0

    run(body)


def test_names_of_orbit_are_not_waited_for() -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(UsageError):
            await rig.wait("_handlers", 1.0)

    run(body)


@pytest.mark.parametrize(
    "value", [None, [], {}, {"name": 1, "timeout_s": 1}, {"name": "x", "timeout_s": -1}]
)
def test_a_wait_that_makes_no_sense_is_answered(value: object) -> None:
    async def body(rig: Rig) -> None:
        request = FakeRequest("_await_handler", encode(value))
        rig.peer.on_request(request)
        await asyncio.sleep(1)
        assert request.outcome[0] == "fail"

    run(body)
