"""Sends: issued at once and in order, one outcome each, whoever looks and whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from orbit.errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    PathUnavailable,
    PeerLost,
    PeerUnreachable,
    UsageError,
)
from orbit.events import SENDS_FAILED_TOTAL, SessionOpened
from orbit.model import PathName, PathReason
from orbit.protocol.messaging.call_header import parse_request
from orbit.runtime.messaging.results import SendState
from tests.unit.runtime.messaging.fake_links import (
    OWN,
    PEER,
    FakeTransport,
    Stage,
    on_stage,
    refused,
    settle,
)


def names(frames: Sequence[object]) -> list[str]:
    return [parse_request(frame.header).text for frame in frames]  # type: ignore[attr-defined]


def test_a_send_over_an_open_link_leaves_within_the_call() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        tasks = len(stage.runner)
        result = stage.send(name="now")
        assert names(link.posted) == ["now"]
        assert (result.state, len(stage.runner)) == (SendState.ADMITTED, tasks)
        await result
        await result.admitted()
        link.confirm()
        assert result.state is SendState.DONE

    on_stage(play)


def test_sends_before_the_link_leave_in_the_order_of_issue_unawaited() -> None:
    async def play(stage: Stage) -> None:
        for n in range(20):
            stage.send(name=f"n{n}")
        assert not stage.transports[0].links
        await settle()
        assert names(stage.link.posted) == [f"n{n}" for n in range(20)]
        stage.send(name="last")
        assert names(stage.link.posted)[-1] == "last"

    on_stage(play)


def test_at_the_bound_a_send_fails_and_is_not_queued() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        first, second = stage.send(), stage.send()
        third = stage.send()
        assert third.state is SendState.FAILED
        with pytest.raises(BudgetExceeded, match="admission of") as caught:
            await third
        assert caught.value.knob == "messaging.queue_frames"
        assert len(link.queue) == 2
        link.post(2)
        await asyncio.gather(first, second)
        await stage_send_passes(stage)

    async def stage_send_passes(stage: Stage) -> None:
        stage.link.hold = False
        await stage.send()

    on_stage(play, queue_frames=2)


def test_the_bound_in_bytes() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        stage.send(payload=b"x" * 600)
        result = stage.send(payload=b"x" * 600)
        with pytest.raises(BudgetExceeded) as caught:
            await result
        assert caught.value.knob == "messaging.queue_bytes"

    on_stage(play, queue_bytes=1000, eager_max_bytes=1000)


def test_waiting_sends_keep_their_order_and_nobody_passes_them() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        stage.send(name="a")
        waiting = [stage.send(name=name, wait=True) for name in "bcd"]
        assert all(result.state is SendState.PENDING for result in waiting)
        link.post(1)  # room, which is b's although nobody has run yet
        late = stage.send(name="late")
        assert late.state is SendState.FAILED
        await settle()
        assert names(link.queue) == ["b"]
        for expected in "bcd":
            assert names(link.queue) == [expected]
            link.post(1)
            await settle()
        await asyncio.gather(*waiting)

    on_stage(play, queue_frames=1)


def test_capacity_waits_for_room() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        await stage.messenger.capacity(PEER, None)
        link.hold = True
        stage.send()
        with pytest.raises(DeadlineExceeded):
            await stage.messenger.capacity(PEER, 0.01)
        waiter = asyncio.ensure_future(stage.messenger.capacity(PEER, None))
        await settle()
        assert not waiter.done()
        link.post(1)
        await waiter
        assert stage.send().state is SendState.PENDING  # the room was not taken by looking

    on_stage(play, queue_frames=1)


def test_many_waiters_all_resolve() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True

        async def sender(number: int) -> None:
            for n in range(50):
                await stage.send(name=f"{number}-{n}", wait=True)

        senders = [asyncio.ensure_future(sender(n)) for n in range(8)]
        while not all(task.done() for task in senders):
            await asyncio.sleep(0)
            link.post(len(link.queue))
        assert len(link.posted) == 400
        for number in range(8):
            own = [name for name in names(link.posted) if name.startswith(f"{number}-")]
            assert own == [f"{number}-{n}" for n in range(50)]

    on_stage(play, queue_frames=3)


def test_cancelling_whoever_awaits_changes_nothing() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        result = stage.send()
        waiters = [asyncio.ensure_future(_wait(result)) for _ in range(3)]
        admission = asyncio.ensure_future(result.admitted())
        await settle()
        waiters[0].cancel()
        admission.cancel()
        await settle()
        assert result.state is SendState.PENDING
        link.post(1)
        await asyncio.gather(*waiters[1:])
        assert waiters[0].cancelled()

    async def _wait(result: object) -> None:
        await result  # type: ignore[misc]

    on_stage(play)


def test_a_dropped_result_still_leaves() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        stage.send(name="kept")
        link.post(1)
        assert names(link.posted) == ["kept"]

    on_stage(play)


def test_withdraw_works_until_it_leaves() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        errors: list[OrbitError] = []
        in_link = stage.send(name="link", on_error=errors.append)
        waiting = stage.send(name="line", wait=True, on_error=errors.append)
        assert waiting.withdraw()
        assert in_link.withdraw()
        assert not in_link.withdraw()
        for result in (in_link, waiting):
            with pytest.raises(NotAdmitted, match="withdrawn"):
                await result
        assert link.queue == []
        gone = stage.send()
        link.post(1)
        assert not gone.withdraw()
        await settle()
        assert errors == [], "who takes a message back need not be told"
        bound = stage.messenger.statistics()
        assert (bound.queued_frames, bound.queued_bytes, bound.waiting_sends) == (0, 0, 0)

    on_stage(play, queue_frames=1)


def test_withdraw_before_there_is_a_link() -> None:
    async def play(stage: Stage) -> None:
        first, second = stage.send(name="a"), stage.send(name="b")
        assert first.withdraw()
        await second
        assert names(stage.link.posted) == ["b"]

    on_stage(play)


def test_a_timeout_ends_what_has_not_left() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        queued = stage.send(timeout=0.01)
        line = stage.send(timeout=0.01, wait=True)
        for result in (queued, line):
            with pytest.raises(DeadlineExceeded) as caught:
                await result
            assert isinstance(caught.value.__cause__, NotAdmitted)
        assert link.queue == []
        found = stage.messenger.statistics()
        assert (found.queued_frames, found.waiting_sends) == (0, 0)

    on_stage(play, queue_frames=1)


def test_a_peer_that_cannot_be_reached_fails_all_with_one_reason() -> None:
    async def play(stage: Stage) -> None:
        stage.unreachable = PeerUnreachable("127.0.0.1:1", "refused")
        told: list[OrbitError] = []
        results = [stage.send(on_error=told.append) for _ in range(3)]
        results.append(stage.send(on_error=told.append, wait=True))
        texts = set()
        for result in results:
            with pytest.raises(NotAdmitted, match="connection refused") as caught:
                await result.admitted()
            assert isinstance(caught.value.__cause__, PeerUnreachable)
            texts.add(str(caught.value))
        await settle()
        assert len(texts) == 1
        assert len(told) == len(results)
        stage.unreachable = None
        await stage.send()

    on_stage(play, queue_frames=3)


def test_the_death_of_a_link_gives_each_frame_one_verdict() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        told: list[OrbitError] = []
        confirmed = stage.send(on_error=told.append)
        link.confirm()
        ambiguous = stage.send(on_error=told.append)
        link.hold = True
        queued = [stage.send(on_error=told.append) for _ in range(3)]
        waiting = stage.send(on_error=told.append, wait=True)
        link.die(PeerLost(str(PEER), "reset"))
        await confirmed
        await ambiguous  # it was admitted, and that is what the result of a send says
        assert (confirmed.state, ambiguous.state) == (SendState.DONE, SendState.FAILED)
        for result in [*queued, waiting]:
            with pytest.raises(NotAdmitted):
                await result
        await settle()
        assert [type(error) for error in told] == [OutcomeUnknown] + [NotAdmitted] * 4
        assert stage.recorder.counters.value(SENDS_FAILED_TOTAL) == 5
        await stage.send(name="next")
        assert len(stage.transports[0].links) == 2

    on_stage(play, queue_frames=4)


def test_what_an_agreed_close_gives_back_goes_by_the_next_link_in_order() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        results = [stage.send(name=f"n{n}") for n in range(3)]
        link.leave()
        results.append(stage.send(name="n3"))
        await asyncio.gather(*results)
        assert names(stage.link.posted) == ["n0", "n1", "n2", "n3"]
        assert stage.link is not link

    on_stage(play)


def test_parting_holds_sends_back_and_loses_none() -> None:
    for agrees in (True, False):

        async def play(stage: Stage, agrees: bool = agrees) -> None:
            link = await stage.connect()
            link.says_goodbye = agrees
            route = stage.messenger.route_to(PEER.worker_id)
            assert route is not None
            parting = asyncio.ensure_future(stage.messenger.part(route, 0.5))
            await asyncio.sleep(0)
            result = stage.send(name="meanwhile")
            assert result.state is SendState.PENDING
            assert await parting is agrees
            await result
            assert names(stage.link.posted) == ["meanwhile"]
            assert (stage.link is link) is not agrees

        on_stage(play)


def test_a_route_with_a_call_outstanding_does_not_part() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        route = stage.messenger.route_to(PEER.worker_id)
        assert route is not None
        call = stage.send(2)
        assert not await stage.messenger.part(route, 0.5)
        assert not stage.messenger.may_close(link)
        link.answer(link.posted[-1], b"")
        await call
        assert stage.messenger.may_close(link)

    on_stage(play)


def test_mistakes_of_the_caller_are_said_at_once() -> None:
    async def play(stage: Stage) -> None:
        for options in (
            {"name": ""},
            {"name": "_reserved"},
            {"name": "n" * 256},
            {"headers": {"k": "v" * 1025}},
            {"headers": {"_k": "v"}},
            {"headers": {"k": 1}},
            {"payload": "text"},
            {"payload": 5},
            {"peer": "somebody"},
            {"peer": 0},
            {"timeout": 0},
            {"timeout": float("inf")},
            {"transport": "pigeon"},
        ):
            with pytest.raises(UsageError):
                stage.send(**options)
        assert stage.messenger.statistics().queued_frames == 0
        stage.messenger.close()
        with pytest.raises(ClosedError):
            stage.send()

    on_stage(play)


def test_the_caller_may_change_its_buffer_at_once() -> None:
    async def play(stage: Stage) -> None:
        buffer = bytearray(b"before")
        stage.send(payload=buffer)
        buffer[:] = b"after!"
        buffer.extend(b"and it may be resized")
        await settle()
        assert bytes(stage.link.posted[0].payload) == b"before"

    on_stage(play)


def test_the_first_transport_that_can_be_had_is_chosen_once_an_epoch() -> None:
    rdma = FakeTransport(PathName.RDMA, refuse=refused(PathName.RDMA, PathReason.NOT_READY))
    tcp = FakeTransport(PathName.TCP)

    async def play(stage: Stage) -> None:
        await stage.send()
        stage.transports[1].links[-1].die(PeerLost(str(PEER), "reset"))
        rdma.refuse = None
        await stage.send()
        assert (len(rdma.links), len(tcp.links)) == (0, 2)
        series = "orbit_transport_chosen_total"
        assert stage.recorder.counters.value(series, transport="tcp", reason="not_ready") == 1
        stage.session = type(stage.session)(PEER, b"2" * 16)  # a new epoch
        tcp.links[-1].die(PeerLost(str(PEER), "reset"))
        await stage.send()
        assert len(rdma.links) == 1

    on_stage(play, rdma, tcp)


def test_a_link_that_cannot_be_opened_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    rdma = FakeTransport(PathName.RDMA, refuse=refused(PathName.RDMA, PathReason.NOT_READY))

    async def play(stage: Stage) -> None:
        for attempt in range(3):
            stage.session = type(stage.session)(PEER, bytes([attempt]) * 16)
            await stage.send()
            stage.transports[1].links[-1].die(PeerLost(str(PEER), "reset"))
            await settle()
        warned = [r for r in caplog.records if "do not go by rdma" in r.getMessage()]
        assert len(warned) == 1
        assert stage.recorder.counters.value("orbit_transport_refused_total") == 3

    on_stage(play, rdma, FakeTransport(PathName.TCP))


def test_a_demanded_transport_has_no_substitute() -> None:
    async def play(stage: Stage) -> None:
        with pytest.raises(PathUnavailable) as caught:
            await stage.send(transport="rdma")
        assert (caught.value.path, caught.value.reason) == ("rdma", PathReason.NO_DEVICE)
        await stage.send(transport="tcp")
        await stage.send(transport="auto")
        assert len(stage.transports[0].links) == 1

    on_stage(play)

    rdma = FakeTransport(PathName.RDMA, reason=PathReason.PEER_WITHOUT)

    async def play_both(stage: Stage) -> None:
        with pytest.raises(PathUnavailable) as caught:
            await stage.send(transport="rdma")
        assert caught.value.reason == PathReason.PEER_WITHOUT
        await stage.send()
        assert not rdma.links

    on_stage(play_both, rdma, FakeTransport(PathName.TCP))


def test_no_transport_at_all() -> None:
    async def play(stage: Stage) -> None:
        with pytest.raises(NotAdmitted, match="tcp: peer_without"):
            await stage.send()

    on_stage(play, FakeTransport(reason=PathReason.PEER_WITHOUT))


def test_closing_fails_what_has_not_left_and_leaves_no_task() -> None:
    async def play(stage: Stage) -> None:
        stage.transports[0].gate = asyncio.Event()
        queued = stage.send()
        call = stage.send(2)
        line = stage.send(wait=True)
        room = asyncio.ensure_future(stage.messenger.capacity(PEER, None))
        await settle()
        stage.messenger.close()
        for result in (queued, call, line):
            with pytest.raises(NotAdmitted):
                await result
        with pytest.raises(ClosedError):
            await room

    on_stage(play, queue_frames=2)


def test_on_error_may_send() -> None:
    async def play(stage: Stage) -> None:
        link = await stage.connect()
        link.hold = True
        again: list[object] = []
        stage.send(name="first", on_error=lambda error: again.append(stage.send(name="again")))
        link.die(PeerLost(str(PEER), "reset"))
        await settle()
        assert len(again) == 1
        assert names(stage.link.posted) == ["again"]

    on_stage(play)


def test_a_node_sends_to_itself() -> None:
    async def play(stage: Stage) -> None:
        call = stage.send(2, b"ping", peer=OWN)
        await settle()
        (request,) = stage.arrivals.requests
        assert bytes(request.payload) == b"ping"
        assert request.sender == OWN
        request.answer(b"pong")
        assert bytes(await call) == b"pong"
        assert not any(isinstance(event, SessionOpened) for event in stage.events)
        assert request.route.link.statistics().unconsumed_bytes == 0

    on_stage(play)


def test_what_a_node_sends_itself_is_bounded_like_any_peers() -> None:
    async def play(stage: Stage) -> None:
        results = [stage.send(0, b"x" * 1000, peer=OWN, wait=True) for _ in range(40)]
        await settle()
        assert len(stage.arrivals.requests) < 10
        while not all(result.done for result in results):
            stage.arrivals.requests.pop(0).answer()
            await settle()

    on_stage(play, eager_max_bytes=1024, inbound_max_bytes=4096, queue_frames=4)


def test_wire_up_opens_the_link_ahead() -> None:
    async def play(stage: Stage) -> None:
        stage.messenger.wire_up(PEER)
        await settle()
        assert len(stage.transports[0].links) == 1
        stage.send(name="at once")
        assert names(stage.link.posted) == ["at once"]

    on_stage(play)
