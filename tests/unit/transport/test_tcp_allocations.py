"""A transfer costs what it costs, however many chunks it has: nothing is allocated for each."""

from __future__ import annotations

import asyncio
import gc
import mmap
import sys
import tracemalloc
from dataclasses import dataclass

import pytest

from orbit.model import Direction, LeaseId
from orbit.testing.leftovers import nothing_left
from orbit.transport.interface import Span, Target
from orbit.transport.tcp_bulk import CALLBACK_BYTES
from orbit.transport.tcp_cursor import LOW_WATER_BYTES
from tests.contract.tcp_pairs import TcpPathPair, tcp_path_pair

SMALL, LARGE = 16 << 20, 256 << 20
# Both sides allocate from one heap here. What a transfer holds at its peak differs by what the
# loop happens to do meanwhile; a list of chunks, or one chunk's bytes, would be far beyond this.
SLACK_BYTES = 16 << 10
SLACK_BLOCKS = 50


@dataclass(frozen=True)
class Cost:
    peak_bytes: int
    blocks: int  # still allocated afterwards
    wakeups: int


async def cost_of(
    pair: TcpPathPair, lease: int, nbytes: int, source: memoryview, target: memoryview, push: bool
) -> Cost:
    """Of one transfer, exposure and retraction included; on both sides together."""
    memory, other = (target, source) if push else (source, target)
    direction = Direction.WRITE if push else Direction.READ
    gc.collect()
    gc.disable()
    tracemalloc.start()
    blocks, before = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
    try:
        exposure = await pair.owner.expose(
            pair.owner_session, Span(memory[:nbytes]), LeaseId(lease), direction=direction
        )
        session, other = pair.consumer_session, other[:nbytes]
        if push:
            report = await pair.consumer.push(session, exposure, LeaseId(lease), Span(other))
        else:
            report = await pair.consumer.pull(session, exposure, LeaseId(lease), Target(other))
        await pair.owner.retract(pair.owner_session, LeaseId(lease), transferred=True)
        peak = tracemalloc.get_traced_memory()[1] - before
        wakeups = report.counts["wakeups"]
        del exposure, report
        return Cost(peak, sys.getallocatedblocks() - blocks, wakeups)
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_nothing_is_allocated_per_chunk(push: bool) -> None:
    async def body() -> None:
        with mmap.mmap(-1, LARGE) as source, mmap.mmap(-1, LARGE) as target:
            source[LARGE - 1 :] = b"\x07"
            views = memoryview(source), memoryview(target)
            async with nothing_left(), tcp_path_pair() as pair:
                await cost_of(pair, 1, SMALL, *views, push)  # dials, and warms what there is
                small = await cost_of(pair, 2, SMALL, *views, push)
                large = await cost_of(pair, 3, LARGE, *views, push)
            assert target[LARGE - 1] == 7
            assert large.peak_bytes <= small.peak_bytes + SLACK_BYTES, (small, large)
            assert large.blocks <= small.blocks + SLACK_BLOCKS, (small, large)
            # It did go in chunks, and no end woke for every segment.
            assert large.wakeups >= LARGE // CALLBACK_BYTES, large
            if not push:
                assert large.wakeups <= LARGE // (LOW_WATER_BYTES // 4), large
            for view in views:
                view.release()

    asyncio.run(body())
