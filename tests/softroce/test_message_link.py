"""Message links over RC queue pairs of two SoftRoCE devices across a link: the contract, what the
device itself counted, and a link that goes down.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit.errors import NotAdmitted, OutcomeUnknown, PathUnavailable, PeerLost
from orbit.model import PathReason
from orbit.protocol.messaging.credits import Windows
from orbit.testing.message_link_contract import MESSAGE_LINK_CASES, check_message_link
from orbit.testing.pattern import pattern
from orbit.transport.messages import LinkLimits, MessageLink
from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.messaging.message_queue_pair import MessageQueuePair
from orbit.verbs.messaging.settings import RdmaMessagesConfig
from orbit.verbs.offload import Offload
from orbit.verbs.turn import STATE_ERR, QueuePairAttributes
from tests.contract.message_pairs import (
    Frame,
    MessagePair,
    close_pair,
    join,
    open_side,
    send_all,
    until,
)
from tests.contract.rdma_link_rig import RdmaLinkRig
from tests.soak import SOAK
from tests.softroce.conftest import Lab
from tests.softroce.rails import rail_of

# An emulated processor may stand still for a while; these bounds are for hangs alone.
DEVICE = RdmaMessagesConfig(
    receive_slabs=256,
    send_slabs=256,
    connect_timeout_s=20,
    connect_backoff_s=0.1,
    ready_timeout_s=20,
    close_timeout_s=10,
    drain_timeout_s=20,
)
DEVICES = ("rxa1", "rxb1")
_RNR_COUNTERS = ("rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err")
_TURNS = 300 if SOAK else 100
Scenario = Callable[[MessagePair], Awaitable[None]]


def counter(device: str, name: str) -> int:
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/{name}").read_text())


def receiver_not_ready() -> int:
    return sum(counter(device, name) for device in DEVICES for name in _RNR_COUNTERS)


@pytest.fixture(autouse=True)
def no_receive_was_missing(lab: Lab) -> Iterator[None]:
    """The credits' own oracle: the device met an empty receive queue in no test."""
    before = receiver_not_ready()
    yield
    assert receiver_not_ready() == before


async def open_pair(left: RdmaMessagesConfig, right: RdmaMessagesConfig) -> MessagePair:
    provider, offload = PyverbsProvider(), Offload()
    sides = [
        await open_side(provider, rail, config, offload, dialer=rail.device == DEVICES[0])
        for rail, config in zip(map(rail_of, DEVICES), (left, right), strict=True)
    ]
    join(sides[0], sides[1], limits=[left.limits, right.limits])
    return MessagePair(sides[0], sides[1])


@contextlib.asynccontextmanager
async def device_pair(config: RdmaMessagesConfig = DEVICE) -> AsyncIterator[MessagePair]:
    pair = await open_pair(config, config)
    try:
        yield pair
    finally:
        await close_pair(pair)


@contextlib.asynccontextmanager
async def device_rig(config: RdmaMessagesConfig) -> AsyncIterator[RdmaLinkRig]:
    before = receiver_not_ready()
    rig = RdmaLinkRig(config, open_pair, lambda: receiver_not_ready() - before)
    try:
        yield rig
    finally:
        await rig.close()


async def set_link(state: str) -> None:
    """Host B's end of the first rail."""
    command = ["orbit-link", "b1", state]
    await asyncio.to_thread(subprocess.run, command, check=True)


def run(scenario: Scenario, config: RdmaMessagesConfig = DEVICE) -> None:
    async def main() -> None:
        async with device_pair(config) as pair:
            await scenario(pair)

    asyncio.run(main())


# A processor that polls is taken from the device's own work here, so that one case must do.
SOME = ("one_credit_both_ways",)


# Long ones that are not about the device: CI has them over scripted ones, `make soak` here, too.
LONG = {"eight_senders", "issue_order_under_pressure", "many_frames", "replies_pass_a_full_window"}


@pytest.mark.parametrize("case", [case for case in MESSAGE_LINK_CASES if SOAK or case not in LONG])
def test_contract(case: str, run_async: Callable[..., Any]) -> None:
    run_async(check_message_link(case, lambda: device_rig(DEVICE)))


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("loop_kind", ["uvloop"])
@pytest.mark.parametrize("progress", ["spin", "polling"])
def test_other_ways_of_progress(case: str, progress: str, run_async: Callable[..., Any]) -> None:
    config = replace(DEVICE, progress=progress)
    run_async(check_message_link(case, lambda: device_rig(config)))


