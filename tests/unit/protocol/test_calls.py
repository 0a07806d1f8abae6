"""Calls over one connection: each ends exactly once, and no answer ever reaches the wrong one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from orbit.errors import (
    BusyError,
    ClosedError,
    DeadlineExceeded,
    InternalError,
    PeerLost,
    PeerProtocolError,
    PeerRefused,
)
from orbit.protocol.calls import (
    CallCompleted,
    CallFailed,
    CallId,
    CallTable,
    GoodbyeArrived,
    PongArrived,
    Serve,
    ServeNotification,
    goodbye_frame,
    notify_frame,
    ping_frame,
)
from orbit.protocol.codec import decode, encode
from orbit.protocol.framing import FrameKind, SendFrame, encode_frame


def _reply(call_id: int, body: object = None) -> bytes:
    return encode_frame(FrameKind.REPLY, encode([call_id, body]))


def _fault(call_id: int, code: str = "unknown_handle", detail: str = "") -> bytes:
    return encode_frame(FrameKind.FAULT, encode([call_id, code, detail]))


def _call(call_id: int, method: str = "_rv_metadata", body: object = None) -> bytes:
    return encode_frame(FrameKind.CALL, encode([call_id, method, body]))


def test_a_call_there_and_back() -> None:
    near, far = CallTable(), CallTable()
    call_id, send = near.start("_rv_metadata", {"handle": 1}, 0.0, 5.0)
    assert far.on_frame(send.frame, 0.0) == [Serve(call_id, "_rv_metadata", {"handle": 1})]
    (answer,) = far.reply(call_id, {"total_len": 9})
    assert isinstance(answer, SendFrame)
    assert near.on_frame(answer.frame, 0.0) == [CallCompleted(call_id, {"total_len": 9})]
    assert near.outstanding == 0
    assert near.deadline is None
    assert near.statistics().completed == 1
    assert far.statistics().served == 1


def test_the_peer_says_no() -> None:
    near, far = CallTable(), CallTable()
    call_id, send = near.start("m", None, 0.0)
    far.on_frame(send.frame, 0.0)
    (answer,) = far.fault(call_id, "unknown_handle", "no\nsuch handle")
    assert isinstance(answer, SendFrame)
    (failed,) = near.on_frame(answer.frame, 0.0)
    assert isinstance(failed, CallFailed)
    assert isinstance(failed.error, PeerRefused)
    assert (failed.error.reason, failed.error.detail) == ("unknown_handle", "no?such handle")


def test_an_answer_is_given_once() -> None:
    far = CallTable()
    far.on_frame(_call(1 << 16), 0.0)
    assert len(far.reply(CallId(1 << 16), None)) == 1
    assert far.reply(CallId(1 << 16), None) == []
    assert far.fault(CallId(1 << 16), "late") == []
    assert far.reply(CallId(99), None) == []


def test_an_answer_that_cannot_be_encoded_leaves_the_call_to_be_refused() -> None:
    far = CallTable()
    far.on_frame(_call(1 << 16), 0.0)
    with pytest.raises(InternalError):
        far.reply(CallId(1 << 16), object())
    assert len(far.fault(CallId(1 << 16), "internal")) == 1


def test_a_call_that_cannot_be_encoded_takes_no_slot() -> None:
    table = CallTable(slots_max=1)
    with pytest.raises(InternalError):
        table.start("m", object(), 0.0)
    table.start("m", None, 0.0)


def test_slots_are_bounded_and_come_back() -> None:
    table = CallTable(slots_max=2)
    first, _ = table.start("m", None, 0.0)
    table.start("m", None, 0.0)
    with pytest.raises(BusyError):
        table.start("m", None, 0.0)
    table.cancel(first)
    table.cancel(first)  # nothing
    again, _ = table.start("m", None, 0.0)
    assert again != first
    assert again & 0xFFFF == first & 0xFFFF


def test_deadlines_fail_their_calls_in_order() -> None:
    table = CallTable()
    late, _ = table.start("late", None, 0.0, 9.0)
    early, _ = table.start("early", None, 1.0, 3.0)
    table.start("never", None, 0.0)
    assert table.deadline == 3.0
    assert table.on_deadline(2.9) == []
    (failed,) = table.on_deadline(3.0)
    assert isinstance(failed, CallFailed)
    assert failed.call_id == early
    assert isinstance(failed.error, DeadlineExceeded)
    assert failed.error.timeout_s == 2.0
    assert "early" in str(failed.error)
    assert [e.call_id for e in table.on_deadline(99.0) if isinstance(e, CallFailed)] == [late]
    assert table.deadline is None
    assert table.outstanding == 1


def test_late_and_duplicate_replies_are_dropped_and_counted() -> None:
    table = CallTable(slots_max=1)
    cancelled, _ = table.start("m", None, 0.0)
    table.cancel(cancelled)
    assert table.on_frame(_reply(cancelled), 0.0) == []
    answered, _ = table.start("m", None, 0.0)
    assert table.on_frame(_reply(cancelled), 0.0) == []  # must not answer the slot's new call
    assert len(table.on_frame(_reply(answered), 0.0)) == 1
    assert table.on_frame(_reply(answered), 0.0) == []
    assert table.on_frame(_fault(answered), 0.0) == []
    statistics = table.statistics()
    assert statistics.late_replies == 2
    assert statistics.duplicate_replies == 2
    assert statistics.outstanding == 0


@pytest.mark.parametrize("call_id", [0, 1, 65535, 1 << 16 | 1, 2 << 16, (1 << 64) - 1])
def test_an_answer_to_a_call_that_was_never_made_breaks_the_protocol(call_id: int) -> None:
    table = CallTable()
    real, _ = table.start("m", None, 0.0)
    assert real == 1 << 16
    with pytest.raises(PeerProtocolError, match="never made"):
        table.on_frame(_reply(call_id), 0.0)
    assert table.outstanding == 1


def test_a_repeated_request_breaks_the_protocol_for_ever() -> None:
    table = CallTable()
    table.on_frame(_call(3 << 16), 0.0)
    for call_id in (3 << 16, 2 << 16, 0):
        with pytest.raises(PeerProtocolError, match="used before"):
            table.on_frame(_call(call_id), 0.0)
    table.reply(CallId(3 << 16), None)
    with pytest.raises(PeerProtocolError, match="used before"):
        table.on_frame(_call(3 << 16), 0.0)
    assert len(table.on_frame(_call(4 << 16), 0.0)) == 1


def test_more_than_can_be_served_is_refused_as_busy() -> None:
    table = CallTable(serving_max=1)
    table.on_frame(_call(1 << 16), 0.0)
    (effect,) = table.on_frame(_call(1 << 16 | 1), 0.0)
    assert isinstance(effect, SendFrame)
    body = decode(effect.frame[1:])
    assert isinstance(body, list)
    assert body[:2] == [1 << 16 | 1, "busy"]


def test_everything_outstanding_fails_when_the_connection_goes() -> None:
    table = CallTable()
    calls = [table.start("m", None, 0.0, 5.0)[0] for _ in range(3)]
    table.on_frame(_call(1 << 16), 0.0)
    effects = table.close(PeerLost("b", "reset"))
    assert [e.call_id for e in effects if isinstance(e, CallFailed)] == calls
    assert all(isinstance(e, CallFailed) and "unknown" in str(e.error) for e in effects)
    assert table.close(ClosedError("session")) == []
    assert table.deadline is None
    assert table.on_frame(_reply(calls[0]), 0.0) == []
    assert table.reply(CallId(1 << 16), None) == []
    with pytest.raises(PeerLost):
        table.start("m", None, 0.0)


def test_the_other_frames() -> None:
    table = CallTable()
    assert table.on_frame(notify_frame("_rv_tick", {"a": 1}), 0.0) == [
        ServeNotification("_rv_tick", {"a": 1})
    ]
    (pong,) = table.on_frame(ping_frame(7), 0.0)
    assert isinstance(pong, SendFrame)
    assert table.on_frame(pong.frame, 0.0) == [PongArrived(7)]
    assert table.on_frame(goodbye_frame(), 0.0) == [GoodbyeArrived()]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x10",
        b"\x10\xc1",
        encode_frame(FrameKind.CALL, encode({})),
        encode_frame(FrameKind.CALL, encode([1 << 16, "m"])),
        encode_frame(FrameKind.CALL, encode([1 << 16, "m", {}, {}])),
        encode_frame(FrameKind.CALL, encode([True, "m", {}])),
        encode_frame(FrameKind.CALL, encode([-1, "m", {}])),
        encode_frame(FrameKind.CALL, encode([1.0, "m", {}])),
        encode_frame(FrameKind.CALL, encode([1 << 16, b"m", {}])),
        encode_frame(FrameKind.CALL, encode([1 << 16, "", {}])),
        encode_frame(FrameKind.CALL, encode([1 << 16, "a b", {}])),
        encode_frame(FrameKind.CALL, encode([1 << 16, "m" * 65, {}])),
        encode_frame(FrameKind.CALL, encode([1 << 16, "é", {}])),
        encode_frame(FrameKind.FAULT, encode([1 << 16, 5, ""])),
        encode_frame(FrameKind.NOTIFY, encode(["m"])),
        encode_frame(FrameKind.PING, encode([])),
        encode_frame(FrameKind.PING, encode(["1"])),
        encode_frame(FrameKind.GOODBYE, encode([1])),
        encode_frame(FrameKind.HELLO, encode([])),
        encode_frame(FrameKind.HELLO, encode({})),
    ],
)
def test_malformed_frames_change_nothing(frame: bytes) -> None:
    table = CallTable()
    call_id, _ = table.start("m", None, 0.0)
    before = table.statistics()
    with pytest.raises(PeerProtocolError):
        table.on_frame(frame, 0.0)
    assert table.statistics() == before
    assert table.on_frame(_reply(call_id), 0.0) == [CallCompleted(call_id, None)]


def test_deadlines_of_ended_calls_are_not_hoarded() -> None:
    table = CallTable()
    for i in range(5000):
        call_id, _ = table.start("m", None, 0.0, 1e9 + i)
        table.on_frame(_reply(call_id), 0.0)
    assert len(table._deadlines) < 100


class CallWorld(RuleBasedStateMachine):
    """Two tables joined by a network that delays and repeats answers; time passes at will."""

    calls = Bundle("calls")
    answers = Bundle("answers")

    def __init__(self) -> None:
        super().__init__()
        self.near = CallTable(slots_max=3)
        self.far = CallTable()
        self.now = 0.0
        self.alive: dict[CallId, int] = {}  # id -> what its reply must carry
        self.ended: set[CallId] = set()
        self.count = 0

    @rule(target=calls, timeout=st.none() | st.floats(0.1, 5))
    def start(self, timeout: float | None) -> CallId | None:
        deadline = None if timeout is None else self.now + timeout
        try:
            call_id, send = self.near.start("m", self.count, self.now, deadline)
        except BusyError:
            assert len(self.alive) == 3
            return None
        assert call_id not in self.alive
        assert call_id not in self.ended
        self.alive[call_id] = self.count
        self.count += 1
        assert self.far.on_frame(send.frame, self.now) == [Serve(call_id, "m", self.alive[call_id])]
        return call_id

    @rule(target=answers, call=consumes(calls))
    def answer(self, call: CallId | None) -> bytes | None:
        if call is None:
            return None
        body = self.count  # any number that is not another call's
        (send,) = self.far.reply(call, [int(call), body])
        assert isinstance(send, SendFrame)
        return send.frame

    @rule(frame=answers)
    def deliver(self, frame: bytes | None) -> None:
        if frame is not None:
            self._take(self.near.on_frame(frame, self.now))

    @rule(call=calls)
    def cancel(self, call: CallId | None) -> None:
        if call in self.alive:
            self.near.cancel(call)
            self._end(call)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.near.on_deadline(self.now))
        due = self.near.deadline
        assert due is None or due > self.now

    def _take(self, effects: list[object]) -> None:
        for effect in effects:
            assert isinstance(effect, CallCompleted | CallFailed)
            if isinstance(effect, CallCompleted):
                assert isinstance(effect.body, list)
                assert effect.body[0] == effect.call_id
            self._end(effect.call_id)

    def _end(self, call_id: CallId) -> None:
        assert call_id not in self.ended
        del self.alive[call_id]
        self.ended.add(call_id)

    @invariant()
    def counts_agree(self) -> None:
        statistics = self.near.statistics()
        assert statistics.outstanding == self.near.outstanding == len(self.alive)
        assert statistics.started == len(self.alive) + len(self.ended)
        assert statistics.completed + statistics.failed == len(self.ended)


TestCallWorld = CallWorld.TestCase
TestCallWorld.settings = settings(max_examples=50, stateful_step_count=40)
