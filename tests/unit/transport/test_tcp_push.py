"""TcpPath's pushes beyond the contract: repetition, refusals that keep a connection, endings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import PathFailed, PeerLost
from orbit.model import Direction, LeaseId, PathReason
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.transport.interface import Exposure, Span
from orbit.transport.tcp_bulk import ANSWER, MAGIC, REQUEST
from orbit.transport.tcp_path import TcpPathOptions
from tests.contract.tcp_pairs import TcpPathPair, tcp_path_pair

Run = Callable[[Coroutine[Any, Any, None]], None]
LEASE = LeaseId(1)
NBYTES = 100_000


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[TcpPathPair]:
    async with nothing_left(), tcp_path_pair(options=TcpPathOptions(**options)) as pair:
        yield pair


async def exposed(
    pair: TcpPathPair, lease: LeaseId = LEASE, nbytes: int = NBYTES
) -> tuple[bytearray, Exposure]:
    """Memory of the owner that may be written."""
    memory = bytearray(nbytes)
    span = Span(memoryview(memory))
    exposure = await pair.owner.expose(pair.owner_session, span, lease, direction=Direction.WRITE)
    return memory, exposure


async def push(pair: TcpPathPair, exposure: Exposure, payload: bytes) -> dict[str, int]:
    span = Span(memoryview(payload))
    report = await pair.consumer.push(pair.consumer_session, exposure, LEASE, span)
    assert set(report.phases) == {"connect", "write"}
    return dict(report.counts)


def test_connections_are_shared_with_pulls(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as pair:
            for number in range(1, 11):
                memory, exposure = await exposed(pair, LeaseId(number))
                counts = await push(pair, exposure, pattern(NBYTES, number))
                assert counts["dials"] == (number == 1)
                assert memory == pattern(NBYTES, number)
            assert pair.listener.statistics().bulk == 1

    run_async(body())


def test_nothing_to_push_opens_nothing(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as pair:
            _memory, exposure = await exposed(pair, nbytes=0)
            span = Span(memoryview(b""), rest=(Span(memoryview(b"")),))
            await pair.consumer.push(pair.consumer_session, exposure, LEASE, span)
            await pair.owner.retract(pair.owner_session, LEASE, transferred=True)
            assert pair.listener.statistics().accepted == 0

    run_async(body())


def test_a_refusal_costs_no_connection(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as pair:
            memory, exposure = await exposed(pair)
            for _ in range(5):
                with pytest.raises(PathFailed, match="not what the owner exposed"):
                    await push(pair, exposure, pattern(NBYTES - 1))
            assert memory == bytes(NBYTES)
            await push(pair, exposure, pattern(NBYTES))
            assert memory == pattern(NBYTES)
            assert pair.listener.statistics().bulk == 1

    run_async(body())


class FlakyOwner:
    """Stands in for the owner, by a script of `take`, `agree` (and hang up) and `hang up`."""

    def __init__(self, pair: TcpPathPair, script: list[str]) -> None:
        self.script = list(script)
        self.requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        pair.owner.serve_bulk = self._serve  # type: ignore[method-assign]

    def _serve(self, wire: Any, hello: Any) -> None:
        task = asyncio.ensure_future(self._talk(wire))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self, wire: Any) -> None:
        while self.script:
            if not await self._read(wire, REQUEST.size):
                break
            self.requests += 1
            step = self.script.pop(0)
            if step == "hang up":
                break
            await wire.send_all(ANSWER.pack(MAGIC, 0, 1000))
            if step == "agree":
                break
            await self._read(wire, 1000)
            await wire.send_all(ANSWER.pack(MAGIC, 0, 1000))
        wire.close()

    async def _read(self, wire: Any, nbytes: int) -> bool:
        left = memoryview(bytearray(nbytes))
        while left:
            await wire.wait_readable()
            count = wire.recv_into(left)
            if not count:
                return False
            left = left[count:]
        return True

    async def ended(self) -> None:
        await until(lambda: not self._tasks)


@pytest.mark.parametrize(
    ("script", "requests", "good"),
    [
        (["take", "hang up", "take"], 3, True),  # asked again on a fresh connection
        (["take", "hang up", "hang up", "take"], 3, False),  # but only once
        (["hang up", "take"], 1, False),  # and not when it was fresh already
        (["take", "agree", "take"], 2, False),  # nor when bytes may have been sent
    ],
)
def test_a_push_is_repeated_before_its_first_byte_only(
    run_async: Run, script: list[str], requests: int, good: bool
) -> None:
    async def body() -> None:
        async with opened() as pair:
            await exposed(pair)
            owner = FlakyOwner(pair, script)
            if script[0] == "take":
                await push(pair, Exposure(1), pattern(1000))
            if good:
                await push(pair, Exposure(2), pattern(1000))
            else:
                with pytest.raises(PathFailed) as caught:
                    await push(pair, Exposure(2), pattern(1000))
                assert caught.value.reason == PathReason.GET_FAILED
            assert owner.requests == requests
            owner.script.clear()
            await pair.consumer.close_session(pair.consumer_session)
            await owner.ended()

    run_async(body())


@pytest.mark.parametrize("transferred", [True, False])
def test_retract_ends_a_push_and_says_what_came_of_it(run_async: Run, transferred: bool) -> None:
    async def body() -> None:
        async with opened() as pair:
            nbytes = 32 << 20
            memory, exposure = await exposed(pair, nbytes=nbytes)
            moving = asyncio.Event()
            span = Span(memoryview(pattern(nbytes)))
            task = asyncio.ensure_future(
                pair.consumer.push(
                    pair.consumer_session, exposure, LEASE, span, lambda sent: moving.set()
                )
            )
            await moving.wait()
            retracting = pair.owner.retract(pair.owner_session, LEASE, transferred=transferred)
            if transferred:
                with pytest.raises(PathFailed, match="not every byte"):
                    await retracting
            else:
                await retracting
            memory[:] = bytes(nbytes)
            await asyncio.wait([task])
            assert isinstance(task.exception(), PathFailed)
            assert memory == bytes(nbytes)

    run_async(body())


def test_the_epoch_ends_during_a_push(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as pair:
            nbytes = 32 << 20
            _memory, exposure = await exposed(pair, nbytes=nbytes)
            task = asyncio.ensure_future(push(pair, exposure, bytes(nbytes)))
            await until(lambda: pair.consumer._pools and pair.listener.statistics().bulk)
            pair.consumer_session.close()
            await pair.consumer.close_session(pair.consumer_session)
            await asyncio.wait([task])
            assert isinstance(task.exception(), PeerLost)

    run_async(body())
