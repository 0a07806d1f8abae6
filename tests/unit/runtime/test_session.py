"""One epoch: calls both ways, faults typed, mistakes contained, and one report of the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from orbit.errors import (
    BusyError,
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PeerLost,
    PeerProtocolError,
    PeerRefused,
    UnknownHandle,
)
from orbit.model import Handle, Incarnation, PeerIdentity, SlotId, WorkerId
from orbit.protocol.bootstrap import Epoch
from orbit.protocol.calls import ping_frame
from orbit.protocol.framing import FrameKind, encode_frame
from orbit.protocol.messages import EmptyReply, Message, MetadataReply, MetadataRequest, RefRequest
from orbit.runtime.runner import TaskRunner
from orbit.runtime.session import ControlSession, SessionSettings
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.network import SimLink, SimNetwork
from orbit.testing.sessions import make_hello
from orbit.transport.interface import CallHandler, Session

HANDLE = Handle(WorkerId(2), SlotId(1))
ATTEMPT = b"a" * 16


@dataclass
class End:
    session: ControlSession
    link: SimLink
    runner: TaskRunner
    closed: list[ControlSession] = field(default_factory=list)


async def answer(session: Session, body: object) -> Message | None:
    return MetadataReply(MetadataRequest.from_wire(body).handle.slot_id, 1, False)


def make_end(
    link: SimLink, own: int, other: int, handlers: Mapping[str, CallHandler], timeout_s: float
) -> End:
    hellos = make_hello(own, other, ATTEMPT), make_hello(other, own, ATTEMPT)
    peer = PeerIdentity(WorkerId(other), Incarnation(100 + other))
    epoch = Epoch(peer, ATTEMPT, b"k" * 32, 1, *hellos)
    runner = TaskRunner()
    closed: list[ControlSession] = []
    settings = SessionSettings(handlers, runner.spawn, closed.append, timeout_s)
    session = ControlSession(epoch, link, (), settings, dialed=own == 1)
    session.start()
    return End(session, link, runner, closed)


def make_pair(
    handlers: Mapping[str, CallHandler], timeout_s: float = 5.0, faults: LinkFaults | None = None
) -> tuple[End, End]:
    near, far = SimNetwork(1).link_pair(faults=faults)
    return make_end(near, 1, 2, {}, timeout_s), make_end(far, 2, 1, handlers, timeout_s)


async def ask(end: End, timeout_s: float | None = None) -> MetadataReply:
    return await end.session.call(MetadataRequest(HANDLE), MetadataReply, timeout_s)


async def end_both(*ends: End) -> None:
    for end in ends:
        end.session.close()
    for end in ends:
        await end.session.wait_closed()
        await end.session.wait_served()
    await asyncio.sleep(0.1)
    for end in ends:
        assert end.closed == [end.session]
        assert end.session.closed
        assert len(end.runner) == 0
    loop = asyncio.get_running_loop()
    assert [t for t in loop._scheduled if not t.cancelled()] == []  # type: ignore[attr-defined]


def test_many_calls_at_once_and_in_both_directions() -> None:
    async def main() -> None:
        a, b = make_pair({MetadataRequest.METHOD: answer})
        replies = await asyncio.gather(*(ask(a) for _ in range(200)))
        assert {reply.total_len for reply in replies} == {1}
        with pytest.raises(PeerRefused) as caught:
            await ask(b)  # the near end has no handlers
        assert caught.value.reason == "unknown_method"
        await end_both(a, b)

    run_virtual(main())


def test_typed_refusals_and_contained_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(session: Session, body: object) -> Message | None:
        raise UnknownHandle("x")

    async def refuse_with_reason(session: Session, body: object) -> Message | None:
        raise PeerRefused("closing")

    async def fail(session: Session, body: object) -> Message | None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        handlers: dict[str, CallHandler] = {
            MetadataRequest.METHOD: refuse,
            RefRequest.METHOD: fail,
        }
        a, b = make_pair(handlers)
        with pytest.raises(PeerRefused) as caught:
            await ask(a)
        assert caught.value.reason == "unknown_handle"
        handlers[MetadataRequest.METHOD] = refuse_with_reason
        with pytest.raises(PeerRefused) as caught:
            await ask(a)
        assert caught.value.reason == "closing"
        with pytest.raises(PeerRefused) as caught:
            await a.session.call(RefRequest(HANDLE), EmptyReply)
        assert caught.value.reason == "internal"
        assert "a bug" not in str(caught.value)  # said in our own log, not to a stranger
        assert "a bug" in caplog.text
        await end_both(a, b)

    run_virtual(main())


def test_a_call_has_its_own_deadline_and_a_late_answer_harms_nobody() -> None:
    async def slow(session: Session, body: object) -> Message | None:
        await asyncio.sleep(1.0)
        return await answer(session, body)

    async def main() -> None:
        a, b = make_pair({MetadataRequest.METHOD: slow})
        started = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await ask(a, 0.25)
        assert asyncio.get_running_loop().time() - started < 0.3
        assert (await ask(a)).total_len == 1
        await end_both(a, b)

    run_virtual(main())


def test_a_cancelled_caller_frees_its_slot() -> None:
    async def never(session: Session, body: object) -> Message | None:
        await asyncio.sleep(0.5)
        return EmptyReply()

    async def main() -> None:
        a, b = make_pair({MetadataRequest.METHOD: never})
        tasks = [asyncio.ensure_future(ask(a)) for _ in range(1024)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await ask(a)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(1.0)
        with pytest.raises(PeerProtocolError):
            await ask(a)  # an empty reply is no metadata
        await asyncio.sleep(0.1)
        assert a.session.closed
        await end_both(a, b)

    run_virtual(main())


def test_outstanding_calls_end_with_the_epoch() -> None:
    async def never(session: Session, body: object) -> Message | None:
        await asyncio.sleep(0.5)
        return EmptyReply()

    async def main() -> None:
        for end_it, expected in (("cut", PeerLost), ("close", OrbitError), ("abort", PeerRefused)):
            a, b = make_pair({MetadataRequest.METHOD: never})
            task = asyncio.ensure_future(ask(a))
            await asyncio.sleep(0.1)
            if end_it == "cut":
                a.link.lose("cable pulled")
            elif end_it == "close":
                a.session.close()
            else:
                a.session.abort(PeerRefused("because"))
            with pytest.raises(expected):
                await task
            with pytest.raises(OrbitError):
                await ask(a)
            a.session.notify(RefRequest(HANDLE))  # silently nothing
            await asyncio.sleep(1.0)
            await end_both(a, b)

    run_virtual(main())


def test_a_goodbye_is_told_from_a_crash() -> None:
    async def main() -> None:
        a, b = make_pair({})
        b.session.close()
        await asyncio.sleep(0.1)
        assert "goodbye" in str(a.session.cause)
        await end_both(a, b)
        a, b = make_pair({})
        b.link.lose("killed")
        await asyncio.sleep(0.1)
        assert "goodbye" not in str(a.session.cause)
        await end_both(a, b)

    run_virtual(main())


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame(FrameKind.HELLO, b"\x90"),
        encode_frame(FrameKind.CALL, b"\xc1"),
        encode_frame(FrameKind.REPLY, b"\x92\x01\x80"),
        encode_frame(FrameKind.CALL, b"\x93\xcd\xff\xff\xac_rv_metadata\xc0"),
    ],
)
def test_nonsense_from_the_peer_ends_the_epoch(frame: bytes) -> None:
    async def main() -> None:
        a, b = make_pair({MetadataRequest.METHOD: answer})
        a.link.send_nowait(frame)
        await asyncio.sleep(0.1)
        assert b.session.closed
        assert isinstance(b.session.cause, PeerProtocolError)
        await end_both(a, b)

    run_virtual(main())


def test_a_ping_is_answered() -> None:
    async def main() -> None:
        a, b = make_pair({})
        a.link.send_nowait(ping_frame(7))
        await asyncio.sleep(0.1)
        assert not a.session.closed
        assert not b.session.closed
        await end_both(a, b)

    run_virtual(main())


def test_somebody_may_wait_for_a_pong() -> None:
    async def main() -> None:
        a, b = make_pair({})
        assert await a.session.ping(1.0) > 0
        both = await asyncio.gather(a.session.ping(1.0), b.session.ping(1.0))
        assert all(seconds < 1.0 for seconds in both)
        b.link.lose("cable pulled")
        with pytest.raises(PeerLost):
            await a.session.ping(1.0)
        with pytest.raises(PeerLost):
            await a.session.ping(1.0)  # at once, now
        await end_both(a, b)
        a, b = make_pair({}, faults=LinkFaults(stalled=True))
        with pytest.raises(DeadlineExceeded):
            await a.session.ping(1.0)
        a.session.close()
        b.session.close()

    run_virtual(main())


@pytest.mark.parametrize("alive", [True, False])
def test_a_silent_peer_that_owes_an_answer_is_asked(alive: bool) -> None:
    async def slow(session: Session, body: object) -> Message | None:
        await asyncio.sleep(60.0)
        return await answer(session, body)

    async def main() -> None:
        faults = LinkFaults()
        a, b = make_pair({MetadataRequest.METHOD: slow}, timeout_s=100.0, faults=faults)
        await asyncio.sleep(1000.0)  # nothing is owed: nobody asks
        started = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(ask(a))
        await asyncio.sleep(1.0)
        faults.stalled = not alive
        if alive:
            assert (await task).total_len == 1
        else:
            with pytest.raises(PeerLost, match="ping"):
                await task
            waited = asyncio.get_running_loop().time() - started
            assert 12.0 <= waited < 13.0  # 10 s of silence, 2 s for the answer
            faults.stalled = False
        a.session.close()
        b.session.close()
        await asyncio.sleep(100.0)

    run_virtual(main())


def test_an_answer_over_the_frame_limit_is_our_bug_and_ends_the_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def huge(session: Session, body: object) -> Message | None:
        from orbit.protocol.messages import AcquireReply, ReadyAnswer

        return AcquireReply(ready=ReadyAnswer(1, 0, 2 << 20, inline=bytes(2 << 20)))

    async def main() -> None:
        a, b = make_pair({MetadataRequest.METHOD: huge})
        with pytest.raises((PeerLost, ClosedError)):
            await ask(a)
        assert "cannot be sent" in caplog.text
        await end_both(a, b)

    run_virtual(main())
