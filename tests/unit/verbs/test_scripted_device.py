"""The fake device: the contract in both modes, what only it can show, and its script."""

from __future__ import annotations

import errno
import gc
import threading
import time

import pytest

from orbit.errors import ClosedError, DeviceError, UsageError
from orbit.verbs import status
from orbit.verbs.provider import Provider, QueuePairCaps
from orbit.verbs.scripted import ANY_OPCODE, RECEIVE, ScriptedFabric, ScriptedProvider
from orbit.verbs.turn import (
    ACCESS_REMOTE_WRITE,
    BIND_WINDOW,
    FENCE,
    READ,
    SEND,
    SEND_WITH_INV,
    SIGNALED,
    STATE_ERR,
    STATE_RESET,
    WRITE,
    QueuePairAttributes,
    pack_bind,
    pack_local_inv,
    pack_read,
    pack_send,
    pack_send_with_inv,
    pack_write,
)
from tests.contract.turn_rig import DEPTH, Rig, expected, made_rig
from tests.contract.turn_suite import BindContract, QueueContract, TurnContract


def scripted_rig(*, rxe: bool) -> tuple[Rig, ScriptedFabric]:
    fabric = ScriptedFabric(rxe=rxe)
    fabric.add_device("fakea1")
    fabric.add_device("fakeb1")
    provider = ScriptedProvider(fabric)
    return made_rig(provider, "fakea1", provider, "fakeb1", not rxe), fabric


class TestTurnOnTheFake(TurnContract):
    pass


class TestBindOnTheFake(BindContract):
    pass


class TestQueuesOnTheFake(QueueContract):
    pass


def test_the_provider_keeps_the_contract(fabric: ScriptedFabric) -> None:
    provider: Provider = ScriptedProvider(fabric, ["fakeb1"])
    assert list(provider.devices()) == ["fakeb1"]
    with pytest.raises(DeviceError) as unseen:
        provider.open("fakea1")
    assert unseen.value.errno == errno.ENODEV
    context = provider.open("fakeb1")
    assert context.device == "fakeb1"
    assert context.limits().window_type_2b
    assert context.port(1).active
    assert context.gid(1, 1) == "::ffff:198.18.0.2"
    assert context.gid(1, 5) == "::"
    with pytest.raises(DeviceError):
        context.port(2)
    context.close()
    with pytest.raises(ClosedError):
        context.limits()


class TestOrderOfClosing:
    def test_parents_go_last(self, rig: Rig) -> None:
        for early in (rig.b.cq, rig.b.channel, rig.b.domain):
            with pytest.raises(DeviceError) as busy:
                early.close()
            assert busy.value.errno == errno.EBUSY
            assert early.native

    def test_a_queue_pair_that_dies_with_a_bound_window_is_seen(self) -> None:
        rig, fabric = scripted_rig(rxe=True)
        key = rig.bind(rig.b.domain.allocate_window(), 0, 64)
        rig.b.qp.close()
        assert key
        assert fabric.devices["fakeb1"].counters().misuse == {"destroyed_with_windows": 1}

    def test_a_stale_address_is_an_error_and_no_crash(self, rig: Rig) -> None:
        extra = rig.a.new_qp()
        stale = extra.native
        extra.close()
        request = pack_send(1, 0, 0, 0)
        assert rig.a.turn.post_send(stale, [request]) == (0, errno.EBADF)
        assert rig.a.turn.post_send(0, [request]) == (0, errno.EBADF)

    def test_a_fabric_goes_with_its_last_user(self) -> None:
        rig, fabric = scripted_rig(rxe=False)
        del fabric
        gc.collect()
        assert rig.read(0, 0, 0).status == status.SUCCESS


