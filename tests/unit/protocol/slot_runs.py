"""Random lives of slots and leases, step by step beside a model of two counters and a clock.

The model says what must have ended, what must be free and what must not be yet; it shares no line
with the store. One seed is one run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from orbit.errors import (
    BusyError,
    ClosedError,
    InternalError,
    LeaseError,
    OrbitError,
    UnknownHandle,
    UsageError,
    WrongDirection,
)
from orbit.model import Direction, Handle, LeaseEnd, LeaseId, Metadata, PathName, SlotId, WorkerId
from orbit.protocol.slots import (
    LEASE_SWEEP_S,
    LOCAL_EPOCH,
    TTL_SWEEP_S,
    FreeSlot,
    RetainSlot,
    RetractLease,
    SlotEffect,
    SlotStore,
)

OWNER = WorkerId(9)
EPOCHS = (b"epoch of a peer.", b"epoch of another", LOCAL_EPOCH)
TIMEOUT_S = 1.0
FORCED = (LeaseEnd.REAPED, LeaseEnd.PEER_LOST)
EVICTED = (LeaseEnd.EXPIRED, LeaseEnd.SHUTDOWN)


@dataclass
class ModelSlot:
    handle: Handle
    nbytes: int
    retain: bool
    directions: tuple[Direction, ...]
    ttl: float | None
    ranged: bool = False
    references: int = 1
    pinned: bool = True
    held: dict[LeaseId, bytes] = field(default_factory=dict)
    unproven: set[LeaseId] = field(default_factory=set)  # ended, and may still be read or written

    @property
    def gone(self) -> bool:
        return not (self.references or self.held or self.unproven)


class SlotRun:
    """One run of `steps` random calls on a fresh store, then its end. Raises AssertionError."""

    def __init__(self, seed: int, make: Callable[[WorkerId, float], SlotStore] = SlotStore) -> None:
        self.random = random.Random(seed)
        self.store = make(OWNER, TIMEOUT_S)
        self.now = 0.0
        self.slots: dict[SlotId, ModelSlot] = {}
        self.leases: dict[LeaseId, ModelSlot] = {}  # every one ever
        self.deadlines: dict[LeaseId, tuple[float, float]] = {}  # of held ones: when, and how long
        self.freed: set[SlotId] = set()
        self.late = 0
        self.said_unproven: set[LeaseId] = set()
        self.moves = (
            (self.register, 3),
            (self.register_ranged, 1),
            (self.acquire, 7),
            (self.end, 6),
            (self.wrong_end, 2),
            (self.renew, 2),
            (self.confirm, 6),
            (self.wait, 4),
            (self.ref, 1),
            (self.lose_peer, 1),
            (self.withdraw, 1),
            (self.evict, 1),
            (self.retire, 1),
            (self.demote, 1),
        )

    def run(self, steps: int = 25) -> None:
        moves, weights = zip(*self.moves, strict=True)
        self.register()
        for move in self.random.choices(moves, weights, k=steps):
            move()
            self.check()
        self.finish()

    # --- moves ------------------------------------------------------------------------------------

    def register(self) -> None:
        retain, ttl = self.random.random() < 0.3, None
        direction = self.random.choice((Direction.READ, Direction.READ, Direction.WRITE))
        if self.random.random() < 0.3:
            ttl = self.now + self.random.choice((0.05, 0.5, 2.0))
        nbytes = self.random.randrange(100)
        handle = self.store.register(
            nbytes, pinned=True, retain=retain, direction=direction, deadline=ttl
        )
        assert handle.worker_id == OWNER
        assert handle.slot_id not in self.slots, "an id was used twice"
        self.slots[handle.slot_id] = ModelSlot(handle, nbytes, retain, (direction,), ttl)

    def register_ranged(self) -> None:
        both = (Direction.READ, Direction.WRITE)
        directions = self.random.choice((both, both[:1], both[1:], ()))
        nbytes = self.random.randrange(100)
        retain = self.random.random() < 0.7
        handle = self.store.register(nbytes, pinned=True, retain=retain, ranged=directions)
        assert handle.slot_id not in self.slots, "an id was used twice"
        self.slots[handle.slot_id] = ModelSlot(
            handle, nbytes, retain, directions, None, ranged=True
        )

    def acquire(self) -> None:
        slot = self.pick()
        direction = self.random.choice((*Direction,))
        if slot.directions and self.random.random() < 0.8:
            direction = self.random.choice(slot.directions)
        epoch, handle = self.random.choice(EPOCHS), slot.handle
        ranged = slot.ranged if self.random.random() < 0.9 else not slot.ranged
        busy = direction is Direction.WRITE and bool(slot.held or slot.unproven) and not ranged
        expected: type[OrbitError] | None = None
        if self.random.random() < 0.1:
            handle, expected = Handle(WorkerId(8), handle.slot_id), UnknownHandle
        elif not slot.references:
            expected = UnknownHandle
        elif ranged is not slot.ranged:
            expected = UsageError
        elif direction not in slot.directions:
            expected = WrongDirection
        elif busy:
            expected = BusyError
        try:
            lease = self.store.acquire(handle, epoch, direction, ranged=ranged)
        except OrbitError as error:
            if type(error) is not expected:
                raise
            return
        assert expected is None, f"acquired in place of {expected}"
        assert lease not in self.leases, "an id was used twice"
        self.leases[lease] = slot
        slot.held[lease] = epoch
        if self.random.random() < 0.5:
            wanted = self.random.choice((None, 0.0, 0.3, 5.0))
            granted = min(max(0.001, TIMEOUT_S if wanted is None else wanted), TIMEOUT_S)
            path = self.random.choice((PathName.RDMA, PathName.TCP))
            assert self.store.arm(lease, self.now, wanted, path) == granted
            self.deadlines[lease] = (self.now + granted, granted)

    def end(self) -> None:
        """Of a lease by its own pair, perhaps a second time."""
        if not self.leases:
            return
        lease = self.random.choice(list(self.leases))
        slot = self.leases[lease]
        epoch = slot.held.get(lease, self.random.choice(EPOCHS))
        drop, transferred = self.random.random() < 0.5, self.random.random() < 0.7
        call = self.store.release if drop else self.store.detach
        how = LeaseEnd.RELEASED if drop else LeaseEnd.DETACHED
        if lease in slot.held:
            effects = call(slot.handle, lease, epoch, transferred=transferred)
            self.expect(effects, {lease: how})
            assert isinstance(effects[0], RetractLease)
            assert effects[0].transferred == transferred
            return
        try:
            effects = call(slot.handle, lease, epoch, transferred=transferred)
        except LeaseError:  # of another epoch than it was, and not forgotten yet
            assert lease in slot.unproven
            return
        assert effects == []
        self.late += 1

    def wrong_end(self) -> None:
        """A wrong handle, epoch or number: nothing may change."""
        held = [(lease, slot) for slot in self.slots.values() for lease in slot.held]
        if not held:
            return
        lease, slot = self.random.choice(held)
        epoch, handle = slot.held[lease], slot.handle
        match self.random.randrange(4):
            case 0:
                handle = Handle(OWNER, SlotId(handle.slot_id + 1))
            case 1:
                epoch = self.random.choice([e for e in EPOCHS if e != epoch])
            case 2:
                lease = LeaseId(len(self.leases) + 1)
            case 3:
                handle = Handle(WorkerId(8), handle.slot_id)
        call = self.random.choice((self.store.detach, self.store.release))
        for attempt in (
            lambda: call(handle, lease, epoch),
            lambda: self.store.renew(handle, lease, epoch, self.now),
        ):
            try:
                attempt()
            except LeaseError:
                continue
            raise AssertionError("a lease was ended or renewed by somebody else")

    def renew(self) -> None:
        held = [(lease, slot) for slot in self.slots.values() for lease in slot.held]
        if not held:
            return
        lease, slot = self.random.choice(held)
        assert self.store.renew(slot.handle, lease, slot.held[lease], self.now) is True
        if lease in self.deadlines:
            granted = self.deadlines[lease][1]
            self.deadlines[lease] = (self.now + granted, granted)

    def confirm(self) -> None:
        waiting = [(lease, slot) for slot in self.slots.values() for lease in slot.unproven]
        if not waiting:
            return
        lease, slot = self.random.choice(waiting)
        if lease not in self.said_unproven and self.random.random() < 0.2:
            (effect,) = self.store.unquiesced(lease, "stuck")
            assert effect == RetainSlot(slot.handle.slot_id, lease, "stuck")
            self.said_unproven.add(lease)
            return
        slot.unproven.discard(lease)
        self.expect(self.store.quiesced(lease), {})
        try:
            self.store.quiesced(lease)
        except InternalError:
            return
        raise AssertionError("confirmed twice")

    def wait(self) -> None:
        until = self.now + self.random.choice((0.01, 0.1, 0.5, 2.0))
        while (due := self.store.next_deadline) is not None and due <= until:
            self.now = max(self.now, due)
            effects = self.store.due(self.now)
            ended: dict[LeaseId, LeaseEnd] = {}
            for effect in effects:
                if isinstance(effect, RetractLease):
                    ended[effect.lease_id] = effect.how
                    slot = self.leases[effect.lease_id]
                    if effect.how is LeaseEnd.REAPED:
                        assert self.deadlines[effect.lease_id][0] <= self.now, "reaped too early"
                    else:
                        assert effect.how is LeaseEnd.EXPIRED
                        assert slot.ttl is not None
                        assert slot.ttl <= self.now, "expired too early"
            self.see_expired()
            self.expect(effects, ended)
            assert self.store.next_deadline is None or self.store.next_deadline > self.now
        self.now = until

    def see_expired(self) -> None:
        """A slot whose time-to-live is over may go at once or a sweep later."""
        for slot in self.slots.values():
            if slot.ttl is None or slot.ttl > self.now or not slot.references:
                continue
            try:
                self.store.metadata(slot.handle)
            except UnknownHandle:
                slot.references, slot.retain = 0, False
            else:
                assert slot.ttl > self.now - TTL_SWEEP_S, "a time-to-live was missed"

    def ref(self) -> None:
        slot = self.pick()
        try:
            self.store.ref(slot.handle)
        except UnknownHandle:
            assert not slot.references
            return
        assert slot.references, "a slot without references was revived"
        slot.references += 1

    def lose_peer(self) -> None:
        epoch = self.random.choice(EPOCHS[:2])
        lost = {
            x: LeaseEnd.PEER_LOST
            for s in self.slots.values()
            for x, e in s.held.items()
            if e == epoch
        }
        self.expect(self.store.end_epoch(epoch), lost)

    def withdraw(self) -> None:
        slot = self.pick()
        expected = dict.fromkeys(slot.held, LeaseEnd.EXPIRED)
        try:
            effects = self.store.withdraw(slot.handle)
        except UnknownHandle:
            assert not slot.references
            return
        assert slot.references
        slot.references, slot.retain = 0, False
        self.expect(effects, expected)

    def evict(self) -> None:
        slot = self.pick()
        expected = dict.fromkeys(slot.held, LeaseEnd.EXPIRED)
        elsewhere = Handle(WorkerId(8), slot.handle.slot_id)
        assert self.store.withdraw(elsewhere, retired=True) == [], (
            "ended by a handle of somebody else"
        )
        effects = self.store.withdraw(slot.handle, retired=True)
        slot.references, slot.retain = 0, False
        self.expect(effects, expected)

    def retire(self) -> None:
        slot = self.pick()
        try:
            effects = self.store.retire(slot.handle)
        except UnknownHandle:
            assert not slot.references
            return
        assert slot.references
        slot.references, slot.retain = 0, False
        self.expect(effects, {})

    def demote(self) -> None:
        slot = self.pick()
        if slot.references:
            self.store.demote(slot.handle)
            slot.pinned = False

    # --- checks -----------------------------------------------------------------------------------

    def pick(self) -> ModelSlot:
        return self.random.choice(list(self.slots.values()))

    def expect(self, effects: list[SlotEffect], ends: dict[LeaseId, LeaseEnd]) -> None:
        """Exactly these leases end, so; and exactly the slots are freed that nothing holds now."""
        found = {e.lease_id: e.how for e in effects if isinstance(e, RetractLease)}
        assert found == ends, f"ended {found} in place of {ends}"
        for lease, how in ends.items():
            slot = self.leases[lease]
            slot.held.pop(lease)
            slot.unproven.add(lease)
            self.deadlines.pop(lease, None)
            if how in EVICTED:
                slot.references, slot.retain = 0, False
            elif how is not LeaseEnd.DETACHED and not (how in FORCED and slot.retain):
                floor = 1 if slot.retain and slot.references else 0
                slot.references = max(floor, slot.references - 1)
        gone = [e.slot_id for e in effects if isinstance(e, FreeSlot)]
        assert len(gone) == len(set(gone)), "freed twice"
        assert not self.freed & set(gone), "freed twice"
        self.freed |= set(gone)

    def check(self) -> None:
        live = [slot for slot in self.slots.values() if not slot.gone]
        held = sum(len(slot.held) for slot in live)
        assert self.freed == set(self.slots) - {slot.handle.slot_id for slot in live}
        found = self.store.statistics()
        assert (found.slots, found.leases_held, found.late_ends) == (len(live), held, self.late)
        assert found.staged_bytes == sum(slot.nbytes for slot in live)
        leased = sum(slot.nbytes for slot in live if slot.held or slot.unproven)
        assert found.leased_bytes == leased
        assert sum(found.leases_by_path.values()) == held
        for slot in live:
            if slot.references:
                expected = Metadata(slot.nbytes, slot.references, slot.pinned)
                assert self.store.metadata(slot.handle) == expected
        self.check_deadlines(live)

    def check_deadlines(self, live: list[ModelSlot]) -> None:
        ttls = [s.ttl for s in live if s.ttl is not None and (s.references or s.held)]
        leases = [deadline for deadline, _ in self.deadlines.values()]
        due = self.store.next_deadline
        if not ttls and not leases:
            assert due is None, "an idle store keeps a timer"
            return
        assert due is not None, "nobody would look at a deadline"
        first = min((*ttls, *leases))
        latest = min([t + TTL_SWEEP_S for t in ttls] + [t + LEASE_SWEEP_S for t in leases])
        assert first <= due <= latest
        assert latest > self.now, "a deadline was missed"

    def finish(self) -> None:
        """The node closes, and every end is proven: nothing is left."""
        expected = {x: LeaseEnd.SHUTDOWN for slot in self.slots.values() for x in slot.held}
        effects = self.store.close()
        for slot in self.slots.values():
            slot.references = 0
        self.expect(effects, expected)
        for slot in self.slots.values():
            for lease in sorted(slot.unproven):
                assert slot.handle.slot_id not in self.freed, "freed under a lease"
                slot.unproven.discard(lease)
                self.expect(self.store.quiesced(lease), {})
        self.check()
        assert self.freed == set(self.slots)
        try:
            self.store.register(1, pinned=False)
        except ClosedError:
            return
        raise AssertionError("registered after the close")
