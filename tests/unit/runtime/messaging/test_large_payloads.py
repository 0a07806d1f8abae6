"""Payloads that travel by rendezvous: whose headers those are, how long each side waits, and what
the receiver's limits do to calls, plain sends and replies.
"""

from __future__ import annotations

import asyncio

import pytest

from orbit.config import RendezvousConfig
from orbit.errors import DeadlineExceeded, RequestFailed, UsageError
from orbit.events import (
    LATE_REPLIES_TOTAL,
    REPLIES_DROPPED_TOTAL,
    STAGED_REFUSALS_TOTAL,
    STAGED_TIMEOUTS_TOTAL,
)
from orbit.model import Handle
from orbit.protocol.messaging.call_header import (
    BUDGET_KEY,
    STAGED_KEY,
    EventCode,
    Outcome,
    Wants,
    pack_call,
    pack_headers,
    parse_outcome,
    parse_request,
)
from orbit.protocol.messaging.packets import PacketKind
from orbit.runtime.messaging.contract import CallerGone, Request
from orbit.transport.messages import OutgoingFrame
from tests.unit.runtime.messaging.fake_links import (
    PEER,
    FakeLink,
    FakeStore,
    Stage,
    on_stage,
    settle,
)

RESPONSE = int(PacketKind.RESPONSE)
MESSAGE, EVENT = int(PacketKind.MESSAGE), int(PacketKind.EVENT)
BIG = b"y" * 1025  # one byte above the fake links' ceiling
WANTS = [Wants.NOTHING, Wants.ACK, Wants.RESPONSE]


def headers_of(frame: OutgoingFrame) -> dict[str, str]:
    return dict(parse_request(frame.header).headers)


def done_of(handle: Handle) -> bytes:
    return pack_call(EventCode.STAGED_DONE, handle.slot_id)


def peers_payload(stage: Stage, payload: bytes = BIG) -> Handle:
    """A payload that the peer serves."""
    handle = FakeStore(PEER.worker_id).stage(payload)
    stage.store.held[handle] = payload
    return handle


def arrive(
    stage: Stage, link: FakeLink, wants: Wants, handle: Handle, budget_ms: str | None = None
) -> Request:
    """A request of the peer whose payload it serves."""
    headers = {STAGED_KEY: str(handle), "k": "v"}
    if budget_ms is not None:
        headers[BUDGET_KEY] = budget_ms
    call_id = 0 if wants is Wants.NOTHING else 7
    link.receive(MESSAGE, pack_call(wants, call_id, b"f", pack_headers(headers)))
    return stage.arrivals.requests[-1]


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants", WANTS)
def test_a_staged_send_writes_its_own_headers(wants: Wants) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.send(wants, BIG, headers={"k": "v"}, timeout=1.5)
        (handle,) = stage.store.held
        own = {STAGED_KEY: str(handle)}
        if wants is not Wants.NOTHING:  # a plain send's timeout is for its admission
            own[BUDGET_KEY] = "1500"
        assert headers_of(link.posted[-1]) == {"k": "v", **own}
        assert stage.store.ttls[handle] == (None if wants is Wants.NOTHING else 1.5)

    on_stage(play, virtual=True)


def test_the_budget_is_what_is_left_when_the_frame_leaves() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.transports[0].gate = asyncio.Event()
        link.leave()
        waits = stage.send(Wants.RESPONSE, BIG, timeout=2.0)
        await asyncio.sleep(0.5004)
        stage.transports[0].gate.set()
        await waits.admitted()
        (handle,) = stage.store.held
        assert headers_of(stage.link.posted[-1])[BUDGET_KEY] == "1500"
        assert stage.store.ttls[handle] == pytest.approx(1.4996)

    on_stage(play, virtual=True)


