"""Calls: answers, refusals, late replies, deadlines, dead links; and payloads above the ceiling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from orbit.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    PeerDraining,
    PeerLost,
    PeerProtocolError,
    RequestFailed,
)
from orbit.events import LATE_REPLIES_TOTAL, REJECTIONS_TOTAL, REPLIES_DROPPED_TOTAL
from orbit.protocol.messaging.call_header import (
    STREAM_SCHEMA,
    EventCode,
    Outcome,
    Wants,
    pack_call,
    pack_headers,
    parse_outcome,
    parse_request,
)
from orbit.protocol.messaging.packets import PacketKind
from orbit.runtime.messaging.contract import CURRENT_CHARGE, Charge, Request
from orbit.runtime.messaging.results import SendState
from tests.unit.runtime.messaging.fake_links import (
    PEER,
    FakeStore,
    Stage,
    on_stage,
    settle,
)

RESPONSE, ACK = int(PacketKind.RESPONSE), int(PacketKind.ACK)
MESSAGE, EVENT = int(PacketKind.MESSAGE), int(PacketKind.EVENT)


def request(wants: Wants, call_id: int, name: bytes = b"f", **headers: str) -> bytes:
    return pack_call(wants, call_id, name, pack_headers(headers))


def test_a_response_ends_its_call() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(2, b"ask")
        assert SendState(call.state) is SendState.ADMITTED
        await call.admitted()
        link.answer(link.posted[0], b"answer")
        assert call.state is SendState.DONE
        assert bytes(await call) == bytes(await call) == b"answer"
        assert stage.messenger.statistics().pending_calls == 0

    on_stage(play)


def test_answers_may_come_in_any_order() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        calls = [stage.send(2) for _ in range(10)]
        for n in reversed(range(10)):
            link.answer(link.posted[n], bytes([n]))
        assert [bytes(await call) for call in calls] == [bytes([n]) for n in range(10)]

    on_stage(play)


def test_an_ack_ends_a_sync() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(1)
        link.answer(link.posted[0], kind=ACK)
        assert await call is None

    on_stage(play)


def test_a_refusal_says_why() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        told: list[OrbitError] = []
        call = stage.send(2, on_error=told.append)
        call_id = parse_request(link.posted[0].header).id
        link.receive(RESPONSE, pack_call(Outcome.FAILED, call_id, b"overflow"), b"lane is full")
        with pytest.raises(RequestFailed, match="lane is full") as caught:
            await call
        assert caught.value.reason == "overflow"
        await settle()
        assert told == [caught.value]

    on_stage(play)


def test_late_and_repeated_answers_are_dropped_and_counted() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(2, timeout=0.01)
        frame = link.posted[0]
        with pytest.raises(DeadlineExceeded) as caught:
            await call
        assert not isinstance(caught.value.__cause__, NotAdmitted)
        assert stage.messenger.statistics().pending_calls == 0
        again = stage.send(2)
        link.answer(frame, b"late")
        assert again.state is SendState.ADMITTED
        link.answer(link.posted[-1], b"right")
        link.answer(link.posted[-1], b"twice")
        assert bytes(await again) == b"right"
        assert stage.recorder.counters.value(LATE_REPLIES_TOTAL) == 2
        assert not link.closed

    on_stage(play)


def test_an_answer_by_another_link_is_no_answer() -> None:
    async def play(stage: Stage) -> None:
        old = await stage.connect()
        call = stage.send(2)
        frame = old.posted[0]
        other = stage.peer_opened()
        other.answer(frame, b"forged")
        assert call.state is SendState.ADMITTED
        old.answer(frame, b"true")
        assert bytes(await call) == b"true"

    on_stage(play)


def test_slots_are_bounded() -> None:
    async def play(stage: Stage) -> None:
        await stage.connect()
        calls = [stage.send(2) for _ in range(4)]
        with pytest.raises(BudgetExceeded) as caught:
            await stage.send(2)
        assert caught.value.knob == "messaging.outstanding_calls"
        await stage.send(0)
        stage.link.answer(stage.link.posted[0])
        await calls[0]
        assert stage.send(2).state is SendState.ADMITTED

    on_stage(play, outstanding_calls=4)


def test_calls_of_a_dead_link_end_with_an_unknown_outcome() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        confirmed = [stage.send(2) for _ in range(50)]
        link.confirm()
        on_wire = stage.send(1)
        link.hold = True
        queued = stage.send(2)
        link.die(PeerLost(str(PEER), "killed"))
        for call in [*confirmed, on_wire]:
            with pytest.raises(OutcomeUnknown, match="killed"):
                await call
        with pytest.raises(NotAdmitted):
            await queued
        found = stage.messenger.statistics()
        assert (found.pending_calls, found.queued_frames) == (0, 0)

    on_stage(play)


def test_the_end_of_a_session_ends_its_links() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(2)
        stage.cut(PeerLost(str(PEER), "gone"))
        assert link.closed
        with pytest.raises(OutcomeUnknown):
            await call
        assert stage.arrivals.lost[0].peer == PEER

    on_stage(play)


def test_a_drain_echo_fails_the_call_fast() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(2)
        link.receive(int(PacketKind.SHUTTING_DOWN), link.posted[0].header)
        with pytest.raises(PeerDraining):
            await call
        fire = stage.send(0)
        link.receive(int(PacketKind.SHUTTING_DOWN), link.posted[-1].header)
        await fire
        assert stage.recorder.counters.value(REJECTIONS_TOTAL, reason="peer_draining") == 2

    on_stage(play)


def test_a_typed_answer_that_cannot_be_decoded() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()

        def decode(payload: memoryview) -> object:
            raise RequestFailed("decode", "no")

        call = stage.send(2, decode=decode)
        link.answer(link.posted[0], b"?")
        with pytest.raises(RequestFailed, match="decode"):
            await call

    on_stage(play)


def test_an_answer_of_the_wrong_kind_is_a_protocol_error() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(2)
        with pytest.raises(PeerProtocolError):
            link.answer(link.posted[0], kind=ACK)
        with pytest.raises(PeerProtocolError):
            await call

    on_stage(play)


# --- requests of the peer ---


def test_a_request_is_answered_by_the_link_it_came_by() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.receive(MESSAGE, request(Wants.RESPONSE, 77, k="v"), b"abc", charge=600)
        (got,) = stage.arrivals.requests
        assert (got.name, bytes(got.payload), got.headers) == ("f", b"abc", {"k": "v"})
        assert (got.sender, got.wants, got.staged) == (PEER, Wants.RESPONSE, False)
        assert not stage.messenger.may_close(link)
        got.answer(b"result")
        reply = link.posted[-1]
        assert (reply.kind, bytes(reply.payload)) == (RESPONSE, b"result")
        assert parse_outcome(reply.header)[:3] == (Outcome.OK, 77, "")
        assert link.consumed_bytes == 600
        got.answer(b"again")
        got.fail("failed")
        assert link.posted[-1] is reply
        assert stage.messenger.may_close(link)

    on_stage(play)


def test_each_want_has_its_answer() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        for call_id, wants in ((0, Wants.NOTHING), (1, Wants.ACK), (2, Wants.RESPONSE)):
            link.receive(MESSAGE, request(wants, call_id))
            stage.arrivals.requests[-1].answer(b"ignored by an ack")
            link.receive(MESSAGE, request(wants, call_id))
            stage.arrivals.requests[-1].fail("failed", "text")
        kinds = [(frame.kind, parse_outcome(frame.header).code) for frame in link.posted]
        assert kinds == [(ACK, 0), (ACK, 1), (RESPONSE, 0), (RESPONSE, 1)]
        assert parse_outcome(link.posted[1].header).text == "failed"
        assert bytes(link.posted[1].payload) == b"text"

    on_stage(play)


def test_a_draining_node_gives_the_request_back_verbatim() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        header = request(Wants.RESPONSE, 5, k="v")
        link.receive(MESSAGE, header, b"payload", charge=40)
        stage.arrivals.requests[0].reject_draining()
        echo = link.posted[-1]
        assert (echo.kind, echo.header) == (int(PacketKind.SHUTTING_DOWN), header)
        assert len(echo.payload) == 0
        assert link.consumed_bytes == 40

    on_stage(play)


def test_an_answer_to_a_link_that_is_gone_is_dropped_and_counted() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.receive(MESSAGE, request(Wants.RESPONSE, 5))
        link.die(PeerLost(str(PEER), "reset"))
        stage.arrivals.requests[0].answer(b"x" * 5000)
        assert stage.recorder.counters.value(REPLIES_DROPPED_TOTAL) == 1
        assert not stage.store.held

    on_stage(play)


def test_frames_that_are_no_calls_close_the_link() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        for kind in (MESSAGE, RESPONSE, ACK, EVENT, int(PacketKind.SHUTTING_DOWN)):
            for header in (b"", b"\x07rubbish"):
                with pytest.raises(PeerProtocolError):
                    link.receive(kind, header)

    on_stage(play)


def test_frames_of_streams_go_to_streams() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        header = bytes([STREAM_SCHEMA]) + b"rest"
        link.receive(MESSAGE, header, b"item", charge=9)
        link.receive(EVENT, header)
        assert stage.arrivals.notes == [("item", header), ("event", header)]
        assert link.consumed_bytes == 9

    on_stage(play)


def test_a_handler_that_waits_for_a_peer_gives_its_charge_back_first() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        for look in ("outcome", "admission", "capacity"):
            charge = Charge(link, 100)
            before = link.consumed_bytes
            CURRENT_CHARGE.set(charge)
            link.hold = look == "admission"
            call = stage.send(2)
            assert link.consumed_bytes == before, "sending alone is no wait"
            if look == "outcome":
                task = asyncio.ensure_future(_outcome(call))
            elif look == "admission":
                task = asyncio.ensure_future(call.admitted())
            else:
                task = asyncio.ensure_future(stage.messenger.capacity(PEER, None))
            await settle()
            assert link.consumed_bytes == before + 100
            charge.release()
            assert link.consumed_bytes == before + 100
            task.cancel()
            await settle()

    async def _outcome(call: object) -> None:
        await call  # type: ignore[misc]

    on_stage(play)


def test_a_request_is_charged_until_its_answer_has_left() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        settle_by: list[Callable[[Request], None]] = [
            lambda got: got.answer(b"result"),
            lambda got: got.fail("failed"),
            lambda got: got.reject_draining(),
        ]
        for way in settle_by:
            link.receive(MESSAGE, request(Wants.RESPONSE, 7), charge=600)
            way(stage.arrivals.requests[-1])
            assert link.consumed_bytes == 0
        link.receive(MESSAGE, request(Wants.NOTHING, 0), charge=50)
        stage.arrivals.requests[-1].answer()
        assert link.consumed_bytes == 50, "nothing leaves for it"
        link.post(2)
        assert link.consumed_bytes == 1250
        link.post(1)
        assert link.consumed_bytes == 1850

    on_stage(play)


def test_an_answer_takes_the_charge_again_that_its_handler_gave_back() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        link.receive(MESSAGE, request(Wants.RESPONSE, 7), charge=600)
        (got,) = stage.arrivals.requests
        got.charge.release()  # it waits for a peer
        assert link.consumed_bytes == 600
        got.answer(b"result")
        assert link.consumed_bytes == 0
        link.post(1)
        link.confirm()
        assert link.consumed_bytes == 600

    on_stage(play)


# --- above the ceiling ---


def test_the_ceiling_and_one_byte_more() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.send(2, b"x" * 1024)
        assert len(link.posted[-1].payload) == 1024
        call = stage.send(2, b"y" * 1025, headers={"k": "v"})
        frame = link.posted[-1]
        assert len(frame.payload) == 0
        parsed = parse_request(frame.header)
        assert parsed.headers["k"] == "v"
        (handle,) = stage.store.held
        assert parsed.headers["_rv"] == str(handle)
        assert call.state is SendState.ADMITTED
        link.receive(EVENT, pack_call(EventCode.STAGED_DONE, handle.slot_id))
        link.receive(EVENT, pack_call(EventCode.STAGED_DONE, handle.slot_id))
        await settle()
        assert stage.store.withdrawn == [handle]
        link.answer(frame, b"got it")
        assert bytes(await call) == b"got it"

    on_stage(play)


def test_a_staged_send_resolves_when_its_payload_was_fetched() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        result = stage.send(0, b"y" * 2000, timeout=0.01)
        await result.admitted()
        link.confirm()
        await asyncio.sleep(0.02)  # its timeout is for admission
        assert SendState(result.state) is SendState.ADMITTED
        assert not stage.messenger.may_close(link)
        (handle,) = stage.store.held
        link.receive(EVENT, pack_call(EventCode.STAGED_DONE, handle.slot_id))
        await result
        assert result.state is SendState.DONE
        assert stage.messenger.may_close(link)

    on_stage(play)


@pytest.mark.parametrize("how", ["died", "withdrawn", "drained", "given up"])
def test_what_was_staged_is_taken_back(how: str) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        timeout = 0.01 if how == "given up" else None
        result = stage.send(0, b"y" * 2000, timeout=timeout)
        assert len(stage.store.held) == 1
        expected: type[OrbitError] = NotAdmitted
        if how == "withdrawn":
            assert result.withdraw()
        elif how == "given up":
            expected = DeadlineExceeded
        else:
            frame = link.queue[0]
            link.post(1)
            if how == "died":
                link.die(PeerLost(str(PEER), "reset"))
                expected = OutcomeUnknown
            else:
                link.receive(int(PacketKind.SHUTTING_DOWN), frame.header)
                expected = PeerDraining
        with pytest.raises(expected):
            await result
        await settle()
        assert len(stage.store.withdrawn) == 1
        assert not stage.store.held
        assert stage.messenger.statistics().staged_payloads == 0

    on_stage(play)


def test_a_staged_request_is_loaded_before_its_handler() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        peers = FakeStore(PEER.worker_id)
        handle = peers.stage(b"large" * 1000)
        stage.store.held[handle] = peers.held[handle]
        link.receive(MESSAGE, request(Wants.ACK, 3, _rv=str(handle), k="v"))
        (got,) = stage.arrivals.requests
        assert got.staged
        assert got.headers == {"k": "v"}
        await got.load()
        assert bytes(got.payload) == b"large" * 1000
        await settle()
        assert stage.store.released == [handle]
        done = link.posted[-1]
        assert done.kind == EVENT
        assert done.header == pack_call(EventCode.STAGED_DONE, handle.slot_id)
        got.answer()
        assert link.posted[-1].kind == ACK

    on_stage(play)


def test_a_staged_request_that_nobody_loads_is_refused_to_its_sender() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        handle = FakeStore(PEER.worker_id).stage(b"")
        link.receive(MESSAGE, request(Wants.NOTHING, 0, _rv=str(handle)))
        stage.arrivals.requests[0].fail("unknown_handler")
        assert link.posted[-1].header == pack_call(EventCode.STAGED_DONE, handle.slot_id)

    on_stage(play)


@pytest.mark.parametrize("text", ["rubbish", "0000000000000001-1", "0000000000000009-1"])
def test_a_handle_that_is_not_the_senders_is_not_fetched(text: str) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.store.stage(b"secret of this node")
        link.receive(MESSAGE, request(Wants.RESPONSE, 3, _rv=text))
        with pytest.raises(RequestFailed) as caught:
            await stage.arrivals.requests[0].load()
        assert caught.value.reason == "decode"

    on_stage(play)


def test_a_peer_cannot_take_back_what_is_not_its_own() -> None:
    async def play(stage: Stage) -> None:
        await stage.connect()
        result = stage.send(0, b"y" * 2000)
        other = stage.peer_opened()
        (handle,) = stage.store.held
        other.receive(EVENT, pack_call(EventCode.STAGED_DONE, handle.slot_id))
        await settle()
        assert handle in stage.store.held
        assert result.state is SendState.ADMITTED

    on_stage(play)


def test_a_large_response_is_staged_and_fetched() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.receive(MESSAGE, request(Wants.RESPONSE, 3))
        stage.arrivals.requests[0].answer(b"r" * 1025)
        reply = link.posted[-1]
        (handle,) = stage.store.held
        assert parse_outcome(reply.header).headers == {"_rv": str(handle)}
        link.receive(EVENT, pack_call(EventCode.STAGED_DONE, handle.slot_id))
        await settle()
        assert not stage.store.held
        # and the other way round
        call = stage.send(2)
        peers = FakeStore(PEER.worker_id).stage(b"")
        stage.store.held[peers] = b"far away"
        call_id = parse_request(link.posted[-1].header).id
        link.receive(RESPONSE, pack_call(0, call_id, b"", pack_headers({"_rv": str(peers)})))
        assert bytes(await call) == b"far away"

    on_stage(play)


def test_a_late_response_that_was_staged_is_refused() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        peers = FakeStore(PEER.worker_id).stage(b"")
        header = pack_call(0, 1 << 16 | 900, b"", pack_headers({"_rv": str(peers)}))
        link.receive(RESPONSE, header)
        assert link.posted[-1].header == pack_call(EventCode.STAGED_DONE, peers.slot_id)

    on_stage(play)


def test_a_response_that_cannot_be_staged_is_an_error_reply() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.receive(MESSAGE, request(Wants.RESPONSE, 3))

        def closed(buffer: object, ttl_s: float | None = None) -> object:
            raise OrbitError("no more handles")

        stage.store.stage = closed  # type: ignore[assignment,method-assign]
        stage.arrivals.requests[0].answer(b"r" * 1025)
        parsed = parse_outcome(link.posted[-1].header)
        assert (parsed.code, parsed.text) == (Outcome.FAILED, "too_large")

    on_stage(play)


def test_headers_without_room_for_the_handle() -> None:
    async def play(stage: Stage) -> None:
        await stage.connect()
        headers = {f"{n:02}": "v" * 1000 for n in range(16)} | {"z": "v" * 275}
        result = stage.send(0, b"y" * 2000, headers=headers)
        with pytest.raises(OrbitError, match="limit is 16384"):
            await result
        await settle()
        assert not stage.store.held

    on_stage(play)
