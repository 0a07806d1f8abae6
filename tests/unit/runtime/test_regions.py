"""The life of a region: the latch, what waits, what is kept, and guards that nobody held.

ORBIT_SOAK (`make soak`) makes the counts of C19 and C20 the cases' own.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import random
import threading
import warnings
import weakref

import numpy as np
import pytest

from orbit.errors import (
    BudgetExceeded,
    ClosedError,
    OutOfRange,
    RegisterOwnedError,
    Unquiesced,
    UsageError,
)
from orbit.memory.buffer import address_of
from orbit.model import Deregistered
from orbit.runtime import retained
from orbit.runtime.region import RegionUse
from orbit.runtime.region_guards import RegionGuard
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from tests.soak import SOAK
from tests.unit.runtime.region_rig import RegionRig, settle

KIB = 1024
PAGE = mmap.PAGESIZE
RELEASES = 10_000 if SOAK else 500
THREAD_ROUNDS = 100 if SOAK else 10


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[retained.Retained]:
    """What could not be proven, of this test alone."""
    found: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", found)
    return found


def broken_stop() -> None:
    raise OSError("a bug")


def obedient_use(guard: RegionGuard) -> RegionUse:
    """One that ends as soon as it is told to."""
    uses: list[RegionUse] = []

    def stop() -> None:
        uses[0].end()

    uses.append(guard.slice().use(stop))
    return uses[0]


def no_stop() -> None:
    raise AssertionError("nobody was out of time")


def grows(buffer: bytearray) -> bool:
    """Whether nobody holds its export."""
    try:
        buffer.extend(b"x")
    except BufferError:
        return False
    return True


# --- the release signal ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [True, False])
def test_the_latch_comes_after_the_devices_confirmed(devices: bool) -> None:
    async def main() -> None:
        rig = RegionRig(devices=devices)
        buffer = bytearray(64 * KIB)
        guard = await rig.regions.register_owned(buffer)
        assert guard.registered is devices
        assert guard.nbytes == 64 * KIB
        assert not grows(buffer)
        latch = asyncio.ensure_future(guard.deregistered())
        await settle()
        assert not latch.done()
        if devices:
            rig.memory.open.clear()
            guard.unregister()
            await settle()
            assert not latch.done()
            assert not grows(buffer)
            rig.memory.open.set()
        assert await guard.unregister() is Deregistered.DRAINED
        assert await latch is Deregistered.DRAINED
        assert await guard.deregistered() is Deregistered.DRAINED
        assert not guard.registered
        assert grows(buffer)
        await rig.check_nothing_left()

    run_virtual(main())


def test_what_was_pinned_is_whole_pages_and_without_devices_nothing_more_than_the_range() -> None:
    async def main() -> None:
        array = np.zeros(3 * PAGE, "u1")[100 : 100 + PAGE]
        start = address_of(memoryview(array))
        async with await RegionRig().regions.register_owned(array) as guard:
            pinned = guard.effective_range
            assert pinned.start % PAGE == 0
            assert len(pinned) % PAGE == 0
            assert pinned.start <= start
            assert start + PAGE <= pinned.stop < start + 3 * PAGE
        async with await RegionRig(devices=False).regions.register_owned(array) as guard:
            assert guard.effective_range == range(start, start + PAGE)

    run_virtual(main())


def test_unregister_waits_for_what_uses_it_and_refuses_the_next() -> None:
    async def main() -> None:
        rig = RegionRig()
        guard = await rig.regions.register_owned(bytearray(KIB))
        use = guard.slice(10, 20).use(no_stop)
        assert use.live
        ending = [guard.unregister(), guard.unregister(timeout=5.0)]
        await asyncio.sleep(4.0)
        assert not any(future.done() for future in ending)
        assert not use.live
        with pytest.raises(ClosedError):
            guard.slice(0, 1).use(no_stop)
        assert use.span.nbytes == 20
        use.end()
        use.end()
        assert await asyncio.gather(*ending) == [Deregistered.DRAINED] * 2
        assert await guard.unregister() is Deregistered.DRAINED
        await rig.check_nothing_left()

    run_virtual(main())


@pytest.mark.parametrize("timeout", [0, 2.0])
def test_out_of_time_uses_are_ended_by_force_and_still_waited_for(timeout: float) -> None:
    async def main() -> None:
        rig = RegionRig()
        guard = await rig.regions.register_owned(bytearray(KIB))
        stopped: list[float] = []
        loop = asyncio.get_running_loop()
        slow = guard.slice().use(lambda: stopped.append(loop.time()))
        obedient_use(guard)
        broken = guard.slice().use(broken_stop)
        ending = guard.unregister(timeout)
        await asyncio.sleep(10.0)
        assert stopped == [timeout]
        assert not ending.done()
        broken.end()
        await settle()
        assert not ending.done()
        slow.end()
        assert await ending is Deregistered.DRAIN_TIMED_OUT
        assert await guard.deregistered() is Deregistered.DRAIN_TIMED_OUT
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_later_call_can_shorten_the_wait() -> None:
    async def main() -> None:
        rig = RegionRig()
        guard = await rig.regions.register_owned(bytearray(KIB))
        obedient_use(guard)
        patient = guard.unregister()
        assert await guard.unregister(timeout=1.0) is Deregistered.DRAIN_TIMED_OUT
        assert await patient is Deregistered.DRAIN_TIMED_OUT

    run_virtual(main())


def test_a_cancelled_waiter_stops_nothing() -> None:
    async def main() -> None:
        rig = RegionRig()
        guard = await rig.regions.register_owned(bytearray(KIB))
        use = guard.slice().use(no_stop)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guard.unregister(), 1.0)
        other = asyncio.ensure_future(guard.deregistered())
        use.end()
        assert await other is Deregistered.DRAINED
        await rig.check_nothing_left()

    run_virtual(main())


# --- what could not be proven ---------------------------------------------------------------------


def test_a_refusing_device_keeps_the_memory_and_a_retry_frees_it(
    kept: list[retained.Retained],
) -> None:
    async def main() -> None:
        rig = RegionRig()
        rig.memory.refuse(2)
        buffer = bytearray(KIB)
        guard = await rig.regions.register_owned(buffer)
        latch = asyncio.ensure_future(guard.deregistered())
        for _ in range(2):
            with pytest.raises(Unquiesced, match="simulated"):
                await guard.unregister()
            await settle()
            assert not latch.done()
            assert not grows(buffer)
            assert [entry.nbytes for entry in kept] == [KIB]
        assert await guard.unregister() is Deregistered.DRAINED
        assert await latch is Deregistered.DRAINED
        assert grows(buffer)
        assert not kept
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_use_without_a_proof_keeps_the_region_for_ever(kept: list[retained.Retained]) -> None:
    async def main() -> None:
        rig = RegionRig()
        buffer = bytearray(KIB)
        guard = await rig.regions.register_owned(buffer)
        guard.slice().use(no_stop).keep("the queue pair would not drain")
        another = guard.slice().use(no_stop)  # what is proven of others still counts
        ending = guard.unregister()
        another.end()
        with pytest.raises(Unquiesced, match="would not drain"):
            await ending
        with pytest.raises(Unquiesced):
            await guard.unregister(timeout=0)
        await rig.regions.latch_all()
        latch = asyncio.ensure_future(guard.deregistered())
        await settle()
        assert not latch.done()
        latch.cancel()
        assert not grows(buffer)
        assert len(kept) == 1
        assert rig.memory.regions == 1

    run_virtual(main())


# --- guards that nobody held ----------------------------------------------------------------------


def drop(guards: list[RegionGuard]) -> list[str]:
    """Drop the guard, wherever this runs; the warnings of that."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        guards.clear()
        gc.collect()
    return [str(one.message) for one in seen if one.category is ResourceWarning]


