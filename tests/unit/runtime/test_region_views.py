"""A region with two registrations: which of them serves whom, and that a region, or a batch, is
registered as a whole or not at all.
"""

from __future__ import annotations

import asyncio

import pytest

from orbit.errors import BudgetExceeded, ClosedError, DeviceError, Unquiesced, UsageError
from orbit.memory.pages import whole_pages
from orbit.model import Deregistered
from orbit.runtime import retained
from orbit.runtime.region import Region
from orbit.testing.clock import run_virtual
from orbit.testing.sim_memory import Refusals, is_live
from orbit.transport.interface import PinnedBuffer, RegisteredRange, Target
from tests.unit.runtime.region_rig import RegionRig, SlowMemory, settle

KIB = 1024


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[retained.Retained]:
    """What could not be proven, of this test alone."""
    found: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", found)
    return found


class FailingMemory(SlowMemory):
    """Registers `good` times, then fails with `error`, or not at all when `stuck`; then devices
    keep the next `kept`.
    """

    good = 1
    kept = 0
    stuck = False
    error: BaseException = DeviceError("simulated", "reg_mr", 12)
    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        self.asked += 1
        if self.asked > self.good:
            self.refusals = Refusals(deregistrations=self.kept)
            self.reached.set()
            await asyncio.sleep(1e9 if self.stuck else 0)
            raise self.error
        return await super().register(view, remote=remote)


def failing(rig: RegionRig, memory: FailingMemory) -> RegionRig:
    rig.memory = memory
    rig.regions = type(rig.regions)(memory, rig.runner, rig.recorder, 30.0)
    return rig


def pieces(target: Target) -> list[PinnedBuffer]:
    found = [piece.pinned for piece in target.pieces if piece.pinned is not None]
    assert len(found) == len(target.pieces)
    return found


def grows(buffer: bytearray) -> bool:
    """Whether nobody holds its export."""
    try:
        buffer.extend(b"x")
    except BufferError:
        return False
    buffer.pop()
    return True


async def views_of(region: Region) -> tuple[list[PinnedBuffer], list[PinnedBuffer]]:
    uses = [region.use(0, region.nbytes, lambda: None, own=own) for own in (True, False)]
    found = [pieces(use.target) for use in uses]
    for use in uses:
        use.end()
    return found[0], found[1]


def test_each_side_has_a_registration_of_its_own() -> None:
    async def main() -> None:
        rig = RegionRig(limit_bytes=16 * KIB)
        buffer = bytearray(40 * KIB)
        region = await rig.regions.open(buffer, own=True, peers=True)
        own, peers = await views_of(region)
        assert len(own) == len(peers) >= 3
        memory = rig.memory
        assert [is_live(memory, piece) for piece in own + peers] == [True] * len(own + peers)
        assert not any(is_live(memory, piece, remote=True) for piece in own)
        assert all(is_live(memory, piece, remote=True) for piece in peers)
        assert [piece.address for piece in own] == [piece.address for piece in peers]
        assert region.memory.address == own[0].address
        assert region.view.nbytes == len(buffer)
        assert memory.registered_bytes == 2 * len(region.memory.effective_range)
        assert await region.unregister() is Deregistered.DRAINED
        assert grows(buffer)
        with pytest.raises(ClosedError):
            _ = region.view
        await rig.check_nothing_left()

    run_virtual(main())


@pytest.mark.parametrize("own", [True, False])
def test_one_registration_where_one_is_enough(own: bool) -> None:
    async def main() -> None:
        rig = RegionRig()
        region = await rig.regions.open(bytearray(KIB), own=own, peers=not own)
        use = region.use(0, KIB, lambda: None, own=True)
        assert is_live(rig.memory, pieces(use.target)[0], remote=not own)
        use.end()
        assert rig.memory.regions == 1
        if own:  # nothing that a window could be bound in
            use = region.use(0, KIB, lambda: None)
            assert use.target.pinned is None
            use.end()
        await region.unregister()
        await rig.check_nothing_left()

    run_virtual(main())


def test_without_devices_both_sides_have_plain_memory() -> None:
    async def main() -> None:
        rig = RegionRig(devices=False)
        region = await rig.regions.open(bytearray(KIB), own=True, peers=True)
        for own in (True, False):
            use = region.use(0, KIB, lambda: None, own=own)
            assert use.target.pinned is None
            use.end()
        await region.unregister()
        await rig.check_nothing_left()

    run_virtual(main())


