"""TcpPath beyond the contract: admission, pooling, repetition, idle deaths."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import PathFailed, PeerLost, PeerRefused
from orbit.model import LeaseId, PathReason
from orbit.protocol.security import BulkTickets
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.testing.waiting import until
from orbit.transport.interface import Exposure, Span, Target
from orbit.transport.tcp_bulk import ANSWER, MAGIC, REQUEST
from orbit.transport.tcp_dial import DialOptions, dial_bulk
from orbit.transport.tcp_path import TcpPath, TcpPathOptions
from tests.contract.tcp_pairs import TcpPathPair, tcp_path_pair

Run = Callable[[Coroutine[Any, Any, None]], None]
LEASE = LeaseId(1)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[TcpPathPair, Exposure]]:
    """A pair that exposes 100,000 bytes."""
    async with nothing_left(), tcp_path_pair(options=TcpPathOptions(**options)) as pair:
        span = Span(memoryview(pattern(100_000)))
        yield pair, await pair.owner.expose(pair.owner_session, span, LEASE)


async def pull(pair: TcpPathPair, exposure: Exposure, nbytes: int = 100_000) -> dict[str, int]:
    """A good pull, checked; its counts."""
    target = bytearray(nbytes)
    report = await pair.consumer.pull(
        pair.consumer_session, exposure, LEASE, Target(memoryview(target))
    )
    assert target == pattern(nbytes)
    return dict(report.counts)


def connections(pair: TcpPathPair) -> list[Any]:
    owner = pair.owner._owners.get(pair.owner_session.attempt)
    return [] if owner is None else list(owner.connections)


def pool(pair: TcpPathPair) -> Any:
    return pair.consumer._pools[pair.consumer_session.attempt]


def test_connections_are_reused(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            counts = [await pull(pair, exposure) for _ in range(20)]
            assert [c["dials"] for c in counts] == [1, *[0] * 19]
            assert pair.listener.statistics().bulk == 1

    run_async(body())


def test_nothing_to_pull_opens_nothing(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            await pull(pair, exposure, 0)
            assert pair.listener.statistics().accepted == 0

    run_async(body())


def test_at_most_two_connections(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            await asyncio.gather(*(pull(pair, exposure) for _ in range(50)))
            assert pair.listener.statistics().bulk == 2
            assert pool(pair).connections == 2

    run_async(body())


def test_idle_connections_are_trimmed(run_async: Run) -> None:
    async def body() -> None:
        async with opened(idle_s=0.02) as (pair, exposure):
            await asyncio.gather(*(pull(pair, exposure) for _ in range(4)))
            await until(lambda: pool(pair).connections == 0)
            await until(lambda: not connections(pair))
            assert (await pull(pair, exposure))["dials"] == 1

    run_async(body())


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("loop_ran", [True, False])
def test_a_connection_that_died_while_idle(run_async: Run, how: str, loop_ran: bool) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            for _ in range(20):
                await asyncio.gather(*(pull(pair, exposure) for _ in range(4)))
                for connection in connections(pair):
                    connection.wire.close() if how == "fin" else connection.wire.abort()
                    pair.owner._owners[pair.owner_session.attempt].connections.discard(connection)
                if loop_ran:
                    await until(lambda: pool(pair).connections == 0)
                await pull(pair, exposure)

    run_async(body())


def holding(held: list[Any]) -> Callable[[Any, Any], None]:
    """Instead of serving: takes connections and stays silent on them."""
    return lambda wire, hello: held.append(wire)


class FlakyOwner:
    """Stands in for the owner: serves each request by a script of `answer` or `hang up`."""

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
        request = memoryview(bytearray(REQUEST.size))
        while self.script:
            await wire.wait_readable()
            if not wire.recv_into(request):
                break
            self.requests += 1
            match self.script.pop(0):
                case "answer":
                    await wire.send_all(ANSWER.pack(MAGIC, 0, 1000) + pattern(1000))
                case "begin":
                    await wire.send_all(ANSWER.pack(MAGIC, 0, 1000)[:7])
                    break
                case _:
                    break
        wire.close()

    async def ended(self) -> None:
        await until(lambda: not self._tasks)


@pytest.mark.parametrize(
    ("script", "requests", "good"),
    [
        (["answer", "hang up", "answer"], 3, True),  # asked again on a fresh connection
        (["answer", "hang up", "hang up", "answer"], 3, False),  # but only once
        (["hang up", "answer"], 1, False),  # and not when it was fresh already
        (["answer", "begin", "answer"], 2, False),  # nor when an answer had begun
    ],
)
def test_a_request_is_repeated_once(
    run_async: Run, script: list[str], requests: int, good: bool
) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            owner = FlakyOwner(pair, script)
            if script[0] == "answer":
                await pull(pair, exposure, 1000)
            if good:
                await pull(pair, exposure, 1000)
            else:
                with pytest.raises(PathFailed) as caught:
                    await pull(pair, exposure, 1000)
                assert caught.value.reason == PathReason.GET_FAILED
            assert owner.requests == requests
            owner.script.clear()
            await pair.consumer.close_session(pair.consumer_session)
            await owner.ended()

    run_async(body())


def test_waiting_for_a_connection_can_be_cancelled(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            held: list[Any] = []
            pair.owner.serve_bulk = holding(held)  # type: ignore[method-assign]
            busy = [asyncio.ensure_future(pull(pair, exposure)) for _ in range(2)]
            await until(lambda: len(held) == 2)
            waiting = asyncio.ensure_future(pull(pair, exposure))
            await asyncio.sleep(0.005)
            waiting.cancel()
            await asyncio.wait([waiting])
            for task in busy:
                task.cancel()
            await asyncio.wait(busy)
            assert pool(pair).connections == 0
            for wire in held:
                wire.close()

    run_async(body())


def test_closing_the_session_ends_those_who_wait(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            held: list[Any] = []
            pair.owner.serve_bulk = holding(held)  # type: ignore[method-assign]
            tasks = [asyncio.ensure_future(pull(pair, exposure)) for _ in range(4)]
            await until(lambda: len(held) == 2)
            pair.consumer_session.close()
            await pair.consumer.close_session(pair.consumer_session)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in errors] == [PeerLost] * 4
            for wire in held:
                wire.close()

    run_async(body())


def test_an_owner_that_cannot_be_reached(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, exposure):
            with socket.create_server(("127.0.0.1", 0)) as gone:
                pair.consumer_session.peer_endpoints = (gone.getsockname(),)
            with pytest.raises(PathFailed) as caught:
                await pull(pair, exposure)
            assert caught.value.reason == PathReason.CONNECT_FAILED
            assert "refused" in caught.value.detail

    run_async(body())


def test_only_the_epoch_is_admitted_and_a_token_once(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (pair, _exposure):
            endpoint, options = pair.listener.endpoints[0], DialOptions()
            session = pair.consumer_session
            good = BulkTickets(session.key, session.attempt).next_hello()
            wire = await dial_bulk([endpoint], good, options)
            stranger = StubSession(9, dialer=True)
            for bad in (
                good,  # replayed
                BulkTickets(bytes(32), session.attempt).next_hello(),
                BulkTickets(stranger.key, stranger.attempt).next_hello(),
            ):
                with pytest.raises(PeerRefused) as caught:
                    await dial_bulk([endpoint], bad, options)
                assert caught.value.reason == "auth"
            wire.close()
            await until(lambda: not connections(pair))

    run_async(body())


def test_accepted_connections_are_capped(run_async: Run) -> None:
    async def body() -> None:
        async with opened(accepted_max=3) as (pair, _exposure):
            session = pair.consumer_session
            tickets = BulkTickets(session.key, session.attempt)
            wires = []
            for _ in range(3):
                endpoint = pair.listener.endpoints[0]
                wires.append(await dial_bulk([endpoint], tickets.next_hello(), DialOptions()))
            with pytest.raises(PeerRefused) as caught:
                await dial_bulk(pair.listener.endpoints, tickets.next_hello(), DialOptions())
            assert caught.value.reason == "busy"
            for wire in wires:
                wire.close()
            await until(lambda: not connections(pair))

    run_async(body())


def test_another_epoch_cannot_name_the_transfer(run_async: Run) -> None:
    """A transfer id is a number that anyone can guess; what counts is whose connection asks."""

    async def body() -> None:
        async with opened() as (pair, exposure):
            owner_end = StubSession(2, dialer=False)
            other = StubSession(2, dialer=True, endpoint=pair.listener.endpoints[0])
            span = Span(memoryview(b"theirs"))
            await pair.owner.expose(owner_end, span, LEASE)
            second = TcpPath()
            target = bytearray(100_000)
            with pytest.raises(PathFailed):
                await second.pull(other, exposure, LEASE, Target(memoryview(target)))
            assert target == bytes(100_000)
            await second.close()
            await pair.owner.close_session(owner_end)

    run_async(body())


def test_a_stuck_peer_does_not_hold_up_another(run_async: Run) -> None:
    async def body() -> None:
        async with opened() as (stuck, stuck_exposure), opened() as (pair, exposure):
            held: list[Any] = []
            stuck.owner.serve_bulk = holding(held)  # type: ignore[method-assign]
            blocked = asyncio.ensure_future(pull(stuck, stuck_exposure))
            for _ in range(50):
                await pull(pair, exposure)
            assert not blocked.done()
            blocked.cancel()
            await asyncio.wait([blocked])
            held[0].close()

    run_async(body())