def test_a_dropped_guard_warns_and_deregisters(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        rig = RegionRig()
        buffer = bytearray(KIB)
        guards = [await rig.regions.register_owned(buffer)]
        watch = guards[0].watch()
        assert watch.live
        (text,) = drop(guards)
        assert "test_regions.py:" in text
        assert "test_regions.py:" in caplog.text
        assert await watch.deregistered() is Deregistered.DRAINED
        assert not watch.live
        assert grows(buffer)
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_drop_waits_for_uses_as_long_as_it_may() -> None:
    async def main() -> None:
        rig = RegionRig(drop_timeout_s=3.0)
        guards = [await rig.regions.register_owned(bytearray(KIB))]
        obedient_use(guards[0])
        watch = guards[0].watch()
        assert len(drop(guards)) == 1
        await asyncio.sleep(2.9)
        assert rig.memory.regions == 1
        assert await watch.deregistered() is Deregistered.DRAIN_TIMED_OUT
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_drop_in_another_thread_and_while_the_loop_is_busy() -> None:
    async def main() -> None:
        rig = RegionRig()
        guards = [await rig.regions.register_owned(bytearray(KIB))]
        watch = guards[0].watch()
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.extend(drop(guards)))
        thread.start()
        thread.join()  # the loop runs nothing meanwhile, and the drop does not wait for it
        assert len(seen) == 1
        assert await asyncio.wait_for(watch.deregistered(), 10) is Deregistered.DRAINED
        await rig.check_nothing_left()

    asyncio.run(main())