def test_bytes_cross_the_device_and_nothing_else(lab: Lab) -> None:
    async def scenario(pair: MessagePair) -> None:
        mine, theirs = await pair.links()
        before = [lab.sent_pkts(device) for device in DEVICES]
        sizes = [0, 1, 64, 255, 256, 257, 4096, 8191, 8192, 8193, 100_000, 256 << 10]
        frames = [Frame(pattern(n, n)) for n in sizes]
        for link in (mine, theirs):
            for frame in [Frame(bytes(f.payload)) for f in frames]:
                link.send(frame)
        for side in pair.sides:
            await side.wait_frames(len(sizes))
            assert [p for _, _, p in side.received.frames] == [f.payload for f in frames]
            assert side.messages.statistics().woken_by_backstop == 0
        for device, count in zip(DEVICES, before, strict=True):
            # One packet of the wire for each path MTU at least.
            assert lab.sent_pkts(device) - count >= sum(sizes) // 4096

    run(scenario)


def test_ping_pong_with_pauses_misses_no_event() -> None:
    """C46: a completion that comes between polling and sleeping. The count here is CI's."""

    async def scenario(pair: MessagePair) -> None:
        mine, _ = await pair.links()
        rng = random.Random(46)

        def echo(link: MessageLink, header: bytes, payload: bytes) -> None:
            link.send(Frame(payload, kind=1))

        pair.listener.received.on_message = echo
        for turn in range(_TURNS):
            mine.send(Frame(turn.to_bytes(4, "big")))
            await pair.dialer.wait_frames(turn + 1)
            if pause_us := rng.randrange(200):
                await asyncio.sleep(pause_us / 1e6)
        got = [int.from_bytes(p, "big") for _, _, p in pair.dialer.received.frames]
        assert got == list(range(_TURNS))
        for side in pair.sides:
            assert side.messages.statistics().woken_by_backstop == 0

    run(scenario)


def test_a_slow_consumer_bounds_what_waits() -> None:
    limits = LinkLimits(
        windows=Windows(8, 2), slab_bytes=1024, ceiling_bytes=4096, inbound_bytes_max=16 << 10
    )

    async def scenario(pair: MessagePair) -> None:
        pair.listener.received.slow = True
        mine, theirs = await pair.links()
        frames = [Frame(pattern(900, i)) for i in range(200)]
        for frame in frames:
            mine.send(frame)
        held = 0
        while len(pair.listener.received.frames) < 200:
            await asyncio.sleep(0.002)
            waiting = theirs.statistics().unconsumed_bytes
            # The bound, and what was on its way when it was reached.
            assert waiting <= (16 << 10) + 8 * 2048
            held = max(held, waiting)
            for link, charge in pair.listener.received.charges[:3]:
                link.consumed(charge)
            del pair.listener.received.charges[:3]
        assert held >= 16 << 10
        assert [p for _, _, p in pair.listener.received.frames] == [f.payload for f in frames]

    run(scenario, replace(DEVICE, limits=limits))


def test_a_peer_whose_queue_pair_is_dead_costs_the_retries_and_the_frames() -> None:
    async def scenario(pair: MessagePair) -> None:
        mine, _ = await pair.links()
        (end,) = pair.listener.parts.lane.ends
        assert isinstance(end, MessageQueuePair)
        await asyncio.to_thread(end._native.modify, QueuePairAttributes(state=STATE_ERR))
        frames = [Frame(pattern(3000, i)) for i in range(10)]
        for frame in frames:
            mine.send(frame)
        for frame in frames:
            assert isinstance(await frame.result(), OutcomeUnknown)
        assert "transport retries exceeded" in str(await pair.dialer.wait_lost())
        assert isinstance(await pair.listener.wait_lost(), PeerLost)
        again, _ = await pair.links()
        assert (await send_all(again, [pattern(50_000, 1)]))[0].verdict == [None]

    run(scenario)


def test_a_link_that_goes_down_fails_at_once_and_comes_back() -> None:
    async def scenario(pair: MessagePair) -> None:
        mine, _ = await pair.links()
        await send_all(mine, [b"before"])
        await set_link("down")
        try:
            for side in pair.sides:
                assert "PORT_ERR" in str(await side.wait_lost())
            late = Frame(b"late")
            mine.send(late)
            assert isinstance(await late.result(), NotAdmitted)
            with pytest.raises(PathUnavailable) as caught:
                await pair.dialer.open()
            assert caught.value.reason == PathReason.PORT_DOWN
        finally:
            await set_link("up")
        dialer, listener = pair.sides
        await until(lambda: dialer.messages.availability(dialer.session) is PathReason.OK)
        await until(lambda: listener.messages.availability(listener.session) is PathReason.OK)
        again, _ = await pair.links()
        assert (await send_all(again, [pattern(50_000, 1)]))[0].verdict == [None]

    run(scenario)
