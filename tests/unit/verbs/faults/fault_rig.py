"""Two RDMA paths over two scripted rails a side, on a clock that jumps and without threads; what is
polled on a rail can be looked at, repeated and forged, and every release of memory is compared with
what its device still reaches.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orbit.config import RdmaPoolConfig
from orbit.model import PathReason
from orbit.transport.rails import RailRoute
from orbit.verbs.completion_source import EventSource
from orbit.verbs.device import DeviceContext
from orbit.verbs.lane import Lane
from orbit.verbs.rail_state import RailPlace
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.records import Completion
from orbit.verbs.requester import LocalMemory, RequesterMember, Transfer
from orbit.verbs.scripted import ScriptedDomain, ScriptedProvider, ScriptedRegion
from orbit.verbs.scripted_fabric import ScriptedDevice, ScriptedFabric
from orbit.verbs.source import SourceGrant, SourceMember
from orbit.verbs.targets import PreparedMemory
from orbit.verbs.turn import Look, Posted
from tests.contract.rdma_pairs import QUICK, ScriptedPair, join, rail_of
from tests.unit.verbs.watched_rails import InlineOffload

PIECE = 4096
CONFIG = replace(
    QUICK,
    pool=RdmaPoolConfig(initial_arena_bytes=1 << 20),
    width=1,
    num_lanes=1,
    piece_bytes=PIECE,
    inflight_bytes=4 * PIECE,
    nap_us=0,
    nap_bytes_max=0,
    spin_us=0,
    connect_backoff_s=0.0,
    monitor_interval_s=3600.0,
)


class Tap:
    """Between the helper and the one lane of a rail, once that is open."""

    def __init__(self, lane: Lane) -> None:
        self.polled: list[Completion] = []
        self.alter: Callable[[Completion], Completion] = lambda completion: completion
        self._coming: list[Completion] = []
        self._lane = lane
        source = lane.source
        assert isinstance(source, EventSource)
        self._turn = source._turn
        source._turn = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._turn, name)

    def wake(self, *arguments: int) -> Look:
        look = self._seen(self._turn.wake(*arguments))
        coming, self._coming = self._coming, []
        return look._replace(found=[*coming, *look.found])

    def nap(self, *arguments: int) -> Look:
        return self._seen(self._turn.nap(*arguments))

    def post(self, *arguments: Any) -> Posted:
        posted = self._turn.post(*arguments)
        return posted if posted.look is None else posted._replace(look=self._seen(posted.look))

    def _seen(self, look: Look) -> Look:
        found = [self.alter(c) for c in look.found]
        self.polled += found
        return look._replace(found=found)

    def bring(self, *completions: Completion) -> None:
        """They come with the next poll, which is now."""
        self._coming += completions
        self._lane.poll()


class Side:
    """One path, and its end of the rail that is hit."""

    def __init__(self, path: RdmaPath, fake: ScriptedDevice) -> None:
        self.path = path
        self.fake = fake  # of the rail that is hit
        self.tap: Tap | None = None

    @property
    def device(self) -> DeviceContext:
        return self.path.devices[0]

    def watch(self) -> None:
        """Its lane is open from here on."""
        (lane,) = self.device.lanes.lanes
        self.tap = self.tap or Tap(lane)

    @property
    def unknown(self) -> int:
        return self.path.statistics().unknown_completions

    @property
    def kept(self) -> list[str]:
        """What is retained, by kind, the same order whatever came first."""
        kinds = {SourceGrant: "grant", Transfer: "local memory"}
        keys = [key for key, _ in self.path._context.retained._entries.values()]
        return sorted(kinds.get(type(key), "queue pair") for key in keys)


class World(ScriptedPair):
    """What RunTransfer wants, and both sides for whoever looks closer."""

    @property
    def source(self) -> Side:
        return self._sides[0]

    @property
    def requester(self) -> Side:
        return self._sides[1]

    def set_sides(self, source: Side, requester: Side) -> None:
        self._sides = source, requester

    @property
    def routes(self) -> tuple[RailRoute, ...]:
        """First of the rail that is hit."""
        return self.consumer.routes(self.consumer_session)

    def fakes_of(self, side: Side) -> tuple[ScriptedDevice, ScriptedDevice]:
        a2, b2 = self.more
        return (self.a, a2) if side is self.source else (self.b, b2)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[World]:
    """A world. Who opens it closes it."""
    fabric = ScriptedFabric()
    names = ("fake_a", "fake_b"), ("fake_a2", "fake_b2")
    fakes = [
        fabric.add_device(name, f"fe80::{rail}:{host}", f"::ffff:198.18.{rail}.{host}")
        for rail, pair in enumerate(names, 1)
        for host, name in enumerate(pair, 1)
    ]
    owner = await _open_path(fabric, "fake_a", "fake_a2")
    consumer = await _open_path(fabric, "fake_b", "fake_b2")
    a, b, *more = fakes
    world = World(owner, consumer, *join(owner, consumer), False, a=a, b=b, more=tuple(more))
    world.set_sides(Side(owner, a), Side(consumer, b))
    with _watched_releases(fakes):
        yield world


async def _open_path(fabric: ScriptedFabric, *names: str) -> RdmaPath:
    offload, provider, devices = InlineOffload(), ScriptedProvider(fabric, names), []
    for nic, name in enumerate(names):
        hint = rail_of(fabric.devices[name])
        devices.append(await DeviceContext.open(provider, hint, CONFIG, offload, 0, RailPlace(nic)))
        devices[-1].state.proven = True
    path = RdmaPath(devices, CONFIG, offload)
    assert await path.memory.ensure() is PathReason.OK
    return path


@contextlib.contextmanager
def _watched_releases(fakes: Sequence[ScriptedDevice]) -> Iterator[None]:
    """Nothing is let go of that a device still reaches."""

    def check(what: str, address: int, nbytes: int) -> None:
        reached = [fake.name for fake in fakes if fake.reaches(address, nbytes)]
        assert not reached, f"{what} is given back, and {reached} reach it"

    with pytest.MonkeyPatch.context() as patch:
        _watch_grants(patch, check)
        _watch_transfers(patch, check)
        _watch_registrations(patch, check)
        yield


_Check = Callable[[str, int, int], None]


def _watch_grants(patch: pytest.MonkeyPatch, check: _Check) -> None:
    remove = SourceMember.remove

    def removed(member: SourceMember, grant: SourceGrant) -> None:
        check("granted memory", grant.record.address, grant.record.length)
        remove(member, grant)

    patch.setattr(SourceMember, "remove", removed)


def _watch_transfers(patch: pytest.MonkeyPatch, check: _Check) -> None:
    let_go, release, discard = Transfer._let_go, RequesterMember.release, PreparedMemory.discard

    def look(memory: LocalMemory | None) -> None:
        for segment in memory._segments if memory is not None else ():
            check("local memory", segment.address, segment.nbytes)

    def gone(transfer: Transfer) -> None:
        look(transfer.memory)
        let_go(transfer)

    def released(member: RequesterMember, transfer: Transfer) -> None:
        look(transfer.memory)
        release(member, transfer)

    async def discarded(prepared: PreparedMemory) -> None:
        for memory in prepared.memory.values():
            look(memory)
        await discard(prepared)

    patch.setattr(Transfer, "_let_go", gone)
    patch.setattr(RequesterMember, "release", released)
    patch.setattr(PreparedMemory, "discard", discarded)


def _watch_registrations(patch: pytest.MonkeyPatch, check: _Check) -> None:
    register, close = ScriptedDomain.register, ScriptedRegion.close
    ranges: dict[ScriptedRegion, tuple[int, int]] = {}

    def registered(
        domain: ScriptedDomain, address: int, length: int, access: int
    ) -> ScriptedRegion:
        made = register(domain, address, length, access)
        ranges[made] = address, length
        return made

    def closed(region: ScriptedRegion) -> None:
        if region in ranges and region.native:
            check("a registration", *ranges[region])
        close(region)

    patch.setattr(ScriptedDomain, "register", registered)
    patch.setattr(ScriptedRegion, "close", closed)
