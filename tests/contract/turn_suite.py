"""What every helper and provider must do: the scripted device in both modes, and a real one.

A user subclasses the contracts and gives the fixture `rig` (`turn_rig.py`).
"""

from __future__ import annotations

import ctypes
import errno
import select
import time

import pytest

from orbit.errors import DeviceError
from orbit.verbs import status
from orbit.verbs.turn import (
    ACCESS_LOCAL_WRITE,
    ACCESS_MW_BIND,
    INLINE,
    SIGNALED,
    STATE_ERR,
    STATE_RTS,
    WINDOW_READ,
    WINDOW_WRITE,
    QueuePairAttributes,
    pack_bind,
    pack_local_inv,
    pack_read,
    pack_recv,
    pack_send,
    pack_send_with_inv,
)
from tests.contract.turn_rig import (
    DEPTH,
    MEMORY_BYTES,
    PATIENCE_S,
    RECEIPT_BYTES,
    Rig,
    expected,
)


class TurnContract:
    """Windows as authority."""

    @pytest.mark.parametrize(
        ("start", "length"), [(0, 1), (1, 4095), (4095, 2), (3, 65519), (0, MEMORY_BYTES)]
    )
    def test_a_window_is_read(self, rig: Rig, start: int, length: int) -> None:
        key = rig.bind(rig.b.window(), start, length)
        done = rig.read(key, start, length)
        assert (done.status, done.opcode) == (status.SUCCESS, status.OPCODE_READ)
        assert (done.wr_id, done.qp_num) == (rig.a.wr_id, rig.a.qp.qp_num)
        assert rig.a.memory[:length] == expected(start, length)
        assert rig.a.memory[length:] == bytes(MEMORY_BYTES - length)

    def test_a_window_is_written(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 4096, 4096, WINDOW_WRITE)
        rig.a.memory[:4096] = expected(7, 4096)
        assert rig.write(key, 4096, 4096).status == status.SUCCESS
        assert rig.b.memory[4096:8192] == expected(7, 4096)
        assert rig.b.memory[:4096] == expected(0, 4096)

    def test_zero_bytes_need_no_authority(self, rig: Rig) -> None:
        assert rig.read(0, 0, 0).status == status.SUCCESS

    @pytest.mark.parametrize("access", [WINDOW_READ, WINDOW_WRITE])
    def test_the_other_direction_is_refused(self, rig: Rig, access: int) -> None:
        key = rig.bind(rig.b.window(), 0, 4096, access)
        use = rig.write if access == WINDOW_READ else rig.read
        assert use(key, 0, 64).status == status.REM_ACCESS_ERR
        assert rig.a.memory[:64] == bytes(64)
        assert rig.b.memory[:4096] == expected(0, 4096)

    def test_a_receipt_invalidates_the_key(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        rig.b.receive()
        a = rig.a
        a.memory[8192 : 8192 + RECEIPT_BYTES] = bytes(range(RECEIPT_BYTES))
        a.post(
            pack_read(1, a.address, a.region.lkey, 4096, rig.b.address, key),
            pack_send_with_inv(2, a.address + 8192, a.region.lkey, RECEIPT_BYTES, key),
        )
        assert [(c.wr_id, c.status) for c in a.completions(2)] == [(1, 0), (2, 0)]
        received = rig.b.done()
        assert (received.wr_id, received.status, received.byte_len) == (1000, 0, RECEIPT_BYTES)
        assert (received.opcode, received.invalidated) == (status.OPCODE_RECV, key)
        offset = MEMORY_BYTES // 2
        assert rig.b.memory[offset : offset + RECEIPT_BYTES] == bytes(range(RECEIPT_BYTES))
        a.memory[:64] = bytes(64)
        assert rig.read(key, 0, 64).status == status.REM_ACCESS_ERR
        assert a.memory[:64] == bytes(64)

    def test_an_old_key_is_dead_after_the_next_bind(self, rig: Rig) -> None:
        window = rig.b.window()
        old = rig.bind(window, 0, 4096)
        rig.b.post(pack_local_inv(5, old))
        assert rig.b.done().status == status.SUCCESS
        new = rig.bind(window, 0, 4096)
        assert new != old
        assert rig.read(new, 0, 64).status == status.SUCCESS
        assert rig.read(old, 0, 64).status == status.REM_ACCESS_ERR

    def test_a_bind_may_say_what_the_window_has(self, rig: Rig) -> None:
        """Then nobody has to write its key back."""
        b, window = rig.b, rig.b.window()
        now = window.key
        for _ in range(3):
            key = now >> 8 << 8 | (now + 1) & 0xFF
            address = b.address
            b.post(
                pack_bind(
                    b.next_id(),
                    window.native,
                    b.region.native,
                    address,
                    4096,
                    key,
                    WINDOW_READ,
                    key_now=now,
                )
            )
            assert b.done().status == status.SUCCESS
            assert rig.read(key, 0, 64).status == status.SUCCESS
            b.post(pack_local_inv(5, key))
            assert b.done().status == status.SUCCESS
            now = key

    def test_freeing_a_bound_window_revokes_it(self, rig: Rig) -> None:
        window = rig.b.domain.allocate_window()
        key = rig.bind(window, 0, 4096)
        window.close()
        assert rig.read(key, 0, 64).status == status.REM_ACCESS_ERR

    def test_the_range_of_a_window(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 8192, 4096)
        assert rig.read(key, 8192, 4096).status == status.SUCCESS
        outside = rig.read(key, 12288, 1)
        assert (outside.status == status.REM_ACCESS_ERR) is rig.enforces_range

    @pytest.mark.parametrize("at", [-1, 0, 4095, 4096])
    def test_an_unaligned_window_is_exact_to_the_byte(self, rig: Rig, at: int) -> None:
        start, length = 1000, 4096
        before = bytes(rig.b.memory)
        key = rig.bind(rig.b.window(), start, length, WINDOW_WRITE)
        rig.a.memory[0] = before[start + at] ^ 0xFF
        lands = 0 <= at < length or not rig.enforces_range
        assert (rig.write(key, start + at, 1).status == status.SUCCESS) is lands
        changed = [i for i, byte in enumerate(before) if rig.b.memory[i] != byte]
        assert changed == ([start + at] if lands else [])

    def test_a_key_is_dead_before_its_bind(self, rig: Rig) -> None:
        assert rig.read(rig.fresh_key(rig.b.window()), 0, 64).status == status.REM_ACCESS_ERR
        assert rig.a.memory[:64] == bytes(64)

    def test_outside_the_parent_nothing_is_read(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), MEMORY_BYTES - 4096, 4096)
        assert rig.read(key, MEMORY_BYTES - 64, 128).status == status.REM_ACCESS_ERR

    def test_a_key_works_on_its_own_queue_pair_only(self, rig: Rig) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d)
        key = rig.bind(rig.b.window(), 0, 4096)
        assert rig.read(key, 0, 64, qp=c).status == status.REM_ACCESS_ERR
        assert rig.read(key, 0, 64).status == status.SUCCESS
        c.close()
        d.close()

    def test_a_parent_has_no_key_of_its_own(self, rig: Rig) -> None:
        assert rig.read(rig.b.region.lkey, 0, 64).status == status.REM_ACCESS_ERR