def test_a_frame_that_was_given_back_leaves_with_a_fresh_budget() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        call = stage.send(Wants.RESPONSE, BIG, timeout=2.0, headers={"k": "v"})
        (handle,) = stage.store.held
        await asyncio.sleep(0.75)
        link.leave()
        await call.admitted()
        assert stage.link is not link
        assert headers_of(stage.link.posted[-1]) == {
            STAGED_KEY: str(handle),
            BUDGET_KEY: "1250",
            "k": "v",
        }
        stage.link.receive(EVENT, done_of(handle))
        await settle()
        assert stage.store.withdrawn == [handle]

    on_stage(play, virtual=True)


@pytest.mark.parametrize("key", [STAGED_KEY, BUDGET_KEY])
def test_users_cannot_write_those_headers(key: str) -> None:
    async def play(stage: Stage) -> None:
        await stage.connect()
        for payload in (b"small", BIG):
            with pytest.raises(UsageError, match="orbit's own"):
                stage.send(Wants.ACK, payload, headers={key: "1"})
        assert not stage.store.held

    on_stage(play)


def test_a_handler_that_forwards_its_headers_forwards_neither() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        got = arrive(stage, link, Wants.ACK, peers_payload(stage), "60000")
        await got.load()
        assert got.headers == {"k": "v"}
        stage.send(Wants.ACK, b"small", headers=got.headers)
        assert headers_of(link.posted[-1]) == {"k": "v"}
        stage.send(Wants.ACK, BIG, headers=got.headers, timeout=3.0)
        (own,) = stage.store.ttls
        assert headers_of(link.posted[-1]) == {"k": "v", STAGED_KEY: str(own), BUDGET_KEY: "3000"}

    on_stage(play)


def test_a_budget_without_a_handle_means_nothing() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        packed = pack_headers({BUDGET_KEY: "rubbish", "k": "v"})
        link.receive(MESSAGE, pack_call(Wants.RESPONSE, 7, b"f", packed), b"inline")
        (got,) = stage.arrivals.requests
        assert not got.staged
        await got.load()
        assert (bytes(got.payload), got.headers) == (b"inline", {"k": "v"})

    on_stage(play)


@pytest.mark.parametrize("text", ["", "rubbish", "-1", "0", "1.5", "٣", "9" * 21])
def test_a_budget_that_is_no_number_refuses_the_message(text: str) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        handle = peers_payload(stage)
        got = arrive(stage, link, Wants.RESPONSE, handle, text)
        with pytest.raises(RequestFailed) as caught:
            await got.load()
        assert caught.value.reason == "decode"
        assert link.posted[-1].header == done_of(handle)
        assert not stage.store.timeouts, "nothing was fetched"

    on_stage(play)


# --- how long the receiver waits ------------------------------------------------------------------

LIMITED = RendezvousConfig(staged_fetch_timeout=2.0)


@pytest.mark.parametrize(
    ("budget_ms", "config", "bound_s"),
    [
        (None, RendezvousConfig(), None),
        ("500", RendezvousConfig(), 0.5),
        (None, LIMITED, 2.0),
        ("500", LIMITED, 0.5),
        ("2000", LIMITED, 2.0),
        ("99999999", LIMITED, 2.0),
    ],
)
def test_the_first_of_two_bounds_ends_the_fetch(
    budget_ms: str | None, config: RendezvousConfig, bound_s: float | None
) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        got = arrive(stage, link, Wants.ACK, peers_payload(stage), budget_ms)
        await got.load()
        assert stage.store.timeouts == [bound_s]
        assert bytes(got.payload) == BIG

    on_stage(play, virtual=True, rendezvous=config)


def test_a_budget_that_runs_out_ends_in_silence() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.store.fetch_s = 10.0
        handle = peers_payload(stage)
        got = arrive(stage, link, Wants.RESPONSE, handle, "500")
        await asyncio.sleep(3.0)  # it stands in a queue: its budget has not begun
        started = asyncio.get_running_loop().time()
        with pytest.raises(CallerGone):
            await got.load()
        assert asyncio.get_running_loop().time() == pytest.approx(started + 0.5)
        got.drop()
        assert [frame.kind for frame in link.posted] == [EVENT], "no reply"
        assert link.posted[-1].header == done_of(handle), "the sender may have its memory back"
        assert stage.recorder.counters.value(STAGED_TIMEOUTS_TOTAL, bound="caller") == 1
        assert stage.messenger.may_close(link)

    on_stage(play, virtual=True, rendezvous=LIMITED)


