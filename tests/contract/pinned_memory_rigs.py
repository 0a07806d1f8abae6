"""PinnedMemory as the contract suite opens it: simulated, and the pool on scripted devices."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from orbit.config import RdmaPoolConfig
from orbit.memory.budget import Budget
from orbit.testing.memory_contract import MemoryRig, PoolSettings
from orbit.testing.sim_memory import Refusals, SimPinnedMemory
from orbit.verbs.arena_pool import ArenaPool
from orbit.verbs.device import DeviceContext
from orbit.verbs.offload import Offload
from orbit.verbs.retention import Retained
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import rail_of

SETTINGS = PoolSettings()
KNOB = "rdma.pool.registered_bytes_budget"


@dataclass(eq=False)
class SimRig:
    memory: SimPinnedMemory
    devices: int = 1

    def refuse(self, *, registrations: int = 0, deregistrations: int = 0) -> None:
        self.memory.refusals = Refusals(registrations, deregistrations)


@dataclass(eq=False)
class PoolRig:
    """An ArenaPool over open scripted devices, the last of which refuses."""

    memory: ArenaPool
    contexts: list[DeviceContext]
    scripted: list[ScriptedDevice]
    retained: Retained

    @property
    def devices(self) -> int:
        return len(self.contexts)

    def refuse(self, *, registrations: int = 0, deregistrations: int = 0) -> None:
        self.scripted[-1].fail_verb("reg_mr", 12, count=registrations)
        self.scripted[-1].fail_verb("dereg_mr", 16, count=deregistrations)

    @property
    def live_objects(self) -> int:
        return sum(device.counters().live_objects for device in self.scripted)


@contextlib.asynccontextmanager
async def open_sim(settings: PoolSettings) -> AsyncIterator[MemoryRig]:
    memory = SimPinnedMemory(
        settings.initial_bytes,
        max_bytes=settings.max_bytes,
        budget_bytes=settings.budget_bytes,
        dedicated_min_bytes=settings.dedicated_min_bytes,
        limit_bytes=settings.limit_bytes,
        reclaim_after_s=settings.reclaim_after_s,
        retain_bytes=settings.retain_bytes,
    )
    yield SimRig(memory)
    memory.refusals = Refusals()
    await memory.close()
    assert memory.budget.charged_bytes == 0


@contextlib.asynccontextmanager
async def open_pool(settings: PoolSettings = SETTINGS, count: int = 1) -> AsyncIterator[PoolRig]:
    """Afterwards the devices must hold nothing."""
    fabric, offload = ScriptedFabric(), Offload()
    scripted = [fabric.add_device(f"fake_{number}") for number in range(count)]
    config = RdmaPathConfig(mr_bytes_max=settings.limit_bytes)
    provider = ScriptedProvider(fabric)
    contexts = [
        await DeviceContext.open(provider, rail_of(device), config, offload) for device in scripted
    ]
    empty = [device.counters().live_objects for device in scripted]
    pool_config = RdmaPoolConfig(
        initial_arena_bytes=settings.initial_bytes,
        max_arena_bytes=settings.max_bytes,
        dedicated_arena_min=settings.dedicated_min_bytes,
        arena_reclaim_after=settings.reclaim_after_s,
        retain_arena_bytes=settings.retain_bytes,
    )
    budget = Budget("registered memory", settings.budget_bytes * count, KNOB)
    retained = Retained()
    memory = ArenaPool(contexts, pool_config, budget, retained)
    yield PoolRig(memory, contexts, scripted, retained)
    for device in scripted:
        device.clear_rules()
    await memory.close()
    assert budget.charged_bytes == 0
    assert not retained.items()
    assert [device.counters().live_objects for device in scripted] == empty
    for context in contexts:
        await context.close()
    offload.close()
    for device in scripted:
        assert device.counters().live_objects == 0
        assert not device.counters().misuse


def pools_of(count: int) -> Callable[[PoolSettings], AbstractAsyncContextManager[MemoryRig]]:
    """The factory for so many devices."""

    @contextlib.asynccontextmanager
    async def opened(settings: PoolSettings) -> AsyncIterator[MemoryRig]:
        async with open_pool(settings, count) as rig:
            yield rig

    return opened