class BindContract:
    """What may be bound."""

    def test_a_window_is_bound_once_at_a_time(self, rig: Rig) -> None:
        window = rig.b.window()
        rig.bind(window, 0, 4096)
        key = rig.fresh_key(window)
        assert rig.try_bind(window, key, 0, 64).status == status.MW_BIND_ERR

    @pytest.mark.parametrize(("start", "length"), [(0, 0), (MEMORY_BYTES - 1, 2)])
    def test_a_range_outside_or_empty(self, rig: Rig, start: int, length: int) -> None:
        window = rig.b.window()
        key = rig.fresh_key(window)
        assert rig.try_bind(window, key, start, length).status == status.MW_BIND_ERR

    def test_a_parent_that_allows_no_windows(self, rig: Rig) -> None:
        region = rig.b.register(ACCESS_LOCAL_WRITE)
        rig.b.closing.append(region)
        window = rig.b.window()
        done = rig.try_bind(window, rig.fresh_key(window), 0, 64, region=region)
        assert done.status == status.MW_BIND_ERR

    def test_a_parent_outlives_its_windows(self, rig: Rig) -> None:
        window = rig.b.domain.allocate_window()
        region = rig.b.register(ACCESS_LOCAL_WRITE | ACCESS_MW_BIND)
        key = rig.fresh_key(window)
        assert rig.try_bind(window, key, 0, 64, region=region).status == status.SUCCESS
        with pytest.raises(DeviceError):
            region.close()
        window.close()
        region.close()

    def test_many_grants_reuse_no_key(self, rig: Rig) -> None:
        """600 grants over reallocated windows; the caller remembers tags, parks used-up indices."""
        b = rig.b
        used: dict[int, int] = {}
        keys: set[int] = set()
        while len(keys) < 600:
            window = b.domain.allocate_window()
            index = window.key >> 8
            if used.get(index, 0) == 255:
                b.closing.append(window)
                continue
            for _ in range(min(100, 255 - used.get(index, 0))):
                used[index] = used.get(index, 0) + 1
                key = index << 8 | used[index]
                assert rig.try_bind(window, key, 0, 4096).status == status.SUCCESS
                b.turn.set_window_key(window.native, key)
                b.post(pack_local_inv(1, key))
                assert b.done().status == status.SUCCESS
                keys.add(key)
            window.close()
        assert rig.read(key, 0, 64).status == status.REM_ACCESS_ERR


