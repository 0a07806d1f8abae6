"""SimPath's faults beyond the contract: where a simulated transfer fails, and what stays behind."""

from __future__ import annotations

import asyncio

import pytest

from orbit.errors import DeadlineExceeded, PathFailed
from orbit.model import Direction, LeaseId, PathName, PathReason
from orbit.testing.clock import run_virtual
from orbit.testing.fabric import SimFabric, SimPath
from orbit.testing.faults import PathFaults
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.transport.interface import Exposure, Span, Target

LEASE = LeaseId(1)
NBYTES = 10_000


class Rig:
    """An owner and a consumer on one fabric; chunks of 1,000 bytes, 1 ms each."""

    def __init__(self, **faults: object) -> None:
        self.faults = PathFaults(bytes_per_s=1e6, chunk_bytes=1000, **faults)  # type: ignore[arg-type]
        fabric = SimFabric()
        self.owner = SimPath(fabric, PathName.RDMA)
        self.consumer = SimPath(fabric, PathName.RDMA, self.faults, no_progress_s=3.0)
        self.near, self.far = StubSession(1, dialer=False), StubSession(1, dialer=True)
        self.memory = memoryview(bytearray(NBYTES))

    async def expose(self, direction: Direction = Direction.WRITE) -> Exposure:
        span = Span(self.memory)
        return await self.owner.expose(self.near, span, LEASE, direction=direction)

    async def push(self, exposure: Exposure) -> None:
        await self.consumer.push(self.far, exposure, LEASE, Span(memoryview(pattern(NBYTES))))

    async def retract(self, *, transferred: bool) -> None:
        await self.owner.retract(self.near, LEASE, transferred=transferred)


@pytest.mark.parametrize(("fail_at", "arrived"), [(0, 0), (1, 0), (3000, 2000), (9999, 9000)])
def test_a_push_that_fails(fail_at: int, arrived: int) -> None:
    async def body() -> None:
        rig = Rig(failures=[(fail_at, PathReason.CONNECT_FAILED)])
        exposure = await rig.expose()
        with pytest.raises(PathFailed) as caught:
            await rig.push(exposure)
        assert caught.value.reason == PathReason.CONNECT_FAILED
        assert rig.memory == pattern(NBYTES)[:arrived] + bytes(NBYTES - arrived)
        if arrived:  # a lease that was written in part takes nothing more
            with pytest.raises(PathFailed, match="already"):
                await rig.push(exposure)
            with pytest.raises(PathFailed, match="not every byte"):
                await rig.retract(transferred=True)
        else:
            await rig.push(exposure)
            await rig.retract(transferred=True)
            assert rig.memory == pattern(NBYTES)

    run_virtual(body())


def test_a_push_that_stalls() -> None:
    async def body() -> None:
        rig = Rig(stall_at_bytes=2000)
        exposure = await rig.expose()
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(DeadlineExceeded):
            await rig.push(exposure)
        assert loop.time() - started > 3.0
        assert rig.memory == pattern(NBYTES)[:2000] + bytes(NBYTES - 2000)
        await rig.retract(transferred=False)

    run_virtual(body())


def test_pulls_and_pushes_use_up_one_list_of_failures() -> None:
    async def body() -> None:
        rig = Rig(failures=[(0, PathReason.GET_FAILED), (0, PathReason.CONNECT_FAILED)])
        exposure = await rig.expose(Direction.READ)
        target = Target(memoryview(bytearray(NBYTES)))
        with pytest.raises(PathFailed, match="get_failed"):
            await rig.consumer.pull(rig.far, exposure, LEASE, target)
        await rig.retract(transferred=False)
        exposure = await rig.expose()
        with pytest.raises(PathFailed, match="connect_failed"):
            await rig.push(exposure)
        await rig.push(exposure)
        await rig.retract(transferred=True)
        assert (rig.consumer.pulls, rig.consumer.pushes) == (1, 2)

    run_virtual(body())
