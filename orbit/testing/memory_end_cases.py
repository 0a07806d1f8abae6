"""What is asked of PinnedMemory at its end, and of its budget when everything happens at once."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from ..errors import BusyError, ClosedError, DeviceError
from ..model import PathReason
from ..transport.interface import RegisteredRange
from .memory_rig import (
    KIB,
    MIB,
    TAKEN,
    MemoryCase,
    OpenMemory,
    PoolSettings,
    failed,
    figures,
    raised,
)
from .waiting import until


async def a_gate_refuses_and_drain_waits(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        piece = await rig.memory.allocate(100)
        view = memoryview(bytearray(MIB))
        begun = [
            asyncio.ensure_future(rig.memory.register(view)),
            asyncio.ensure_future(rig.memory.allocate(3 * MIB)),
        ]
        charged = rig.memory.budget.charged_bytes
        await until(lambda: rig.memory.budget.charged_bytes >= charged + 4 * MIB * rig.devices)
        rig.memory.gate()
        rig.memory.gate()
        raised(lambda: rig.memory.allocate_nowait(1), BusyError)
        await failed(rig.memory.allocate(1), BusyError)
        await failed(rig.memory.allocate(3 * MIB), BusyError)
        await failed(rig.memory.register(memoryview(bytearray(1))), ClosedError)
        assert await rig.memory.ensure() is PathReason.DRAINING
        await rig.memory.drain()
        await asyncio.wait(begun)  # what had begun is not missed: here, or failed
        found = figures(rig)
        assert found.regions == (1 if begun[0].exception() is None else 0)
        rig.memory.free(piece)
        await rig.memory.close()
        assert rig.memory.budget.charged_bytes == 0


async def close_takes_what_is_left_and_goes_on_where_it_failed(open_memory: OpenMemory) -> None:
    async with open_memory(PoolSettings()) as rig:
        piece = await rig.memory.allocate(100)
        held = await rig.memory.register(memoryview(bytearray(10_000)))
        rig.refuse(deregistrations=1)
        await failed(rig.memory.close(), DeviceError)
        assert rig.memory.budget.charged_bytes > 0
        await rig.memory.close()
        await rig.memory.close()
        assert rig.memory.budget.charged_bytes == 0
        await rig.memory.deregister(held)  # nothing is left to do
        rig.memory.free(piece)
        assert await rig.memory.ensure() is PathReason.DRAINING


async def the_budget_is_never_overshot(open_memory: OpenMemory) -> None:
    """200 tasks that allocate, free, register, are refused and are cancelled at any moment."""
    rng = random.Random(4)
    async with open_memory(PoolSettings(budget_bytes=4 * MIB)) as rig:
        budget = rig.memory.budget
        worst = 0

        def look() -> None:
            nonlocal worst
            worst = max(worst, budget.charged_bytes)
            assert figures(rig).registered_bytes <= budget.charged_bytes <= budget.limit_bytes

        async def use(nbytes: int, turns: int) -> None:
            piece = await rig.memory.allocate(nbytes)
            look()
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                rig.memory.free(piece)

        async def register(buffer: bytearray, turns: int) -> None:
            held: RegisteredRange = await rig.memory.register(memoryview(buffer))
            look()
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                await asyncio.shield(rig.memory.deregister(held))

        shared = [bytearray(rng.randint(1, 600 * KIB)) for _ in range(4)]
        tasks: list[asyncio.Task[None]] = []
        for number in range(200):
            turns = rng.randint(0, 20)
            if number % 2:
                work = use(rng.choice([1, 5000, 300 * KIB, 2 * MIB + 5]), turns)
            else:
                work = register(rng.choice([*shared, bytearray(rng.randint(1, MIB))]), turns)
            tasks.append(asyncio.ensure_future(work))
            if rng.random() < 0.1:
                rig.refuse(registrations=1)
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            look()
        rig.refuse()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, (*TAKEN, asyncio.CancelledError)), result
        assert worst > MIB
        await rig.memory.drain()
        await until(lambda: figures(rig).regions == 0)  # whose holders have not waited for it
        found = figures(rig)
        assert found.arena_bytes_used == 0
        assert budget.charged_bytes == found.arena_bytes * rig.devices


END_CASES: Final[tuple[MemoryCase, ...]] = (
    a_gate_refuses_and_drain_waits,
    close_takes_what_is_left_and_goes_on_where_it_failed,
    the_budget_is_never_overshot,
)
