"""Registered memory on scripted devices: what only devices show. The rest is in the contract."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import random
import threading
from collections.abc import Awaitable, Callable

import pytest

from orbit.errors import BudgetExceeded, BusyError, DeviceError, UsageError
from orbit.memory.buffer import address_of
from orbit.model import PathReason
from orbit.testing.memory_rig import PoolSettings, failed
from orbit.testing.waiting import until
from orbit.verbs import arena_mapping, registration
from orbit.verbs.arena_memory import map_arena
from orbit.verbs.registration import KeyHolder, TargetRegistration
from tests.contract.pinned_memory_rigs import PoolRig, open_pool

KIB, MIB = 1 << 10, 1 << 20
EBUSY, ENOMEM = 16, 12

Scenario = Callable[[PoolRig], Awaitable[None]]


def run(scenario: Scenario, settings: PoolSettings | None = None, count: int = 2) -> None:
    async def main() -> None:
        async with open_pool(settings or PoolSettings(), count) as rig:
            await scenario(rig)

    asyncio.run(main())


def test_every_device_has_a_key_of_its_own() -> None:
    async def scenario(rig: PoolRig) -> None:
        piece = await rig.memory.allocate(100)
        held = await rig.memory.register(memoryview(bytearray(100)))
        for buffer in (piece, held.parts[0]):
            assert isinstance(buffer.arena, KeyHolder)
            regions = [buffer.arena.region(device.domain) for device in rig.contexts]
            assert all(region is not None and region.lkey for region in regions)
            assert regions[0] is not regions[1]
        holder = held.parts[0].arena
        assert isinstance(holder, KeyHolder)
        await rig.memory.deregister(held)
        assert holder.region(rig.contexts[0].domain) is None
        rig.memory.free(piece)

    run(scenario)


def test_an_arena_whose_end_is_refused_is_listed_until_close_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(rig: PoolRig) -> None:
        piece = await rig.memory.allocate(2 * MIB)
        live = rig.live_objects
        rig.refuse(deregistrations=1)
        rig.memory.free(piece)
        await rig.memory.drain()
        assert rig.live_objects == live - 1  # the other device was asked all the same
        (item,) = rig.retained.items()
        assert (item.what, item.nbytes) == ("registered memory", 2 * MIB)
        assert "dereg_mr" in item.cause
        assert rig.memory.registered_bytes == 2 * 2 * MIB
        assert rig.memory.statistics().arenas == 0
        await rig.memory.close()
        assert not rig.retained.items()

    with caplog.at_level(logging.ERROR, "orbit.verbs"):
        run(scenario)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_part_that_fails_takes_the_others_with_it() -> None:
    """C42: parts 1 to 3 of a range on both devices, the fourth on the first; then a refusal."""

    async def scenario(rig: PoolRig) -> None:
        live = rig.live_objects
        buffer = bytearray(5 * MIB + 123)
        rig.scripted[1].fail_verb("reg_mr", ENOMEM, skip=3)
        await failed(rig.memory.register(memoryview(buffer)), DeviceError)
        assert rig.live_objects == live
        assert rig.memory.budget.charged_bytes == 0
        buffer.append(0)  # nothing holds its export
        held = await rig.memory.register(memoryview(buffer))
        assert len(held.parts) >= 6
        assert rig.live_objects == live + 2 * len(held.parts)
        await rig.memory.deregister(held)
        assert rig.live_objects == live

    run(scenario, PoolSettings(limit_bytes=MIB, budget_bytes=8 * MIB))


def test_a_rollback_that_is_refused_keeps_the_memory() -> None:
    async def scenario(rig: PoolRig) -> None:
        buffer = bytearray(3 * MIB)
        rig.scripted[1].fail_verb("reg_mr", ENOMEM, skip=2)
        rig.scripted[1].fail_verb("dereg_mr", EBUSY)
        await failed(rig.memory.register(memoryview(buffer)), DeviceError)
        (item,) = rig.retained.items()
        assert item.nbytes >= 3 * MIB
        with pytest.raises(BufferError):
            buffer.append(0)
        await rig.memory.close()
        assert not rig.retained.items()
        buffer.append(0)

    run(scenario, PoolSettings(limit_bytes=MIB))


def test_the_limit_of_the_device_itself_cuts_too() -> None:
    async def main() -> None:
        async with open_pool(PoolSettings(limit_bytes=0), 1) as rig:
            device = rig.contexts[0]
            assert device.region_bytes_max == device.limits.max_region_bytes
            long = memoryview(bytearray(MIB))
            rig.scripted[0].fail_verb("reg_mr", 22)  # as a device says it of what is too long
            error = await failed(rig.memory.register(long), DeviceError)
            assert "length" in getattr(error, "hint", "")

    asyncio.run(main())


def test_a_freed_address_never_meets_its_old_registration() -> None:
    """C30 on the fake: every round has a registration of its own, and nothing is left of it."""

    async def scenario(rig: PoolRig) -> None:
        rng = random.Random(30)
        live, seen = rig.live_objects, []
        memory = bytearray(64 * KIB)
        for _ in range(300):
            held = await rig.memory.register(memoryview(memory)[: rng.randint(1, len(memory))])
            holder = held.parts[0].arena
            assert isinstance(holder, KeyHolder)
            region = holder.region(rig.contexts[0].domain)
            assert region is not None
            assert all(region is not other for other in seen)
            seen.append(region)
            await rig.memory.deregister(held)
            assert region.native == 0
            assert holder.region(rig.contexts[0].domain) is None
            assert rig.memory.registered_bytes == 0
        assert rig.live_objects == live

    run(scenario)


def test_a_registration_that_never_comes_back_is_kept_and_undone_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "REGISTER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(arena_mapping, "REGISTER_TIMEOUT_S", 0.05)

    async def scenario(rig: PoolRig) -> None:
        live, answer = rig.live_objects, threading.Event()
        domain = rig.contexts[0].domain.native
        real = domain.register

        def slow(address: int, length: int, access: int) -> object:
            answer.wait(10)
            return real(address, length, access)

        monkeypatch.setattr(domain, "register", slow)
        buffer = bytearray(100)
        error = await failed(rig.memory.register(memoryview(buffer)), DeviceError)
        assert "answer" in str(error)
        assert [item.what for item in rig.retained.items()] == ["registered memory"]
        with pytest.raises(BufferError):
            buffer.append(0)
        await failed(rig.memory.allocate(1), BusyError)
        assert rig.memory.budget.charged_bytes > 0
        answer.set()
        await until(lambda: rig.memory.budget.charged_bytes == 0)
        assert rig.live_objects == live
        assert not rig.retained.items()
        buffer.append(0)

    run(scenario, count=1)


def test_a_target_is_charged_and_cut_and_holds_its_export() -> None:
    async def scenario(rig: PoolRig) -> None:
        domain = rig.contexts[0].domain
        buffer = bytearray(2 * MIB + 5)
        target = await rig.memory.register_target(domain, memoryview(buffer))
        assert sum(segment.nbytes for segment in target.segments) == len(buffer)
        assert target.segments[0].address == address_of(memoryview(buffer))
        assert len({segment.lkey for segment in target.segments}) == len(target.segments) >= 3
        assert rig.memory.budget.charged_bytes >= len(buffer)
        with pytest.raises(BufferError):
            buffer.append(0)
        rig.scripted[0].fail_verb("dereg_mr", EBUSY)
        await failed(target.close(), DeviceError)
        assert rig.memory.budget.charged_bytes >= len(buffer)
        assert len(rig.retained.items()) == 1
        await target.close()
        assert rig.memory.budget.charged_bytes == len(rig.retained.items()) == 0
        buffer.append(0)
        large = memoryview(bytearray(9 * MIB))
        await failed(rig.memory.register_target(domain, large), BudgetExceeded)

    run(scenario, PoolSettings(limit_bytes=MIB), count=1)


def test_a_cancelled_target_is_rolled_back_first() -> None:
    async def scenario(rig: PoolRig) -> None:
        buffer = bytearray(MIB)
        live = rig.live_objects
        opening = asyncio.ensure_future(
            TargetRegistration.open(
                rig.contexts[0].domain, memoryview(buffer), rig.memory.budget, rig.retained
            )
        )
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        assert rig.memory.budget.charged_bytes == 0
        assert rig.live_objects == live

    run(scenario, count=1)


def test_pieces_of_others_and_second_ends_are_refused() -> None:
    async def scenario(rig: PoolRig) -> None:
        held = await rig.memory.register(memoryview(bytearray(10)))
        with pytest.raises(UsageError):
            rig.memory.free(held.parts[0])
        assert not rig.memory.owns(held.parts[0])
        piece = await rig.memory.allocate(10)
        assert rig.memory.owns(piece)
        rig.memory.free(piece)
        await rig.memory.deregister(held)
        await failed(rig.memory.deregister(held), UsageError)

    run(scenario)


def test_concurrent_ends_of_one_range_meet_in_one_call() -> None:
    async def scenario(rig: PoolRig) -> None:
        held = await rig.memory.register(memoryview(bytearray(10)))
        ends = [asyncio.ensure_future(rig.memory.deregister(held)) for _ in range(5)]
        ends[2].cancel()
        done = await asyncio.gather(*ends, return_exceptions=True)
        assert [result for result in done if result is not None] == [done[2]]
        assert rig.memory.budget.charged_bytes == 0

    run(scenario)


def test_the_timer_lives_only_while_something_may_go() -> None:
    settings = PoolSettings(reclaim_after_s=100.0)

    async def scenario(rig: PoolRig) -> None:
        def armed() -> bool:
            timer = rig.memory._timer
            return timer is not None and timer.armed

        assert await rig.memory.ensure() is PathReason.OK
        assert not armed()  # the floor
        pieces = [await rig.memory.allocate(256 * KIB) for _ in range(2)]
        assert not armed()
        rig.memory.free(pieces[1])
        assert armed()
        pieces[1] = await rig.memory.allocate(256 * KIB)
        assert not armed()
        rig.memory.free(pieces[1])
        rig.memory.gate()
        assert not armed()
        rig.memory.free(pieces[0])

    run(scenario, settings)


@pytest.mark.parametrize("nbytes", [4096, MIB, 2 * MIB, 2 * MIB + 4096, 5 * MIB])
def test_arena_memory_is_exact_aligned_and_writable(nbytes: int) -> None:
    memory = map_arena(nbytes)
    assert memory.view.nbytes == nbytes
    assert memory.address == address_of(memory.view)
    assert memory.address % (2 * MIB if nbytes >= 2 * MIB else 4096) == 0
    memory.view[0] = memory.view[nbytes - 1] = 7
    assert ctypes.string_at(memory.address, 1) == b"\x07"


def test_no_memory_is_a_busy_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise OSError(ENOMEM, "no addresses")

    monkeypatch.setattr(arena_mapping, "map_arena", refuse)

    async def scenario(rig: PoolRig) -> None:
        assert await rig.memory.ensure() is PathReason.POOL_EXHAUSTED
        assert "no addresses" in rig.memory.failure
        assert rig.memory.budget.charged_bytes == 0

    run(scenario)
