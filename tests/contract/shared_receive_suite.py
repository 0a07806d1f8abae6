"""What every provider must do with receives that queue pairs share, and with asynchronous events.

A user subclasses the contracts and gives the fixture `rig` (`turn_rig.py`). Host B receives.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

import pytest

from orbit.errors import ClosedError, DeviceError
from orbit.testing.pattern import pattern
from orbit.verbs import status
from orbit.verbs.async_events import AsyncEvent, AsyncEventKind, Subject
from orbit.verbs.provider import NativeQueuePair, NativeSharedReceive, QueuePairCaps
from orbit.verbs.quirks import quirks_of
from orbit.verbs.turn import (
    INLINE,
    SIGNALED,
    STATE_ERR,
    Completion,
    QueuePairAttributes,
    pack_recv,
    pack_send,
)
from tests.contract.turn_rig import DEPTH, PATIENCE_S, RECEIPT_BYTES, Endpoint, Rig
from tests.contract.turn_suite import readable

SLAB_BYTES = 256
ENDLESS = 7


class SharedRig:
    """`pairs` queue pairs of B on one shared receive queue, each with its own sender at A."""

    def __init__(
        self, rig: Rig, *, pairs: int = 2, depth: int = 16, rnr_retry: int = ENDLESS
    ) -> None:
        self.rig = rig
        self.srq: NativeSharedReceive = rig.b.domain.create_shared_receive(depth)
        rig.b.closing.append(self.srq)  # closed in reverse: after its queue pairs
        self.senders: list[NativeQueuePair] = []
        self.receivers: list[NativeQueuePair] = []
        for _ in range(pairs):
            sender, receiver = rig.a.new_qp(), self.new_receiver()
            rig.connect(sender, receiver, rnr_retry=rnr_retry)
            rig.a.closing.append(sender)
            rig.b.closing.append(receiver)
            self.senders.append(sender)
            self.receivers.append(receiver)

    def new_receiver(self) -> NativeQueuePair:
        caps = QueuePairCaps(DEPTH, 0)
        return self.rig.b.domain.create_queue_pair(self.rig.b.cq, self.rig.b.cq, caps, self.srq)

    def post(self, count: int, length: int = SLAB_BYTES, first: int = 0) -> None:
        """Receives with ids from 1000 + `first`, each into its own slab."""
        recvs = self.packed(range(first, first + count), length)
        assert self.rig.b.turn.post_shared_receive(self.srq.native, recvs) == (count, 0)

    def packed(self, slabs: Sequence[int], length: int = SLAB_BYTES) -> list[bytes]:
        b = self.rig.b
        return [
            pack_recv(1000 + i, b.receive_address(i % 64, SLAB_BYTES), length, b.region.lkey)
            for i in slabs
        ]

    def send(self, pair: int, payload: bytes, *, wr_id: int = 1) -> None:
        a = self.rig.a
        at = pair * SLAB_BYTES
        a.memory[at : at + len(payload)] = payload
        request = pack_send(wr_id, a.address + at, a.region.lkey, len(payload))
        a.post(request, qp=self.senders[pair])

    def slab(self, done: Completion) -> bytes:
        """What a receive's completion brought."""
        b = self.rig.b
        start = b.receive_address((done.wr_id - 1000) % 64, SLAB_BYTES) - b.address
        return b.memory[start : start + done.byte_len]


def next_event(end: Endpoint) -> AsyncEvent:
    assert readable(end.context.async_fd, PATIENCE_S)
    event = end.context.next_async_event()
    assert event is not None
    return event


def no_event(end: Endpoint) -> None:
    assert not readable(end.context.async_fd, 0.01)
    assert end.context.next_async_event() is None


def no_limit_event(end: Endpoint) -> None:
    """Other kinds may come: a device says what it likes about its ports and queue pairs."""
    while (event := end.context.next_async_event()) is not None:
        assert event.kind is not AsyncEventKind.SRQ_LIMIT_REACHED