class QueueContract:
    """Posting, order, flushing and events."""

    def test_a_long_chain_in_one_post(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 0, MEMORY_BYTES)
        a = rig.a
        count, piece = 70, 512
        a.post(
            *(
                pack_read(
                    i, a.address + i * piece, a.region.lkey, piece, rig.b.address + i * piece, key
                )
                for i in range(count)
            )
        )
        assert [(c.wr_id, c.status) for c in a.completions(count)] == [(i, 0) for i in range(count)]
        assert a.memory[: count * piece] == expected(0, count * piece)

    def test_unsignaled_requests_complete_silently(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        a = rig.a
        reads = [
            pack_read(i, a.address, a.region.lkey, 64, rig.b.address, key, SIGNALED * (i == 3))
            for i in range(4)
        ]
        a.post(*reads)
        assert a.done().wr_id == 3

    def test_inline_payload_may_change_after_the_post(self, rig: Rig) -> None:
        rig.b.receive()
        payload = ctypes.create_string_buffer(b"receipt" * 20, RECEIPT_BYTES)
        address = ctypes.addressof(payload)
        rig.a.post(pack_send(1, address, 0, RECEIPT_BYTES, SIGNALED | INLINE))
        ctypes.memset(address, 0, RECEIPT_BYTES)
        assert rig.a.done().status == status.SUCCESS
        assert rig.b.done().byte_len == RECEIPT_BYTES
        offset = MEMORY_BYTES // 2
        assert rig.b.memory[offset : offset + 140] == b"receipt" * 20

    def test_more_inline_than_granted(self, rig: Rig) -> None:
        granted = rig.a.qp.caps.inline_bytes
        assert granted >= RECEIPT_BYTES
        request = pack_send(1, rig.a.address, 0, granted + 1, SIGNALED | INLINE)
        assert rig.a.turn.post_send(rig.a.qp.native, [request]) == (0, errno.EINVAL)

    def test_a_full_queue_says_how_much_it_took(self, rig: Rig) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d, rnr_retry=7)  # waits for ever for the receive
        a = rig.a
        send = pack_send(0, a.address, a.region.lkey, 8)
        many = [send, *(pack_send(i, a.address, a.region.lkey, 0) for i in range(1, 300))]
        accepted, why = a.turn.post_send(c.native, many)
        assert why == errno.ENOMEM
        assert accepted is not None
        assert DEPTH <= accepted < 300
        rig.b.receive(DEPTH, 16, qp=d)
        got = a.completions(DEPTH)
        assert [(done.wr_id, done.status) for done in got] == [(i, 0) for i in range(DEPTH)]
        c.modify(QueuePairAttributes(STATE_ERR))
        rest = a.completions(accepted - DEPTH)
        assert {done.status for done in rest} <= {status.WR_FLUSH_ERR}
        rig.b.completions(DEPTH)
        c.close()
        d.close()

    def test_no_receive_is_an_error_after_the_retries(self, rig: Rig) -> None:
        c, d = rig.a.new_qp(), rig.b.new_qp()
        rig.connect(c, d, rnr_retry=1)
        rig.a.post(pack_send(1, rig.a.address, rig.a.region.lkey, 8), qp=c)
        assert rig.a.done().status == status.RNR_RETRY_EXC_ERR
        c.close()
        d.close()

    def test_a_dead_peer_is_noticed(self, rig: Rig) -> None:
        key = rig.bind(rig.b.window(), 0, 4096)
        rig.b.qp.modify(QueuePairAttributes(STATE_ERR))
        assert rig.read(key, 0, 64).status == status.RETRY_EXC_ERR

    def test_an_error_flushes_everything_in_order(self, rig: Rig) -> None:
        rig.b.receive(70, 16)
        rig.b.qp.modify(QueuePairAttributes(STATE_ERR))
        flushed = rig.b.completions(70)
        assert [c.wr_id for c in flushed] == list(range(1000, 1070))
        assert {c.status for c in flushed} == {status.WR_FLUSH_ERR}
        a = rig.a
        a.post(
            pack_read(1, a.address, a.region.lkey, 64, rig.b.address, 0xABCD00),
            pack_read(2, a.address, a.region.lkey, 64, rig.b.address, 0xABCD00, flags=0),
            pack_read(3, a.address, a.region.lkey, 64, rig.b.address, 0xABCD00),
        )
        found = a.completions(3)  # an unsignaled request that fails completes, too
        assert [c.wr_id for c in found] == [1, 2, 3]
        assert [c.status for c in found[1:]] == [status.WR_FLUSH_ERR] * 2
        a.post(pack_read(4, a.address, a.region.lkey, 64, rig.b.address, 0))
        assert a.done().status == status.WR_FLUSH_ERR

    def test_nothing_is_posted_before_the_queue_pair_is_ready(self, rig: Rig) -> None:
        fresh = rig.a.new_qp()
        rig.a.closing.append(fresh)
        request = pack_send(1, rig.a.address, rig.a.region.lkey, 8)
        accepted, why = rig.a.turn.post_send(fresh.native, [request])
        assert why == errno.EINVAL
        assert accepted in {0, None}  # rxe queues it, then fails the doorbell
        with pytest.raises(DeviceError) as refused:
            fresh.modify(QueuePairAttributes(STATE_RTS))
        assert refused.value.errno == errno.EINVAL
        assert refused.value.device == rig.a.context.device
        assert "RTS" in refused.value.verb
        fresh.close()
        fresh.close()
        assert fresh.native == 0

    def test_an_event_follows_an_armed_completion(self, rig: Rig) -> None:
        a = rig.a
        assert a.turn.channel_fd(a.channel.native) == a.channel.fd
        rig.read(0, 0, 0)
        a.turn.drain_events(a.channel.native, a.cq.native)
        assert not readable(a.channel.fd, 0)
        a.turn.arm(a.cq.native)
        a.post(pack_read(9, a.address, a.region.lkey, 0, rig.b.address, 0))
        assert readable(a.channel.fd, PATIENCE_S)
        assert a.turn.drain_events(a.channel.native, a.cq.native) == 1
        assert not readable(a.channel.fd, 0)
        assert a.done().wr_id == 9

    def test_what_came_before_the_arm_raises_no_event(self, rig: Rig) -> None:
        a = rig.a
        a.post(pack_read(9, a.address, a.region.lkey, 0, rig.b.address, 0))
        time.sleep(0.02)
        a.turn.drain_events(a.channel.native, a.cq.native)
        a.turn.arm(a.cq.native)
        assert not readable(a.channel.fd, 0.01)
        assert a.done().wr_id == 9

    def test_a_failed_request_raises_an_event(self, rig: Rig) -> None:
        a = rig.a
        a.turn.arm(a.cq.native)
        a.post(pack_read(9, a.address, a.region.lkey, 8, rig.b.address, 0xABCD00))
        assert readable(a.channel.fd, PATIENCE_S)
        a.turn.drain_events(a.channel.native, a.cq.native)
        assert a.done().status == status.REM_ACCESS_ERR

    def test_a_wait_in_vain_leaves_the_queue_armed(self, rig: Rig) -> None:
        a = rig.a
        assert a.turn.wait(a.cq.native, a.channel.native, 10, 2000) == []
        a.post(pack_read(9, a.address, a.region.lkey, 0, rig.b.address, 0))
        assert readable(a.channel.fd, PATIENCE_S)
        a.turn.drain_events(a.channel.native, a.cq.native)
        assert a.done().wr_id == 9

    def test_one_call_polls_and_arms(self, rig: Rig) -> None:
        a = rig.a
        queue = (a.channel.native, a.cq.native)
        assert a.turn.wake(*queue) == ([], True, 0)
        a.post(pack_read(9, a.address, a.region.lkey, 0, rig.b.address, 0))
        assert readable(a.channel.fd, PATIENCE_S)
        found, armed, events = a.turn.wake(*queue, True)
        assert ([done.wr_id for done in found], armed, events) == ([9], True, 1)
        assert not readable(a.channel.fd, 0)
        a.post(pack_read(10, a.address, a.region.lkey, 0, rig.b.address, 0))
        assert readable(a.channel.fd, PATIENCE_S)  # it was armed again
        assert a.done().wr_id == 10

    def test_a_full_batch_leaves_the_rest_to_the_next_call(self, rig: Rig) -> None:
        a = rig.a
        queue = (a.channel.native, a.cq.native)
        assert a.turn.wake(*queue) == ([], True, 0)
        a.post(*(pack_read(i, a.address, a.region.lkey, 0, rig.b.address, 0) for i in range(5)))
        found: list[int] = []
        armed = True
        while len(found) < 5:
            assert not armed or readable(a.channel.fd, PATIENCE_S)
            look = a.turn.wake(*queue, armed, 2)
            found += [done.wr_id for done in look.found]
            assert len(look.found) <= 2
            armed = look.armed
        assert found == [0, 1, 2, 3, 4]
        assert a.turn.wake(*queue, armed)[:2] == ([], True)

    def test_an_event_whose_completion_was_polled(self, rig: Rig) -> None:
        a = rig.a
        queue = (a.channel.native, a.cq.native)
        a.turn.arm(a.cq.native)
        a.post(pack_read(9, a.address, a.region.lkey, 0, rig.b.address, 0))
        assert readable(a.channel.fd, PATIENCE_S)
        assert [done.wr_id for done in a.turn.poll(a.cq.native)] == [9]
        assert a.turn.wake(*queue, True) == ([], True, 1)
        assert a.turn.wake(*queue, True) == ([], True, 0)

    def test_a_nap_ends_with_the_queue_armed(self, rig: Rig) -> None:
        a = rig.a
        queue = (a.channel.native, a.cq.native)
        armed = True
        for number in range(3):
            a.post(pack_read(number, a.address, a.region.lkey, 0, rig.b.address, 0))
            found, armed, _ = a.turn.nap(*queue, 0, int(PATIENCE_S * 1e6), number > 0 and armed)
            assert ([done.wr_id for done in found], armed) == ([number], True)
        assert a.turn.nap(*queue, 10, 2000, armed).found == []

    def test_receives_and_sends_of_one_call(self, rig: Rig) -> None:
        """The receives are there first: what the request causes finds them."""
        a, b = rig.a, rig.b
        receive = pack_recv(1000, b.receive_address(), 256, b.region.lkey)
        bare = pack_read(1, b.address, b.region.lkey, 0, a.address, 0)
        posted = b.turn.post(b.qp.native, [receive], [bare])
        assert posted == ((1, 0), (1, 0), None)
        assert b.done().wr_id == 1
        a.post(pack_send(2, a.address, a.region.lkey, 8))
        assert (a.done().wr_id, b.done().wr_id) == (2, 1000)

    def test_refused_receives_keep_the_sends_back(self, rig: Rig) -> None:
        b = rig.b
        many = [pack_recv(1000 + i, b.address, 8, b.region.lkey) for i in range(2000)]
        send = pack_read(1, b.address, b.region.lkey, 0, rig.a.address, 0)
        receives, sends, look = b.turn.post(
            b.qp.native, many, [send], b.channel.native, b.cq.native, False, 8
        )
        assert receives.errno == errno.ENOMEM
        assert receives.accepted is not None
        assert DEPTH <= receives.accepted < 2000
        assert (sends, look) == ((0, errno.ENOMEM), None)
        b.no_completion()

    def test_crossings_are_counted(self, rig: Rig) -> None:
        before = rig.a.turn.crossings.post_send
        rig.read(0, 0, 0)
        assert rig.a.turn.crossings.post_send == before + 1
        assert rig.a.turn.crossings.total > before


def readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])
