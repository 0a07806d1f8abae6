"""Links over RC queue pairs between two scripted devices: opening, traffic, death and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import OutcomeUnknown, PathUnavailable, PeerLost
from orbit.model import PathName, PathReason
from orbit.protocol.messaging.credits import Windows
from orbit.testing.pattern import pattern
from orbit.transport.messages import LinkLimits
from orbit.verbs.scripted import RECEIVE
from orbit.verbs.turn import SEND
from tests.contract.message_pairs import QUICK, Frame, MessagePair, message_pair, until

KINDS = ["asyncio", "uvloop"]


@pytest.mark.parametrize("loop_kind", KINDS)
@pytest.mark.parametrize("rxe", [False, True], ids=["specification", "rxe"])
@pytest.mark.parametrize("progress", ["event", "spin", "polling"])
def test_frames_go_both_ways(rxe: bool, progress: str, run_async: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with message_pair(rxe=rxe, config=replace(QUICK, progress=progress)) as pair:
            mine, theirs = await pair.links()
            assert mine.transport is PathName.RDMA
            sent = [pattern(n, n) for n in (0, 1, 200, 8000, 8192, 20_000, 256 << 10)]
            frames = [Frame(p) for p in sent]
            back = [Frame(p, kind=1) for p in sent]
            for frame in frames:
                mine.send(frame)
            for frame in back:
                theirs.send(frame)
            assert [await f.result() for f in frames + back] == [None] * 14
            await pair.listener.wait_frames(7)
            await pair.dialer.wait_frames(7)
            assert [p for _, _, p in pair.listener.received.frames] == sent
            assert [p for _, _, p in pair.dialer.received.frames] == sent
            assert {k for k, _, _ in pair.dialer.received.frames} == {1}
            for side in pair.sides:
                counted = side.messages.statistics()
                assert counted.woken_by_backstop == 0
                assert counted.limit_hits == 0
                assert counted.unknown_completions == counted.orphans == 0

    run_async(scenario())


def test_the_accepting_side_opens_by_asking() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            link = await pair.listener.open()
            assert pair.listener.received.opened == [link]
            await until(lambda: len(pair.dialer.received.opened) == 1)
            frame = Frame(b"from the accepting side")
            link.send(frame)
            assert await frame.result() is None

    asyncio.run(scenario())


def test_concurrent_opens_share_one_link() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            links = await asyncio.gather(
                *(pair.dialer.open() for _ in range(5)), *(pair.listener.open() for _ in range(5))
            )
            assert set(links[:5]) == set(pair.dialer.received.opened)
            assert set(links[5:]) == set(pair.listener.received.opened)
            assert len(set(links)) == 2
            assert pair.dialer.messages.statistics().links == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("rxe", [False, True], ids=["specification", "rxe"])
def test_windows_of_one_saturated_both_ways(rxe: bool) -> None:
    tight = replace(QUICK, limits=LinkLimits(windows=Windows(1, 1)))

    async def scenario() -> None:
        async with message_pair(rxe=rxe, config=tight) as pair:
            links = await pair.links()
            frames = [[Frame(pattern(20_000, i)) for i in range(60)] for _ in links]
            for link, some in zip(links, frames, strict=True):
                for frame in some:
                    link.send(frame)
            for frame in frames[0] + frames[1]:
                assert await frame.result() is None
            for side in pair.sides:
                await side.wait_frames(60)
                assert [p for _, _, p in side.received.frames] == [f.payload for f in frames[0]]
            assert pair.a.counters().receiver_not_ready == 0
            assert pair.b.counters().receiver_not_ready == 0

    asyncio.run(scenario())


def test_a_dead_peer_fails_the_frames_and_the_next_open_replaces_the_link() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            frames = [Frame(pattern(5000, i)) for i in range(10)]
            pair.a.fail(SEND, 12, skip=3)  # transport retries exceeded
            for frame in frames:
                mine.send(frame)
            verdicts = [await frame.result() for frame in frames]
            assert verdicts[:3] == [None] * 3
            assert all(isinstance(v, OutcomeUnknown) for v in verdicts[3:]), verdicts
            await pair.listener.wait_lost()
            (lost,) = pair.dialer.received.lost
            assert isinstance(lost, PeerLost)
            assert "retries exceeded" in str(lost)
            assert isinstance(pair.listener.received.lost[0], PeerLost)
            again, _ = await pair.links()
            assert again is not mine
            frame = Frame(b"on the second link")
            again.send(frame)
            assert await frame.result() is None
            assert pair.dialer.messages.statistics().links == 1
            assert pair.dialer.messages.statistics().lost == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("loop_kind", KINDS)
def test_goodbye_closes_both_ends_in_good_order(run_async: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, theirs = await pair.links()
            frames = [Frame(b"x" * n) for n in range(20)]
            for frame in frames:
                mine.send(frame)
            for frame in frames:
                assert await frame.result() is None
            await pair.listener.wait_frames(20)
            assert await mine.goodbye(2.0)
            await mine.wait_closed()
            await theirs.wait_closed()
            assert pair.dialer.received.lost == pair.listener.received.lost == [None]
            for side in pair.sides:
                counted = side.messages.statistics()
                assert (counted.links, counted.lost) == (0, 0)
            again, _ = await pair.links()
            assert again is not mine

    run_async(scenario())


def test_without_a_packet_the_epoch_is_not_ready() -> None:
    async def scenario() -> None:
        async with message_pair(config=replace(QUICK, ready_timeout_s=0.05)) as pair:
            pair.b.hold(RECEIVE)
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason == PathReason.NOT_READY
            for side in pair.sides:
                assert side.messages.availability(side.session) is PathReason.NOT_READY
            await pair.wait_no_links()
            with pytest.raises(PathUnavailable):
                await pair.listener.open()
            assert pair.dialer.received.opened == []

    asyncio.run(scenario())


def test_a_peer_without_messages() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            session = pair.dialer.session
            hello = session.peer_hello
            session.peer_hello = replace(hello, limits=replace(hello.limits, message_credits=0))
            found = pair.dialer.messages.availability(session)
            assert found is PathReason.PEER_WITHOUT
            session.peer_hello = replace(hello, rails=())
            assert pair.dialer.messages.availability(session) is PathReason.PEER_WITHOUT
            session.peer_hello = hello
            pair.listener.session.handlers = {}
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason == PathReason.PEER_WITHOUT
            assert pair.dialer.messages.availability(session) is PathReason.PEER_WITHOUT

    asyncio.run(scenario())


def test_registered_memory_has_its_budget() -> None:
    async def scenario() -> None:
        async with message_pair(budget_bytes=1 << 20) as pair:
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason == PathReason.BUDGET

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["create_srq", "create_cq", "create_qp", "reg_mr"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_device_that_refuses_leaves_nothing_behind(verb: str, skip: int) -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            pair.a.fail_verb(verb, 12, skip=skip, count=1)
            if skip and verb != "reg_mr":
                await pair.links()  # the second one of a device is never asked for
                return
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason in (PathReason.BUDGET, PathReason.CONNECT_FAILED)
            await asyncio.sleep(QUICK.connect_backoff_s)
            await pair.links()  # the next attempt finds the device well

    asyncio.run(scenario())


def test_the_end_of_the_session_ends_its_link() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            await pair.links()
            pair.dialer.session.close()
            for side in pair.sides:
                await side.messages.close_session(side.session)
                assert side.messages.statistics().links == 0
                assert isinstance(side.received.lost[0], PeerLost)
                with pytest.raises(PathUnavailable):
                    await side.open()

    asyncio.run(scenario())


async def exchange(pair: MessagePair, count: int = 5) -> None:
    mine, theirs = await pair.links()
    for link in (mine, theirs):
        frames = [Frame(pattern(3000, i)) for i in range(count)]
        for frame in frames:
            link.send(frame)
        for frame in frames:
            assert await frame.result() is None


def test_the_first_link_makes_what_the_device_needs_and_no_earlier() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            assert pair.dialer.messages.statistics().registered_bytes == 0
            await exchange(pair)
            counted = pair.dialer.messages.statistics()
            assert counted.registered_bytes == pair.dialer.budget.charged_bytes > 0
            assert counted.receive_slabs_free < 128
            link = pair.dialer.received.opened[-1]
            link.abort()
            await link.wait_closed()
            counted = pair.dialer.messages.statistics()
            assert counted.receive_slabs_free == 128 - 16
            assert counted.send_slabs_free == 128

    asyncio.run(scenario())