class TestInvalidates:
    """A second invalidate ends the queue pair by the specification and the kernel on rxe."""

    @pytest.mark.parametrize("rxe", [False, True])
    @pytest.mark.parametrize("first", ["local", "remote"])
    def test_twice(self, rxe: bool, first: str) -> None:
        rig, fabric = scripted_rig(rxe=rxe)
        key = rig.bind(rig.b.window(), 0, 64)
        rig.b.receive(2)
        remote = pack_send_with_inv(1, rig.a.address, rig.a.region.lkey, 8, key)
        if first == "local":
            rig.b.post(pack_local_inv(1, key))
        else:
            rig.a.post(remote)
            assert rig.a.done().status == status.SUCCESS
        assert rig.b.done().status == status.SUCCESS
        rig.a.post(remote)
        assert rig.a.done().status == status.SUCCESS  # the sender has its acknowledgement
        late = rig.b.completions(2 if first == "local" else 1)
        assert late[0].status == status.REM_INV_REQ_ERR
        assert late[0].invalidated == 0
        assert fabric.devices["fakeb1"].panicked is rxe

    def test_of_a_fresh_window(self) -> None:
        rig, fabric = scripted_rig(rxe=True)
        rig.b.post(pack_local_inv(1, rig.b.window().key))
        assert rig.b.done().status == status.LOC_QP_OP_ERR
        assert fabric.devices["fakeb1"].panicked

    def test_of_another_queue_pair(self) -> None:
        for rxe in (False, True):
            rig, _ = scripted_rig(rxe=rxe)
            c, d = rig.a.new_qp(), rig.b.new_qp()
            rig.connect(c, d)
            key = rig.bind(rig.b.window(), 0, 64)
            rig.b.post(pack_local_inv(1, key), qp=d)
            assert (rig.b.done().status == status.SUCCESS) is rxe

    def test_a_reused_key_is_seen(self) -> None:
        rig, fabric = scripted_rig(rxe=False)
        window = rig.b.window()
        key = rig.bind(window, 0, 64)
        rig.b.post(pack_local_inv(1, key))
        rig.b.done()
        assert rig.try_bind(window, key, 0, 64).status == status.SUCCESS
        assert fabric.devices["fakeb1"].counters().misuse == {"keys_reused": 1}

    def test_a_reallocated_window_comes_with_the_same_key(self) -> None:
        """The worst that is allowed: only a caller's own history keeps keys apart."""
        rig, _ = scripted_rig(rxe=False)
        first = rig.b.domain.allocate_window()
        key = first.key
        first.close()
        assert rig.b.window().key == key


