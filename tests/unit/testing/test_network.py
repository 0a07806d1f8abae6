"""Simulated links: one seed is one run, and the faults do what they say."""

from __future__ import annotations

import asyncio

import pytest

from orbit.errors import PeerLost
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.link_contract import Recorder, make_frame
from orbit.testing.network import SimNetwork


def arrivals(seed: int) -> list[float]:
    async def body() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        left, right = SimNetwork(seed).link_pair()
        left.start(lambda frame: None, lambda cause: None)
        right.start(lambda frame: times.append(loop.time()), lambda cause: None)
        for i in range(30):
            left.send_nowait(make_frame(10 + i))
            await asyncio.sleep(0.0001)
        await asyncio.sleep(1)
        left.close()
        return times

    return run_virtual(body())


def test_a_seed_replays() -> None:
    assert arrivals(7) == arrivals(7)
    assert arrivals(7) != arrivals(8)
    assert arrivals(7) == sorted(arrivals(7))


def test_cut_reaches_both_ends_once() -> None:
    async def body() -> None:
        network = SimNetwork(1)
        left, right = network.link_pair()
        a, b = Recorder(left), Recorder(right)
        left.send_nowait(make_frame(5))
        network.cut(left)
        network.cut_all()
        await asyncio.sleep(1)
        assert a.ended == b.ended == 1
        assert isinstance(a.cause, PeerLost)
        assert isinstance(b.cause, PeerLost)

    run_virtual(body())


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_cut_after_frames(limit: int) -> None:
    async def body() -> None:
        left, right = SimNetwork(1, LinkFaults(cut_after_frames=limit)).link_pair()
        a, b = Recorder(left), Recorder(right)
        for i in range(limit + 1):
            (left if i % 2 else right).send_nowait(make_frame(5))
        await asyncio.sleep(1)
        assert len(a.frames) + len(b.frames) <= limit
        assert a.ended == b.ended == 1

    run_virtual(body())


def test_a_stalled_link_says_nothing() -> None:
    async def body() -> None:
        faults = LinkFaults(stalled=True)
        left, right = SimNetwork(1, faults).link_pair()
        b = Recorder(right)
        Recorder(left)
        left.send_nowait(make_frame(5))
        await asyncio.sleep(1000)
        left.abort()
        await asyncio.sleep(1000)
        assert not b.frames
        assert not b.ended
        right.abort()
        await right.wait_closed()

    run_virtual(body())
