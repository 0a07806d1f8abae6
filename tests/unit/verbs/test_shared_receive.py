"""Shared receive queues, asynchronous events and pollers on the fake: the contracts in both modes,
and what only the fake can show.
"""

from __future__ import annotations

import errno
import os

import pytest

from orbit.errors import ClosedError, DeviceError, UsageError
from orbit.verbs import status
from orbit.verbs.async_events import AsyncEvent, AsyncEventKind, Subject, event_of, kind_of
from orbit.verbs.poller import NativePoller
from orbit.verbs.provider import Provider, QueuePairCaps
from orbit.verbs.scripted import RECEIVE, ScriptedFabric, ScriptedProvider, Step
from orbit.verbs.turn import READ, STATE_ERR, QueuePairAttributes, pack_read, pack_send
from tests.contract.poller_suite import PollerContract, polled, post_empty_reads, woken
from tests.contract.shared_receive_suite import (
    AsyncEventContract,
    LimitEventContract,
    SharedReceiveContract,
    SharedRig,
    next_event,
    no_event,
)
from tests.contract.turn_rig import PATIENCE_S, Endpoint, Rig, made_rig
from tests.contract.turn_suite import readable


class TestSharedReceivesOnTheFake(SharedReceiveContract):
    pass


class TestLimitEventsOnTheFake(LimitEventContract):
    pass


class TestAsyncEventsOnTheFake(AsyncEventContract):
    pass


class TestPollersOnTheFake(PollerContract):
    pass


class TestSharedReceives:
    def test_a_receive_that_is_missing_is_counted_once(
        self, rig: Rig, fabric: ScriptedFabric
    ) -> None:
        shared = SharedRig(rig)
        for pair in (0, 1):
            shared.send(pair, b"x")
        counters = fabric.devices["fakeb1"].counters
        assert counters().receiver_not_ready == 2
        shared.post(1)  # one of them goes on, the other one waits as before
        assert rig.a.done().status == status.SUCCESS
        assert counters().receiver_not_ready == 2
        shared.post(1)
        rig.a.done()
        rig.b.completions(2)

    @pytest.mark.parametrize(("known", "accepted"), [(True, 2), (False, None)])
    def test_a_post_is_refused_at_an_entry(
        self, rig: Rig, fabric: ScriptedFabric, known: bool, accepted: int | None
    ) -> None:
        shared = SharedRig(rig, pairs=1)
        fabric.devices["fakeb1"].refuse_post(RECEIVE, errno.EIO, known=known, skip=2)
        packed = shared.packed(range(4))
        result = rig.b.turn.post_shared_receive(shared.srq.native, packed)
        assert result == (accepted, errno.EIO)
        for _ in range(2):
            shared.send(0, b"x")
        assert [done.wr_id for done in rig.b.completions(2)] == [1000, 1001]
        shared.send(0, b"x")
        rig.b.no_completion()

    def test_receives_complete_late_twice_or_never(self, rig: Rig, fabric: ScriptedFabric) -> None:
        shared = SharedRig(rig)
        shared.post(4)
        device = fabric.devices["fakeb1"]
        device.lose(RECEIVE)
        device.duplicate(RECEIVE, skip=1)
        device.hold(RECEIVE, skip=2, count=1)
        for pair in (0, 0, 1, 0):
            shared.send(pair, b"x")
        rig.a.completions(4)
        # A held completion holds those of its own queue pair only.
        assert [done.wr_id for done in rig.b.completions(3)] == [1001, 1001, 1003]
        device.release()
        assert rig.b.done().wr_id == 1002

    def test_codes_of_a_message_that_does_not_fit(self, rig: Rig, fabric: ScriptedFabric) -> None:
        shared = SharedRig(rig)
        shared.post(1, length=16)
        shared.send(0, bytes(17))
        codes = (rig.a.done().status, rig.b.done().status)
        if fabric.rxe:
            assert codes == (status.REM_OP_ERR, status.LOC_QP_OP_ERR)
        else:
            assert codes == (status.REM_INV_REQ_ERR, status.LOC_LEN_ERR)
            assert next_event(rig.b).kind is AsyncEventKind.QP_LAST_WQE_REACHED

    def test_regions_of_the_queues_own_domain(self, rig: Rig) -> None:
        other = rig.b.context.allocate_domain()
        srq = other.create_shared_receive(4)
        qp = rig.b.domain.create_queue_pair(rig.b.cq, rig.b.cq, QueuePairCaps(4, 0), srq)
        sender = rig.a.new_qp()
        rig.connect(sender, qp)
        shared = SharedRig(rig, pairs=1)
        assert rig.b.turn.post_shared_receive(srq.native, shared.packed([0])) == (1, 0)
        rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 8), qp=sender)
        assert rig.a.done().status == status.REM_OP_ERR
        assert rig.b.done().status == status.LOC_PROT_ERR
        for thing in (sender, qp, srq, other):
            thing.close()

    def test_a_limit_that_fires_as_it_is_armed(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].set_limit_event_at_arm(at_arm=True)
        shared = SharedRig(rig, pairs=1)
        shared.post(2)
        shared.srq.arm_limit(2)
        no_event(rig.b)
        shared.srq.arm_limit(3)
        assert next_event(rig.b).native == shared.srq.native

    def test_verbs_fail_as_scripted(self, rig: Rig, fabric: ScriptedFabric) -> None:
        device = fabric.devices["fakeb1"]
        device.fail_verb("create_srq", errno.ENOMEM)
        with pytest.raises(DeviceError) as refused:
            rig.b.domain.create_shared_receive(4)
        assert (refused.value.verb, refused.value.errno) == ("create_srq", errno.ENOMEM)
        with pytest.raises(DeviceError) as refused:
            rig.b.domain.create_shared_receive(0)
        assert refused.value.errno == errno.EINVAL
        srq = rig.b.domain.create_shared_receive(4)
        device.fail_verb("modify_srq", errno.EIO)
        with pytest.raises(DeviceError):
            srq.arm_limit(1)
        device.fail_verb("destroy_srq", errno.EBUSY)
        with pytest.raises(DeviceError):
            srq.close()
        assert srq.native
        stale = srq.native
        srq.close()
        assert rig.b.turn.post_shared_receive(stale, [bytes(24)]) == (0, errno.EBADF)
        assert rig.b.turn.post_shared_receive(0, [bytes(24)]) == (0, errno.EBADF)

    def test_a_granted_inline_size(self, rig: Rig, fabric: ScriptedFabric) -> None:
        qp = rig.a.domain.create_queue_pair(rig.a.cq, rig.a.cq, QueuePairCaps(4, 4, 0))
        assert qp.caps.inline_bytes == (16 if fabric.rxe else 0)
        qp.close()


