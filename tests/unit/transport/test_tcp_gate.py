"""Exposed memory is accessed within single callbacks of the loop, and never after `retract`.

The proof here is munmap: a mapping that is gone cannot be read by accident, and cannot go while an
operation holds it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import PathFailed
from orbit.model import Direction, LeaseId
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.transport.interface import Exposure, Span, Target
from tests.contract.tcp_pairs import TcpPathPair, tcp_path_pair

Run = Callable[[Coroutine[Any, Any, None]], None]
LEASE, OTHER = LeaseId(1), LeaseId(2)
NBYTES = 32 << 20


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def started(
    pair: TcpPathPair, exposure: Exposure, direction: Direction
) -> tuple[asyncio.Task[Any], bytearray]:
    """A transfer that is under way, and the consumer's memory."""
    memory, moving = bytearray(NBYTES), asyncio.Event()
    session, view = pair.consumer_session, memoryview(memory)

    def on_progress(moved: int) -> None:
        moving.set()

    if direction is Direction.READ:
        move = pair.consumer.pull(session, exposure, LEASE, Target(view), on_progress)
    else:
        move = pair.consumer.push(session, exposure, LEASE, Span(view), on_progress)
    task = asyncio.ensure_future(move)
    await moving.wait()
    assert not task.done()
    return task, memory


async def refused(pair: TcpPathPair, exposure: Exposure, direction: Direction) -> str:
    """What a transfer that comes too late is told."""
    view, session = memoryview(bytearray(NBYTES)), pair.consumer_session
    if direction is Direction.READ:
        move = pair.consumer.pull(session, exposure, LEASE, Target(view))
    else:
        move = pair.consumer.push(session, exposure, LEASE, Span(view))
    with pytest.raises(PathFailed) as caught:
        await move
    return caught.value.detail


@pytest.mark.parametrize("direction", Direction)
def test_a_region_goes_when_its_transfer_is_retracted(run_async: Run, direction: Direction) -> None:
    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            memory = mmap.mmap(-1, NBYTES)
            view = memoryview(memory)
            exposure = await pair.owner.expose(
                pair.owner_session, Span(view), LEASE, direction=direction
            )
            task, _ = await started(pair, exposure, direction)
            view.release()
            with pytest.raises(BufferError):
                memory.close()  # the transfer under way holds it
            await pair.owner.retract(pair.owner_session, LEASE, transferred=False)
            memory.close()  # from here on any access would end this process
            await asyncio.wait([task])
            assert isinstance(task.exception(), PathFailed)
            assert "no such transfer" in await refused(pair, exposure, direction)

    run_async(body())


@pytest.mark.parametrize("direction", Direction)
def test_retract_ends_what_is_its_own_only(run_async: Run, direction: Direction) -> None:
    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            source = memoryview(pattern(NBYTES))
            first = await pair.owner.expose(pair.owner_session, Span(source), LEASE)
            second = await pair.owner.expose(
                pair.owner_session, Span(memoryview(bytearray(NBYTES))), OTHER, direction=direction
            )
            task, memory = await started(pair, first, Direction.READ)
            other, _ = await started(pair, second, direction)
            await pair.owner.retract(pair.owner_session, OTHER, transferred=False)
            await asyncio.wait([task, other])
            assert isinstance(other.exception(), PathFailed)
            assert task.exception() is None
            assert memory == source

    run_async(body())


def test_between_two_callbacks_nothing_is_read(run_async: Run) -> None:
    """What the kernel holds by now was copied; everything behind it is what is there later."""

    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            source = bytearray(NBYTES)
            exposure = await pair.owner.expose(pair.owner_session, Span(memoryview(source)), LEASE)
            task, memory = await started(pair, exposure, Direction.READ)
            source[:] = b"\x01" * NBYTES  # one step of this loop: no call reads in between
            await task
            border = memory.index(1)
            assert memory == bytes(border) + b"\x01" * (NBYTES - border)
            await pair.owner.retract(pair.owner_session, LEASE, transferred=True)

    run_async(body())


@pytest.mark.parametrize("kept_bytes", [0, 4096, 1 << 20])
def test_a_file_truncated_under_its_owner(run_async: Run, kept_bytes: int) -> None:
    """The transfer ends in a typed error, and the owner serves the next one."""

    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            with tempfile.TemporaryFile() as file:
                file.write(pattern(4 << 20))
                file.flush()
                with mmap.mmap(file.fileno(), 4 << 20, prot=mmap.PROT_READ) as memory:
                    os.ftruncate(file.fileno(), kept_bytes)
                    view = memoryview(memory)
                    exposure = await pair.owner.expose(pair.owner_session, Span(view), LEASE)
                    target = bytearray(4 << 20)
                    with pytest.raises(PathFailed):
                        await pair.consumer.pull(
                            pair.consumer_session, exposure, LEASE, Target(memoryview(target))
                        )
                    assert target[kept_bytes:] == bytes(len(target) - kept_bytes)
                    await pair.owner.retract(pair.owner_session, LEASE, transferred=False)
                    view.release()
            good = Span(memoryview(pattern(100_000)))
            exposure = await pair.owner.expose(pair.owner_session, good, OTHER)
            small = bytearray(100_000)
            await pair.consumer.pull(
                pair.consumer_session, exposure, OTHER, Target(memoryview(small))
            )
            assert small == pattern(100_000)

    run_async(body())


def test_a_file_truncated_under_a_transfer(run_async: Run) -> None:
    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            with tempfile.TemporaryFile() as file:
                file.truncate(NBYTES)
                with mmap.mmap(file.fileno(), NBYTES, prot=mmap.PROT_READ) as memory:
                    view = memoryview(memory)
                    exposure = await pair.owner.expose(pair.owner_session, Span(view), LEASE)
                    task, _ = await started(pair, exposure, Direction.READ)
                    os.ftruncate(file.fileno(), 0)
                    await asyncio.wait([task])
                    assert isinstance(task.exception(), PathFailed)
                    owner = pair.owner._owners[pair.owner_session.attempt]
                    await until(lambda: not owner.connections)
                    await pair.owner.retract(pair.owner_session, LEASE, transferred=False)
                    view.release()

    run_async(body())


def test_a_source_truncated_under_a_push(run_async: Run) -> None:
    """The consumer's own memory: its push fails, the owner is told nothing arrived whole."""

    async def body() -> None:
        async with nothing_left(), tcp_path_pair() as pair:
            memory = bytearray(4 << 20)
            exposure = await pair.owner.expose(
                pair.owner_session, Span(memoryview(memory)), LEASE, direction=Direction.WRITE
            )
            with tempfile.TemporaryFile() as file:
                file.truncate(4 << 20)
                with mmap.mmap(file.fileno(), 4 << 20, prot=mmap.PROT_READ) as source:
                    os.ftruncate(file.fileno(), 4096)
                    view = memoryview(source)
                    with pytest.raises(PathFailed):
                        await pair.consumer.push(pair.consumer_session, exposure, LEASE, Span(view))
                    view.release()
            with pytest.raises(PathFailed):
                await pair.owner.retract(pair.owner_session, LEASE, transferred=True)

    run_async(body())