@pytest.mark.parametrize("devices", [True, False])
def test_a_drop_after_the_loop_is_closed_keeps_what_is_registered(
    devices: bool, kept: list[retained.Retained], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> tuple[RegionRig, list[RegionGuard], bytearray]:
        rig = RegionRig(devices=devices)
        buffer = bytearray(KIB)
        return rig, [await rig.regions.register_owned(buffer)], buffer

    _, guards, buffer = run_virtual(main())
    assert len(drop(guards)) == 1
    assert len(kept) == devices
    assert not grows(buffer)


def test_a_guard_that_was_unregistered_is_dropped_in_silence() -> None:
    async def main() -> None:
        rig = RegionRig()
        guards = [await rig.regions.register_owned(bytearray(KIB))]
        guards[0].unregister()
        assert drop(guards) == []
        await settle()
        await rig.check_nothing_left()

    run_virtual(main())


def test_releases_that_nobody_awaits_release() -> None:
    """C20: the call alone does it."""

    async def main() -> None:
        rig = RegionRig()
        for number in range(RELEASES):
            guard = await rig.regions.register_owned(bytearray(KIB))
            if number % 3 == 0:
                guard.unregister_owned()
            elif number % 3 == 1:
                guard.unregister(timeout=1.0)
            else:
                with pytest.raises(ZeroDivisionError):
                    async with guard:
                        raise ZeroDivisionError
            del guard
        await asyncio.sleep(1.0)
        assert rig.memory.statistics().registrations["external"] == RELEASES
        await rig.check_nothing_left()

    run_virtual(main())


# --- buffers --------------------------------------------------------------------------------------


def test_the_buffer_is_held_until_the_end_and_no_longer() -> None:
    """C07: the registration holds the export, not an address."""

    async def main() -> None:
        rig = RegionRig()
        array = np.full(8 * KIB, 7, "u1")
        alive = weakref.ref(array)
        guard = await rig.regions.register_owned(array)
        del array
        gc.collect()
        assert alive() is not None
        await guard.unregister()
        gc.collect()
        assert alive() is None  # though the guard lives
        buffer = bytearray(KIB)
        guard = await rig.regions.register_owned(buffer)
        with pytest.raises(BufferError):
            buffer.extend(b"x")
        how, given_back = await guard.unregister_owned()
        assert (how, given_back is buffer) == (Deregistered.DRAINED, True)
        buffer.extend(b"x")
        with pytest.raises(ClosedError):
            guard.unregister_owned()

    run_virtual(main())


def test_a_refused_buffer_comes_back() -> None:
    async def main() -> None:
        rig = RegionRig()
        buffer = bytearray(KIB)
        rig.memory.over_budget = True
        with pytest.raises(RegisterOwnedError) as refused:
            await rig.regions.register_owned(buffer)
        assert refused.value.buffer is buffer
        assert isinstance(refused.value.cause, BudgetExceeded)
        assert grows(buffer)
        with pytest.raises(BudgetExceeded):
            await rig.regions.register_external_memory(address_of(memoryview(buffer)), 8, None)
        rig.regions.gate()
        with pytest.raises(RegisterOwnedError) as refused:
            await rig.regions.register_owned(buffer)
        assert isinstance(refused.value.cause, ClosedError)
        await rig.check_nothing_left()

    run_virtual(main())


def test_degenerate_memory_is_refused() -> None:
    async def main() -> None:
        rig = RegionRig()
        for bad in (bytearray(), b"read-only", memoryview(bytearray(10))[::2], 7, [bytearray(3)]):
            with pytest.raises(UsageError):
                await rig.regions.register_owned(bad)
        for address, nbytes in (
            (4096, 0),
            (0, 10),
            (-1, 10),
            (4096, -1),
            ((1 << 64) - 10, 11),
            (4096, 1 << 64),
        ):
            with pytest.raises(UsageError):
                await rig.regions.register_external_memory(address, nbytes, None)
        guard = await rig.regions.register_owned(bytearray(100))
        for offset, size in ((-1, 1), (0, 101), (101, 0), (101, None), (50, 51), (5, -1)):
            with pytest.raises(OutOfRange):
                guard.slice(offset, size)
        assert guard.slice(100).nbytes == 0
        empty = guard.slice(100, 0).use(no_stop)
        assert empty.span.nbytes == empty.target.nbytes == 0
        empty.end()
        for bad_timeout in (-1, float("inf"), float("nan")):
            with pytest.raises(UsageError):
                guard.unregister(bad_timeout)
        assert guard.watch().live
        await guard.unregister(timeout=0)

    run_virtual(main())


def test_memory_by_address() -> None:
    async def main() -> None:
        rig = RegionRig()
        array = np.arange(100, dtype="u1")
        alive = weakref.ref(array)
        guard = await rig.regions.register_external_memory(
            address_of(memoryview(array)) + 10, 50, array
        )
        use = guard.slice(5, 3).use(no_stop)
        assert bytes(use.span.view) == bytes([15, 16, 17])
        use.target.view[:] = b"abc"
        assert bytes(array[15:18]) == b"abc"
        use.end()
        with pytest.raises(UsageError):
            guard.unregister_owned()
        del array
        gc.collect()
        assert alive() is not None
        await guard.unregister()
        assert alive() is None

    run_virtual(main())


def test_a_range_over_several_registrations_is_one_payload() -> None:
    async def main() -> None:
        rig = RegionRig(limit_bytes=PAGE)
        size = 4 * PAGE + 500
        data = pattern(size)
        memory = mmap.mmap(-1, size)
        memory[:] = data
        guard = await rig.regions.register_owned(memory)
        for offset, nbytes, pieces in (
            (0, size, 5),
            (PAGE - 1, 2, 2),
            (PAGE, PAGE, 1),
            (size - 1, 1, 1),
        ):
            use = guard.slice(offset, nbytes).use(no_stop)
            assert b"".join(piece.view for piece in use.span.pieces) == data[offset:][:nbytes]
            assert len(use.span.pieces) == len(use.target.pieces) == pieces
            assert use.span.all_pinned
            for piece in use.target.pieces:
                assert piece.pinned is not None
                assert piece.pinned.address == address_of(piece.view)
            use.end()
            assert use.span.nbytes == use.target.nbytes == 0
        del use, piece
        await guard.unregister()

    run_virtual(main())


# --- the end of a node ----------------------------------------------------------------------------


def test_a_registration_in_progress_is_not_missed() -> None:
    async def main() -> None:
        rig = RegionRig()
        rig.memory.open.clear()
        registering = asyncio.ensure_future(rig.regions.register_owned(bytearray(KIB)))
        await settle()
        rig.regions.gate()
        draining = asyncio.ensure_future(rig.regions.drain())
        ending = asyncio.ensure_future(rig.regions.deregister_all())
        await settle()
        assert not draining.done()
        assert not ending.done()
        rig.memory.open.set()
        guard = await registering
        await draining
        await ending
        assert await guard.deregistered() is Deregistered.DRAINED
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_cancelled_registration_holds_nothing() -> None:
    async def main() -> None:
        rig = RegionRig()
        rig.memory.open.clear()
        buffer = bytearray(KIB)
        registering = asyncio.ensure_future(rig.regions.register_owned(buffer))
        await settle()
        registering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await registering
        await rig.regions.drain()
        assert grows(buffer)
        await rig.check_nothing_left()

    run_virtual(main())


def test_the_end_forces_uses_and_latches_all_but_what_is_not_proven(
    kept: list[retained.Retained],
) -> None:
    async def main() -> None:
        rig = RegionRig()
        guards = [await rig.regions.register_owned(bytearray(KIB)) for _ in range(3)]
        idle, used, stuck = guards
        obedient_use(used)
        stuck.slice().use(lambda: None)
        rig.regions.gate()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rig.regions.drain(), 1.0)
        ending = asyncio.ensure_future(rig.regions.deregister_all())
        assert await idle.deregistered() is Deregistered.DRAINED
        assert await used.deregistered() is Deregistered.DRAIN_TIMED_OUT
        await asyncio.sleep(1.0)
        assert not ending.done()
        ending.cancel()
        await rig.regions.latch_all()
        latch = asyncio.ensure_future(stuck.deregistered())
        await settle()
        assert not latch.done()
        latch.cancel()
        assert len(kept) == 1
        assert rig.memory.regions == 1

    run_virtual(main())


