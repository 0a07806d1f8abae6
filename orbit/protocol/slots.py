"""An owner's slots and the leases on them: who may read or write, who frees, and when.

Two counters rule a slot: references and held leases. Whoever makes both zero frees it, in that one
step, and its memory goes only after the retraction of every lease was confirmed. A lease whose
deadline passes is released by force, which drops its lock and one reference, whatever its path; a
slot whose time-to-live passes goes with all its leases. It knows no buffer and no clock: the
runtime keeps the payloads by slot id, carries out the effects, and feeds `quiesced` or `unquiesced`
for each retracted lease. A *ranged* slot is memory that many read and write at once, each its own
ranges of it: which of them get in each other's way is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from ..errors import (
    BusyError,
    ClosedError,
    InternalError,
    LeaseError,
    UnknownHandle,
    UsageError,
    WrongDirection,
)
from ..model import (
    Direction,
    Handle,
    LeaseEnd,
    LeaseId,
    Metadata,
    PathName,
    SlotId,
    WorkerId,
)
from .deadlines import Deadlines

_StateT = TypeVar("_StateT", bound=StrEnum)

EpochId = bytes  # names one epoch of one peer (Session.attempt)
LOCAL_EPOCH: EpochId = b""  # leases that this node takes on its own slots

LEASE_TIMEOUT_S = 30.0
LEASE_TIMEOUT_S_MIN = 0.001  # 0 means "no deadline" on the wire
LEASE_SWEEP_S = 0.010  # leases that are due are looked for at most this often
TTL_SWEEP_S = 0.100  # slots likewise


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
    """Of now, but for the counts that only grow: late_ends, leases_reaped, leases_ended,
    slots_expired.
    """

    slots: int  # every slot whose memory is not free
    leases_held: int
    leases_retracting: int
    leases_unquiesced: int
    late_ends: int  # detach, release or renew of a lease that had ended: no effect
    leases_reaped: int
    staged_bytes: int = 0  # of every slot
    leased_bytes: int = 0  # of slots that a lease holds, or may still be read or written through
    leases_armed: int = 0  # held, with a deadline
    ttl_armed: int = 0  # slots with a time-to-live
    slots_expired: int = 0  # by their time-to-live
    leases_by_path: Mapping[PathName, int] = field(default_factory=dict)  # held
    leases_ended: Mapping[LeaseEnd, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    slot_id: SlotId
    total_bytes: int
    pinned: bool
    retain: bool
    directions: frozenset[Direction]  # what consumers may do with it
    ranged: bool = False
    state: SlotState = SlotState.SERVING
    refcount: int = 1
    held: set[LeaseId] = field(default_factory=set)
    unconfirmed: set[LeaseId] = field(default_factory=set)


@dataclass(slots=True)
class _Lease:
    lease_id: LeaseId
    slot: _Slot
    epoch: EpochId
    path: PathName
    state: LeaseState = LeaseState.HELD
    timeout_s: float = 0.0  # 0: it has no deadline


class SlotStore:
    """All slots of one node. Calls are synchronous and return effects, to be carried out in order.

    `lease_timeout_s` is the longest life of a lease with a deadline after its grant or last
    renewal. One that is not renewed is released by force after its timeout, LEASE_SWEEP_S later at
    most (so within one and a half timeouts, unless a timeout is shorter than two sweeps). A lease
    without a deadline ends with its slot or its epoch at the latest.
    """

    def __init__(self, worker_id: WorkerId, lease_timeout_s: float = LEASE_TIMEOUT_S) -> None:
        self._worker_id = worker_id
        self.lease_timeout_s = max(lease_timeout_s, LEASE_TIMEOUT_S_MIN)
        self._lease_deadlines: Deadlines[LeaseId] = Deadlines(LEASE_SWEEP_S)
        self._slot_deadlines: Deadlines[SlotId] = Deadlines(TTL_SWEEP_S)
        self._slots: dict[SlotId, _Slot] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._epochs: dict[EpochId, dict[LeaseId, None]] = {}  # held leases, oldest first
        self._last_slot = 0
        self._last_lease = 0
        self._late_ends = 0
        self._ended = dict.fromkeys(LeaseEnd, 0)
        self._slots_expired = 0
        self._closed = False

    # --- slots ------------------------------------------------------------------------------------

    def register(
        self,
        total_bytes: int,
        *,
        pinned: bool,
        retain: bool = False,
        direction: Direction = Direction.READ,
        ranged: Iterable[Direction] | None = None,
        deadline: float | None = None,
    ) -> Handle:
        """A new slot with one reference. `retain`: the owner keeps that one; no consumer can
        drop it. `direction`: what consumers do with it; one writer at a time. `ranged`: in
        place of that the directions of a ranged slot, which any number of leases use at once.
        `deadline`: when its time-to-live ends, at most TTL_SWEEP_S late. Raises ClosedError.
        """
        if self._closed:
            raise ClosedError("the node")
        self._last_slot += 1
        slot_id = SlotId(self._last_slot)
        directions = frozenset({direction} if ranged is None else ranged)
        self._slots[slot_id] = _Slot(
            slot_id, total_bytes, pinned, retain, directions, ranged is not None
        )
        if deadline is not None:
            self._slot_deadlines.set(slot_id, deadline)
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
        """The payload was copied to plain memory: new leases get it over TCP. Raises
        UnknownHandle.
        """
        self._serving(handle).pinned = False

    def retire(self, handle: Handle) -> list[SlotEffect]:
        """The owner gives up every reference, and new leases are refused; those that are held go
        on, and the last of them frees. Raises UnknownHandle.
        """
        slot = self._serving(handle)
        slot.refcount = 0
        slot.retain = False
        return self._settle(slot)

    def withdraw(self, handle: Handle, *, retired: bool = False) -> list[SlotEffect]:
        """The owner takes the payload back, from its readers too. `retired`: also when it has no
        reference any more, so that the leases which it still has end by force; nothing when it is
        gone. Raises UnknownHandle.
        """
        if not retired:
            return self._evict(self._serving(handle), LeaseEnd.EXPIRED)
        slot = self._slots.get(handle.slot_id)
        if slot is None or handle.worker_id != self._worker_id:
            return []
        return self._evict(slot, LeaseEnd.EXPIRED)

    def close(self) -> list[SlotEffect]:
        """Withdraw everything; nothing is registered any more. Idempotent."""
        self._closed = True
        effects: list[SlotEffect] = []
        for slot in list(self._slots.values()):
            effects += self._evict(slot, LeaseEnd.SHUTDOWN)
        return effects

    # --- leases -----------------------------------------------------------------------------------

    def acquire(
        self,
        handle: Handle,
        epoch: EpochId,
        direction: Direction = Direction.READ,
        *,
        ranged: bool = False,
    ) -> LeaseId:
        """Take a lock. The lease counts as one of TCP and has no deadline until `arm`. `ranged`:
        it is for ranges of a ranged slot, and the caller knows which.

        Raises UnknownHandle, UsageError (the slot is of the other kind), WrongDirection, BusyError:
        a writer is there, or the end of the last one is not proven yet; never of a ranged slot.
        """
        slot = self._serving(handle)
        if ranged is not slot.ranged:
            how = "by ranges only" if slot.ranged else "as a whole, and not by ranges"
            raise UsageError(f"{handle} can be reached {how}")
        if direction not in slot.directions:
            refused = "be read" if direction is Direction.READ else "be written"
            raise WrongDirection(f"{handle} cannot {refused}")
        if direction is Direction.WRITE and not ranged and (slot.held or slot.unconfirmed):
            raise BusyError(f"{handle} has a writer")
        self._last_lease += 1
        lease_id = LeaseId(self._last_lease)
        path = PathName.LOCAL if epoch == LOCAL_EPOCH else PathName.TCP
        self._leases[lease_id] = _Lease(lease_id, slot, epoch, path)
        self._epochs.setdefault(epoch, {})[lease_id] = None
        slot.held.add(lease_id)
        return lease_id

    def arm(
        self,
        lease_id: LeaseId,
        now: float,
        timeout_s: float | None = None,
        path: PathName = PathName.TCP,
    ) -> float:
        """Give a held lease its path and its deadline: `timeout_s` after now and after each
        renewal, and never more than the store's. Returns what it got; 0 when it has ended
        meanwhile.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.HELD:
            return 0.0
        wanted = self.lease_timeout_s if timeout_s is None else timeout_s
        lease.timeout_s = min(max(wanted, LEASE_TIMEOUT_S_MIN), self.lease_timeout_s)
        lease.path = path
        self._lease_deadlines.set(lease_id, now + lease.timeout_s)
        return lease.timeout_s

    def renew(self, handle: Handle, lease_id: LeaseId, epoch: EpochId, now: float) -> bool:
        """Move the deadline. False, and counted, when the lease has ended. Raises LeaseError for
        a foreign lease.
        """
        lease = self._held(handle, lease_id, epoch)
        if lease is None:
            return False
        if lease.timeout_s:
            self._lease_deadlines.set(lease_id, now + lease.timeout_s)
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
        """When `due` wants to be called; None while nothing has a deadline."""
        leases, slots = self._lease_deadlines.next, self._slot_deadlines.next
        if leases is None or slots is None:
            return slots if leases is None else leases
        return min(leases, slots)

    def due(self, now: float) -> list[SlotEffect]:
        """End the slots whose time-to-live has passed, with every lease, also in the middle of a
        read; then release by force each lease whose deadline has. Cheap when nothing is due.
        """
        effects: list[SlotEffect] = []
        for slot_id in self._slot_deadlines.take(now):
            self._slots_expired += 1
            effects += self._evict(self._slots[slot_id], LeaseEnd.EXPIRED)
        for lease_id in self._lease_deadlines.take(now):
            effects += self._end(self._leases[lease_id], LeaseEnd.REAPED, drop=True)
        return effects

    # --- retraction -------------------------------------------------------------------------------

    def quiesced(self, lease_id: LeaseId) -> list[SlotEffect]:
        """Nothing can read or write through that ended lease any more."""
        lease = _known(self._leases, lease_id)
        _move(LEASE_TABLE, lease.state, LeaseState.QUIESCED)
        del self._leases[lease_id]
        lease.slot.unconfirmed.discard(lease_id)
        return self._settle(lease.slot)

    def unquiesced(self, lease_id: LeaseId, cause: str) -> list[SlotEffect]:
        """The end of its access could not be proven; a later `quiesced` is welcome."""
        lease = _known(self._leases, lease_id)
        lease.state = _move(LEASE_TABLE, lease.state, LeaseState.UNQUIESCED)
        return [RetainSlot(lease.slot.slot_id, lease_id, cause)]

    def statistics(self) -> SlotStatistics:
        states = [lease.state for lease in self._leases.values()]
        slots = self._slots.values()
        by_path = dict.fromkeys(PathName, 0)
        for lease in self._leases.values():
            by_path[lease.path] += lease.state is LeaseState.HELD
        return SlotStatistics(
            slots=len(slots),
            leases_held=states.count(LeaseState.HELD),
            leases_retracting=states.count(LeaseState.RETRACTING),
            leases_unquiesced=states.count(LeaseState.UNQUIESCED),
            late_ends=self._late_ends,
            leases_reaped=self._ended[LeaseEnd.REAPED],
            staged_bytes=sum(slot.total_bytes for slot in slots),
            leased_bytes=sum(s.total_bytes for s in slots if s.held or s.unconfirmed),
            leases_armed=len(self._lease_deadlines),
            ttl_armed=len(self._slot_deadlines),
            slots_expired=self._slots_expired,
            leases_by_path=by_path,
            leases_ended=dict(self._ended),
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

    def _end(
        self, lease: _Lease, how: LeaseEnd, *, drop: bool, transferred: bool = False
    ) -> list[SlotEffect]:
        slot = lease.slot
        lease.state = _move(LEASE_TABLE, lease.state, LeaseState.RETRACTING)
        self._lease_deadlines.discard(lease.lease_id)
        self._ended[how] += 1
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
            if state is not SlotState.LEAVING:  # no lease is left that it could end
                self._slot_deadlines.discard(slot.slot_id)
            if state is SlotState.FREED:
                del self._slots[slot.slot_id]
                return [FreeSlot(slot.slot_id)]
        return []


def _known(leases: Mapping[LeaseId, _Lease], lease_id: LeaseId) -> _Lease:
    lease = leases.get(lease_id)
    if lease is None:
        raise InternalError(f"lease {lease_id} was confirmed twice")
    return lease


def _move(table: Mapping[_StateT, frozenset[_StateT]], old: _StateT, new: _StateT) -> _StateT:
    if new not in table[old]:
        raise InternalError(f"{type(old).__name__}: from {old} to {new}")
    return new