class TestRxeMode:
    def test_flags_of_a_receipt(self) -> None:
        for rxe, flags in ((False, 8), (True, 5)):
            rig, _ = scripted_rig(rxe=rxe)
            key = rig.bind(rig.b.window(), 0, 64)
            rig.b.receive()
            rig.a.post(pack_send_with_inv(1, rig.a.address, rig.a.region.lkey, 8, key))
            assert rig.b.done().wc_flags == flags

    def test_a_key_that_was_not_written_back(self) -> None:
        for rxe in (False, True):
            rig, _ = scripted_rig(rxe=rxe)
            window = rig.b.window()
            key = rig.fresh_key(window)
            assert rig.try_bind(window, key, 0, 64).status == status.SUCCESS
            rig.b.post(pack_local_inv(1, key))
            rig.b.done()
            again = rig.try_bind(window, key + 1, 0, 64).status
            assert again == (status.MW_BIND_ERR if rxe else status.SUCCESS)

    def test_no_remote_key_without_a_remote_flag(self) -> None:
        rig, _ = scripted_rig(rxe=True)
        assert rig.b.region.rkey == 0

    def test_a_short_receive(self) -> None:
        for rxe, sender, receiver in (
            (False, status.REM_INV_REQ_ERR, status.LOC_LEN_ERR),
            (True, status.REM_OP_ERR, status.LOC_QP_OP_ERR),
        ):
            rig, _ = scripted_rig(rxe=rxe)
            rig.b.receive(length=16)
            rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 17))
            assert rig.a.done().status == sender
            assert rig.b.done().status == receiver

    def test_endless_retries_wait(self) -> None:
        rig, _ = scripted_rig(rxe=True)
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d, retry_cnt=7)
        d.modify(QueuePairAttributes(STATE_ERR))
        rig.a.post(pack_read(1, rig.a.address, rig.a.region.lkey, 8, rig.b.address, 1), qp=c)
        rig.a.no_completion()
        c.modify(QueuePairAttributes(STATE_ERR))
        assert rig.a.done().status == status.WR_FLUSH_ERR

    def test_an_overrun_is_fatal_by_the_specification_only(self) -> None:
        for rxe in (False, True):
            fabric = ScriptedFabric(rxe=rxe)
            device = fabric.add_device("fake")
            provider = ScriptedProvider(fabric)
            rig = made_rig(provider, "fake", provider, "fake", not rxe)
            small = rig.a.context.create_cq(3, rig.a.channel)
            c = rig.a.domain.create_queue_pair(small, small, QueuePairCaps(8, 8))
            d = rig.b.new_qp()
            rig.connect(c, d)
            rig.a.post(
                *(pack_read(i, rig.a.address, rig.a.region.lkey, 0, 0, 0) for i in range(5)), qp=c
            )
            assert [done.wr_id for done in rig.a.turn.poll(small.native)] == [0, 1, 2]
            assert device.counters().overruns
            ended = c.state == STATE_ERR  # type: ignore[attr-defined]
            assert ended is not rxe