def test_what_a_device_refused_is_released_when_it_lets_go_at_the_end(
    kept: list[retained.Retained],
) -> None:
    async def main() -> None:
        rig = RegionRig()
        rig.memory.refuse(1)
        guard = await rig.regions.register_owned(bytearray(KIB))
        await rig.regions.deregister_all()
        assert len(kept) == 1
        await rig.regions.latch_all()
        assert await guard.deregistered() is Deregistered.DRAINED
        assert not kept
        await rig.check_nothing_left()

    run_virtual(main())


# --- the same memory twice ------------------------------------------------------------------------


def test_the_same_memory_from_sixteen_threads() -> None:
    """C19: whole, halves and neighbours in one page, registered and unregistered at random."""

    async def main() -> None:
        rig = RegionRig()
        array = np.zeros(1 << 20, "u1")
        ranges = [array, array[: 1 << 19], array[1 << 19 :], array[:100], array[100:200]]
        loop = asyncio.get_running_loop()

        def one_thread(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(THREAD_ROUNDS):
                buffer = ranges[0] if seed % 2 else chance.choice(ranges)
                register = rig.regions.register_owned(buffer)
                guard = asyncio.run_coroutine_threadsafe(register, loop).result(30)

                async def unregister(guard: RegionGuard = guard) -> Deregistered:
                    return await guard.unregister()

                ended = asyncio.run_coroutine_threadsafe(unregister(), loop).result(30)
                assert ended is Deregistered.DRAINED

        await asyncio.gather(*(asyncio.to_thread(one_thread, seed) for seed in range(16)))
        await rig.check_nothing_left()

    asyncio.run(main())
