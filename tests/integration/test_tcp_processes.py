"""TcpPath between two real processes on loopback: death, stopping, and sizes that need 64 bits."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from orbit.errors import DeadlineExceeded, PathFailed
from orbit.model import LeaseId
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
                writers = pair.owner._owners[pair.owner_session.attempt].writers
                assert len(writers) == 1
                consumer.kill()
                await until(lambda: not writers)
            await pair.owner.retract(pair.owner_session, LEASE, transferred=False)
            span.view.release()

    run_async(body())


def test_a_forked_child_does_not_keep_a_connection_open(run_async: Run) -> None:
    async def body() -> None:
        async with tcp_path_pair() as pair:
            span = Span(memoryview(pattern(1000)))
            exposure = await pair.owner.expose(pair.owner_session, span, LEASE)
            target = Target(memoryview(bytearray(1000)))
            await pair.consumer.pull(pair.consumer_session, exposure, LEASE, target)
            writers = pair.owner._owners[pair.owner_session.attempt].writers
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            try:
                await pair.consumer.close()
                await until(lambda: not writers)
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # noqa: ASYNC222  (it was just killed)

    run_async(body())


def test_more_than_two_gib() -> None:
    """Beyond what one call to the kernel moves, and beyond 31 bits; markers at the edges."""
    nbytes = (1 << 31) + (64 << 20) + 1
    marks = {
        at: bytes([at % 250 + 1]) for at in (0, 0x7FFFEFFF, 0x7FFFF000, (1 << 31) - 1, 1 << 31)
    }
    marks[nbytes - 1] = b"\xfe"

    async def body() -> None:
        with mmap.mmap(-1, nbytes) as source, mmap.mmap(-1, nbytes) as memory:
            for pages in (source, memory):
                pages.madvise(mmap.MADV_HUGEPAGE)  # half a million page faults less
            for at, mark in marks.items():
                source[at : at + 1] = mark
            async with nothing_left(), tcp_path_pair() as pair:
                span = Span(memoryview(source).toreadonly())
                target = Target(memoryview(memory))
                exposure = await pair.owner.expose(pair.owner_session, span, LEASE)
                await pair.consumer.pull(pair.consumer_session, exposure, LEASE, target)
                await pair.owner.retract(pair.owner_session, LEASE, transferred=True)
                span.view.release()
                target.view.release()
            assert {at: memory[at : at + 1] for at in marks} == marks

    asyncio.run(body())
