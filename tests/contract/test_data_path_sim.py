"""SimPath against the contract of DataPath, on the virtual clock, under both path names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from orbit.model import PathName
from orbit.testing.clock import run_virtual
from orbit.testing.contracts import PATH_CASES, check_data_path
from orbit.testing.fabric import SimFabric, SimPath
from orbit.testing.sessions import StubSession
from orbit.transport.interface import Target


@dataclass(eq=False)
class SimPathPair:
    owner: SimPath
    consumer: SimPath
    owner_session: StubSession
    consumer_session: StubSession
    big_bytes: int = 4 << 20

    def allocate_source(self, nbytes: int) -> Target:
        return Target(memoryview(bytearray(nbytes)))

    def allocate_target(self, nbytes: int) -> Target:
        return Target(memoryview(bytearray(nbytes)))

    def free(self, memory: Target) -> None:
        memory.view.release()

    async def kill_owner(self) -> None:
        await self.owner.close()


@pytest.mark.parametrize("case", PATH_CASES)
@pytest.mark.parametrize("name", [PathName.RDMA, PathName.TCP])
def test_simulated(case: str, name: PathName) -> None:
    @contextlib.asynccontextmanager
    async def open_pair() -> AsyncIterator[SimPathPair]:
        fabric = SimFabric()
        owner_session = StubSession(1, dialer=False)
        consumer_session = StubSession(1, dialer=True)
        owner_session.connect(consumer_session)
        owner, consumer = SimPath(fabric, name), SimPath(fabric, name)
        yield SimPathPair(owner, consumer, owner_session, consumer_session)
        await consumer.close()
        await owner.close()
        assert fabric.exposed_count == 0

    run_virtual(check_data_path(case, open_pair))
