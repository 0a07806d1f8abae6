"""TcpPath between two real processes on loopback: death and stopping, of pulls and of pushes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from orbit.errors import DeadlineExceeded, PathFailed
from orbit.model import Direction, LeaseId
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.testing.waiting import until
from orbit.transport.interface import Exposure, Span, Target
from orbit.transport.tcp_path import TcpPath, TcpPathOptions
from tests.contract.tcp_pairs import tcp_path_pair

Run = Callable[[Coroutine[Any, Any, None]], None]
LEASE = LeaseId(1)
BIG = 64 << 20


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def end(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integration.tcp_ends", *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def consumer_of(
    owner: subprocess.Popen[str], **options: Any
) -> AsyncIterator[tuple[TcpPath, StubSession, Exposure]]:
    assert owner.stdout is not None
    port, transfer_id = map(int, (await asyncio.to_thread(owner.stdout.readline)).split())
    path = TcpPath(options=TcpPathOptions(**options))
    session = StubSession(1, dialer=True, endpoint=("127.0.0.1", port))
    async with nothing_left():
        yield path, session, Exposure(transfer_id)
        await path.close()


async def pull_until_moving(
    path: TcpPath, session: StubSession, exposure: Exposure, act: Callable[[], None]
) -> bytearray:
    """Pull BIG bytes; `act` runs once, at the first of them, and holds the loop a little."""
    target = bytearray(BIG)
    acted = False

    def on_progress(arrived: int) -> None:
        nonlocal acted
        if not acted:
            acted = True
            act()
            time.sleep(0.02)  # so that what was on its way has arrived or died

    await path.pull(session, exposure, LEASE, Target(memoryview(target)), on_progress)
    return target


def test_killed_owner(run_async: Run) -> None:
    async def body() -> None:
        with end("owner", BIG) as owner:
            async with consumer_of(owner, no_progress_s=30) as (path, session, exposure):
                with pytest.raises(PathFailed):
                    await pull_until_moving(path, session, exposure, owner.kill)

    run_async(body())


def test_stopped_owner(run_async: Run) -> None:
    """Stuck, not dead: the no-progress deadline ends the pull; its connection is not used again."""

    async def body() -> None:
        with end("owner", BIG) as owner:
            async with consumer_of(owner, no_progress_s=0.2) as (path, session, exposure):
                with pytest.raises(DeadlineExceeded):
                    await pull_until_moving(
                        path, session, exposure, lambda: owner.send_signal(signal.SIGSTOP)
                    )
                owner.send_signal(signal.SIGCONT)
                target = bytearray(BIG)
                report = await path.pull(session, exposure, LEASE, Target(memoryview(target)))
                assert report.counts["dials"] == 1
                assert target == pattern(BIG)

    run_async(body())


def test_a_short_stop_is_survived(run_async: Run) -> None:
    async def body() -> None:
        with end("owner", BIG) as owner:

            def stop_and_go() -> None:
                owner.send_signal(signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.1, owner.send_signal, signal.SIGCONT)

            async with consumer_of(owner, no_progress_s=30) as (path, session, exposure):
                assert await pull_until_moving(path, session, exposure, stop_and_go) == pattern(BIG)

    run_async(body())


def test_killed_consumer(run_async: Run) -> None:
    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            span = Span(memoryview(pattern(BIG)))
            exposure = await pair.owner.expose(pair.owner_session, span, LEASE)
            port = pair.listener.endpoints[0][1]
            with end("consumer", port, exposure.transfer_id, BIG) as consumer:
                assert consumer.stdout is not None
                assert await asyncio.to_thread(consumer.stdout.readline) == "moving\n"
                connections = pair.owner._owners[pair.owner_session.attempt].connections
                assert len(connections) == 1
                consumer.kill()
                await until(lambda: not connections)
            await pair.owner.retract(pair.owner_session, LEASE, transferred=False)
            span.view.release()

    run_async(body())


async def push_until_moving(
    path: TcpPath, session: StubSession, exposure: Exposure, act: Callable[[], None]
) -> None:
    """Push BIG bytes; `act` runs once, when the first of them are out, and holds the loop."""
    acted = False

    def on_progress(sent: int) -> None:
        nonlocal acted
        if not acted:
            acted = True
            act()
            time.sleep(0.02)

    span = Span(memoryview(bytes(BIG)))
    await path.push(session, exposure, LEASE, span, on_progress)


def test_killed_owner_of_a_push(run_async: Run) -> None:
    async def body() -> None:
        with end("taker", BIG) as owner:
            async with consumer_of(owner, no_progress_s=30) as (path, session, exposure):
                with pytest.raises(PathFailed):
                    await push_until_moving(path, session, exposure, owner.kill)

    run_async(body())


def test_stopped_owner_of_a_push(run_async: Run) -> None:
    """Its kernel takes what fits, and then nothing more: that is no progress."""

    async def body() -> None:
        with end("taker", BIG) as owner:
            async with consumer_of(owner, no_progress_s=0.2) as (path, session, exposure):
                with pytest.raises(DeadlineExceeded):
                    await push_until_moving(
                        path, session, exposure, lambda: owner.send_signal(signal.SIGSTOP)
                    )
                owner.send_signal(signal.SIGCONT)
                # A part of the first attempt is there: the lease is of no more use.
                with pytest.raises(PathFailed):
                    await push_until_moving(path, session, exposure, lambda: None)

    run_async(body())


def test_killed_writer(run_async: Run) -> None:
    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            memory = bytearray(BIG)
            span = Span(memoryview(memory))
            exposure = await pair.owner.expose(
                pair.owner_session, span, LEASE, direction=Direction.WRITE
            )
            port = pair.listener.endpoints[0][1]
            with end("pusher", port, exposure.transfer_id, BIG) as consumer:
                assert consumer.stdout is not None
                assert await asyncio.to_thread(consumer.stdout.readline) == "moving\n"
                connections = pair.owner._owners[pair.owner_session.attempt].connections
                assert len(connections) == 1
                consumer.kill()
                await until(lambda: not connections)
            with pytest.raises(PathFailed, match="not every byte"):
                await pair.owner.retract(pair.owner_session, LEASE, transferred=True)
            span.view.release()
            memory.clear()  # fails while anything holds it

    run_async(body())


def test_a_forked_child_does_not_keep_a_connection_open(run_async: Run) -> None:
    async def body() -> None:
        async with tcp_path_pair() as pair:
            span = Span(memoryview(pattern(1000)))
            exposure = await pair.owner.expose(pair.owner_session, span, LEASE)
            target = Target(memoryview(bytearray(1000)))
            await pair.consumer.pull(pair.consumer_session, exposure, LEASE, target)
            connections = pair.owner._owners[pair.owner_session.attempt].connections
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            try:
                await pair.consumer.close()
                await until(lambda: not connections)
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # noqa: ASYNC222  (it was just killed)

    run_async(body())