class SharedReceiveContract:
    """Receives of several queue pairs in one queue."""

    def test_each_message_takes_the_next_receive(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=3)
        shared.post(9)
        sent: dict[int, list[bytes]] = {}
        for turn in range(9):
            pair = (0, 2, 1)[turn % 3]
            payload = pattern(100 + turn, seed=turn)
            shared.send(pair, payload)
            assert rig.a.done().status == status.SUCCESS
            done = rig.b.done()
            assert (done.wr_id, done.status, done.opcode) == (1000 + turn, 0, status.OPCODE_RECV)
            assert done.qp_num == shared.receivers[pair].qp_num
            assert shared.slab(done) == payload
            sent.setdefault(pair, []).append(payload)
        assert {pair: len(payloads) for pair, payloads in sent.items()} == {0: 3, 1: 3, 2: 3}

    def test_a_long_chain_in_one_post(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1, depth=100)
        shared.post(70)
        for start in range(0, 70, 35):
            rig.a.post(
                *(pack_send(i, rig.a.address, rig.a.region.lkey, 8) for i in range(35)),
                qp=shared.senders[0],
            )
            rig.a.completions(35)
            got = [done.wr_id for done in rig.b.completions(35)]
            assert got == list(range(1000 + start, 1035 + start))

    def test_an_inline_message(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        shared.post(1)
        payload = ctypes.create_string_buffer(pattern(RECEIPT_BYTES), RECEIPT_BYTES)
        address = ctypes.addressof(payload)
        flags = SIGNALED | INLINE
        rig.a.post(pack_send(1, address, 0, RECEIPT_BYTES, flags), qp=shared.senders[0])
        ctypes.memset(address, 0, RECEIPT_BYTES)
        assert rig.a.done().status == status.SUCCESS
        assert shared.slab(rig.b.done()) == pattern(RECEIPT_BYTES)

    def test_an_empty_queue_holds_the_sender_up(self, rig: Rig) -> None:
        shared = SharedRig(rig)
        shared.send(0, b"first")
        shared.send(1, b"second")
        rig.a.no_completion()
        shared.post(2)
        assert [done.status for done in rig.a.completions(2)] == [0, 0]
        assert {shared.slab(done) for done in rig.b.completions(2)} == {b"first", b"second"}

    def test_finite_patience_ends(self, rig: Rig) -> None:
        shared = SharedRig(rig, rnr_retry=1)
        shared.send(0, b"in vain")
        assert rig.a.done().status == status.RNR_RETRY_EXC_ERR
        shared.post(1)
        shared.send(1, b"in time")
        assert rig.a.done().status == status.SUCCESS
        assert shared.slab(rig.b.done()) == b"in time"

    def test_an_error_flushes_no_shared_receive(self, rig: Rig) -> None:
        shared = SharedRig(rig)
        shared.post(4)
        shared.receivers[0].modify(QueuePairAttributes(STATE_ERR))
        rig.b.no_completion()
        for turn in range(4):
            shared.send(1, b"still here")
            assert rig.a.done().status == status.SUCCESS
            assert rig.b.done().wr_id == 1000 + turn

    def test_the_end_of_a_queue_pair_leaves_the_receives(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        extra = shared.new_receiver()
        shared.post(2)
        extra.close()
        shared.send(0, b"x")
        assert rig.b.done().wr_id == 1000

    def test_the_last_receive_is_told_where_the_device_does(self, rig: Rig) -> None:
        shared = SharedRig(rig)
        shared.receivers[0].modify(QueuePairAttributes(STATE_ERR))
        quirks = quirks_of(rig.b.context.limits().vendor_id)
        if not quirks.last_wqe_event:
            no_event(rig.b)
            return
        event = next_event(rig.b)
        assert event.kind is AsyncEventKind.QP_LAST_WQE_REACHED
        assert event.subject is Subject.QUEUE_PAIR
        assert event.qp_num == shared.receivers[0].qp_num
        assert event.native == shared.receivers[0].native
        no_event(rig.b)

    def test_a_message_that_does_not_fit_ends_its_queue_pair_only(self, rig: Rig) -> None:
        shared = SharedRig(rig)
        shared.post(2, length=16)
        shared.send(0, bytes(17))
        assert rig.a.done().status != status.SUCCESS
        ended = rig.b.done()
        assert ended.status != status.SUCCESS
        assert (ended.wr_id, ended.qp_num) == (1000, shared.receivers[0].qp_num)
        shared.send(1, bytes(16))
        assert rig.a.done().status == status.SUCCESS
        assert rig.b.done().wr_id == 1001

    def test_a_full_queue_says_how_much_it_took(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        assert shared.srq.depth >= 16
        many = shared.packed(range(shared.srq.depth + 64))
        accepted, why = rig.b.turn.post_shared_receive(shared.srq.native, many)
        assert why == errno.ENOMEM
        assert accepted is not None
        assert shared.srq.depth <= accepted < len(many)
        shared.send(0, b"x")
        assert rig.b.done().wr_id == 1000
        assert rig.b.turn.post_shared_receive(shared.srq.native, many[:1]) == (1, 0)

    def test_a_queue_pair_that_shares_has_no_receives_of_its_own(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        assert shared.receivers[0].caps.recv_depth == 0
        accepted, why = rig.b.turn.post_recv(shared.receivers[0].native, shared.packed([0]))
        assert why in {errno.EINVAL, errno.ENOMEM}
        assert accepted in {0, None}  # rdma_rxe does not say

    def test_it_ends_after_its_queue_pairs(self, rig: Rig) -> None:
        srq = rig.b.domain.create_shared_receive(8)
        qp = rig.b.domain.create_queue_pair(rig.b.cq, rig.b.cq, QueuePairCaps(8, 0), srq)
        with pytest.raises(DeviceError) as busy:
            srq.close()
        assert busy.value.errno == errno.EBUSY
        with pytest.raises(DeviceError) as busy:
            rig.b.domain.close()
        assert busy.value.errno == errno.EBUSY
        qp.close()
        srq.close()
        srq.close()
        assert srq.native == 0
        with pytest.raises((ClosedError, DeviceError)):
            srq.arm_limit(1)


class LimitEventContract:
    """The low watermark of a shared receive queue."""

    def test_once_when_fewer_are_left(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        shared.post(8)
        shared.srq.arm_limit(4)
        for _ in range(4):
            shared.send(0, b"x")
            rig.b.done()
        no_limit_event(rig.b)  # four are left
        shared.send(0, b"x")
        rig.b.done()
        event = next_event(rig.b)
        assert (event.kind, event.subject) == ("SRQ_LIMIT_REACHED", Subject.SHARED_RECEIVE)
        assert (event.native, event.qp_num, event.port) == (shared.srq.native, 0, 0)
        for _ in range(3):
            shared.send(0, b"x")
            rig.b.done()
        no_limit_event(rig.b)

    def test_armed_again_it_fires_again(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        for lap in range(3):
            shared.post(4, first=4 * lap)
            shared.srq.arm_limit(2)
            for _ in range(4):
                shared.send(0, b"x")
                rig.b.done()
            assert next_event(rig.b).kind is AsyncEventKind.SRQ_LIMIT_REACHED
            no_limit_event(rig.b)

    def test_armed_while_fewer_are_left_it_fires_by_the_next_receive(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        shared.post(2)
        shared.srq.arm_limit(8)
        shared.send(0, b"x")
        rig.b.done()
        assert next_event(rig.b).kind is AsyncEventKind.SRQ_LIMIT_REACHED
        shared.send(0, b"x")
        rig.b.done()
        no_limit_event(rig.b)

    def test_disarmed_it_is_silent(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        shared.post(2)
        shared.srq.arm_limit(2)
        shared.srq.arm_limit(0)
        for _ in range(2):
            shared.send(0, b"x")
            rig.b.done()
        no_limit_event(rig.b)

    def test_a_limit_over_the_depth_is_refused(self, rig: Rig) -> None:
        srq = rig.b.domain.create_shared_receive(8)
        rig.b.closing.append(srq)
        with pytest.raises(DeviceError) as refused:
            srq.arm_limit(2 * srq.depth + 2)  # rdma_rxe holds more than it grants
        assert (refused.value.verb, refused.value.errno) == ("modify_srq", errno.EINVAL)


class AsyncEventContract:
    """How events are read."""

    def test_none_is_a_value(self, rig: Rig) -> None:
        no_event(rig.b)
        assert not os.get_blocking(rig.b.context.async_fd)
        assert rig.b.turn.async_fd(rig.b.context.native) == rig.b.context.async_fd

    def test_an_event_that_nobody_read_goes_with_its_object(self, rig: Rig) -> None:
        srq = rig.b.domain.create_shared_receive(8)
        qp = rig.b.domain.create_queue_pair(rig.b.cq, rig.b.cq, QueuePairCaps(8, 0), srq)
        sender = rig.a.new_qp()
        rig.connect(sender, qp)
        recv = pack_recv(1, rig.b.receive_address(), 64, rig.b.region.lkey)
        assert rig.b.turn.post_shared_receive(srq.native, [recv]) == (1, 0)
        srq.arm_limit(4)
        rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 8), qp=sender)
        rig.a.done()
        rig.b.done()
        assert readable(rig.b.context.async_fd, PATIENCE_S)
        sender.close()
        qp.close()
        srq.close()
        no_event(rig.b)

    def test_events_of_a_peer_are_not_ours(self, rig: Rig) -> None:
        shared = SharedRig(rig, pairs=1)
        shared.post(1)
        shared.srq.arm_limit(8)
        shared.send(0, b"x")
        rig.b.done()
        assert next_event(rig.b).native == shared.srq.native
        no_event(rig.a)
