"""What a device says outside completions, and what it refuses: links fail at once with that cause,
nothing is left behind, and the next link works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from orbit.errors import DeviceError, OutcomeUnknown, PathUnavailable, Unquiesced
from orbit.model import PathReason
from orbit.testing.pattern import pattern
from orbit.verbs.async_events import AsyncEventKind
from orbit.verbs.provider import NativeObject
from orbit.verbs.scripted import RECEIVE
from orbit.verbs.turn import BIND_WINDOW, SEND
from tests.contract.message_pairs import Frame, MessagePair, message_pair, send_all, until


def queue_pair_of(pair: MessagePair) -> NativeObject:
    (end,) = pair.dialer.parts.lane.ends
    native: NativeObject = end._native  # type: ignore[attr-defined]
    return native


SUBJECTS: dict[AsyncEventKind, Callable[[MessagePair], NativeObject | None]] = {
    AsyncEventKind.QP_FATAL: queue_pair_of,
    AsyncEventKind.QP_ACCESS_ERR: queue_pair_of,
    AsyncEventKind.CQ_ERR: lambda pair: pair.dialer.parts.lane.source.cq,
    AsyncEventKind.SRQ_ERR: lambda pair: pair.dialer.parts.receives.shared,
}


@pytest.mark.parametrize("rxe", [False, True], ids=["specification", "rxe"])
@pytest.mark.parametrize("kind", list(SUBJECTS))
def test_an_event_fails_its_links_and_the_next_one_works(kind: AsyncEventKind, rxe: bool) -> None:
    async def scenario() -> None:
        async with message_pair(rxe=rxe) as pair:
            mine, _ = await pair.links()
            await send_all(mine, [b"before"])
            pair.a.raise_event(kind, SUBJECTS[kind](pair))
            for side in pair.sides:
                await side.wait_lost()
            (cause,) = pair.dialer.received.lost
            assert isinstance(cause, DeviceError)
            assert kind in str(cause)
            await pair.wait_no_links()
            again, _ = await pair.links()
            await send_all(again, [pattern(9000, 1)])

    asyncio.run(scenario())


def test_a_port_that_goes_down_fails_its_links_and_comes_back() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            await pair.links()
            pair.a.set_port(active=False)
            for side in pair.sides:
                await side.wait_lost()
            assert "PORT_ERR" in str(pair.dialer.received.lost[0])
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason == PathReason.PORT_DOWN
            pair.a.set_port(active=True)
            session = pair.dialer.session
            await until(lambda: pair.dialer.messages.availability(session) is PathReason.OK)
            await pair.links()

    asyncio.run(scenario())


def test_a_port_that_goes_down_before_the_first_link_is_known() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            pair.a.set_port(active=False)
            session = pair.dialer.session
            await until(lambda: pair.dialer.messages.availability(session) is PathReason.PORT_DOWN)
            pair.a.set_port(active=True)
            await until(lambda: pair.dialer.messages.availability(session) is PathReason.OK)
            await pair.links()

    asyncio.run(scenario())


def test_links_end_with_a_fence_and_need_no_event_to_come_back() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            await pair.links()
            session, state = pair.dialer.session, pair.dialer.device.state
            pair.a.set_port(active=False)
            await until(lambda: pair.dialer.messages.availability(session) is PathReason.PORT_DOWN)
            state.fence("its GID is gone")
            for side in pair.sides:
                await side.wait_lost()
            await pair.wait_no_links()
            pair.a.set_quiet(quiet=True)
            pair.a.set_port(active=True)
            await asyncio.sleep(0.01)
            assert pair.dialer.messages.availability(session) is PathReason.PORT_DOWN
            state.resume(state.rail)
            assert pair.dialer.messages.availability(session) is PathReason.OK
            await pair.links()

    asyncio.run(scenario())


def test_a_rail_that_is_paused_has_no_links() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            pair.dialer.device.state.fence("port 1 is DOWN")
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason == PathReason.PORT_DOWN

    asyncio.run(scenario())


def test_a_device_that_is_beyond_use_offers_no_link() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            await pair.links()
            pair.a.raise_event(AsyncEventKind.DEVICE_FATAL)
            await pair.dialer.wait_lost()
            session = pair.dialer.session
            found = pair.dialer.messages.availability(session)
            assert found is PathReason.DEVICE_FAILED

    asyncio.run(scenario())


def test_the_low_water_event_is_armed_again_after_each_firing() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            receives = pair.listener.parts.receives

            async def wait_hits(count: int) -> None:
                await until(lambda: receives.counters.limit_hits >= count)

            receives.limit = len(receives._ids) - 1
            await receives.arm()
            for turn in range(1, 4):
                pair.b.hold(RECEIVE)
                frames = [Frame(bytes(10)) for _ in range(6)]
                for frame in frames:
                    mine.send(frame)
                await wait_hits(turn)
                pair.b.clear_rules()
                pair.b.release()
                for frame in frames:
                    assert await frame.result() is None
                await pair.listener.wait_frames(6 * turn)
            assert pair.listener.messages.statistics().limit_hits == 3
            assert pair.b.counters().receiver_not_ready == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_refused_send_fails_the_link(known: bool, skip: int) -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            pair.a.refuse_post(SEND, 12, known=known, skip=skip)
            frame = Frame(pattern(40_000, 1))  # several packets in one chain
            mine.send(frame)
            assert isinstance(await frame.result(), OutcomeUnknown)
            for side in pair.sides:
                await side.wait_lost()
            assert "post_send" in str(pair.dialer.received.lost[0])
            await pair.wait_no_links()
            again, _ = await pair.links()
            await send_all(again, [b"well again"])

    asyncio.run(scenario())


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_refused_receive_fails_the_links_and_the_queue_is_made_anew(known: bool) -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            pair.b.refuse_post(RECEIVE, 12, known=known)
            mine.send(Frame(b"its slab is not posted again"))
            for side in pair.sides:
                await side.wait_lost()
            assert "post_srq_recv" in str(pair.listener.received.lost[0])
            await pair.wait_no_links()
            again, _ = await pair.links()
            await send_all(again, [pattern(3000, i) for i in range(30)])

    asyncio.run(scenario())


@pytest.mark.parametrize("rxe", [False, True], ids=["specification", "rxe"])
def test_what_cannot_be_proven_is_kept(rxe: bool) -> None:
    async def scenario() -> None:
        async with message_pair(rxe=rxe) as pair:
            mine, _ = await pair.links()
            pair.a.hold(SEND)  # the flush does not come either
            frame = Frame(b"x")
            mine.send(frame)
            mine.abort()
            assert isinstance(await frame.result(), OutcomeUnknown)
            with pytest.raises(Unquiesced):
                await mine.wait_closed()
            counted = pair.dialer.messages.statistics()
            assert counted.links == 1
            assert counted.send_slabs_free < 128  # nobody else may write there
            pair.a.clear_rules()
            pair.a.release()
            await mine.wait_closed()
            counted = pair.dialer.messages.statistics()
            assert (counted.links, counted.send_slabs_free) == (0, 128)

    asyncio.run(scenario())


def test_inline_room_that_cannot_be_had_is_done_without() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            pair.a.fail_verb("create_qp", 22)
            mine, _ = await pair.links()
            (end,) = pair.dialer.parts.lane.ends
            assert end.inline_bytes == 0  # type: ignore[attr-defined]
            await send_all(mine, [b"short", pattern(8000, 1)])

    asyncio.run(scenario())


def test_messages_bind_nothing() -> None:
    """No remote access of any kind: a message queue pair has no use for it (D1)."""

    async def scenario() -> None:
        async with message_pair() as pair:
            pair.a.fail(BIND_WINDOW, 6)
            mine, _ = await pair.links()
            await send_all(mine, [pattern(60_000, 1)])
            assert pair.a.counters().binds == pair.b.counters().binds == 0

    asyncio.run(scenario())
