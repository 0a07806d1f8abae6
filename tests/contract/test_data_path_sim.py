"""Simulated paths against the contract of DataPath, on the virtual clock: one without rails, under
both names, and one over two rails.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import pytest

from orbit.model import PathName
from orbit.testing.clock import run_virtual
from orbit.testing.contracts import (
    PATH_CASES,
    RAIL_CASES,
    check_data_path,
    check_railed_path,
)
from orbit.testing.fabric import SimFabric, SimPath
from orbit.testing.sessions import StubSession
from orbit.testing.sim_railed_path import SimRailedPath
from orbit.transport.interface import Target

PathT = TypeVar("PathT", bound=SimPath)


@dataclass(eq=False)
class SimPathPair(Generic[PathT]):
    owner: PathT
    consumer: PathT
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
    async def open_pair() -> AsyncIterator[SimPathPair[SimPath]]:
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


@pytest.mark.parametrize("case", PATH_CASES)
def test_simulated_rails(case: str) -> None:
    run_virtual(check_data_path(case, railed_pair))


@pytest.mark.parametrize("case", RAIL_CASES)
def test_as_a_path_over_rails(case: str) -> None:
    run_virtual(check_railed_path(case, railed_pair))


@contextlib.asynccontextmanager
async def railed_pair() -> AsyncIterator[SimPathPair[SimRailedPath]]:
    """Afterwards nothing is exposed and no queue pair is left."""
    fabric = SimFabric()
    owner, consumer = SimRailedPath(fabric), SimRailedPath(fabric)
    owner_session, consumer_session = join(owner, consumer)
    yield SimPathPair(owner, consumer, owner_session, consumer_session)
    await consumer.close()
    await owner.close()
    assert fabric.exposed_count == 0
    assert not fabric.misuse
    for path in (owner, consumer):
        assert path.rail_statistics().endpoints == 0


def join(owner: SimRailedPath, consumer: SimRailedPath) -> tuple[StubSession, StubSession]:
    """The owner's and the consumer's end of one epoch between them."""
    ours, theirs = StubSession(1, dialer=False), StubSession(1, dialer=True)
    for session, own, other in ((ours, owner, consumer), (theirs, consumer, owner)):
        session.local_hello = replace(session.local_hello, rails=own.hints)
        session.peer_hello = replace(session.peer_hello, rails=other.hints)
    ours.connect(theirs)
    return ours, theirs