@pytest.mark.parametrize("wants", WANTS)
@pytest.mark.parametrize("budget_ms", [None, "5000"])
def test_the_receivers_own_bound_is_an_error(wants: Wants, budget_ms: str | None) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.store.fetch_s = 10.0
        handle = peers_payload(stage)
        got = arrive(stage, link, wants, handle, budget_ms)
        with pytest.raises(RequestFailed, match="not fetched within 2 s") as caught:
            await got.load()
        assert caught.value.reason == "fetch_timeout"
        assert link.posted[-1].header == done_of(handle)
        assert stage.recorder.counters.value(STAGED_TIMEOUTS_TOTAL, bound="receiver") == 1

    on_stage(play, virtual=True, rendezvous=LIMITED)


def test_silence_of_the_rendezvous_itself_is_no_timeout_of_the_call() -> None:
    """A deadline within the fetch (a control call, no progress) is an error with an answer."""

    async def play(stage: Stage) -> None:
        link = await stage.connect()

        async def silent(handle: Handle, timeout_s: float | None) -> object:
            await asyncio.sleep(1.0)
            raise DeadlineExceeded("acquire", 1.0)

        stage.store.fetch = silent  # type: ignore[assignment,method-assign]
        got = arrive(stage, link, Wants.RESPONSE, peers_payload(stage), "9000")
        with pytest.raises(RequestFailed, match="cannot be fetched") as caught:
            await got.load()
        assert caught.value.reason == "failed"
        assert stage.recorder.counters.value(STAGED_TIMEOUTS_TOTAL) == 0

    on_stage(play, virtual=True, rendezvous=LIMITED)


# --- what a sender gets back ----------------------------------------------------------------------


def test_the_memory_of_a_call_comes_back_with_its_deadline() -> None:
    """Though the receiver never says a word about it."""

    async def play(stage: Stage) -> None:
        link = await stage.connect()
        calls = [stage.send(Wants.RESPONSE, BIG, timeout=2.0) for _ in range(20)]
        plain = stage.send(Wants.NOTHING, BIG, timeout=2.0)
        assert stage.messenger.statistics().staged_payloads == 21
        for call in calls:
            with pytest.raises(DeadlineExceeded):
                await call
        await settle()
        assert len(stage.store.withdrawn) == 20
        assert stage.messenger.statistics().staged_payloads == 1
        (handle,) = stage.store.held
        link.receive(EVENT, done_of(handle))
        await plain
        assert stage.messenger.may_close(link)

    on_stage(play, virtual=True)


def test_a_word_that_comes_after_the_deadline_changes_nothing() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(Wants.ACK, BIG, timeout=1.0)
        (handle,) = stage.store.held
        with pytest.raises(DeadlineExceeded):
            await call
        await settle()
        link.receive(EVENT, done_of(handle))
        await settle()
        assert stage.store.withdrawn == [handle]

    on_stage(play, virtual=True)


def test_a_large_reply_goes_when_its_caller_waits_no_more() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        got = arrive(stage, link, Wants.RESPONSE, peers_payload(stage), "3000")
        await got.load()
        await asyncio.sleep(1.0)
        got.answer(BIG)
        (reply,) = (handle for handle in stage.store.ttls if handle in stage.store.held)
        assert stage.store.ttls[reply] == pytest.approx(2.0)
        assert parse_outcome(link.posted[-1].header).headers == {STAGED_KEY: str(reply)}
        await asyncio.sleep(2.1)
        assert stage.store.withdrawn == [reply]
        assert stage.messenger.statistics().staged_payloads == 0

    on_stage(play, virtual=True)


