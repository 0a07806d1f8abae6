"""Two engines of one process over real sockets: one suite, for the asynchronous classes on asyncio
and on uvloop, and for the synchronous twins.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import orbit
import orbit.sync
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS

Run = Callable[[Any], Any]
TCP = orbit.NodeConfig(transport="tcp")
CONFIG = orbit.EngineConfig(node=TCP)
SIZE = 3_000_017
KINDS = [*LOOP_KINDS, "sync"]


class Ways:
    """How a kind of engine is called."""

    async def call(self, function: Callable[[], Any]) -> Any:
        found = function()
        return await found if inspect.isawaitable(found) else found

    async def results(self, batch: Any) -> Any:
        return await batch

    def engine(self, config: orbit.EngineConfig = CONFIG, **options: Any) -> Any:
        return orbit.TransferEngine(config, **options)

    @contextlib.asynccontextmanager
    async def opened(self, engine: Any) -> AsyncIterator[Any]:
        async with engine:
            yield engine


class SyncWays(Ways):
    """Each call in a thread of its own, since it blocks."""

    async def call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    async def results(self, batch: Any) -> Any:
        return await asyncio.to_thread(batch.result)

    def engine(self, config: orbit.EngineConfig = CONFIG, **options: Any) -> Any:
        return orbit.sync.TransferEngine(config, **options)

    @contextlib.asynccontextmanager
    async def opened(self, engine: Any) -> AsyncIterator[Any]:
        await asyncio.to_thread(engine.__enter__)
        try:
            yield engine
        finally:
            await asyncio.to_thread(engine.__exit__, None, None, None)


@dataclass
class Two:
    """The first is the source."""

    ways: Ways
    source: Any
    requester: Any
    there: Any
    here: Any
    far: bytearray
    near: bytearray

    async def moved(self, op: str, low: int, high: int, **options: Any) -> Any:
        request = orbit.TransferRequest(
            op, self.here[low:high], self.there.remote()[low:high], "tcp", **options
        )
        return await self.ways.results(self.requester.submit([request]))


@contextlib.asynccontextmanager
async def two_engines(kind: str) -> AsyncIterator[Two]:
    ways = SyncWays() if kind == "sync" else Ways()
    far, near = bytearray(pattern(SIZE, 1)), bytearray(pattern(SIZE, 2))
    async with (
        nothing_left(),
        ways.opened(ways.engine()) as source,
        ways.opened(ways.engine()) as requester,
    ):
        there = await ways.call(lambda: source.register(far, "readwrite"))
        (here,) = await ways.call(lambda: requester.register([near]))
        peer = await ways.call(lambda: requester.open_peer(bytes(source.address)))
        assert peer == orbit.EnginePeer(source.node.identity, "direct")
        yield Two(ways, source, requester, there, here, far, near)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loop_kind(kind: str) -> str:
    return "asyncio" if kind == "sync" else kind


def test_bytes_both_ways(run_async: Run, kind: str) -> None:
    async def main() -> None:
        async with two_engines(kind) as two:
            for low, high in ((0, SIZE), (5, 6), (1_000, 70_000)):
                (result,) = await two.moved("read", low, high, timeout=30.0)
                assert result.nbytes == high - low
                assert two.near[low:high] == two.far[low:high]
            two.near[:100] = bytes(100)
            await two.moved("write", 50, 150)
            assert two.far[50:100] == bytes(50)
            assert two.far[100:150] == pattern(SIZE, 1)[100:150]
            found = two.requester.statistics()
            assert found.outcomes["succeeded"] == 4
            assert found.bytes_moved == SIZE + 1 + 69_000 + 100

    run_async(main())


def test_names_travel_as_bytes_and_text(run_async: Run, kind: str) -> None:
    async def main() -> None:
        async with two_engines(kind) as two:
            remote = two.there.remote()
            assert orbit.RemoteRegion.from_bytes(bytes(remote)) == remote
            assert orbit.RemoteRegion.parse(f" {remote}\n") == remote
            for bad in ("", str(remote)[:-3], "orbit1:abc"):
                with pytest.raises(orbit.UsageError):
                    orbit.RemoteRegion.parse(bad)
            with pytest.raises(orbit.UsageError):
                two.here.remote()

    run_async(main())


def test_many_ranges(run_async: Run, kind: str) -> None:
    async def main() -> None:
        async with two_engines(kind) as two:
            count = 4_096
            local = np.arange(count) * 700
            ranges = orbit.RangeRequest(
                "read",
                two.here,
                two.there.remote(),
                local,
                local[::-1].copy(),
                np.full(count, 300),
                "tcp",
            )
            before, batch = bytearray(two.near), two.requester.submit([ranges])
            (result,) = await two.ways.results(batch)
            assert result.nbytes == count * 300
            for number in range(count):
                other = (count - 1 - number) * 700
                before[number * 700 : number * 700 + 300] = two.far[other : other + 300]
            assert two.near == before
            assert "check ranges" in batch.explain()

    run_async(main())


def test_access_by_the_cpu(run_async: Run, kind: str) -> None:
    async def main() -> None:
        async with two_engines(kind) as two:

            def write() -> None:
                with two.here.cpu(10, 5, write=True) as view:
                    view[:] = b"abcde"
                with pytest.raises(orbit.OutOfRange), two.here.cpu(0, SIZE + 1):
                    pass

            await two.ways.call(write)
            assert two.near[9:16] == pattern(SIZE, 2)[9:10] + b"abcde" + pattern(SIZE, 2)[15:16]

            held = two.there.cpu(0, 100, write=True)
            view = await two.ways.call(held.__enter__)
            assert view.nbytes == 100
            with pytest.raises(orbit.RangeBusy):
                await two.moved("read", 0, 10)
            await two.moved("read", 100, 110)
            await two.ways.call(lambda: held.__exit__(None, None, None))
            await two.moved("read", 0, 10)

    run_async(main())


def test_unregistered_memory_is_the_callers_again(run_async: Run, kind: str) -> None:
    async def main() -> None:
        async with two_engines(kind) as two:
            remote = two.there.remote()
            with pytest.raises(BufferError):
                two.far.append(0)
            await two.ways.call(two.there.unregister)
            two.far.append(0)
            request = orbit.TransferRequest("read", two.here, remote, "tcp")
            batch = two.requester.submit([request])
            with pytest.raises(orbit.UnknownHandle):
                await two.ways.results(batch)
            assert await two.ways.call(lambda: batch.wait(1.0)) is True

    run_async(main())


def test_rdma_is_refused_before_anything_moves(run_async: Run, kind: str) -> None:
    async def main() -> None:
        async with two_engines(kind) as two:
            request = orbit.TransferRequest("read", two.here, two.there.remote(), "rdma")
            with pytest.raises(orbit.PathUnavailable):
                await two.ways.results(two.requester.submit([request]))
            assert two.near == pattern(SIZE, 2)

    run_async(main())


def test_a_given_node_stays_open(run_async: Run, kind: str) -> None:
    async def main() -> None:
        ways = SyncWays() if kind == "sync" else Ways()
        node = orbit.sync.Node(TCP) if kind == "sync" else orbit.Node(TCP)
        await ways.call(node.open)
        async with ways.opened(ways.engine(node=node)) as engine:
            assert engine.address == node.address
            assert engine.node is node
            with pytest.raises(orbit.UsageError):
                await ways.call(ways.engine(node=node).open)
        assert node.statistics().slots.slots == 0
        async with ways.opened(ways.engine(node=node)) as again:  # one after the other
            with pytest.raises(orbit.ConfigError):
                again.submit([orbit.TransferRequest("read", None, None, "no such")])
        await ways.call(node.close)
        with pytest.raises(orbit.ClosedError):
            again.submit([])

    run_async(main())


def test_a_peer_without_an_engine(run_async: Run, kind: str) -> None:
    async def main() -> None:
        ways = SyncWays() if kind == "sync" else Ways()
        async with orbit.Node(TCP) as node, ways.opened(ways.engine()) as engine:
            address = node.address
            with pytest.raises(orbit.PeerRefused, match="no_engine"):
                await ways.call(lambda: engine.open_peer(address))

    run_async(main())


def test_leaving_gives_up_what_still_runs(run_async: Run) -> None:
    async def main() -> None:
        async with two_engines("asyncio") as two:
            request = orbit.TransferRequest("read", two.here, two.there.remote(), "tcp")
            engine = two.requester
            batch = engine.submit([request])
            await until(lambda: engine.statistics().budgets["max_direct_bytes"][0] or batch.done)
            await engine.__aexit__(None, None, None)
            assert batch.done
            (result,) = batch.results()
            assert result.locally_drained

    run_async(main())
