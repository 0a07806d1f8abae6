"""The slot store beside an independent model: ten thousand random lives, and planted mistakes that
the same runs must find.
"""

from __future__ import annotations

import pytest

from orbit.errors import BusyError, UnknownHandle
from orbit.model import Direction, Handle, LeaseEnd, LeaseId, WorkerId
from orbit.protocol.slots import EpochId, FreeSlot, LeaseState, SlotEffect, SlotState, SlotStore
from orbit.protocol.slots import _Lease as Lease
from orbit.protocol.slots import _Slot as Slot

from .slot_runs import SlotRun

RUNS = 10_000
MUTANT_RUNS = 500


def test_ten_thousand_random_lives_agree_with_the_model() -> None:
    for seed in range(RUNS):
        try:
            SlotRun(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# --- planted mistakes: background 4.2 of the checklist, and some of our own -----------------------


class LockThenReference(SlotStore):
    """4.2 (1): the lock goes first, and what that left is not looked at when the reference goes."""

    def release(
        self, handle: Handle, lease_id: LeaseId, epoch: EpochId, *, transferred: bool = True
    ) -> list[SlotEffect]:
        lease = self._held(handle, lease_id, epoch)
        if lease is None:
            return []
        effects = self._end(lease, LeaseEnd.RELEASED, drop=False, transferred=transferred)
        slot = lease.slot
        slot.refcount = max(1 if slot.retain else 0, slot.refcount - 1)
        return effects


class LastDetachFreesNothing(SlotStore):
    """4.2 (2): only a release frees."""

    def detach(
        self, handle: Handle, lease_id: LeaseId, epoch: EpochId, *, transferred: bool = True
    ) -> list[SlotEffect]:
        effects = super().detach(handle, lease_id, epoch, transferred=transferred)
        lease = self._leases.get(lease_id)
        if effects and lease is not None and lease.slot.state is SlotState.QUIESCING:
            lease.slot.state = SlotState.LEAVING
            lease.slot.held.add(LeaseId(0))
        return effects


class Resurrection(SlotStore):
    """4.2 (3): a slot without references is served and counted up again."""

    def _serving(self, handle: Handle) -> Slot:
        slot = self._slots.get(handle.slot_id)
        if slot is None or handle.worker_id != self._worker_id:
            raise UnknownHandle(str(handle))
        if slot.state is not SlotState.LEAVING:
            return super()._serving(handle)
        return slot


class AnyWorkersHandle(SlotStore):
    """4.2 (4): the worker id of a handle is not looked at."""

    def _serving(self, handle: Handle) -> Slot:
        return super()._serving(Handle(self._worker_id, handle.slot_id))


class WrongPairConsumes(SlotStore):
    """4.2 (7): a lease under the wrong handle is ended."""

    def _held(self, handle: Handle, lease_id: LeaseId, epoch: EpochId) -> Lease | None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.epoch == epoch and lease.state is LeaseState.HELD:
            return lease
        return super()._held(handle, lease_id, epoch)


class NobodyReaps(SlotStore):
    """4.2 (8): leases have no deadline."""

    def arm(self, *args: object, **named: object) -> float:
        granted = super().arm(*args, **named)  # type: ignore[arg-type]
        self._lease_deadlines.discard(args[0])  # type: ignore[arg-type]
        return granted


class NoTimeToLive(SlotStore):
    """4.2 (8): the time-to-live is kept and never read."""

    def register(self, *args: object, **named: object) -> Handle:
        named["deadline"] = None
        return super().register(*args, **named)  # type: ignore[arg-type]


class FreedUnderALease(SlotStore):
    """Memory goes before the end of its last lease is proven."""

    def _settle(self, slot: Slot) -> list[SlotEffect]:
        unconfirmed, slot.unconfirmed = slot.unconfirmed, set()
        effects = super()._settle(slot)
        slot.unconfirmed = unconfirmed
        return effects


class ReapingKeepsTheReference(SlotStore):
    """A forced release drops the lock alone."""

    def _end(
        self, lease: Lease, how: LeaseEnd, *, drop: bool, transferred: bool = False
    ) -> list[SlotEffect]:
        return super()._end(
            lease, how, drop=drop and how is not LeaseEnd.REAPED, transferred=transferred
        )


class ForcedReleaseIgnoresRetain(SlotStore):
    """A consumer that dies takes the owner's own reference with it."""

    def _end(
        self, lease: Lease, how: LeaseEnd, *, drop: bool, transferred: bool = False
    ) -> list[SlotEffect]:
        if how is LeaseEnd.PEER_LOST:
            lease.slot.retain = False
        return super()._end(lease, how, drop=drop, transferred=transferred)


class TwoWriters(SlotStore):
    """A writer is admitted while the end of the last one is not proven."""

    def acquire(
        self,
        handle: Handle,
        epoch: EpochId,
        direction: Direction = Direction.READ,
        *,
        ranged: bool = False,
    ) -> LeaseId:
        slot = self._slots.get(handle.slot_id)
        if slot is None or slot.held:
            return super().acquire(handle, epoch, direction, ranged=ranged)
        unconfirmed, slot.unconfirmed = slot.unconfirmed, set()
        try:
            return super().acquire(handle, epoch, direction, ranged=ranged)
        finally:
            slot.unconfirmed = unconfirmed


class AnyDirection(SlotStore):
    """A destination is read."""

    def acquire(
        self,
        handle: Handle,
        epoch: EpochId,
        direction: Direction = Direction.READ,
        *,
        ranged: bool = False,
    ) -> LeaseId:
        slot = self._slots.get(handle.slot_id)
        if slot is not None:
            slot.directions |= {direction}
        return super().acquire(handle, epoch, direction, ranged=ranged)


class RangedSlotsHaveOneWriter(SlotStore):
    """Writers of a ranged slot keep each other out."""

    def acquire(
        self,
        handle: Handle,
        epoch: EpochId,
        direction: Direction = Direction.READ,
        *,
        ranged: bool = False,
    ) -> LeaseId:
        slot = self._slots.get(handle.slot_id)
        if slot is not None and slot.held and direction is Direction.WRITE:
            raise BusyError("a writer")
        return super().acquire(handle, epoch, direction, ranged=ranged)


class EitherKind(SlotStore):
    """A ranged slot is read as a whole."""

    def acquire(
        self,
        handle: Handle,
        epoch: EpochId,
        direction: Direction = Direction.READ,
        *,
        ranged: bool = False,
    ) -> LeaseId:
        slot = self._slots.get(handle.slot_id)
        return super().acquire(
            handle, epoch, direction, ranged=ranged if slot is None else slot.ranged
        )


class RetiredLeasesGoOn(SlotStore):
    """What a retired slot has left cannot be ended by force."""

    def withdraw(self, handle: Handle, *, retired: bool = False) -> list[SlotEffect]:
        slot = self._slots.get(handle.slot_id)
        if retired and (slot is None or not slot.refcount):
            return []
        return super().withdraw(handle, retired=retired)


class EpochForgetsALease(SlotStore):
    """The end of an epoch misses its last lease."""

    def end_epoch(self, epoch: EpochId) -> list[SlotEffect]:
        effects: list[SlotEffect] = []
        for lease_id in list(self._epochs.get(epoch, ()))[:-1]:
            effects += self._end(self._leases[lease_id], LeaseEnd.PEER_LOST, drop=True)
        return effects


class RenewalIsIdle(SlotStore):
    """A renewal is accepted and moves nothing."""

    def renew(self, handle: Handle, lease_id: LeaseId, epoch: EpochId, now: float) -> bool:
        return self._held(handle, lease_id, epoch) is not None


class LateEndCountsAgain(SlotStore):
    """A second release of one lease takes a second reference."""

    def release(
        self, handle: Handle, lease_id: LeaseId, epoch: EpochId, *, transferred: bool = True
    ) -> list[SlotEffect]:
        held = self.is_held(lease_id)
        effects = super().release(handle, lease_id, epoch, transferred=transferred)
        slot = self._slots.get(handle.slot_id)
        if not held and slot is not None and slot.refcount > 1:
            slot.refcount -= 1
        return effects


class TimerOutlivesItsSlot(SlotStore):
    """The time-to-live of a slot that went early stays armed."""

    def _settle(self, slot: Slot) -> list[SlotEffect]:
        armed = slot.slot_id in self._slot_deadlines
        effects = super()._settle(slot)
        if armed and effects:
            self._slot_deadlines.set(slot.slot_id, 1e9)
        return effects


class ExpirySparesReaders(SlotStore):
    """A time-to-live waits for the leases of its slot."""

    def due(self, now: float) -> list[SlotEffect]:
        for slot in self._slots.values():
            if slot.held and slot.slot_id in self._slot_deadlines:
                self._slot_deadlines.set(slot.slot_id, now + 1e6)
        return super().due(now)


class FreedTwice(SlotStore):
    """Two confirmations free one slot twice."""

    def quiesced(self, lease_id: LeaseId) -> list[SlotEffect]:
        effects = super().quiesced(lease_id)
        return [*effects, *[e for e in effects if isinstance(e, FreeSlot)]]


MUTANTS = [
    LockThenReference,
    LastDetachFreesNothing,
    Resurrection,
    AnyWorkersHandle,
    WrongPairConsumes,
    NobodyReaps,
    NoTimeToLive,
    FreedUnderALease,
    ReapingKeepsTheReference,
    ForcedReleaseIgnoresRetain,
    TwoWriters,
    AnyDirection,
    RangedSlotsHaveOneWriter,
    EitherKind,
    RetiredLeasesGoOn,
    EpochForgetsALease,
    RenewalIsIdle,
    LateEndCountsAgain,
    TimerOutlivesItsSlot,
    ExpirySparesReaders,
    FreedTwice,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_planted_mistake_is_found(mutant: type[SlotStore]) -> None:
    def made(worker_id: WorkerId, lease_timeout_s: float) -> SlotStore:
        return mutant(worker_id, lease_timeout_s)

    for seed in range(MUTANT_RUNS):
        try:
            SlotRun(seed, made).run()
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} survived {MUTANT_RUNS} runs")
