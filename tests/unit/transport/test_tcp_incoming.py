"""A dialer between its proof and its welcome: parked, admitted, refused, gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import ClosedError, PeerRefused, PeerUnreachable
from orbit.testing.leftovers import nothing_left
from orbit.testing.sessions import make_hello
from orbit.testing.waiting import until
from orbit.transport.tcp_dial import DialOptions, dial
from orbit.transport.tcp_handshake import EstablishedLink
from orbit.transport.tcp_incoming import IncomingLink
from orbit.transport.tcp_listener import ListenOptions, TcpListener
from tests.conftest import LOOP_KINDS

Run = Callable[[Coroutine[Any, Any, None]], None]
HELLO = make_hello(1, 0, b"a" * 16, nonce=b"m" * 16)

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)


class Gate:
    """Lets everybody wait; `gone` counts who left."""

    def __init__(self) -> None:
        self.incoming: list[IncomingLink] = []
        self.gone = 0

    def __call__(self, incoming: IncomingLink) -> None:
        self.incoming.append(incoming)
        incoming.watch(self.left)

    def left(self) -> None:
        self.gone += 1


@contextlib.asynccontextmanager
async def parked(
    timeout_s: float = 5.0,
) -> AsyncIterator[tuple[TcpListener, Gate, asyncio.Task[EstablishedLink]]]:
    """A dialer that has proven itself and waits."""
    gate = Gate()
    options = ListenOptions(handshake_timeout_s=timeout_s)
    listener = TcpListener(lambda: make_hello(2, 0, bytes(16)), None, gate, options=options)
    async with nothing_left():
        await listener.open("127.0.0.1", 0)
        dialing = asyncio.ensure_future(
            dial(listener.endpoints, HELLO, None, options=DialOptions(handshake_timeout_s=5.0))
        )
        await until(lambda: gate.incoming)
        yield listener, gate, dialing
        await listener.close()


def test_admitted_after_a_while_both_ends_talk(run_async: Run) -> None:
    async def main() -> None:
        async with parked() as (listener, gate, dialing):
            await asyncio.sleep(0.01)
            assert not dialing.done()
            assert listener.statistics().half_open == 1
            theirs = gate.incoming[0].admit()
            mine = await dialing
            got: list[bytes] = []
            theirs.start(lambda frame: got.append(bytes(frame)), lambda cause: None)
            mine.link.send_nowait(b"\x10hello")
            await until(lambda: got)
            assert listener.statistics().control == 1
            assert gate.gone == 0
            with pytest.raises(ClosedError):
                gate.incoming[0].admit()
            gate.incoming[0].refuse("late")  # nothing
            mine.link.abort()
            await until(lambda: listener.statistics().half_open == 0)
            theirs.abort()

    run_async(main())


def test_refused_after_a_while_the_dialer_is_told(run_async: Run) -> None:
    async def main() -> None:
        async with parked() as (listener, gate, dialing):
            gate.incoming[0].refuse("superseded", "there is a session already")
            with pytest.raises(PeerRefused) as caught:
                await dialing
            assert caught.value.reason == "superseded"
            await until(lambda: listener.statistics().refused)
            assert listener.statistics().refused == {"superseded": 1}
            assert gate.gone == 0

    run_async(main())


def test_one_that_leaves_is_noticed(run_async: Run) -> None:
    async def main() -> None:
        async with parked() as (listener, gate, dialing):
            dialing.cancel()
            await until(lambda: gate.gone)
            with pytest.raises(ClosedError):
                gate.incoming[0].admit()
            late: list[int] = []
            gate.incoming[0].watch(lambda: late.append(1))
            await until(lambda: late)
            await until(lambda: listener.statistics().half_open == 0)
            assert listener.statistics().refused == {"peer_unreachable": 1}

    run_async(main())


def test_the_wait_has_the_handshakes_deadline(run_async: Run) -> None:
    async def main() -> None:
        async with parked(timeout_s=0.05) as (listener, gate, dialing):
            with pytest.raises(PeerUnreachable) as caught:
                await dialing
            assert caught.value.kind == "silent"
            assert gate.gone == 1
            assert listener.statistics().refused == {"silent": 1}

    run_async(main())


def test_admitted_in_the_moment_of_the_deadline_it_stays_admitted(run_async: Run) -> None:
    async def main() -> None:
        async with parked() as (listener, gate, dialing):
            theirs = gate.incoming[0].admit()
            for greeting in tuple(listener._greetings):
                greeting.cancel()  # as the deadline does, before the greeting has heard of it
            mine = await dialing
            got: list[bytes] = []
            theirs.start(lambda frame: got.append(bytes(frame)), lambda cause: None)
            mine.link.send_nowait(b"\x10hello")
            await until(lambda: got)
            mine.link.abort()
            theirs.abort()

    run_async(main())


def test_a_listener_that_closes_ends_the_wait(run_async: Run) -> None:
    async def main() -> None:
        async with parked() as (listener, gate, dialing):
            await listener.close()
            assert gate.gone == 1
            with pytest.raises(PeerUnreachable):
                await dialing

    run_async(main())