def test_a_large_reply_to_a_caller_that_is_gone_is_not_staged() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        got = arrive(stage, link, Wants.RESPONSE, peers_payload(stage), "3000")
        await got.load()
        await asyncio.sleep(3.0)
        got.answer(BIG)
        assert not stage.store.ttls
        assert [frame.kind for frame in link.posted] == [EVENT]
        counted = stage.recorder.counters.value(REPLIES_DROPPED_TOTAL, reason="caller_gone")
        assert counted == 1
        assert link.consumed_bytes > 0

    on_stage(play, virtual=True)


def test_a_large_reply_to_a_small_request_stays_until_it_was_fetched() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.receive(MESSAGE, pack_call(Wants.RESPONSE, 7, b"f"))
        stage.arrivals.requests[0].answer(BIG)
        (reply,) = stage.store.held
        assert stage.store.ttls[reply] is None
        await asyncio.sleep(1000)
        assert reply in stage.store.held
        link.receive(EVENT, done_of(reply))
        await settle()
        assert stage.store.withdrawn == [reply]

    on_stage(play, virtual=True)


# --- replies, at the caller -----------------------------------------------------------------------


def answer_by_handle(link: FakeLink, handle: Handle) -> None:
    call_id = parse_request(link.posted[-1].header).id
    packed = pack_headers({STAGED_KEY: str(handle)})
    link.receive(RESPONSE, pack_call(Outcome.OK, call_id, b"", packed))


@pytest.mark.parametrize(("timeout_s", "bound_s"), [(1.5, 1.0), (9.0, 2.0)])
def test_the_fetch_of_a_reply_has_the_calls_time_or_the_nodes(
    timeout_s: float, bound_s: float
) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        call = stage.send(Wants.RESPONSE, timeout=timeout_s)
        await asyncio.sleep(0.5)
        answer_by_handle(link, peers_payload(stage))
        assert bytes(await call) == BIG
        assert stage.store.timeouts == [pytest.approx(bound_s)]

    on_stage(play, virtual=True, rendezvous=LIMITED)


def test_a_reply_that_comes_too_slowly_is_the_calls_own_timeout() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.store.fetch_s = 10.0
        call = stage.send(Wants.RESPONSE, timeout=1.0)
        handle = peers_payload(stage)
        answer_by_handle(link, handle)
        with pytest.raises(DeadlineExceeded, match="within 1 s"):
            await call
        await settle()
        assert link.posted[-1].header == done_of(handle)
        assert stage.messenger.statistics().pending_calls == 0
        assert stage.recorder.counters.value(LATE_REPLIES_TOTAL) == 0

    on_stage(play, virtual=True, rendezvous=LIMITED)


def test_a_reply_that_the_node_gives_up_fails_its_call() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.store.fetch_s = 10.0
        call = stage.send(Wants.RESPONSE, timeout=9.0)
        answer_by_handle(link, peers_payload(stage))
        with pytest.raises(RequestFailed) as caught:
            await call
        assert caught.value.reason == "fetch_timeout"

    on_stage(play, virtual=True, rendezvous=LIMITED)


# --- the receiver's limit -------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_limit_and_one_byte_more(beyond: int) -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        stage.store.payload_max = 5000
        payload = bytes(5000 + beyond)
        handle = peers_payload(stage, payload)
        got = arrive(stage, link, Wants.RESPONSE, handle)
        call = stage.send(Wants.RESPONSE)
        reply = peers_payload(stage, payload)
        if not beyond:
            await got.load()
            assert bytes(got.payload) == payload
            answer_by_handle(link, reply)
            assert bytes(await call) == payload
            return
        with pytest.raises(RequestFailed, match=r"5001.* 5000") as caught:
            await got.load()
        assert caught.value.reason == "too_large"
        assert link.posted[-1].header == done_of(handle)
        link.posted.pop()
        answer_by_handle(link, reply)
        with pytest.raises(RequestFailed, match=r"5001.* 5000") as caught:
            await call
        assert caught.value.reason == "too_large"
        assert stage.recorder.counters.value(STAGED_REFUSALS_TOTAL, what="message") == 2

    on_stage(play)
