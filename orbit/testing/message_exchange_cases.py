"""Cases of MessageLink about what arrives: kinds, sizes, order, and whose the buffers are."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from ..errors import UsageError
from ..protocol.messaging.credits import Windows
from ..protocol.messaging.packets import FIXED_BYTES, LENGTH_BYTES, PacketKind
from ..transport.messages import LinkLimits
from .message_link_rig import (
    LIMITS,
    LinkRig,
    MessageLinkCase,
    Received,
    pair,
    payloads,
)
from .pattern import pattern
from .waiting import until

KINDS = (
    PacketKind.MESSAGE,
    PacketKind.RESPONSE,
    PacketKind.ACK,
    PacketKind.EVENT,
    PacketKind.SHUTTING_DOWN,
)


async def single_message(rig: LinkRig) -> None:
    left, right = await pair(rig)
    frame = left.send(pattern(100), b"header")
    await right.wait_frames(1)
    await left.wait_settled()
    assert right.frames == [Received(PacketKind.MESSAGE, b"header", pattern(100))]
    assert frame.outcome == ["done"]
    assert frame.postings == 1


async def both_directions(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for n in range(30):
        left.send(pattern(50, n))
        right.send(pattern(60, n))
    await left.wait_frames(30)
    await right.wait_frames(30)
    assert payloads(right.frames) == [pattern(50, n) for n in range(30)]
    assert payloads(left.frames) == [pattern(60, n) for n in range(30)]


async def every_kind(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for n in range(4):
        for kind in KINDS:
            left.send(pattern(20 + n, kind), bytes([n]), kind)
    await right.wait_frames(4 * len(KINDS))
    for kind in KINDS:
        expected = [Received(kind, bytes([n]), pattern(20 + n, kind)) for n in range(4)]
        assert right.of(kind) == expected


async def every_reply_in_order(rig: LinkRig) -> None:
    """Kinds of one window keep the order of all of them."""
    left, right = await pair(rig)
    replies = list(itertools.islice(itertools.cycle(KINDS[1:]), 60))
    for n, kind in enumerate(replies):
        left.send(pattern(n), kind=kind)
    await right.wait_frames(60)
    assert [frame.kind for frame in right.frames] == replies
    assert payloads(right.frames) == [pattern(n) for n in range(60)]


def _sizes(limits: LinkLimits, header_bytes: int) -> list[int]:
    """Limit and limit + 1 of each tier: the empty frame, one slab, several, the ceiling."""
    whole = limits.slab_bytes - FIXED_BYTES - header_bytes
    first = whole - LENGTH_BYTES
    later = limits.slab_bytes - FIXED_BYTES
    edges = (0, whole, first, first + later, first + 2 * later, limits.ceiling_bytes - 1)
    return [edge + more for edge in edges for more in (0, 1)]


async def every_limit(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for header_bytes in (0, 1, 100):
        sizes = _sizes(LIMITS, header_bytes)
        header = pattern(header_bytes, 9)
        for kind in (PacketKind.MESSAGE, PacketKind.RESPONSE):
            right.frames.clear()
            for nbytes in sizes:
                left.send(pattern(nbytes, nbytes), header, kind)
            await right.wait_frames(len(sizes))
            expected = [Received(kind, header, pattern(nbytes, nbytes)) for nbytes in sizes]
            assert right.frames == expected
    await left.wait_settled()
    assert bool(left.link.statistics().segmented_sent) == rig.segments


async def long_headers(rig: LinkRig) -> None:
    """A header may be longer than a slab."""
    left, right = await pair(rig)
    sent = [
        (pattern(size, size), pattern(nbytes))
        for size in (8_000, 16 << 10)
        for nbytes in (0, 1, 9_000)
    ]
    for header, payload in sent:
        left.send(payload, header)
    await right.wait_frames(len(sent))
    assert right.frames == [
        Received(PacketKind.MESSAGE, header, payload) for header, payload in sent
    ]


async def over_the_limits(rig: LinkRig) -> None:
    """Refused before the wire, and the link is none the worse for it."""
    small = LinkLimits(windows=LIMITS.windows, slab_bytes=1024, ceiling_bytes=2000)
    left, right = await pair(rig, LIMITS, small)
    assert left.link.ceiling_bytes == right.link.ceiling_bytes == 2000
    refused = [
        left.send(bytes(2001)),
        left.send(b"", bytes(33 << 10)),
        left.send(b"x", kind=PacketKind.PING),
        left.send(b"x", kind=99),
    ]
    for frame in refused:
        assert frame.outcome == ["failed"]
        assert isinstance(frame.errors[0], UsageError)
    left.send(pattern(2000))
    await right.wait_frames(1)
    assert payloads(right.frames) == [pattern(2000)]
    assert left.link.statistics().frames_sent == 1


async def large_payload(rig: LinkRig) -> None:
    limits = LinkLimits(windows=Windows(64, 16), slab_bytes=8 << 10, ceiling_bytes=512 << 10)
    left, right = await pair(rig, limits)
    for n in range(6):
        left.send(pattern(512 << 10, n), b"large")
        right.send(pattern((512 << 10) - n, n), b"large")
    await left.wait_frames(6)
    await right.wait_frames(6)
    assert payloads(right.frames) == [pattern(512 << 10, n) for n in range(6)]
    assert payloads(left.frames) == [pattern((512 << 10) - n, n) for n in range(6)]


async def empty_frames(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for _ in range(40):
        left.send()
    await right.wait_frames(40)
    assert right.frames == [Received(PacketKind.MESSAGE, b"", b"")] * 40


async def mesh_of_three(rig: LinkRig) -> None:
    links = [await pair(rig) for _ in range(3)]  # 1-2, 2-3, 3-1
    for number, ends in enumerate(links):
        for end in ends:
            for n in range(20):
                end.send(pattern(100 + n, number))
    for number, ends in enumerate(links):
        for end in ends:
            await end.wait_frames(20)
            assert payloads(end.frames) == [pattern(100 + n, number) for n in range(20)]


async def eight_senders(rig: LinkRig) -> None:
    """Each sender's frames arrive once and in its order, at each of two targets."""
    targets = [await pair(rig), await pair(rig)]
    each = 60

    async def sender(number: int) -> None:
        for n in range(each):
            for left, _ in targets:
                left.send(pattern(1 + (n * 97) % 3000, n), b"%d %d" % (number, n))
            if (n + number) % 5 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(sender(number) for number in range(8)))
    for _, right in targets:
        await right.wait_frames(8 * each)
        by_sender: dict[int, list[int]] = {}
        for frame in right.frames:
            number, n = map(int, frame.header.split())
            by_sender.setdefault(number, []).append(n)
            assert frame.payload == pattern(1 + (n * 97) % 3000, n)
        assert by_sender == {number: list(range(each)) for number in range(8)}


