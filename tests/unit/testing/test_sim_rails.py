"""SimRailedPath's rails, arrays and faults, beyond the contract of DataPath."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    PathFailed,
    PathUnavailable,
    Unquiesced,
)
from orbit.model import Direction, LeaseId, PathReason
from orbit.protocol.messages import SliceRun
from orbit.testing.clock import run_virtual
from orbit.testing.fabric import SimFabric
from orbit.testing.flights import Flights
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.testing.sim_memory import SimPinnedMemory
from orbit.testing.sim_railed_path import SimRailedPath
from orbit.transport.interface import Exposure, Span, Target
from orbit.transport.rails import RailedPath

LEASE = LeaseId(1)
NBYTES = 10_000
READ, WRITE = Direction.READ, Direction.WRITE


class Rig:
    """A source and a requester with two rails each; chunks of 1,000 bytes, 1 ms each."""

    def __init__(self, endpoints_max: int = 64) -> None:
        self.fabric = SimFabric()
        self.fabric.flights = Flights()
        self.source = SimRailedPath(self.fabric, endpoints_max=endpoints_max)
        self.requester = SimRailedPath(self.fabric, no_progress_s=3.0, endpoints_max=endpoints_max)
        self.requester.faults.chunk_bytes, self.requester.faults.bytes_per_s = 1000, 1e6
        self.near, self.far = StubSession(1, dialer=False), StubSession(1, dialer=True)
        self.near.peer_hello = replace(self.near.peer_hello, rails=self.requester.hints)
        self.far.peer_hello = replace(self.far.peer_hello, rails=self.source.hints)
        self.memory = memoryview(bytearray(pattern(NBYTES)))
        self.target = bytearray(NBYTES)

    async def connect(self, place: int, direction: Direction = READ, **options: object) -> int:
        route = self.requester.routes(self.far)[place]
        return await self.requester.connect_route(self.far, direction, route, **options)  # type: ignore[arg-type]

    async def expose(self, *arrays: int, direction: Direction = READ) -> Exposure:
        share = NBYTES // len(arrays)
        runs = [SliceRun(array, share) for array in arrays]
        return await self.source.expose_runs(self.near, Span(self.memory), LEASE, runs, direction)

    async def pull(self, exposure: Exposure) -> None:
        await self.requester.pull(self.far, exposure, LEASE, Target(memoryview(self.target)))

    async def push(self, exposure: Exposure) -> None:
        source = Span(memoryview(pattern(NBYTES, 7)))
        await self.requester.push(self.far, exposure, LEASE, source)

    async def retract(self, *, transferred: bool) -> None:
        await self.source.retract(self.near, LEASE, transferred=transferred)

    async def close(self) -> None:
        await self.requester.close()
        await self.source.close()
        endpoints = [p.rail_statistics().endpoints for p in (self.source, self.requester)]
        assert endpoints == [0, 0]
        assert self.fabric.exposed_count == 0
        assert self.fabric.flights is not None
        assert not self.fabric.flights.conflicts


def test_it_is_a_railed_path_with_a_route_for_each_rail() -> None:
    async def body() -> None:
        rig = Rig()
        assert isinstance(rig.requester, RailedPath)
        routes = rig.requester.routes(rig.far)
        assert [(r.rail.device, r.remote_device) for r in routes] == [
            ("sim_0", "sim_0"),
            ("sim_1", "sim_1"),
        ]
        assert all(route.same_name for route in routes)
        rig.requester.rail_down(0)
        assert [route.rail.device for route in rig.requester.routes(rig.far)] == ["sim_1"]
        assert [fact.active for fact in rig.requester.rails()] == [False, True]
        rig.requester.rail_up(0)
        assert rig.requester.rail_statistics().route_recoveries == 1

    run_virtual(body())


@pytest.mark.parametrize("direction", Direction)
def test_runs_go_over_both_rails(direction: Direction) -> None:
    async def body() -> None:
        rig = Rig()
        numbers = [await rig.connect(place, direction) for place in (0, 1)]
        assert numbers == [direction - 1, 2]
        exposure = await rig.expose(*numbers, direction=direction)
        assert len(exposure.grants) == 2
        started = asyncio.get_running_loop().time()
        await (rig.pull if direction is READ else rig.push)(exposure)
        assert asyncio.get_running_loop().time() - started == pytest.approx(0.005)  # both at once
        await rig.retract(transferred=True)
        if direction is READ:
            assert rig.target == rig.memory
        else:
            assert rig.memory == pattern(NBYTES, 7)
        await rig.close()

    run_virtual(body())


def test_runs_that_do_not_cover_the_span_expose_nothing() -> None:
    async def body() -> None:
        rig = Rig()
        number = await rig.connect(0)
        span = Span(rig.memory)
        for runs in ([SliceRun(number, NBYTES - 1)], [SliceRun(number, NBYTES), SliceRun(9, 1)]):
            with pytest.raises(PathUnavailable):
                await rig.source.expose_runs(rig.near, span, LEASE, runs, READ)
        assert rig.fabric.exposed_count == 0
        await rig.close()

    run_virtual(body())


def test_a_dial_is_shared_and_goes_on_without_who_gave_up() -> None:
    async def body() -> None:
        rig = Rig()
        rig.requester.faults.prepare_s = 1.0
        patient = asyncio.ensure_future(rig.connect(0))
        with pytest.raises(DeadlineExceeded):
            await rig.connect(0, deadline=0.5)
        assert await patient == 0
        assert rig.requester.rail_statistics().endpoints == 2
        await rig.close()

    run_virtual(body())


def test_private_arrays_are_fresh_and_gone_on_both_sides_when_closed() -> None:
    async def body() -> None:
        rig = Rig()
        shared = await rig.connect(0)
        first = await rig.connect(0, private=True)
        second = await rig.connect(0, private=True)
        assert len({shared, first, second}) == 3
        for number in (first, second, 99):
            await rig.requester.close_array(rig.far, READ, number)
        assert [p.rail_statistics().endpoints for p in (rig.source, rig.requester)] == [2, 2]
        with pytest.raises(PathUnavailable):
            await rig.expose(first)
        with pytest.raises(DeadlineExceeded):
            await rig.connect(1, private=True, deadline=asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        assert rig.requester.rail_statistics().endpoints == 2
        await rig.close()

    run_virtual(body())


def test_endpoints_are_given_out_in_order_and_idle_arrays_make_room() -> None:
    async def body() -> None:
        rig = Rig(endpoints_max=4)
        held = [await rig.connect(0, private=True) for _ in range(2)]
        waiting = [asyncio.ensure_future(rig.connect(0, private=True)) for _ in range(2)]
        await asyncio.sleep(0.5)
        with pytest.raises(DeadlineExceeded):
            await rig.connect(0, deadline=1.0)
        assert not any(task.done() for task in waiting)
        await rig.requester.close_array(rig.far, READ, held[0])
        assert await asyncio.wait_for(waiting[0], 1.0)
        assert not waiting[1].done()
        await rig.requester.close_array(rig.far, READ, held[1])
        await asyncio.wait_for(waiting[1], 1.0)
        for task in waiting:
            await rig.requester.close_array(rig.far, READ, task.result())
        shared = [await rig.connect(place) for place in (0, 1)]
        third = await rig.connect(0, private=True)  # in the place of the one that was idle longest
        with pytest.raises(PathUnavailable):
            await rig.expose(shared[0])
        await rig.requester.close_array(rig.far, READ, third)
        await rig.close()
        with pytest.raises(BudgetExceeded):
            await Rig(endpoints_max=1).connect(0)

    run_virtual(body())


@pytest.mark.parametrize("side", ["source", "requester"])
def test_a_rail_that_goes_down_ends_what_is_on_it_and_carries_again_when_it_is_back(
    side: str,
) -> None:
    async def body() -> None:
        rig = Rig()
        path: SimRailedPath = getattr(rig, side)
        numbers = [await rig.connect(place) for place in (0, 1)]
        moving = asyncio.ensure_future(rig.pull(await rig.expose(*numbers)))
        await asyncio.sleep(0.002)
        path.rail_down(1, "unplugged")
        with pytest.raises(PathFailed, match="unplugged"):
            await moving
        await rig.retract(transferred=False)
        await asyncio.sleep(0.01)
        if side == "source":
            with pytest.raises(PathUnavailable):
                await rig.connect(1)
        path.rail_up(1)
        assert await rig.connect(1) == numbers[1]
        await rig.pull(await rig.expose(*numbers))
        await rig.retract(transferred=True)
        assert rig.target == rig.memory
        assert path.rail_statistics().route_recoveries == 1
        await rig.close()

    run_virtual(body())


def test_an_array_that_only_its_source_lost_is_refused_until_the_requester_hears_of_it() -> None:
    async def body() -> None:
        rig = Rig()
        number = await rig.connect(1)
        rig.source.lose_arrays()
        assert await rig.connect(1) == number
        with pytest.raises(PathUnavailable) as caught:
            await rig.expose(number)
        assert caught.value.reason == PathReason.CONNECT_FAILED
        await asyncio.sleep(0.01)
        assert await rig.connect(1) == number
        await rig.pull(await rig.expose(number))
        await rig.retract(transferred=True)
        await rig.close()

    run_virtual(body())


def test_lost_completions_leave_the_memory_in_use_and_a_ghost_writes_it() -> None:
    async def body() -> None:
        rig = Rig()
        number = await rig.connect(1)
        rig.requester.rail_faults.withheld.append(4500)
        with pytest.raises(Unquiesced):
            await rig.pull(await rig.expose(number))
        await rig.retract(transferred=False)
        assert rig.fabric.flights is not None
        assert len(rig.fabric.flights) == 1
        rig.target[:] = bytes(NBYTES)
        await asyncio.sleep(5)
        assert rig.target == bytes(4000) + rig.memory[4000:5000] + bytes(5000)
        await rig.requester.close()
        await rig.source.close()
        assert rig.requester.rail_statistics().endpoints == 2  # for good
        assert rig.source.rail_statistics().endpoints == 0

    run_virtual(body())


def test_a_receipt_that_does_not_come_is_no_success_of_a_push() -> None:
    async def body() -> None:
        rig = Rig()
        number = await rig.connect(1, WRITE)
        rig.requester.rail_faults.receipts_lost = 1
        await rig.push(await rig.expose(number, direction=WRITE))
        with pytest.raises(PathFailed, match="1 of 1 receipts"):
            await rig.retract(transferred=True)
        await rig.close()

    run_virtual(body())


def test_an_end_that_is_not_proven_keeps_what_was_exposed_in_use() -> None:
    async def body() -> None:
        rig = Rig()
        number = await rig.connect(1, WRITE)
        await rig.expose(number, direction=WRITE)
        rig.source.rail_faults.retracts_unproven = 1
        with pytest.raises(Unquiesced):
            await rig.retract(transferred=False)
        await asyncio.sleep(5)
        assert rig.memory[:1] == b"\x66"
        assert len(rig.fabric.stuck) == 1
        assert rig.fabric.flights is not None
        assert len(rig.fabric.flights) == 1

    run_virtual(body())


def test_what_moves_through_memory_that_is_not_registered_is_noted() -> None:
    async def body() -> None:
        fabric = SimFabric()
        memory = SimPinnedMemory()
        source = SimRailedPath(fabric, memory=memory)
        requester = SimRailedPath(fabric)
        near, far = StubSession(1, dialer=False), StubSession(1, dialer=True)
        far.peer_hello = replace(far.peer_hello, rails=source.hints)
        view = memoryview(bytearray(4096))
        number = await requester.connect_route(far, READ, requester.routes(far)[0])
        runs = [SliceRun(number, 4096)]
        local = await memory.register(view, remote=False)
        for span in (Span(view), Span(view, local.parts[0])):
            with pytest.raises(PathUnavailable):
                await source.expose_runs(near, span, LEASE, runs, READ)
        shared = await memory.register(view)
        exposure = await source.expose_runs(near, Span(view, shared.parts[0]), LEASE, runs, READ)
        await memory.deregister(shared)
        await requester.pull(far, exposure, LEASE, Target(memoryview(bytearray(4096))))
        assert len(fabric.misuse) == 1

    run_virtual(body())
