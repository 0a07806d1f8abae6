"""Each request is answered exactly once, in every mode and whatever its handler does."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orbit.errors import RequestFailed, UsageError
from orbit.events import Counters
from orbit.protocol.codec import decode, encode
from orbit.protocol.messaging.call_header import Wants
from orbit.runtime.messaging.contract import CallerGone, Request, release_current_charge
from orbit.runtime.messaging.dispatch import DISPATCH_FAILURES_TOTAL, Dispatcher
from orbit.runtime.messaging.handlers import Dispatch, Message, OrderedConfig
from orbit.testing.clock import run_virtual
from orbit.testing.leftovers import nothing_left
from tests.unit.runtime.messaging.requests import FakeRequest

MODES = {
    "spawn": Dispatch.spawn(),
    "ordered": Dispatch.ordered(),
    "ordered_global": Dispatch.ordered_global(),
    "capped": Dispatch.ordered_with(OrderedConfig(max_concurrent=1)),
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Rig:
    def __init__(self) -> None:
        self.node = object()
        self.counters = Counters()
        self.dispatcher = Dispatcher(self.node, self.counters)

    def put(self, *requests: FakeRequest) -> None:
        for request in requests:
            checked: Request = request
            self.dispatcher.on_request(checked)

    def failures(self, **labels: str) -> int:
        return self.counters.value(DISPATCH_FAILURES_TOTAL, **labels)

    async def settled(self) -> None:
        """Every request was answered, and nothing of it is left."""
        await asyncio.sleep(1000)
        assert self.dispatcher.gate.guards == 0
        for handler in self.dispatcher.statistics().handlers:
            assert handler.in_flight == 0
            assert handler.lanes.depth == 0


def run(body: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        async with nothing_left():
            rig = Rig()
            await body(rig)
            await rig.settled()
            assert await rig.dispatcher.close(1.0)

    run_virtual(main())


@each_mode
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_answers(mode: Dispatch, kind: str) -> None:
    async def body(rig: Rig) -> None:
        seen: list[Message] = []

        def plain(message: Message) -> bytes:
            seen.append(message)
            return bytes(message.payload)[::-1]

        async def waiting(message: Message) -> bytes:
            await asyncio.sleep(0.1)
            return plain(message)

        rig.dispatcher.add("back", plain if kind == "plain" else waiting, mode)
        request = FakeRequest("back", b"abc", sender=9, headers={"k": "v"})
        rig.put(request)
        assert request.settled == (kind == "plain")
        await asyncio.sleep(1)
        assert request.outcome == ("answer", b"cba")
        assert request.link.returned == 3 + 512
        (message,) = seen
        assert (message.name, message.headers, message.sender.worker_id) == ("back", {"k": "v"}, 9)
        assert message.node is rig.node
        (found,) = rig.dispatcher.statistics().handlers
        assert (found.requests, found.failures) == (1, 0)
        assert (found.request_bytes, found.response_bytes) == (3, 3)
        assert sum(found.buckets) == 1

    run(body)


@each_mode
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("wants", Wants)
def test_a_handler_that_raises_answers(
    mode: Dispatch, kind: str, wants: Wants, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(rig: Rig) -> None:
        def plain(message: Message) -> bytes:
            if bytes(message.payload) == b"bad":
                raise ValueError("no such thing")
            return b"good"

        async def waiting(message: Message) -> bytes:
            await asyncio.sleep(0.1)
            return plain(message)

        rig.dispatcher.add("f", plain if kind == "plain" else waiting, mode)
        requests = [FakeRequest("f", text, wants=wants) for text in (b"ok", b"bad", b"ok")]
        rig.put(*requests)
        await asyncio.sleep(1)
        assert requests[0].outcome == ("answer", b"good")
        assert requests[1].outcome == ("fail", "failed: ValueError: no such thing")
        assert requests[2].outcome == ("answer", b"good")  # the lane lives on
        assert rig.failures(stage="handler", reason="failed") == 1

    run(body)
    assert "no such thing" in caplog.text


@each_mode
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_handler_that_raises_a_cancellation_by_itself_answers(mode: Dispatch, kind: str) -> None:
    async def body(rig: Rig) -> None:
        def plain(message: Message) -> None:
            raise asyncio.CancelledError

        async def waiting(message: Message) -> None:
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone

        rig.dispatcher.add("f", plain if kind == "plain" else waiting, mode)
        requests = [FakeRequest("f"), FakeRequest("f")]
        rig.put(*requests)
        await asyncio.sleep(1)
        assert [r.outcome for r in requests] == [("fail", "failed: the handler was cancelled")] * 2

    run(body)


def test_what_ends_the_process_is_answered_and_passed_on() -> None:
    async def body(rig: Rig) -> None:
        def stop(message: Message) -> None:
            raise KeyboardInterrupt

        rig.dispatcher.add("stop", stop)
        request = FakeRequest("stop")
        with pytest.raises(KeyboardInterrupt):
            rig.put(request)
        assert request.outcome[0] == "fail"

    run(body)


def test_an_unknown_handler_is_answered_and_counted() -> None:
    async def body(rig: Rig) -> None:
        request = FakeRequest("nobody")
        rig.put(request)
        assert request.outcome == ("fail", "unknown_handler: nobody")
        assert rig.failures(reason="unknown_handler") == 1

    run(body)


def test_results_that_travel() -> None:
    async def body(rig: Rig) -> None:
        results: dict[str, object] = {
            "none": None,
            "bytes": b"x",
            "bytearray": bytearray(b"y"),
            "view": memoryview(b"z"),
            "array": array.array("H", [1, 2]),
        }
        for name, result in results.items():
            rig.dispatcher.add(name, lambda message, result=result: result)
        requests = {name: FakeRequest(name) for name in results}
        rig.put(*requests.values())
        assert requests["none"].outcome == ("answer", None)
        assert requests["bytes"].outcome == ("answer", b"x")
        assert requests["bytearray"].outcome == ("answer", b"y")
        assert requests["view"].outcome == ("answer", b"z")
        assert requests["array"].outcome == ("answer", array.array("H", [1, 2]).tobytes())

    run(body)


def test_results_that_cannot_travel_are_answered() -> None:
    async def body(rig: Rig) -> None:
        async def inner(message: Message) -> bytes:
            return b""

        rig.dispatcher.add("text", lambda message: "text")
        rig.dispatcher.add("lost", lambda message: [inner(message)][0])
        requests = [FakeRequest("text"), FakeRequest("lost")]
        rig.put(*requests)
        assert [r.outcome[0] for r in requests] == ["fail", "fail"]
        assert "coroutine" in str(requests[1].outcome[1])

    run(body)


def test_a_peers_refusal_within_a_handler_is_not_passed_off_as_ours() -> None:
    async def body(rig: Rig) -> None:
        async def forward(message: Message) -> None:
            raise RequestFailed("unknown_handler", "elsewhere")

        rig.dispatcher.add("forward", forward)
        request = FakeRequest("forward")
        rig.put(request)
        await asyncio.sleep(1)
        assert str(request.outcome[1]).startswith("failed: ")

    run(body)


def test_typed_handlers_take_and_give_values() -> None:
    async def body(rig: Rig) -> None:
        async def add(value: object, message: Message) -> object:
            return {"got": value}

        rig.dispatcher.add("add", add, typed=True)
        rig.dispatcher.add("odd", lambda value, message: object(), typed=True)
        good, empty = FakeRequest("add", encode([1, "a"])), FakeRequest("add")
        bad, odd = FakeRequest("add", b"\xc1"), FakeRequest("odd", encode(1))
        rig.put(good, empty, bad, odd)
        await asyncio.sleep(1)
        how, payload = good.outcome
        assert how == "answer"
        assert isinstance(payload, bytes)
        assert decode(payload) == {"got": [1, "a"]}
        assert empty.outcome == ("answer", encode({"got": None}))
        assert str(bad.outcome[1]).startswith("decode: ")
        assert rig.failures(reason="decode") == 1
        assert str(odd.outcome[1]).startswith("failed: ")

    run(body)


@each_mode
def test_a_staged_payload_is_loaded_in_its_place(mode: Dispatch) -> None:
    async def body(rig: Rig) -> None:
        seen: list[bytes] = []
        rig.dispatcher.add("f", lambda message: seen.append(bytes(message.payload)), mode)
        large = FakeRequest("f", staged=b"large")
        lost = FakeRequest("f", staged=RequestFailed("too_large", "1 GiB"))
        small = FakeRequest("f", b"small")
        rig.put(large, lost, small)
        await asyncio.sleep(1)
        if mode.lanes is not None:
            assert seen == [b"large", b"small"]
        assert sorted(seen) == [b"large", b"small"]
        assert lost.outcome == ("fail", "too_large: 1 GiB")

    run(body)


@each_mode
def test_a_request_whose_caller_is_gone_is_dropped_in_silence(mode: Dispatch) -> None:
    async def body(rig: Rig) -> None:
        seen: list[bytes] = []
        rig.dispatcher.add("f", lambda message: seen.append(bytes(message.payload)), mode)
        gone, small = FakeRequest("f", staged=CallerGone()), FakeRequest("f", b"small")
        rig.put(gone, small)
        await asyncio.sleep(1)
        assert (gone.outcome, seen) == (("drop", None), [b"small"])
        assert rig.failures(stage="dispatch", reason="caller_gone") == 1

    run(body)


@pytest.mark.parametrize("wants", Wants)
def test_the_log_says_that_a_plain_send_was_lost(
    wants: Wants, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(rig: Rig) -> None:
        rig.dispatcher.add("f", lambda message: None)
        rig.put(FakeRequest("f", wants=wants, staged=RequestFailed("too_large", "2 of 1 bytes")))
        await asyncio.sleep(1)
        assert rig.failures(stage="dispatch", reason="too_large") == 1
        told = [record for record in caplog.records if "2 of 1 bytes" in record.getMessage()]
        assert len(told) == (1 if wants is Wants.NOTHING else 0)

    caplog.set_level("WARNING")
    run(body)


def test_ordered_keeps_each_senders_order_and_senders_run_beside_each_other() -> None:
    async def body(rig: Rig) -> None:
        ended: list[tuple[int, int]] = []

        async def slow(message: Message) -> None:
            number = message.payload[0]
            await asyncio.sleep(10 - number)  # the later, the faster
            ended.append((message.sender.worker_id, number))

        rig.dispatcher.add("slow", slow, Dispatch.ordered())
        rig.put(*(FakeRequest("slow", bytes([n]), sender=s) for n in range(5) for s in (1, 2)))
        await asyncio.sleep(100)
        for sender in (1, 2):
            assert [n for s, n in ended if s == sender] == list(range(5))
        assert [s for s, _ in ended[:2]] == [1, 2]

    run(body)


def test_a_key_of_the_message_makes_the_lanes() -> None:
    async def body(rig: Rig) -> None:
        ended: list[str] = []

        async def slow(message: Message) -> None:
            await asyncio.sleep(float(message.headers["s"]))
            ended.append(message.headers["k"] + message.headers["s"])

        config = OrderedConfig(key=lambda message: message.headers["k"])
        rig.dispatcher.add("slow", slow, Dispatch.ordered_with(config))
        rig.put(
            FakeRequest("slow", headers={"k": "a", "s": "5"}),
            FakeRequest("slow", headers={"k": "a", "s": "1"}),
            FakeRequest("slow", headers={"k": "b", "s": "2"}),
        )
        keyless = FakeRequest("slow")
        rig.put(keyless)
        assert str(keyless.outcome[1]).startswith("failed: KeyError")
        await asyncio.sleep(10)
        assert ended == ["b2", "a5", "a1"]

    run(body)


def test_a_full_lane_that_rejects_answers() -> None:
    async def body(rig: Rig) -> None:
        async def slow(message: Message) -> None:
            await asyncio.sleep(1)

        config = OrderedConfig(max_queue_depth=2, overflow="reject")
        rig.dispatcher.add("slow", slow, Dispatch.ordered_with(config))
        requests = [FakeRequest("slow") for _ in range(3)]
        other = FakeRequest("slow", sender=2)
        rig.put(*requests, other)
        assert str(requests[2].outcome[1]).startswith("overflow: ")
        assert rig.failures(reason="overflow") == 1
        await asyncio.sleep(10)
        assert [r.outcome[0] for r in requests] == ["answer", "answer", "fail"]
        assert other.outcome[0] == "answer"
        (found,) = rig.dispatcher.statistics().handlers
        assert (found.requests, found.rejected) == (4, 1)

    run(body)


def test_a_handler_that_waits_for_a_peer_gives_its_charge_back_first() -> None:
    async def body(rig: Rig) -> None:
        async def calls(message: Message) -> None:
            await asyncio.sleep(1)
            release_current_charge()
            await asyncio.sleep(1)

        async def nested(message: Message) -> None:
            await asyncio.create_task(calls(message))

        rig.dispatcher.add("calls", calls)
        rig.dispatcher.add("nested", nested, Dispatch.ordered())
        requests = [FakeRequest("calls", b"1234"), FakeRequest("nested", b"1234")]
        rig.put(*requests)
        await asyncio.sleep(0.5)
        assert [r.link.returned for r in requests] == [0, 0]
        await asyncio.sleep(1)
        assert [r.link.returned for r in requests] == [516, 516]
        assert not any(r.settled for r in requests)
        await asyncio.sleep(1)
        assert [r.link.returned for r in requests] == [516, 516]  # once

    run(body)


def test_a_draining_node_turns_requests_away_and_answers_those_it_has() -> None:
    async def body(rig: Rig) -> None:
        async def slow(message: Message) -> bytes:
            await asyncio.sleep(1)
            return b"late"

        rig.dispatcher.add("slow", slow, Dispatch.ordered())
        had = [FakeRequest("slow"), FakeRequest("slow")]
        rig.put(*had)
        rig.dispatcher.gate.shut()
        late = FakeRequest("slow")
        rig.put(late)
        assert late.outcome == ("draining", None)
        idle = rig.dispatcher.gate.watch_idle()
        await asyncio.sleep(1.5)
        assert not idle.done()  # a queued request holds its guard
        await asyncio.sleep(1)
        assert idle.done()
        assert [r.outcome for r in had] == [("answer", b"late")] * 2
        assert rig.dispatcher.statistics().turned_away == 1

    run(body)


@each_mode
def test_dropping_settles_everything_once(mode: Dispatch) -> None:
    async def body(rig: Rig) -> None:
        async def slow(message: Message) -> bytes:
            await asyncio.sleep(100)
            return b"never"

        rig.dispatcher.add("slow", slow, mode)
        began = [FakeRequest("slow") for _ in range(3)]
        rig.put(*began)
        await asyncio.sleep(1)
        rig.dispatcher.gate.shut()
        assert rig.dispatcher.drop() == 3
        await asyncio.sleep(0.1)
        assert rig.dispatcher.gate.guards == 0
        ran = 3 if mode.lanes is None else 1
        outcomes = sorted(r.outcome[0] for r in began)
        assert outcomes == ["draining"] * (3 - ran) + ["fail"] * ran
        assert rig.dispatcher.statistics().dropped == 3

    run(body)


@each_mode
def test_dropping_before_a_task_began_settles_too(mode: Dispatch) -> None:
    async def body(rig: Rig) -> None:
        async def slow(message: Message) -> None:
            raise AssertionError("dropped before it began")

        rig.dispatcher.add("slow", slow, mode)
        requests = [FakeRequest("slow"), FakeRequest("slow")]
        rig.put(*requests)
        assert rig.dispatcher.drop() == 2
        assert [r.outcome for r in requests] == [("draining", None)] * 2

    run(body)


def test_a_handler_that_ignores_its_cancellation_was_answered_all_the_same() -> None:
    async def main() -> None:
        rig = Rig()
        let_go = asyncio.Event()

        async def stubborn(message: Message) -> bytes:
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue
            return b"too late"

        rig.dispatcher.add("stubborn", stubborn)
        request = FakeRequest("stubborn")
        rig.put(request)
        await asyncio.sleep(1)
        assert not await rig.dispatcher.close(0.5)
        assert rig.dispatcher.gate.guards == 0
        assert request.outcome[0] == "fail"
        let_go.set()
        await asyncio.sleep(1)
        assert request.outcome[0] == "fail"

    run_virtual(main())


def test_a_removed_handler_finishes_what_it_took_on() -> None:
    async def body(rig: Rig) -> None:
        async def slow(message: Message) -> bytes:
            await asyncio.sleep(1)
            return b"old"

        rig.dispatcher.add("slow", slow, Dispatch.ordered())
        first = FakeRequest("slow")
        rig.put(first)
        rig.dispatcher.remove("slow")
        gone = FakeRequest("slow")
        rig.put(gone)
        assert gone.outcome[0] == "fail"
        rig.dispatcher.add("slow", lambda message: b"new")
        second = FakeRequest("slow")
        rig.put(second)
        await asyncio.sleep(5)
        assert (first.outcome, second.outcome) == (("answer", b"old"), ("answer", b"new"))
        with pytest.raises(UsageError):
            rig.dispatcher.remove("never")

    run(body)


def test_handlers_may_be_registered_before_there_is_a_loop() -> None:
    dispatcher = Dispatcher(None, Counters())
    dispatcher.add("f", lambda message: b"", Dispatch.ordered())
    assert dispatcher.registry.names() == ["f"]