async def used_again_after_a_rest(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for n in range(5):
        left.send(pattern(10, n))
        await right.wait_frames(n + 1)
        await left.wait_settled()
        await until(lambda: left.link.idle_s > 0)
    assert payloads(right.frames) == [pattern(10, n) for n in range(5)]


async def many_frames(rig: LinkRig) -> None:
    left, right = await pair(rig, LinkLimits(windows=Windows(64, 16), slab_bytes=1024))
    for n in range(2000):
        left.send(b"%d" % n)
    await right.wait_frames(2000)
    await left.wait_settled()
    assert payloads(right.frames) == [b"%d" % n for n in range(2000)]
    statistics = left.link.statistics()
    assert statistics.frames_sent == 2000
    assert statistics.queued_frames == statistics.queued_bytes == 0
    assert right.link.statistics().frames_received == 2000


async def buffers_are_free_when_done(rig: LinkRig) -> None:
    """Until its verdict the link may read a payload; afterwards never again."""
    left, right = await pair(rig)
    buffers = [bytearray(pattern(5000, n)) for n in range(20)]
    frames = [left.send(memoryview(buffer)) for buffer in buffers]
    pending = dict(zip(frames, buffers, strict=True))
    while pending:
        for frame in [frame for frame in pending if frame.settled]:
            pending.pop(frame)[:] = bytes(5000)
        await asyncio.sleep(0.001)
    await right.wait_frames(20)
    assert payloads(right.frames) == [pattern(5000, n) for n in range(20)]


async def answers_from_the_handler(rig: LinkRig) -> None:
    left, right = await pair(rig)

    def answer(received: Received) -> None:
        right.send(received.payload[::-1], received.header, PacketKind.RESPONSE)

    right.on_message = answer
    for n in range(100):
        left.send(pattern(30, n), b"%d" % n)
    await left.wait_frames(100)
    assert payloads(left.frames) == [pattern(30, n)[::-1] for n in range(100)]
    assert [frame.header for frame in left.frames] == [b"%d" % n for n in range(100)]


EXCHANGE_CASES: Final[tuple[MessageLinkCase, ...]] = (
    single_message,
    both_directions,
    every_kind,
    every_reply_in_order,
    every_limit,
    long_headers,
    over_the_limits,
    large_payload,
    empty_frames,
    mesh_of_three,
    eight_senders,
    used_again_after_a_rest,
    many_frames,
    buffers_are_free_when_done,
    answers_from_the_handler,
)
