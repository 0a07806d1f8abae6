"""Pairs of transfer engines on the lab's rails, and what tests look at in them.

Both nodes live in this process: host A's devices are the source's rails, host B's the requester's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import orbit
from orbit.testing import waiting
from orbit.transport.rails import RailFacts, RailStatistics
from orbit.verbs import opening
from orbit.verbs.device import DeviceContext
from orbit.verbs.discovery import Discovery, discover
from orbit.verbs.rdma_path import RdmaPath
from tests.scenarios.engine_rig import (
    HANG_S,
    MIB,
    Devices,
    EngineRig,
    EngineScenario,
    filled,
    guarded,
    open_engines,
)
from tests.softroce import links

RAILS = Devices(("rxa1", "rxa2"), ("rxb1", "rxb2"))
# An emulated processor may stand still for a while; these bounds are for hangs alone.
PATIENT = orbit.RdmaConfig(device_timeout_s=20.0)
SOON = {"monitor_interval": 0.2}


@contextlib.asynccontextmanager
async def engines(
    source: dict[str, Any] | None = None,
    requester: dict[str, Any] | None = None,
    *,
    devices: Devices = RAILS,
    rdma: orbit.RdmaConfig = PATIENT,
    find: Callable[[], Discovery] | None = None,
) -> AsyncIterator[EngineRig]:
    """Two of their own, whose monitors look often. `find` None: the devices are as they were at the
    first time. A thousand GID rows cost seconds on an emulated processor.
    """
    node = orbit.NodeConfig(rdma=rdma)
    knobs = ({**SOON, **(role or {})} for role in (source, requester))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "discover", find or usual_devices)
        async with open_engines(devices, *knobs, node=node) as rig:
            yield rig


@functools.cache
def usual_devices() -> Discovery:
    return discover()


class SharedPair:
    """One pair of engines and its loop, for all tests of a module that can share one."""

    def __init__(self, **knobs: Any) -> None:
        self._runner = asyncio.Runner()
        self._opened = engines(knobs, knobs)
        self.rig: EngineRig = self._runner.run(self._opened.__aenter__())

    def run(self, scenario: EngineScenario) -> None:
        async def main() -> None:
            await seen_anew(self.rig)
            await scenario(self.rig)

        self._runner.run(main())

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._opened.__aexit__(None, None, None))


def shared_pair(**knobs: Any) -> Iterator[SharedPair]:
    """For a fixture."""
    pair = SharedPair(**knobs)
    yield pair
    pair.close()


Natives = list[tuple[int, set[int]]]


@dataclass
class Regions:
    """Registered memory of both sides, of one size."""

    data: bytearray
    into: bytearray
    region: orbit.EngineRegion
    local: orbit.EngineRegion
    native: dict[orbit.TransferEngine, Natives]

    def outlived(self) -> bool:
        """Every rail of both sides has its protection domain, and these registrations in it."""
        return all(
            domain == domain_now and keys <= keys_now
            for engine, before in self.native.items()
            for (domain, keys), (domain_now, keys_now) in zip(before, natives(engine), strict=True)
        )

    @property
    def remote(self) -> orbit.RemoteRegion:
        return self.region.remote()


@contextlib.asynccontextmanager
async def regions(rig: EngineRig, nbytes: int, seed: int = 0) -> AsyncIterator[Regions]:
    data, into = filled(nbytes, seed), guarded(nbytes)
    before = {engine: natives(engine) for engine in (rig.source, rig.requester)}
    async with (
        await rig.source.register(data, access="readwrite") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        added = {
            engine: [
                (domain, keys - old)
                for (domain, keys), (_, old) in zip(natives(engine), known, strict=True)
            ]
            for engine, known in before.items()
        }
        yield Regions(data, into, region, local, added)
    await rig.idle()


async def transfer(
    rig: EngineRig, op: str, nbytes: int = MIB, seed: int = 0, **options: Any
) -> orbit.TransferResult:
    """One that succeeds, with the right bytes and everything given back."""
    async with regions(rig, nbytes, seed) as memory:
        request = rig.request(op, memory.local, memory.remote, **options)
        if op == "write":
            memory.into[:] = memory.data[::-1]
        (result,) = await rig.requester.submit([request])
        assert (result.state, result.nbytes) == ("succeeded", nbytes)
        assert memory.into == memory.data
    return result


async def both_rails_carry(rig: EngineRig, nbytes: int = MIB) -> None:
    """READ and WRITE go over both, each counted by its devices. At least two slices."""
    for op in ("read", "write"):
        before = links.sent_pkts(1, 2)
        result = await transfer(rig, op, nbytes, seed=len(op))
        after = links.sent_pkts(1, 2)
        assert set(result.rails) == set(RAILS.requester), result
        sent = {rail: after[rail] - before[rail] for rail in after}
        assert min(sent.values()) >= nbytes // 2 // 4096, sent


def contexts(engine: orbit.TransferEngine) -> tuple[DeviceContext, ...]:
    """By name."""
    path = engine.node._open().parts().paths.rdma
    assert isinstance(path, RdmaPath)
    return tuple(sorted(path.devices, key=lambda device: device.name))


def natives(engine: orbit.TransferEngine) -> Natives:
    """Each rail's protection domain, and the keys of what is registered in it."""
    return [
        (
            device.domain.native.native,
            {region.lkey for region in device.domain.regions._live.values()},
        )
        for device in contexts(engine)
    ]


async def seen_anew(rig: EngineRig) -> None:
    """What happened while the loop stood still is known, and every rail serves."""
    both = rig.source, rig.requester
    seen = [monitor_ticks(engine) + 1 for engine in both]
    await waiting.until(
        lambda: all(monitor_ticks(e) > old for e, old in zip(both, seen, strict=True)), HANG_S
    )
    await until_active(rig, 1, 2)


def statistics(engine: orbit.TransferEngine) -> RailStatistics:
    rails = engine.statistics().rails
    assert rails is not None
    return rails


def rail_facts(engine: orbit.TransferEngine, name: str) -> RailFacts:
    return next(facts for facts in statistics(engine).rails if facts.device == name)


def recoveries(engine: orbit.TransferEngine) -> int:
    return statistics(engine).route_recoveries


def monitor_ticks(engine: orbit.TransferEngine) -> int:
    return statistics(engine).monitor_ticks


async def until_active(rig: EngineRig, *rails: int, active: bool = True) -> None:
    """Both ends of these rails serve, or none does."""
    facts = [
        (engine, links.device(end, rail))
        for rail in rails
        for end, engine in zip(links.ENDS, (rig.source, rig.requester), strict=True)
    ]
    await waiting.until(
        lambda: all(rail_facts(engine, name).active == active for engine, name in facts), HANG_S
    )