class TestEvents:
    def test_ports_and_addresses(self, rig: Rig, fabric: ScriptedFabric) -> None:
        device = fabric.devices["fakeb1"]
        device.set_port(active=False)
        device.set_port(active=False)  # nothing new
        device.set_port(active=True)
        device.set_gid(5, "::ffff:198.18.0.77")
        told = []
        while (event := rig.b.context.next_async_event()) is not None:
            told.append((event.kind, event.subject, event.port))
        up = [("PORT_ACTIVE", Subject.PORT, 1)] * (2 if fabric.rxe else 1)
        assert told == [
            ("PORT_ERR", Subject.PORT, 1),
            *up,
            ("GID_CHANGE", Subject.PORT, 1),
        ]
        no_event(rig.a)

    def test_every_context_is_told_of_a_port(self, rig: Rig, fabric: ScriptedFabric) -> None:
        provider: Provider = ScriptedProvider(fabric)
        other = provider.open("fakeb1")
        fabric.devices["fakeb1"].set_port(active=False)
        for context in (rig.b.context, other):
            event = context.next_async_event()
            assert event == AsyncEvent(AsyncEventKind.PORT_ERR, port=1)
        other.close()
        with pytest.raises(ClosedError):
            other.next_async_event()

    def test_what_is_raised_by_a_script(self, rig: Rig, fabric: ScriptedFabric) -> None:
        device = fabric.devices["fakeb1"]
        device.raise_event(AsyncEventKind.QP_FATAL, rig.b.qp)
        device.raise_event(AsyncEventKind.CQ_ERR, rig.b.cq)
        device.raise_event(AsyncEventKind.DEVICE_FATAL)
        fatal = next_event(rig.b)
        assert fatal == AsyncEvent(AsyncEventKind.QP_FATAL, rig.b.qp.native, rig.b.qp.qp_num)
        overrun = next_event(rig.b)
        assert (overrun.subject, overrun.native) == (Subject.COMPLETION_QUEUE, rig.b.cq.native)
        assert next_event(rig.b) == AsyncEvent(AsyncEventKind.DEVICE_FATAL)
        assert fatal.subject is Subject.QUEUE_PAIR
        qp = rig.b.new_qp()
        device.raise_event(AsyncEventKind.QP_FATAL, qp)
        qp.close()
        no_event(rig.b)  # nobody is told of what is gone
        with pytest.raises(UsageError):
            device.raise_event(AsyncEventKind.QP_FATAL, qp)

    def test_a_refused_request_is_told_by_the_specification_only(
        self, rig: Rig, fabric: ScriptedFabric
    ) -> None:
        assert rig.read(0xABCD00, 0, 8).status == status.REM_ACCESS_ERR
        if fabric.rxe:
            no_event(rig.b)
        else:
            event = next_event(rig.b)
            assert (event.kind, event.qp_num) == ("QP_ACCESS_ERR", rig.b.qp.qp_num)

    def test_an_overrun_is_told(self) -> None:
        for rxe in (False, True):
            fabric = ScriptedFabric(rxe=rxe)
            fabric.add_device("fake")
            provider = ScriptedProvider(fabric)
            rig = made_rig(provider, "fake", provider, "fake", not rxe)
            small = rig.a.context.create_cq(3, rig.a.channel)
            qp = rig.a.domain.create_queue_pair(small, small, QueuePairCaps(8, 8))
            rig.connect(qp, rig.b.new_qp())
            a = rig.a
            a.post(*(pack_read(i, a.address, a.region.lkey, 0, 0, 0) for i in range(5)), qp=qp)
            told = []
            while (event := a.context.next_async_event()) is not None:
                told.append(event)
            # rxe tells it of each completion that it lost.
            expected = AsyncEvent(AsyncEventKind.CQ_ERR, small.native)
            assert told == [expected] * (2 if rxe else 1)

    def test_a_context_ends_after_its_objects(self, rig: Rig) -> None:
        with pytest.raises(DeviceError) as busy:
            rig.b.context.close()
        assert busy.value.errno == errno.EBUSY

    def test_numbers_are_those_of_the_verbs_library(self) -> None:
        assert AsyncEventKind.CQ_ERR.number == 0
        assert AsyncEventKind.PORT_ERR.number == 10
        assert AsyncEventKind.SRQ_LIMIT_REACHED.number == 15
        assert AsyncEventKind.QP_LAST_WQE_REACHED.number == 16
        assert AsyncEventKind.GID_CHANGE.number == 18
        assert kind_of(99) is kind_of(-1) is AsyncEventKind.UNKNOWN
        assert event_of(99, 7) == AsyncEvent(AsyncEventKind.UNKNOWN)