@pytest.mark.parametrize(
    "error", [DeviceError("simulated", "reg_mr", 12), BudgetExceeded("b", 1, 0, 0, "knob")]
)
def test_the_first_registration_goes_when_the_second_is_refused(error: Exception) -> None:
    async def main() -> None:
        rig = failing(RegionRig(), FailingMemory())
        assert isinstance(rig.memory, FailingMemory)
        rig.memory.error = error
        buffer = bytearray(KIB)
        with pytest.raises(type(error)) as caught:
            await rig.regions.open(buffer, own=True, peers=True)
        assert caught.value is error
        assert grows(buffer)
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_second_registration_that_is_cancelled_takes_the_first_with_it() -> None:
    async def main() -> None:
        memory = FailingMemory()
        rig = failing(RegionRig(), memory)
        buffer = bytearray(KIB)
        memory.stuck = True
        opening = asyncio.ensure_future(rig.regions.open(buffer, own=True, peers=True))
        await memory.reached.wait()
        memory.open.clear()
        opening.cancel()
        await settle()
        opening.cancel()  # the rollback is not cut short by that
        await settle()
        assert not opening.done()
        assert not grows(buffer)
        rig.memory.open.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert grows(buffer)
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_rollback_that_a_device_refuses_keeps_the_region(
    kept: list[retained.Retained],
) -> None:
    async def main() -> None:
        memory = FailingMemory()
        memory.kept = 1
        rig = failing(RegionRig(), memory)
        buffer = bytearray(KIB)
        with pytest.raises(Unquiesced) as caught:
            await rig.regions.open(buffer, own=True, peers=True)
        assert caught.value.__cause__ is memory.error
        assert not grows(buffer)
        assert [entry.nbytes for entry in kept] == [KIB]
        assert len(rig.regions) == 1
        assert memory.registered_bytes >= whole_pages(KIB)
        rig.regions.gate()
        await rig.regions.latch_all()  # another attempt, as a node's close makes it
        assert grows(buffer)
        assert not kept
        await rig.check_nothing_left()

    run_virtual(main())


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_is_registered_together() -> None:
    async def main() -> None:
        rig = RegionRig()
        buffers = [bytearray(KIB) for _ in range(5)]
        regions = await rig.regions.open_many(buffers, own=True, peers=True)
        assert [region.source for region in regions] == buffers
        assert rig.memory.regions == 10
        for region in regions:
            await region.unregister()
        assert await rig.regions.open_many([], own=True, peers=True) == []
        await rig.check_nothing_left()

    run_virtual(main())


@pytest.mark.parametrize("good", range(6))
def test_a_batch_that_fails_anywhere_leaves_nothing(good: int) -> None:
    async def main() -> None:
        memory = FailingMemory()
        memory.good = good
        rig = failing(RegionRig(), memory)
        buffers = [bytearray(KIB) for _ in range(3)]
        with pytest.raises(DeviceError) as caught:
            await rig.regions.open_many(buffers, own=True, peers=True)
        assert caught.value is memory.error
        assert all(grows(buffer) for buffer in buffers)
        await rig.check_nothing_left()

    run_virtual(main())


def test_what_is_no_memory_fails_the_batch() -> None:
    async def main() -> None:
        rig = RegionRig()
        buffer = bytearray(KIB)
        for wrong in (b"read-only", bytearray(), "text"):
            with pytest.raises(UsageError):
                await rig.regions.open_many([buffer, wrong], own=True, peers=True)
        assert grows(buffer)
        await rig.check_nothing_left()

    run_virtual(main())


def test_a_batch_keeps_what_does_not_come_off_and_only_that(
    kept: list[retained.Retained],
) -> None:
    async def main() -> None:
        memory = FailingMemory()
        memory.good, memory.kept = 5, 1
        rig = failing(RegionRig(), memory)
        buffers = [bytearray((n + 1) * KIB) for n in range(3)]
        with pytest.raises(Unquiesced):
            await rig.regions.open_many(buffers, own=True, peers=True)
        assert sum(not grows(buffer) for buffer in buffers) == 1
        assert len(rig.regions) == len(kept) == 1
        await rig.regions.latch_all()
        assert all(grows(buffer) for buffer in buffers)
        await rig.check_nothing_left()

    run_virtual(main())
