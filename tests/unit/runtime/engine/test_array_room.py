"""Grants of parents against the receives that a peer has for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import BudgetExceeded, DeadlineExceeded
from orbit.protocol.messages import Limits, SliceRun
from orbit.runtime.engine.array_room import ArrayRoom, grants_at_once
from orbit.testing.clock import run_virtual
from orbit.testing.sessions import StubSession


def session_to(grants_max: int, width: int = 2, own_width: int = 2) -> StubSession:
    session = StubSession(1, dialer=True)
    theirs, ours = Limits(grants_max=grants_max, bulk_width=width), Limits(bulk_width=own_width)
    session.peer_hello = replace(session.peer_hello, limits=theirs)
    session.local_hello = replace(session.local_hello, limits=ours)
    return session


@pytest.mark.parametrize(
    ("grants_max", "width", "own_width", "at_once"),
    [(32, 2, 2, 32), (32, 2, 1, 16), (64, 4, 2, 32), (32, 2, 4, 32), (0, 2, 2, 0), (32, 0, 2, 0)],
)
def test_what_an_array_has_follows_both_widths(
    grants_max: int, width: int, own_width: int, at_once: int
) -> None:
    assert grants_at_once(session_to(grants_max, width, own_width)) == at_once


@pytest.mark.parametrize(
    ("ranges", "runs", "counts"),
    [
        ([10], [(2, 10)], {2: 1}),
        ([10], [(2, 4), (2, 6)], {2: 2}),
        ([4, 6], [(2, 4), (3, 6)], {2: 1, 3: 1}),  # the borders meet
        ([4, 6], [(2, 5), (3, 5)], {2: 2, 3: 1}),
        ([1, 1, 1, 7], [(2, 10)], {2: 4}),
        ([1, 1, 1, 7], [(2, 2), (3, 4), (2, 4)], {2: 3, 3: 2}),
    ],
)
def test_a_grant_for_each_run_and_each_border(
    ranges: list[int], runs: list[tuple[int, int]], counts: dict[int, int]
) -> None:
    async def main() -> None:
        room = ArrayRoom()
        session = session_to(8)
        held = await room.take(session, ranges, [SliceRun(*run) for run in runs], None)
        assert room.in_use == sum(counts.values())
        for array, count in counts.items():  # what is left is exactly that
            rest = [SliceRun(array, 1)] * (8 - count)
            others = await room.take(session, [8 - count], rest, 0.0)
            with pytest.raises(DeadlineExceeded):
                await room.take(session, [1], [SliceRun(array, 1)], 0.5)
            others.close()
        held.close()
        assert (room.in_use, room._budgets) == (0, {})

    run_virtual(main())


def test_each_array_waits_for_itself_and_in_order() -> None:
    async def main() -> None:
        room, session = ArrayRoom(), session_to(4)
        first = await room.take(session, [4], [SliceRun(0, 1)] * 4, None)
        order: list[int] = []

        async def wait(number: int, count: int) -> None:
            with await room.take(session, [count], [SliceRun(0, 1)] * count, None):
                order.append(number)
                await asyncio.sleep(0.01)

        waiting = [asyncio.ensure_future(wait(number, 3 - number)) for number in range(3)]
        await asyncio.sleep(0.01)
        with await room.take(session, [4], [SliceRun(2, 1)] * 4, None):
            assert order == []
        first.close()
        await asyncio.gather(*waiting)
        assert order == [0, 1, 2]
        with pytest.raises(BudgetExceeded, match="array 0"):
            await room.take(session, [5], [SliceRun(0, 1)] * 5, None)
        assert room._budgets == {}

    run_virtual(main())


def test_who_gives_up_has_nothing() -> None:
    async def main() -> None:
        room, session = ArrayRoom(), session_to(2)
        held = await room.take(session, [2], [SliceRun(5, 1)] * 2, None)
        both = asyncio.ensure_future(
            room.take(session, [2], [SliceRun(4, 1), SliceRun(5, 1)], None)
        )
        await asyncio.sleep(0.01)
        assert room.in_use == 3
        both.cancel()
        await asyncio.wait([both])
        assert room.in_use == 2
        held.close()
        assert room._budgets == {}

    run_virtual(main())


def test_a_peer_that_does_not_say_has_no_limit() -> None:
    async def main() -> None:
        room = ArrayRoom()
        with await room.take(session_to(0), [100], [SliceRun(0, 1)] * 100, 0.0):
            assert room.in_use == 0

    run_virtual(main())