def parked(end: Endpoint) -> bool:
    """What a lane does before it sleeps, and its sleep; True: a completion was found or announced.
    The wrong order loses one: see `parked_without_a_second_look`."""
    end.turn.drain_events(end.channel.native, end.cq.native)
    if end.turn.poll(end.cq.native):
        return True
    end.turn.arm(end.cq.native)
    if end.turn.poll(end.cq.native):
        return True
    return readable(end.channel.fd, PATIENCE_S)


def parked_without_a_second_look(end: Endpoint) -> bool:
    if end.turn.poll(end.cq.native):
        return True
    end.turn.arm(end.cq.native)
    return readable(end.channel.fd, 0.02)


class TestBetweenTheSteps:
    """A completion that comes at each possible moment between polling, arming and sleeping."""

    @pytest.mark.parametrize(
        ("step", "skip"),
        [
            (Step.BEFORE_DRAIN, 0),
            (Step.AFTER_DRAIN, 0),
            (Step.BEFORE_POLL, 0),
            (Step.AFTER_POLL, 0),
            (Step.BEFORE_ARM, 0),
            (Step.AFTER_ARM, 0),
            (Step.BEFORE_POLL, 1),
            (Step.AFTER_POLL, 1),
        ],
    )
    def test_a_loop_misses_none(
        self, rig: Rig, fabric: ScriptedFabric, step: Step, skip: int
    ) -> None:
        device = fabric.devices["fakea1"]
        device.hold(READ, count=1)
        post_empty_reads(rig, 7, 1)
        device.release_at(step, skip=skip)
        assert parked(rig.a)
        rig.a.turn.drain_events(rig.a.channel.native, rig.a.cq.native)
        rig.a.turn.poll(rig.a.cq.native)
        rig.a.no_completion()

    def test_a_loop_that_does_not_look_again_misses_one(
        self, rig: Rig, fabric: ScriptedFabric
    ) -> None:
        device = fabric.devices["fakea1"]
        device.hold(READ, count=1)
        post_empty_reads(rig, 7, 1)
        device.release_at(Step.AFTER_POLL)
        assert not parked_without_a_second_look(rig.a)
        assert rig.a.done().wr_id == 7

    @pytest.mark.parametrize("step", [*Step])
    @pytest.mark.parametrize("spin_us", [0, 50])
    def test_a_wait_misses_none(
        self, rig: Rig, fabric: ScriptedFabric, step: Step, spin_us: int
    ) -> None:
        if step in {Step.BEFORE_DRAIN, Step.AFTER_DRAIN}:
            stale_event(rig)
        device = fabric.devices["fakea1"]
        device.hold(READ, count=1)
        post_empty_reads(rig, 7, 1)
        device.release_at(step)
        a = rig.a
        patience_us = int(PATIENCE_S * 1e6)
        found = a.turn.wait(a.cq.native, a.channel.native, spin_us, patience_us)
        assert [done.wr_id for done in found] == [7]

    def test_a_step_that_does_not_come_releases_nothing(
        self, rig: Rig, fabric: ScriptedFabric
    ) -> None:
        device = fabric.devices["fakea1"]
        device.hold(READ, count=1)
        post_empty_reads(rig, 7, 1)
        device.release_at(Step.BEFORE_SLEEP)
        assert rig.a.turn.poll(rig.a.cq.native) == []
        device.release()
        assert rig.a.done().wr_id == 7


