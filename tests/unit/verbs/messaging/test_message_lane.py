"""The road from a completion to its link: nothing is missed between polling and sleeping, what is
late or doubled reaches nobody, and a flood leaves the loop its other work.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orbit.testing.pattern import pattern
from orbit.verbs.completion_source import EventSource
from orbit.verbs.scripted import RECEIVE
from orbit.verbs.scripted_fabric import Step
from orbit.verbs.turn import SEND, Look
from tests.contract.message_pairs import QUICK, Frame, message_pair, send_all, until

PATIENT = replace(QUICK, backstop_s=60.0)  # a missed completion is a hang, and no rescue


@pytest.mark.parametrize("step", list(Step))
@pytest.mark.parametrize("skip", range(3))
@pytest.mark.parametrize("opcode", [RECEIVE, SEND], ids=["receive", "send"])
def test_a_completion_that_comes_in_between_is_not_missed(
    step: Step, skip: int, opcode: int
) -> None:
    async def scenario() -> None:
        async with message_pair(config=PATIENT) as pair:
            mine, _ = await pair.links()
            device = pair.b if opcode == RECEIVE else pair.a
            device.hold(opcode, skip=1)
            frames = [Frame(b"first"), Frame(b"second")]
            device.release_at(step, skip=skip)
            for frame in frames:
                mine.send(frame)
            await asyncio.sleep(0.005)
            device.clear_rules()
            # Where the step is not reached any more, the completion comes now, to a lane at rest.
            device.release()
            for frame in frames:
                assert await frame.result() is None
            await pair.listener.wait_frames(2)
            for side in pair.sides:
                assert side.messages.statistics().woken_by_backstop == 0

    asyncio.run(scenario())


def test_an_event_that_never_comes_costs_a_moment_and_a_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            await send_all(mine, [b"well"])
            await asyncio.sleep(0.01)
            source = pair.dialer.parts.lane.source
            assert isinstance(source, EventSource)
            turn = source._turn

            def wake(channel: int, cq: int, armed: bool, room: int) -> Look:
                """Armed, as the lane believes, while the queue is not."""
                events = turn.drain_events(channel, cq)
                return Look(turn.poll(cq, room), True, events)

            monkeypatch.setattr(source, "_turn", SimpleNamespace(wake=wake))
            await send_all(mine, [b"the event of the last arming"])
            await send_all(mine, [b"no event any more"])
            await until(lambda: pair.dialer.messages.statistics().woken_by_backstop > 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("opcode", [RECEIVE, SEND], ids=["receive", "send"])
def test_a_doubled_completion_reaches_nobody(opcode: int) -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            device = pair.b if opcode == RECEIVE else pair.a
            device.duplicate(opcode, count=5)
            sent = [pattern(100, i) for i in range(20)]
            for payload in sent:
                await send_all(mine, [payload])
            await pair.listener.wait_frames(20)
            assert [p for _, _, p in pair.listener.received.frames] == sent
            side = pair.listener if opcode == RECEIVE else pair.dialer
            assert side.messages.statistics().unknown_completions == 5

    asyncio.run(scenario())


def test_a_lost_send_completion_is_covered_by_the_next_one() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            pair.a.lose(SEND)
            first = Frame(b"its completion is lost")
            mine.send(first)
            await asyncio.sleep(0.005)
            assert first.verdict == []
            await send_all(mine, [b"the next one"])
            assert await first.result() is None

    asyncio.run(scenario())


def test_late_completions_of_an_earlier_link_never_touch_the_next() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, theirs = await pair.links()
            pair.a.duplicate(SEND, count=1)
            await send_all(mine, [b"one"])
            mine.abort()
            await mine.wait_closed()
            await theirs.wait_closed()
            again, _ = await pair.links()
            frames = await send_all(again, [pattern(50, i) for i in range(10)])
            assert all(f.verdict == [None] for f in frames)
            await pair.listener.wait_frames(11)

    asyncio.run(scenario())


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_flood_leaves_the_loop_its_other_work(run_async: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with message_pair(config=replace(QUICK, pass_completions_max=4)) as pair:
            mine, _ = await pair.links()
            pair.b.hold(RECEIVE)
            frames = [Frame(pattern(64, i)) for i in range(48)]
            for frame in frames:
                mine.send(frame)
            await asyncio.sleep(0.005)
            pair.b.clear_rules()
            pair.b.release()
            seen: list[int] = []

            def look() -> None:
                seen.append(len(pair.listener.received.frames))
                if seen[-1] < 48:
                    asyncio.get_running_loop().call_soon(look)

            look()
            await pair.listener.wait_frames(48)
            steps = [after - before for before, after in itertools.pairwise(seen)]
            assert max(steps, default=0) <= 64  # one batch of the helper, not everything
            for frame in frames:
                await frame.result()

    run_async(scenario())


def test_a_bug_of_one_link_fails_that_link_alone() -> None:
    async def scenario() -> None:
        async with message_pair() as pair:
            mine, _ = await pair.links()
            lane = pair.listener.parts.lane
            (end,) = lane.ends

            def bug(packet: memoryview) -> None:
                raise ZeroDivisionError

            end.deliver = bug  # type: ignore[method-assign]
            mine.send(Frame(b"x"))
            await pair.listener.wait_lost()
            assert "ZeroDivisionError" in str(pair.listener.received.lost[0])
            await pair.dialer.wait_lost()
            await pair.wait_no_links()
            await pair.links()

    asyncio.run(scenario())
