"""An owner's staged payloads and the leases on them: who may read, who frees, and when.

Two counters rule a slot: references and held leases. Whoever makes both zero frees it, in that one
step, and its memory goes only after the retraction of every lease was confirmed. It knows no
buffer, path or clock: the runtime keeps the payloads by slot id, carries out the effects, and feeds
`quiesced` or `unquiesced` for each retracted lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from ..errors import ClosedError, InternalError, LeaseError, UnknownHandle
from ..model import Handle, LeaseEnd, LeaseId, Metadata, SlotId, WorkerId

_StateT = TypeVar("_StateT", bound=StrEnum)

EpochId = bytes  # names one epoch of one peer (Session.attempt)
LOCAL_EPOCH: EpochId = b""  # leases that this node takes on its own slots

LEASE_TIMEOUT_S = 30.0
LEASE_TIMEOUT_S_MIN = 0.001  # 0 means "no deadline" on the wire
SCAN_PERIOD_S_MIN = 0.010


class SlotState(StrEnum):
    SERVING = "serving"  # leases may be taken
    LEAVING = "leaving"  # no reference is left; leases are
    QUIESCING = "quiescing"  # both counters are zero; a retraction is not confirmed yet
    FREED = "freed"


class LeaseState(StrEnum):
    HELD = "held"
    RETRACTING = "retracting"  # ended; the path has not confirmed yet
    UNQUIESCED = "unquiesced"  # ended; the path could not prove the end of access
    QUIESCED = "quiesced"


SLOT_TABLE: Mapping[SlotState, frozenset[SlotState]] = {
    SlotState.SERVING: frozenset({SlotState.LEAVING, SlotState.QUIESCING, SlotState.FREED}),
    SlotState.LEAVING: frozenset({SlotState.QUIESCING, SlotState.FREED}),
    SlotState.QUIESCING: frozenset({SlotState.FREED}),
    SlotState.FREED: frozenset(),
}
LEASE_TABLE: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.HELD: frozenset({LeaseState.RETRACTING}),
    LeaseState.RETRACTING: frozenset({LeaseState.UNQUIESCED, LeaseState.QUIESCED}),
    LeaseState.UNQUIESCED: frozenset({LeaseState.QUIESCED}),  # the proof came late
    LeaseState.QUIESCED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RetractLease:
    """Take the lease's authority back, then feed `quiesced` or `unquiesced`. `transferred`: the
    consumer said so.
    """

    slot_id: SlotId
    lease_id: LeaseId
    epoch: EpochId
    how: LeaseEnd
    transferred: bool


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """Nobody can reach the payload any more: free its memory."""

    slot_id: SlotId


@dataclass(frozen=True, slots=True)
class RetainSlot:
    """The end of a lease's access is not proven: keep the memory and list it, until FreeSlot
    comes after all.
    """

    slot_id: SlotId
    lease_id: LeaseId
    cause: str


SlotEffect = RetractLease | FreeSlot | RetainSlot


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    slots: int  # every slot whose memory is not free
    leases_held: int
    leases_retracting: int
    leases_unquiesced: int
    late_ends: int  # detach, release or renew of a lease that had ended: no effect
    leases_reaped: int


@dataclass(slots=True)
class _Slot:
    slot_id: SlotId
    total_bytes: int
    pinned: bool
    retain: bool
    state: SlotState = SlotState.SERVING
    refcount: int = 1
    held: set[LeaseId] = field(default_factory=set)
    unconfirmed: set[LeaseId] = field(default_factory=set)


@dataclass(slots=True)
class _Lease:
    lease_id: LeaseId
    slot: _Slot
    epoch: EpochId
    state: LeaseState = LeaseState.HELD
    deadline: float | None = None


class SlotStore:
    """All slots of one node. Calls are synchronous and return effects, to be carried out in order.

    `lease_timeout_s` is the life of a lease with a deadline after its grant or last renewal; it is
    released by force between one and one and a half of it. A lease without a deadline ends with its
    epoch at the latest.
    """

    def __init__(self, worker_id: WorkerId, lease_timeout_s: float = LEASE_TIMEOUT_S) -> None:
        self._worker_id = worker_id
        self.lease_timeout_s = max(lease_timeout_s, LEASE_TIMEOUT_S_MIN)
        self._scan_period_s = max(self.lease_timeout_s / 2, SCAN_PERIOD_S_MIN)
        self._next_scan: float | None = None
        self._slots: dict[SlotId, _Slot] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._epochs: dict[EpochId, dict[LeaseId, None]] = {}  # held leases, oldest first
        self._last_slot = 0
        self._last_lease = 0
        self._late_ends = 0
        self._reaped = 0
        self._closed = False

    # --- slots ------------------------------------------------------------------------------------

    def register(self, total_bytes: int, *, pinned: bool, retain: bool = False) -> Handle:
        """A new slot with one reference. `retain`: the owner keeps that one; no consumer can
        drop it.
        """
        if self._closed:
            raise ClosedError("the node")
        self._last_slot += 1
        slot_id = SlotId(self._last_slot)
        self._slots[slot_id] = _Slot(slot_id, total_bytes, pinned, retain)
        return Handle(self._worker_id, slot_id)

    def metadata(self, handle: Handle) -> Metadata:
        """Raises UnknownHandle."""
        slot = self._serving(handle)
        return Metadata(slot.total_bytes, slot.refcount, slot.pinned)

    def ref(self, handle: Handle) -> None:
        """One reference more. Raises UnknownHandle, also for a slot without references: it is
        gone already.
        """
        self._serving(handle).refcount += 1

    def demote(self, handle: Handle) -> None:
        """The payload was copied to plain memory: new leases get it over TCP."""
        self._serving(handle).pinned = False

    def withdraw(self, handle: Handle) -> list[SlotEffect]:
        """The owner takes the payload back, from its readers too. Raises UnknownHandle."""
        return self._evict(self._serving(handle), LeaseEnd.EXPIRED)

    def close(self) -> list[SlotEffect]:
        """Withdraw everything; nothing is registered any more. Idempotent."""
        self._closed = True
        effects: list[SlotEffect] = []
        for slot in list(self._slots.values()):
            effects += self._evict(slot, LeaseEnd.SHUTDOWN)
        return effects

    # --- leases -----------------------------------------------------------------------------------

    def acquire(self, handle: Handle, epoch: EpochId) -> LeaseId:
        """Take a read lock. Raises UnknownHandle. The lease has no deadline until `arm`."""
        slot = self._serving(handle)
        self._last_lease += 1
        lease_id = LeaseId(self._last_lease)
        self._leases[lease_id] = _Lease(lease_id, slot, epoch)
        self._epochs.setdefault(epoch, {})[lease_id] = None
        slot.held.add(lease_id)
        return lease_id

    def arm(self, lease_id: LeaseId, now: float) -> bool:
        """Give a held lease its deadline (an RDMA answer always has one). False when it has
        ended meanwhile.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.HELD:
            return False
        lease.deadline = now + self.lease_timeout_s
        if self._next_scan is None:
            self._next_scan = now + self._scan_period_s
        return True

    def renew(self, handle: Handle, lease_id: LeaseId, epoch: EpochId, now: float) -> bool:
        """Move the deadline. False, and counted, when the lease has ended. Raises LeaseError for
        a foreign lease.
        """
        lease = self._held(handle, lease_id, epoch)
        if lease is None:
            return False
        if lease.deadline is not None:
            lease.deadline = now + self.lease_timeout_s
        return True

    def is_held(self, lease_id: LeaseId) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.HELD

    def detach(
        self, handle: Handle, lease_id: LeaseId, epoch: EpochId, *, transferred: bool = True
    ) -> list[SlotEffect]:
        """Drop the lock. A lease that has ended is counted and nothing else. Raises LeaseError
        for a lease of another handle or epoch, which stays as it is.
        """
        lease = self._held(handle, lease_id, epoch)
        if lease is None:
            return []
        return self._end(lease, LeaseEnd.DETACHED, drop=False, transferred=transferred)

    def release(
        self, handle: Handle, lease_id: LeaseId, epoch: EpochId, *, transferred: bool = True
    ) -> list[SlotEffect]:
        """Drop the lock and one reference; otherwise as `detach`."""
        lease = self._held(handle, lease_id, epoch)
        if lease is None:
            return []
        return self._end(lease, LeaseEnd.RELEASED, drop=True, transferred=transferred)

    def end_epoch(self, epoch: EpochId) -> list[SlotEffect]:
        """The peer is gone: release each of its leases by force."""
        effects: list[SlotEffect] = []
        for lease_id in list(self._epochs.get(epoch, ())):
            effects += self._end(self._leases[lease_id], LeaseEnd.PEER_LOST, drop=True)
        return effects

    @property
    def next_deadline(self) -> float | None:
        """When `due` wants to be called; None while no lease has a deadline."""
        return self._next_scan

    def due(self, now: float) -> list[SlotEffect]:
        """Release by force each lease whose deadline has passed. Cheap before the scan is due."""
        if self._next_scan is None or now < self._next_scan:
            return []
        effects: list[SlotEffect] = []
        armed = False
        for lease in [x for x in self._leases.values() if x.state is LeaseState.HELD]:
            if lease.deadline is not None and lease.deadline <= now:
                self._reaped += 1
                effects += self._end(lease, LeaseEnd.REAPED, drop=True)
            else:
                armed = armed or lease.deadline is not None
        self._next_scan = now + self._scan_period_s if armed else None
        return effects

    # --- retraction -------------------------------------------------------------------------------

    def quiesced(self, lease_id: LeaseId) -> list[SlotEffect]:
        """Nothing can read through that ended lease any more."""
        lease = self._ended(lease_id)
        _move(LEASE_TABLE, lease.state, LeaseState.QUIESCED)
        del self._leases[lease_id]
        lease.slot.unconfirmed.discard(lease_id)
        return self._settle(lease.slot)

    def unquiesced(self, lease_id: LeaseId, cause: str) -> list[SlotEffect]:
        """The end of its access could not be proven; a later `quiesced` is welcome."""
        lease = self._ended(lease_id)
        lease.state = _move(LEASE_TABLE, lease.state, LeaseState.UNQUIESCED)
        return [RetainSlot(lease.slot.slot_id, lease_id, cause)]

    def statistics(self) -> SlotStatistics:
        states = [lease.state for lease in self._leases.values()]
        return SlotStatistics(
            slots=len(self._slots),
            leases_held=states.count(LeaseState.HELD),
            leases_retracting=states.count(LeaseState.RETRACTING),
            leases_unquiesced=states.count(LeaseState.UNQUIESCED),
            late_ends=self._late_ends,
            leases_reaped=self._reaped,
        )

    # --- within -----------------------------------------------------------------------------------

    def _serving(self, handle: Handle) -> _Slot:
        slot = self._slots.get(handle.slot_id)
        if (
            slot is None
            or handle.worker_id != self._worker_id
            or slot.state is not SlotState.SERVING
        ):
            raise UnknownHandle(str(handle))
        return slot

    def _held(self, handle: Handle, lease_id: LeaseId, epoch: EpochId) -> _Lease | None:
        lease = self._leases.get(lease_id)
        if lease is None and 0 < lease_id <= self._last_lease:
            self._late_ends += 1  # ended and forgotten: ids are never reused
            return None
        if (
            lease is None
            or lease.epoch != epoch
            or handle != Handle(self._worker_id, lease.slot.slot_id)
        ):
            raise LeaseError(f"lease {lease_id} is not a lease of this peer on {handle}")
        if lease.state is not LeaseState.HELD:
            self._late_ends += 1
            return None
        return lease

    def _ended(self, lease_id: LeaseId) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise InternalError(f"lease {lease_id} was confirmed twice")
        return lease

    def _end(
        self, lease: _Lease, how: LeaseEnd, *, drop: bool, transferred: bool = False
    ) -> list[SlotEffect]:
        slot = lease.slot
        lease.state = _move(LEASE_TABLE, lease.state, LeaseState.RETRACTING)
        lease.deadline = None
        slot.held.discard(lease.lease_id)
        slot.unconfirmed.add(lease.lease_id)
        of_epoch = self._epochs[lease.epoch]
        del of_epoch[lease.lease_id]
        if not of_epoch:
            del self._epochs[lease.epoch]
        forced = how in (LeaseEnd.REAPED, LeaseEnd.PEER_LOST)
        if drop and not (forced and slot.retain):
            slot.refcount = max(1 if slot.retain else 0, slot.refcount - 1)
        retract = RetractLease(slot.slot_id, lease.lease_id, lease.epoch, how, transferred)
        return [retract, *self._settle(slot)]

    def _evict(self, slot: _Slot, how: LeaseEnd) -> list[SlotEffect]:
        slot.refcount = 0
        slot.retain = False
        effects: list[SlotEffect] = []
        for lease_id in sorted(slot.held):
            effects += self._end(self._leases[lease_id], how, drop=False)
        return effects or self._settle(slot)

    def _settle(self, slot: _Slot) -> list[SlotEffect]:
        """Bring the slot's state in line with its counters; free it when nothing is left."""
        if slot.refcount:
            return []
        if slot.held:
            state = SlotState.LEAVING
        elif slot.unconfirmed:
            state = SlotState.QUIESCING
        else:
            state = SlotState.FREED
        if state is not slot.state:
            slot.state = _move(SLOT_TABLE, slot.state, state)
            if state is SlotState.FREED:
                del self._slots[slot.slot_id]
                return [FreeSlot(slot.slot_id)]
        return []


def _move(table: Mapping[_StateT, frozenset[_StateT]], old: _StateT, new: _StateT) -> _StateT:
    if new not in table[old]:
        raise InternalError(f"{type(old).__name__}: from {old} to {new}")
    return new
