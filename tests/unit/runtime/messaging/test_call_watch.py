"""A silent peer that owes an answer is asked, and given up when it does not reply."""

from __future__ import annotations

import asyncio

from orbit.errors import DeadlineExceeded, PeerLost
from orbit.runtime.messaging.call_watch import CallWatch
from orbit.testing.clock import run_virtual
from orbit.testing.leftovers import nothing_left
from tests.unit.runtime.messaging.callers import FakeCaller, FakeSession


def test_only_the_silent_peer_that_owes_an_answer_is_given_up() -> None:
    async def main() -> None:
        async with nothing_left():
            caller = FakeCaller()
            watch = CallWatch(caller, 10.0, 2.0)
            silent, _ = caller.add_route(2)
            talking, talking_link = caller.add_route(3)
            slow, _ = caller.add_route(4)  # its handler takes long, its event loop answers
            idle, _ = caller.add_route(5)
            silent.calls = talking.calls = slow.calls = 1
            session = silent.session
            assert isinstance(session, FakeSession)
            session.answer = DeadlineExceeded("a ping", 2.0)
            watch.call_bound()
            for _ in range(6):
                await asyncio.sleep(4)
                talking_link.frames_received += 1
            (error,) = session.aborted
            assert isinstance(error, PeerLost)
            assert "no answer to a ping within 2 s" in str(error)
            for route in (talking, slow, idle):
                assert isinstance(route.session, FakeSession)
                assert not route.session.aborted
            watch.close()

    run_virtual(main())


def test_without_calls_there_is_no_timer() -> None:
    async def main() -> None:
        async with nothing_left():
            caller = FakeCaller()
            watch = CallWatch(caller, 10.0, 2.0)
            route, _ = caller.add_route(2)
            route.calls = 1
            watch.call_bound()
            watch.call_bound()
            await asyncio.sleep(5)
            route.calls = 0
            await asyncio.sleep(6)
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(1000)  # nothing wakes in between
            assert asyncio.get_running_loop().time() == before + 1000
            assert isinstance(route.session, FakeSession)
            assert not route.session.aborted

    run_virtual(main())
