"""Slots and leases: who frees, what a forced release does, when deadlines are looked at.

The last part has hypothesis look for a short sequence of calls that a simple model disagrees with;
test_slots_model.py runs ten thousand longer ones.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbit.errors import (
    BusyError,
    ClosedError,
    InternalError,
    LeaseError,
    UnknownHandle,
    UsageError,
    WrongDirection,
)
from orbit.model import Direction, Handle, LeaseEnd, LeaseId, Metadata, PathName, SlotId, WorkerId
from orbit.protocol.deadlines import Deadlines
from orbit.protocol.slots import (
    LOCAL_EPOCH,
    TTL_SWEEP_S,
    FreeSlot,
    RetainSlot,
    RetractLease,
    SlotEffect,
    SlotStore,
)

OWNER = WorkerId(9)
PEER = b"epoch of a peer."
OTHER = b"epoch of another"


def store(lease_timeout_s: float = 30.0) -> SlotStore:
    return SlotStore(OWNER, lease_timeout_s)


def retracted(effects: list[SlotEffect]) -> list[tuple[LeaseId, LeaseEnd]]:
    return [(e.lease_id, e.how) for e in effects if isinstance(e, RetractLease)]


def test_metadata_takes_no_lock() -> None:
    slots = store()
    handle = slots.register(5, pinned=True)
    slots.ref(handle)
    assert slots.metadata(handle) == Metadata(5, 2, True)
    slots.demote(handle)
    assert not slots.metadata(handle).pinned
    assert slots.statistics().leases_held == 0


def test_release_of_the_last_reference_frees_after_the_confirmation() -> None:
    slots = store()
    handle = slots.register(5, pinned=False)
    lease = slots.acquire(handle, PEER)
    effects = slots.release(handle, lease, PEER)
    assert effects == [RetractLease(SlotId(1), lease, PEER, LeaseEnd.RELEASED, True)]
    assert slots.statistics().slots == 1
    assert slots.quiesced(lease) == [FreeSlot(SlotId(1))]
    assert slots.statistics().slots == 0


def test_two_releases_at_one_reference_free_once() -> None:
    slots = store()
    handle = slots.register(5, pinned=False)
    first, second = slots.acquire(handle, PEER), slots.acquire(handle, OTHER)
    slots.release(handle, first, PEER)
    assert slots.quiesced(first) == []
    slots.release(handle, second, OTHER)
    assert slots.quiesced(second) == [FreeSlot(SlotId(1))]


def test_the_last_detach_frees_a_slot_without_references() -> None:
    slots = store()
    handle = slots.register(5, pinned=False)
    reader, last = slots.acquire(handle, PEER), slots.acquire(handle, OTHER)
    slots.release(handle, reader, PEER)
    slots.quiesced(reader)
    slots.detach(handle, last, OTHER)
    assert slots.quiesced(last) == [FreeSlot(SlotId(1))]


def test_nothing_revives_a_slot_without_references() -> None:
    slots = store()
    handle = slots.register(5, pinned=False)
    reader, holder = slots.acquire(handle, PEER), slots.acquire(handle, PEER)
    slots.release(handle, reader, PEER)
    for call in (
        lambda: slots.acquire(handle, PEER),
        lambda: slots.ref(handle),
        lambda: slots.metadata(handle),
        lambda: slots.withdraw(handle),
    ):
        with pytest.raises(UnknownHandle):
            call()
    assert slots.is_held(holder)


def test_a_handle_of_another_node_is_unknown() -> None:
    slots = store()
    handle = slots.register(5, pinned=False)
    with pytest.raises(UnknownHandle):
        slots.acquire(Handle(WorkerId(8), handle.slot_id), PEER)


def test_a_mismatched_lease_stays_as_it_is() -> None:
    slots = store()
    one, two = slots.register(1, pinned=False), slots.register(1, pinned=False)
    lease = slots.acquire(one, PEER)
    for handle, number, epoch in (
        (two, lease, PEER),
        (one, lease, OTHER),
        (one, LeaseId(99), PEER),
    ):
        with pytest.raises(LeaseError):
            slots.release(handle, number, epoch)
        with pytest.raises(LeaseError):
            slots.renew(handle, number, epoch, 0.0)
    assert slots.is_held(lease)
    assert slots.metadata(one).refcount == 1


def test_late_ends_are_counted_and_do_nothing() -> None:
    slots = store()
    handle = slots.register(1, pinned=False)
    lease = slots.acquire(handle, PEER)
    slots.detach(handle, lease, PEER)
    assert slots.detach(handle, lease, PEER) == []  # not confirmed yet
    slots.quiesced(lease)
    assert slots.release(handle, lease, PEER) == []  # forgotten
    assert not slots.renew(handle, lease, PEER, 0.0)
    assert slots.statistics().late_ends == 3
    assert slots.metadata(handle).refcount == 1


def test_the_end_of_an_epoch_releases_its_leases_and_no_other() -> None:
    slots = store()
    handle = slots.register(1, pinned=False)
    kept = slots.register(1, pinned=False, retain=True)
    mine = [slots.acquire(handle, PEER), slots.acquire(kept, PEER)]
    other = slots.acquire(kept, OTHER)
    effects = slots.end_epoch(PEER)
    assert retracted(effects) == [(lease, LeaseEnd.PEER_LOST) for lease in mine]
    assert [e.transferred for e in effects if isinstance(e, RetractLease)] == [False, False]
    assert slots.quiesced(mine[0]) == [FreeSlot(handle.slot_id)]
    assert slots.quiesced(mine[1]) == []
    assert slots.is_held(other)
    assert slots.end_epoch(PEER) == []


def test_no_consumer_drops_the_reference_of_a_retained_slot() -> None:
    slots = store()
    handle = slots.register(1, pinned=False, retain=True)
    for _ in range(3):
        slots.quiesced(retracted(slots.release(handle, slots.acquire(handle, PEER), PEER))[0][0])
    slots.ref(handle)
    slots.acquire(handle, PEER)
    slots.end_epoch(PEER)  # a forced release takes the lock alone
    assert slots.metadata(handle).refcount == 2


@pytest.mark.parametrize("silent_for", [0.0, 0.4, 0.9])
def test_a_silent_lease_is_reaped_between_one_and_one_and_a_half_timeouts(
    silent_for: float,
) -> None:
    slots = store(lease_timeout_s=1.0)
    handle = slots.register(1, pinned=True)
    slots.arm(slots.acquire(handle, OTHER), 0.0)  # keeps the scan going from 0
    granted = silent_for
    lease = slots.acquire(handle, PEER)
    slots.arm(lease, granted)
    reaped_at = None
    for _ in range(10):
        now = slots.next_deadline
        if now is None:
            break
        ended = dict(retracted(slots.due(now)))
        if lease in ended:
            assert ended[lease] is LeaseEnd.REAPED
            reaped_at = now
    assert reaped_at is not None
    assert granted + 1.0 <= reaped_at <= granted + 1.5
    assert slots.next_deadline is None, "an idle store arms no timer"
    assert slots.statistics().leases_reaped == 2


def test_renewal_keeps_a_lease_and_idle_stores_need_no_timer() -> None:
    slots = store(lease_timeout_s=1.0)
    handle = slots.register(1, pinned=True)
    plain = slots.acquire(handle, PEER)
    assert slots.next_deadline is None
    lease = slots.acquire(handle, PEER)
    assert slots.arm(lease, 0.0)
    for half in range(1, 10):
        assert slots.renew(handle, lease, PEER, half / 2)
        assert slots.due(half / 2) == []
    assert slots.renew(handle, plain, PEER, 5.0)
    slots.detach(handle, lease, PEER)
    assert not slots.arm(lease, 6.0)
    slots.due(slots.next_deadline or 0.0)
    assert slots.next_deadline is None


def test_a_tiny_timeout_never_means_none() -> None:
    slots = store(lease_timeout_s=0.0)
    assert slots.lease_timeout_s == 0.001
    slots.arm(slots.acquire(slots.register(1, pinned=True), PEER), 0.0)
    assert slots.next_deadline == 0.001
    assert slots.arm(slots.acquire(slots.register(1, pinned=True), PEER), 0.0, 0.0) == 0.001


def test_withdraw_takes_the_payload_from_its_readers() -> None:
    slots = store()
    handle = slots.register(1, pinned=False, retain=True)
    lease = slots.acquire(handle, PEER)
    assert retracted(slots.withdraw(handle)) == [(lease, LeaseEnd.EXPIRED)]
    assert slots.quiesced(lease) == [FreeSlot(handle.slot_id)]
    unread = slots.register(1, pinned=False)
    assert slots.withdraw(unread) == [FreeSlot(unread.slot_id)]


def test_close_ends_everything_and_refuses_more() -> None:
    slots = store()
    held, free = slots.register(1, pinned=True), slots.register(1, pinned=False, retain=True)
    lease = slots.acquire(held, LOCAL_EPOCH)
    effects = slots.close()
    assert retracted(effects) == [(lease, LeaseEnd.SHUTDOWN)]
    assert FreeSlot(free.slot_id) in effects
    assert slots.close() == []
    with pytest.raises(ClosedError):
        slots.register(1, pinned=False)
    assert slots.quiesced(lease) == [FreeSlot(held.slot_id)]


def test_memory_whose_end_of_access_is_not_proven_is_kept() -> None:
    slots = store()
    handle = slots.register(1, pinned=True)
    lease = slots.acquire(handle, PEER)
    slots.release(handle, lease, PEER, transferred=False)
    assert slots.unquiesced(lease, "stuck") == [RetainSlot(handle.slot_id, lease, "stuck")]
    assert slots.statistics().leases_unquiesced == 1
    assert slots.close() == []
    assert slots.statistics().slots == 1
    assert slots.quiesced(lease) == [FreeSlot(handle.slot_id)]
    with pytest.raises(InternalError):
        slots.quiesced(lease)


def test_a_held_lease_cannot_be_confirmed() -> None:
    slots = store()
    lease = slots.acquire(slots.register(1, pinned=True), PEER)
    with pytest.raises(InternalError):
        slots.quiesced(lease)
    assert slots.is_held(lease)


# --- deadlines ------------------------------------------------------------------------------------


def test_a_lease_may_ask_for_less_than_the_stores_timeout_and_never_gets_more() -> None:
    slots = store(lease_timeout_s=10.0)
    handle = slots.register(1, pinned=False, retain=True)
    short, long = slots.acquire(handle, PEER), slots.acquire(handle, PEER)
    assert slots.arm(short, 0.0, 2.0) == 2.0
    assert slots.arm(long, 0.0, 99.0) == 10.0
    assert slots.due(1.9) == []
    assert slots.renew(handle, short, PEER, 1.9)
    assert slots.due(3.8) == []
    assert retracted(slots.due(3.9)) == [(short, LeaseEnd.REAPED)]
    assert slots.next_deadline == 10.0


def test_what_the_expiry_of_a_lease_over_tcp_drops() -> None:
    slots = store(lease_timeout_s=1.0)
    handle = slots.register(1, pinned=False)
    lease = slots.acquire(handle, PEER)
    slots.arm(lease, 0.0, 1.0, PathName.TCP)
    assert retracted(slots.due(1.0)) == [(lease, LeaseEnd.REAPED)]
    assert slots.quiesced(lease) == [FreeSlot(handle.slot_id)]  # the lock, and the only reference


def test_a_time_to_live_takes_the_slot_with_its_leases_and_no_other() -> None:
    slots = store()
    mortal = slots.register(1, pinned=False, retain=True, deadline=5.0)
    unread = slots.register(1, pinned=False, deadline=5.0)
    other = slots.register(1, pinned=False)
    mine, local = slots.acquire(mortal, PEER), slots.acquire(mortal, LOCAL_EPOCH)
    theirs = slots.acquire(other, PEER)
    assert slots.next_deadline == 5.0
    assert slots.due(4.9) == []
    effects = slots.due(5.0)
    assert retracted(effects) == [(mine, LeaseEnd.EXPIRED), (local, LeaseEnd.EXPIRED)]
    assert FreeSlot(unread.slot_id) in effects
    assert slots.is_held(theirs)
    with pytest.raises(UnknownHandle):
        slots.acquire(mortal, PEER)
    assert slots.quiesced(mine) == []
    assert slots.quiesced(local) == [FreeSlot(mortal.slot_id)]
    assert slots.next_deadline is None
    found = slots.statistics()
    assert (found.slots_expired, found.leases_ended[LeaseEnd.EXPIRED]) == (2, 2)


def test_a_time_to_live_ends_the_readers_of_a_slot_without_references() -> None:
    slots = store()
    handle = slots.register(1, pinned=False, deadline=5.0)
    reader, holder = slots.acquire(handle, PEER), slots.acquire(handle, OTHER)
    slots.release(handle, reader, PEER)
    assert retracted(slots.due(5.0)) == [(holder, LeaseEnd.EXPIRED)]


def test_slots_that_go_early_leave_no_timer() -> None:
    slots = store()
    handles = [slots.register(1, pinned=False, deadline=30.0) for _ in range(1000)]
    for handle in handles:
        slots.withdraw(handle)
    assert slots.next_deadline is None
    assert slots.statistics().ttl_armed == 0


def test_many_deadlines_close_together_cost_few_looks() -> None:
    slots = store()
    for number in range(1000):
        slots.register(1, pinned=False, deadline=1.0 + number / 1000)
    looks, now = 0, 0.0
    while (due := slots.next_deadline) is not None:
        assert due - now >= TTL_SWEEP_S or looks == 0
        now, looks = due, looks + 1
        slots.due(now)
    assert looks <= 12
    assert now <= 2.0 + TTL_SWEEP_S


def test_deadlines_that_moved_and_went_do_not_pile_up() -> None:
    deadlines: Deadlines[LeaseId] = Deadlines(0.01)
    for number in range(1, 10_001):
        deadlines.set(LeaseId(number), float(number))
        deadlines.set(LeaseId(number), number + 5.0)
        deadlines.discard(LeaseId(number - 10))
    assert len(deadlines) == 10
    assert len(deadlines._heap) < 200
    assert deadlines.next == 9991 + 5.0
    deadlines.set(LeaseId(10_000), 1.0)
    assert deadlines.take(1.0) == [LeaseId(10_000)]
    assert deadlines.take(1e6) == [LeaseId(number) for number in range(9991, 10_000)]
    assert deadlines.next is None
    assert LeaseId(9991) not in deadlines


# --- destinations ---------------------------------------------------------------------------------


def test_a_destination_has_one_writer_until_its_end_is_proven() -> None:
    slots = store()
    handle = slots.register(1, pinned=False, direction=Direction.WRITE)
    with pytest.raises(WrongDirection):
        slots.acquire(handle, PEER)
    with pytest.raises(WrongDirection):
        slots.acquire(slots.register(1, pinned=False), PEER, Direction.WRITE)
    writer = slots.acquire(handle, PEER, Direction.WRITE)
    with pytest.raises(BusyError):
        slots.acquire(handle, OTHER, Direction.WRITE)
    slots.detach(handle, writer, PEER)
    with pytest.raises(BusyError):
        slots.acquire(handle, OTHER, Direction.WRITE)
    slots.unquiesced(writer, "stuck")
    with pytest.raises(BusyError):
        slots.acquire(handle, OTHER, Direction.WRITE)
    slots.quiesced(writer)
    slots.acquire(handle, OTHER, Direction.WRITE)


def test_a_ranged_slot_is_read_and_written_by_many_at_once() -> None:
    slots = store()
    handle = slots.register(8, pinned=True, retain=True, ranged=Direction)
    leases = [
        slots.acquire(handle, epoch, direction, ranged=True)
        for epoch in (PEER, OTHER)
        for direction in Direction
    ]
    slots.release(handle, leases[0], PEER)
    assert slots.metadata(handle) == Metadata(8, 1, True), "the reference is the owner's"
    slots.unquiesced(leases[0], "stuck")
    slots.acquire(handle, OTHER, Direction.WRITE, ranged=True)
    with pytest.raises(UsageError, match="by ranges only"):
        slots.acquire(handle, PEER)
    with pytest.raises(UsageError, match="as a whole"):
        slots.acquire(slots.register(1, pinned=False), PEER, ranged=True)
    readable = slots.register(8, pinned=True, ranged=[Direction.READ])
    with pytest.raises(WrongDirection):
        slots.acquire(readable, PEER, Direction.WRITE, ranged=True)
    with pytest.raises(WrongDirection):
        slots.acquire(slots.register(8, pinned=True, ranged=[]), PEER, ranged=True)


def test_what_a_retired_slot_has_left_can_still_be_ended_by_force() -> None:
    slots = store()
    handle = slots.register(8, pinned=True, retain=True, ranged=Direction)
    lease = slots.acquire(handle, PEER, Direction.WRITE, ranged=True)
    assert slots.retire(handle) == []
    with pytest.raises(UnknownHandle):
        slots.acquire(handle, PEER, Direction.WRITE, ranged=True)
    assert slots.withdraw(Handle(WorkerId(8), handle.slot_id), retired=True) == []
    assert retracted(slots.withdraw(handle, retired=True)) == [(lease, LeaseEnd.EXPIRED)]
    assert slots.withdraw(handle, retired=True) == []
    assert slots.quiesced(lease) == [FreeSlot(handle.slot_id)]
    assert slots.withdraw(handle, retired=True) == []
    unused = slots.register(8, pinned=True, retain=True, ranged=Direction)
    assert slots.withdraw(unused, retired=True) == [FreeSlot(unused.slot_id)]


def test_a_retired_slot_serves_those_it_has_and_nobody_else() -> None:
    slots = store()
    handle = slots.register(1, pinned=True, retain=True)
    lease = slots.acquire(handle, PEER)
    assert slots.retire(handle) == []
    for call in (slots.retire, slots.metadata, slots.ref):
        with pytest.raises(UnknownHandle):
            call(handle)
    assert slots.is_held(lease)
    slots.detach(handle, lease, PEER)
    assert slots.quiesced(lease) == [FreeSlot(handle.slot_id)]
    unread = slots.register(1, pinned=True, retain=True)
    assert slots.retire(unread) == [FreeSlot(unread.slot_id)]


def test_statistics_say_what_is_staged_and_leased_and_by_what() -> None:
    slots = store()
    one, two = slots.register(10, pinned=True), slots.register(7, pinned=False, deadline=9.0)
    slots.register(100, pinned=True)
    rdma, tcp = slots.acquire(one, PEER), slots.acquire(two, PEER)
    slots.acquire(two, LOCAL_EPOCH)
    slots.arm(rdma, 0.0, None, PathName.RDMA)
    found = slots.statistics()
    assert (found.staged_bytes, found.leased_bytes) == (117, 17)
    assert (found.leases_armed, found.ttl_armed) == (1, 1)
    assert found.leases_by_path == {PathName.RDMA: 1, PathName.TCP: 1, PathName.LOCAL: 1}
    slots.detach(one, rdma, PEER)
    assert slots.statistics().leased_bytes == 17  # it may still be read
    slots.quiesced(rdma)
    assert slots.statistics().leased_bytes == 7
    assert slots.is_held(tcp)
    assert slots.statistics().leases_ended[LeaseEnd.DETACHED] == 1


# --- against a model ------------------------------------------------------------------------------


class Model:
    """What a slot is, without any rule of order: two counters and who holds what."""

    def __init__(self, handle: Handle, retain: bool) -> None:
        self.handle = handle
        self.retain = retain
        self.refcount = 1
        self.held: dict[LeaseId, bytes] = {}
        self.unconfirmed: set[LeaseId] = set()

    @property
    def free(self) -> bool:
        return not (self.refcount or self.held or self.unconfirmed)


class SlotsAgainstModel(RuleBasedStateMachine):
    """Random calls; after each, the store agrees with the model about every slot and every
    lease.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotStore(OWNER, lease_timeout_s=1.0)
        self.now = 0.0
        self.models: dict[SlotId, Model] = {}
        self.freed: set[SlotId] = set()
        self.deadlines: dict[LeaseId, float] = {}
        self.lease_ids: list[LeaseId] = []

    def absorb(self, effects: list[SlotEffect]) -> None:
        for effect in effects:
            if isinstance(effect, RetractLease):
                model = self.models[effect.slot_id]
                assert model.held.pop(effect.lease_id) == effect.epoch
                self.deadlines.pop(effect.lease_id, None)
                model.unconfirmed.add(effect.lease_id)
                forced = effect.how in (LeaseEnd.REAPED, LeaseEnd.PEER_LOST)
                if effect.how in (LeaseEnd.EXPIRED, LeaseEnd.SHUTDOWN):
                    model.refcount = 0
                elif effect.how is not LeaseEnd.DETACHED and not (forced and model.retain):
                    floor = 1 if model.retain and model.refcount else 0
                    model.refcount = max(floor, model.refcount - 1)
            elif isinstance(effect, FreeSlot):
                assert effect.slot_id not in self.freed
                self.freed.add(effect.slot_id)

    def pick(self, data: st.DataObject) -> Model:
        return self.models[data.draw(st.sampled_from(sorted(self.models)))]

    @rule(retain=st.booleans())
    def register(self, retain: bool) -> None:
        handle = self.slots.register(1, pinned=True, retain=retain)
        assert handle.slot_id not in self.models
        self.models[handle.slot_id] = Model(handle, retain)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), epoch=st.sampled_from([PEER, OTHER]), armed=st.booleans())
    def acquire(self, data: st.DataObject, epoch: bytes, armed: bool) -> None:
        model = self.pick(data)
        if not model.refcount:
            with pytest.raises(UnknownHandle):
                self.slots.acquire(model.handle, epoch)
            return
        lease = self.slots.acquire(model.handle, epoch)
        assert lease not in self.lease_ids
        self.lease_ids.append(lease)
        model.held[lease] = epoch
        if armed:
            assert self.slots.arm(lease, self.now)
            self.deadlines[lease] = self.now + 1.0

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def ref(self, data: st.DataObject) -> None:
        model = self.pick(data)
        if model.refcount:
            self.slots.ref(model.handle)
            model.refcount += 1
        else:
            with pytest.raises(UnknownHandle):
                self.slots.ref(model.handle)

    @precondition(lambda self: self.models and self.lease_ids)
    @rule(
        data=st.data(),
        how=st.sampled_from(["detach", "release", "renew"]),
        epoch=st.sampled_from([PEER, OTHER]),
    )
    def end(self, data: st.DataObject, how: str, epoch: bytes) -> None:
        lease = data.draw(st.sampled_from(self.lease_ids))
        model = self.pick(data)
        late = self.slots.statistics().late_ends
        call = {
            "detach": lambda: self.slots.detach(model.handle, lease, epoch),
            "release": lambda: self.slots.release(model.handle, lease, epoch),
            "renew": lambda: self.slots.renew(model.handle, lease, epoch, self.now),
        }[how]
        try:
            result = call()
        except LeaseError:
            assert model.held.get(lease) != epoch
            return
        if model.held.get(lease) != epoch:
            assert not result
            assert self.slots.statistics().late_ends == late + 1
        elif how == "renew":
            assert result is True
            if lease in self.deadlines:
                self.deadlines[lease] = self.now + 1.0
        else:
            assert isinstance(result, list)
            self.absorb(result)
            assert lease not in model.held

    @precondition(lambda self: any(m.unconfirmed for m in self.models.values()))
    @rule(data=st.data(), proven=st.booleans())
    def confirm(self, data: st.DataObject, proven: bool) -> None:
        waiting = [(m, x) for m in self.models.values() for x in sorted(m.unconfirmed)]
        model, lease = data.draw(st.sampled_from(waiting))
        if not proven:
            try:
                (effect,) = self.slots.unquiesced(lease, "stuck")
            except InternalError:
                return  # said before
            assert isinstance(effect, RetainSlot)
            return
        model.unconfirmed.discard(lease)
        self.absorb(self.slots.quiesced(lease))

    @rule(epoch=st.sampled_from([PEER, OTHER]))
    def lose_peer(self, epoch: bytes) -> None:
        self.absorb(self.slots.end_epoch(epoch))
        assert not any(epoch in m.held.values() for m in self.models.values())

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        model = self.pick(data)
        if model.refcount:
            effects = self.slots.withdraw(model.handle)
            model.refcount = 0
            self.absorb(effects)
            assert not model.held

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.slots.next_deadline) is not None and due <= until:
            self.now = max(self.now, due)
            effects = self.slots.due(self.now)
            for lease, how in retracted(effects):
                assert how is LeaseEnd.REAPED
                assert self.now - 0.5 <= self.deadlines[lease] <= self.now
            self.absorb(effects)
        self.now = until

    @invariant()
    def agree(self) -> None:
        statistics = self.slots.statistics()
        assert statistics.leases_held == sum(len(m.held) for m in self.models.values())
        assert self.freed == {slot for slot, m in self.models.items() if m.free}
        assert statistics.slots == len(self.models) - len(self.freed)
        for model in self.models.values():
            if model.refcount:
                assert self.slots.metadata(model.handle).refcount == model.refcount
        # Every deadline that has passed is at most one scan old.
        assert all(self.now < deadline + 0.5 for deadline in self.deadlines.values())
        assert (self.slots.next_deadline is None) <= (not self.deadlines)

    def teardown(self) -> None:
        self.absorb(self.slots.close())
        for model in self.models.values():
            model.refcount = 0
            for lease in sorted(model.unconfirmed):
                model.unconfirmed.discard(lease)
                self.absorb(self.slots.quiesced(lease))
        assert self.slots.statistics().slots == 0
        assert self.freed == set(self.models)


SlotsAgainstModel.TestCase.settings = settings(
    max_examples=150,  # test_slots_model has the many
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSlotsAgainstModel = SlotsAgainstModel.TestCase