def stale_event(rig: Rig) -> None:
    """An event of a completion that was polled already."""
    rig.a.turn.arm(rig.a.cq.native)
    post_empty_reads(rig, 1, 1)
    assert rig.a.turn.poll(rig.a.cq.native)


class TestPollers:
    def test_a_poll_that_fails_is_told_after_what_was_found(
        self, rig: Rig, fabric: ScriptedFabric
    ) -> None:
        extra = rig.a.context.create_cq(16, rig.a.channel)
        qp = rig.a.domain.create_queue_pair(extra, extra, QueuePairCaps(16, 4))
        peer = rig.b.new_qp()
        rig.connect(qp, peer)
        poller = NativePoller(rig.a.turn, extra, 16)
        a = rig.a
        a.post(*(pack_read(i, a.address, a.region.lkey, 0, 0, 0) for i in range(5)), qp=qp)
        assert len(woken(poller, 5, 64)) == 5
        qp.close()
        extra.close()  # under the thread, which must not happen: it ends, and says why
        with pytest.raises(DeviceError) as failed:
            woken(poller, 1, 64)
        assert failed.value.errno == errno.EBADF
        assert poller.stop() == []
        peer.close()

    def test_a_burst_behind_a_slow_reader(self, rig: Rig, fabric: ScriptedFabric) -> None:
        """The wakes and the ring under thousands of completions, a reader of one at a time."""
        with polled(rig, entries=8) as poller:
            for lap in range(40):
                post_empty_reads(rig, 0, 60)
                batch = (1, 2, 7, 64)[lap % 4]
                assert [done.wr_id for done in woken(poller, 60, batch)] == list(range(60))

    def test_late_completions(self, rig: Rig, fabric: ScriptedFabric) -> None:
        device = fabric.devices["fakea1"]
        device.hold(READ)
        with polled(rig) as poller:
            post_empty_reads(rig, 0, 3)
            assert not readable(poller.fd, 0.005)
            rig.a.qp.modify(QueuePairAttributes(STATE_ERR))
            device.release()
            assert [done.wr_id for done in woken(poller, 3, 64)] == [0, 1, 2]

    def test_a_forked_child_has_no_thread_to_drain(self, rig: Rig) -> None:
        with polled(rig) as poller:
            pid = os.fork()
            if pid == 0:
                code = 0
                for use in (poller.drain, poller.stop):
                    try:
                        use()
                    except ClosedError:
                        code += 1
                os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
            post_empty_reads(rig, 1, 1)
            assert woken(poller, 1, 64)[0].wr_id == 1