class TestLateLostDuplicated:
    def test_held_completions_come_in_order(self, rig: Rig, fabric: ScriptedFabric) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        device, a = fabric.devices["fakea1"], rig.a
        device.hold(READ, skip=1, count=1)
        reads = [pack_read(i, a.address, a.region.lkey, 64, rig.b.address, key) for i in range(3)]
        a.post(*reads)
        assert a.done().wr_id == 0
        a.no_completion()
        a.turn.arm(a.cq.native)
        assert device.release() == 2
        assert a.turn.drain_events(a.channel.native, a.cq.native) == 1
        assert [c.wr_id for c in a.completions(2)] == [1, 2]

    def test_a_held_receive(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].hold(RECEIVE)
        rig.b.receive()
        rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 8))
        assert rig.a.done().status == status.SUCCESS
        rig.b.no_completion()
        fabric.devices["fakeb1"].release()
        assert rig.b.done().byte_len == 8

    def test_lost(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakea1"].lose(READ)
        a = rig.a
        a.post(*(pack_read(i, a.address, a.region.lkey, 0, 0, 0) for i in range(2)))
        assert a.done().wr_id == 1

    def test_duplicated(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakea1"].duplicate(READ)
        a = rig.a
        a.post(pack_read(7, a.address, a.region.lkey, 0, 0, 0))
        assert [c.wr_id for c in a.completions(2)] == [7, 7]

    def test_flushes_queue_behind_what_is_held(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakea1"].hold(READ, count=1)
        a = rig.a
        a.post(pack_read(1, a.address, a.region.lkey, 0, 0, 0))
        a.qp.modify(QueuePairAttributes(STATE_ERR))
        a.post(pack_read(2, a.address, a.region.lkey, 0, 0, 0))
        a.no_completion()
        fabric.devices["fakea1"].release()
        assert [c.status for c in a.completions(2)] == [status.SUCCESS, status.WR_FLUSH_ERR]


class TestFailures:
    def test_the_nth_request_fails(self, rig: Rig, fabric: ScriptedFabric) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        fabric.devices["fakea1"].fail(READ, status.RETRY_EXC_ERR, vendor_err=9, skip=1)
        a = rig.a
        a.post(*(pack_read(i, a.address, a.region.lkey, 8, rig.b.address, key) for i in range(3)))
        found = a.completions(3)
        assert [c.status for c in found] == [0, status.RETRY_EXC_ERR, status.WR_FLUSH_ERR]
        assert found[1].vendor_err == 9

    def test_a_receive_fails(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].fail(RECEIVE, status.LOC_PROT_ERR)
        rig.b.receive()
        rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 8))
        assert rig.a.done().status == status.REM_OP_ERR
        assert rig.b.done().status == status.LOC_PROT_ERR

    def test_a_bind_fails(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].fail_bind()
        window = rig.b.window()
        done = rig.try_bind(window, rig.fresh_key(window), 0, 64)
        assert done.status == status.MW_BIND_ERR

    @pytest.mark.parametrize(("known", "accepted"), [(True, 2), (False, None)])
    def test_a_post_is_refused_at_an_entry(
        self, rig: Rig, fabric: ScriptedFabric, known: bool, accepted: int | None
    ) -> None:
        fabric.devices["fakea1"].refuse_post(READ, errno.EIO, known=known, skip=2)
        a = rig.a
        reads = [pack_read(i, a.address, a.region.lkey, 0, 0, 0) for i in range(4)]
        assert a.turn.post_send(a.qp.native, reads) == (accepted, errno.EIO)
        assert [c.wr_id for c in a.completions(2)] == [0, 1]

    def test_a_receive_is_refused(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].refuse_post(RECEIVE, errno.ENOMEM)
        assert rig.b.turn.post_recv(rig.b.qp.native, [bytes(24)]) == (0, errno.ENOMEM)

    def test_a_full_receive_queue(self, rig: Rig) -> None:
        accepted, why = rig.b.turn.post_recv(rig.b.qp.native, [bytes(24)] * 300)
        assert why == errno.ENOMEM
        assert accepted is not None
        assert DEPTH <= accepted < 300
        rig.b.qp.modify(QueuePairAttributes(STATE_RESET))

    def test_rules_are_cleared(self, rig: Rig, fabric: ScriptedFabric) -> None:
        device = fabric.devices["fakea1"]
        device.fail(ANY_OPCODE, status.LOC_PROT_ERR)
        device.clear_rules()
        assert rig.read(0, 0, 0).status == status.SUCCESS
        for _ in range(32):
            device.lose(SEND)
        with pytest.raises(UsageError):
            device.lose(SEND)


class TestVerbs:
    @pytest.mark.parametrize(
        ("verb", "code"),
        [("open_device", errno.EACCES), ("alloc_pd", errno.ENOMEM), ("create_cq", errno.EINVAL)],
    )
    def test_a_verb_fails_as_scripted(self, fabric: ScriptedFabric, verb: str, code: int) -> None:
        fabric.devices["fakea1"].fail_verb(verb, code)
        provider = ScriptedProvider(fabric)

        def everything() -> None:
            context = provider.open("fakea1")
            context.allocate_domain()
            context.create_cq(4, context.create_channel())

        with pytest.raises(DeviceError) as refused:
            everything()
        assert (refused.value.verb, refused.value.errno) == (verb, code)
        everything()

    def test_registration_over_the_limit(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].fail_verb("reg_mr", errno.ENOMEM, skip=1)
        rig.b.closing.append(rig.b.register(1))
        with pytest.raises(DeviceError):
            rig.b.register(1)

    def test_remote_write_needs_local_write(self, rig: Rig) -> None:
        with pytest.raises(DeviceError) as refused:
            rig.b.register(ACCESS_REMOTE_WRITE)
        assert refused.value.errno == errno.EINVAL

    def test_no_windows(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].set_windows(supported=False)
        assert not rig.b.context.limits().window_type_2b
        with pytest.raises(DeviceError) as refused:
            rig.b.domain.allocate_window()
        assert refused.value.errno == errno.EOPNOTSUPP

    def test_a_capability_that_is_a_lie(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].set_windows(supported=False, capability=True)
        assert rig.b.context.limits().window_type_2b
        with pytest.raises(DeviceError):
            rig.b.domain.allocate_window()

    def test_an_absent_neighbour(self, rig: Rig) -> None:
        fresh = rig.a.new_qp()
        rig.a.closing.append(fresh)
        fresh.modify(QueuePairAttributes(1))
        with pytest.raises(DeviceError) as refused:
            fresh.modify(QueuePairAttributes(2, dgid="::ffff:198.18.9.9", sgid_index=1))
        assert refused.value.errno == errno.ETIMEDOUT
        with pytest.raises(DeviceError) as refused:
            fresh.modify(QueuePairAttributes(2, dgid=rig.gids[1][1], sgid_index=9))
        assert refused.value.errno == errno.ENODATA
        with pytest.raises(UsageError):
            fresh.modify(QueuePairAttributes(2, dgid="nonsense"))

    def test_a_slow_transition_leaves_the_interpreter_free(
        self, rig: Rig, fabric: ScriptedFabric
    ) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        fabric.devices["fakea1"].set_rtr_delay(0.05)
        thread = threading.Thread(target=rig.connect, args=(c, d))
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 3
        thread.join()
        c.close()
        d.close()


class TestPorts:
    def test_a_port_that_is_down(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakea1"].set_port(active=False)
        assert not rig.a.context.port(1).active
        own = rig.read(0, 0, 0).status
        assert own == (status.LOC_QP_OP_ERR if fabric.rxe else status.RETRY_EXC_ERR)

    def test_the_other_port_is_down(self, rig: Rig, fabric: ScriptedFabric) -> None:
        fabric.devices["fakeb1"].set_port(active=False)
        assert rig.read(0, 0, 0).status == status.RETRY_EXC_ERR


class TestDelayedPayload:
    def test_bytes_move_at_the_release(self, rig: Rig, fabric: ScriptedFabric) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        device, a = fabric.devices["fakea1"], rig.a
        device.delay_payload(READ, count=1)
        a.post(*(pack_read(i, a.address, a.region.lkey, 64, rig.b.address, key) for i in range(2)))
        a.no_completion()
        assert device.release() >= 1
        assert [c.status for c in a.completions(2)] == [0, 0]
        assert a.memory[:64] == expected(0, 64)

    def test_a_dead_queue_pair_writes_nothing_more(self, rig: Rig, fabric: ScriptedFabric) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        device, a = fabric.devices["fakea1"], rig.a
        device.delay_payload(READ)
        a.post(pack_read(1, a.address, a.region.lkey, 64, rig.b.address, key))
        a.qp.modify(QueuePairAttributes(STATE_ERR))
        assert a.done().status == status.WR_FLUSH_ERR
        assert device.release() == 0
        assert a.memory[:64] == bytes(64)

    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_fence_keeps_the_receipt_behind_the_read(
        self, rig: Rig, fabric: ScriptedFabric, fenced: bool
    ) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        rig.b.receive()
        device, a = fabric.devices["fakea1"], rig.a
        device.delay_payload(READ)
        flags = SIGNALED | FENCE if fenced else SIGNALED
        send = pack_send_with_inv(2, a.address, a.region.lkey, 8, key, flags)
        a.post(pack_read(1, a.address, a.region.lkey, 64, rig.b.address, key), send)
        if not fenced:
            assert rig.b.done().invalidated == key
        else:
            rig.b.no_completion()
        device.release()
        first, second = a.completions(2)
        assert first.status == (status.SUCCESS if fenced else status.REM_ACCESS_ERR)
        assert second.status == (status.SUCCESS if fenced else status.WR_FLUSH_ERR)
        if fenced:
            assert rig.b.done().invalidated == key

    def test_a_delayed_write_holds_what_follows(self, rig: Rig, fabric: ScriptedFabric) -> None:
        key = rig.bind(rig.b.window(), 0, 4096, 3)
        device, a = fabric.devices["fakea1"], rig.a
        device.delay_payload(WRITE)
        a.memory[:8] = b"new data"
        rig.b.receive()
        a.post(
            pack_write(1, a.address, a.region.lkey, 8, rig.b.address, key),
            pack_send(2, a.address, a.region.lkey, 8),
        )
        rig.b.no_completion()
        assert rig.b.memory[:8] == expected(0, 8)
        device.release()
        assert [c.status for c in a.completions(2)] == [0, 0]
        assert rig.b.memory[:8] == b"new data"
        assert rig.b.done().byte_len == 8


class TestPeers:
    def test_a_blocked_sender_goes_on_when_the_receive_comes(self, rig: Rig) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d, rnr_retry=7)
        rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 8), qp=c)
        rig.a.no_completion()
        rig.b.receive(qp=d)
        assert rig.a.done().status == status.SUCCESS
        assert rig.b.done().qp_num == d.qp_num
        c.close()
        d.close()

    def test_packet_numbers_must_fit(self, rig: Rig, fabric: ScriptedFabric) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d)
        for state in (STATE_RESET, 1):
            d.modify(QueuePairAttributes(state, access=7))
        index, _ = rig.gids[1]
        d.modify(
            QueuePairAttributes(
                2, dest_qpn=c.qp_num, dgid=rig.gids[0][1], sgid_index=index, rq_psn=8
            )
        )
        rig.a.post(pack_read(1, rig.a.address, rig.a.region.lkey, 0, 0, 0), qp=c)
        assert rig.a.done().status == status.RETRY_EXC_ERR
        c.close()
        d.close()

    def test_local_errors_leave_the_peer_alive(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        rig.a.post(pack_read(1, rig.a.address, 0x999900, 64, rig.b.address, key))
        assert rig.a.done().status == status.LOC_PROT_ERR
        assert rig.b.qp.state == 3  # type: ignore[attr-defined]

    def test_the_queue_pair_must_allow_remote_access(self, rig: Rig) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d)
        d.modify(QueuePairAttributes(STATE_RESET))
        d.modify(QueuePairAttributes(1, access=1))
        index, _ = rig.gids[1]
        d.modify(
            QueuePairAttributes(
                2, dest_qpn=c.qp_num, dgid=rig.gids[0][1], sgid_index=index, rq_psn=7
            )
        )
        rig.a.post(pack_read(1, rig.a.address, rig.a.region.lkey, 64, rig.b.address, 1), qp=c)
        assert rig.a.done().status == status.REM_INV_REQ_ERR
        c.close()
        d.close()

    def test_a_foreign_region_cannot_be_a_parent(self, rig: Rig) -> None:
        other = rig.b.context.allocate_domain()
        region = other.register(rig.b.address, 4096, 17)
        window = rig.b.window()
        done = rig.try_bind(window, rig.fresh_key(window), 0, 64, region=region)
        assert done.status == status.MW_BIND_ERR
        region.close()
        other.close()

    def test_unknown_requests_are_refused_at_the_post(self, rig: Rig) -> None:
        bind = pack_bind(1, 0, 0, rig.b.address, 64, 7, 1)
        assert rig.b.turn.post_send(rig.b.qp.native, [bind]) == (0, errno.EINVAL)
        unknown = bind[:56] + b"\x63\x00" + bind[58:]
        assert rig.b.turn.post_send(rig.b.qp.native, [unknown]) == (0, errno.EINVAL)


def test_opcodes_name_what_they_are() -> None:
    assert status.opcode_name(status.OPCODE_RECV) == "RECV"
    assert status.opcode_name(77) == "opcode 77"
    assert status.status_name(status.REM_ACCESS_ERR) == "remote access error"
    assert status.status_name(99) == "status 99"
    assert (SEND_WITH_INV, BIND_WINDOW) == (1, 4)
