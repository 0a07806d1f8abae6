"""Cases of MessageLink about flow control: progress with one credit, slow receivers, bursts."""

from __future__ import annotations

from typing import Final

from ..protocol.messaging.credits import Windows
from ..protocol.messaging.packets import PacketKind
from ..transport.messages import LinkLimits
from .message_link_rig import LinkRig, MessageLinkCase, Received, pair, payloads
from .pattern import pattern
from .waiting import until

ONE = LinkLimits(windows=Windows(1, 1), slab_bytes=1024, ceiling_bytes=8 << 10)
FEW = LinkLimits(
    windows=Windows(4, 1), slab_bytes=1024, ceiling_bytes=2 << 10, inbound_bytes_max=8 << 10
)


async def one_credit_both_ways(rig: LinkRig) -> None:
    """Saturated in both directions, in both windows, with segments: all of it arrives."""
    left, right = await pair(rig, ONE)
    for n in range(40):
        for end in (left, right):
            end.send(pattern((n * 531) % 7000, n))
            end.send(pattern((n * 317) % 4000, n), kind=PacketKind.RESPONSE)
    for end in (left, right):
        await end.wait_frames(80)
        messages, replies = end.of(PacketKind.MESSAGE), end.of(PacketKind.RESPONSE)
        assert payloads(messages) == [pattern((n * 531) % 7000, n) for n in range(40)]
        assert payloads(replies) == [pattern((n * 317) % 4000, n) for n in range(40)]
    await left.wait_settled()
    await right.wait_settled()


async def nested_answers_with_one_credit(rig: LinkRig) -> None:
    """Messages both ways whose handlers answer: replies never wait for message credit."""
    left, right = await pair(rig, ONE)
    for end in (left, right):

        def answer(received: Received, end=end) -> None:  # type: ignore[no-untyped-def]
            if received.kind == PacketKind.MESSAGE:
                end.send(received.payload, kind=PacketKind.RESPONSE)

        end.on_message = answer
    for n in range(60):
        left.send(pattern(n))
        right.send(pattern(n + 500))
    for end in (left, right):
        await end.wait_frames(120)
    assert payloads(left.of(PacketKind.RESPONSE)) == [pattern(n) for n in range(60)]
    assert payloads(right.of(PacketKind.RESPONSE)) == [pattern(n + 500) for n in range(60)]


async def grants_alone_make_progress(rig: LinkRig) -> None:
    """A receiver that never sends a frame returns its credit all the same."""
    left, right = await pair(rig, FEW)
    for n in range(200):
        left.send(b"%d" % n)
    await right.wait_frames(200)
    await left.wait_settled()
    assert payloads(right.frames) == [b"%d" % n for n in range(200)]
    assert right.link.statistics().frames_sent == 0
    assert right.link.statistics().grants_sent > 0


async def a_quiet_link_says_nothing(rig: LinkRig) -> None:
    """Once all is delivered, grants are not answered by grants without end."""
    left, right = await pair(rig, FEW)
    for n in range(50):
        left.send(b"%d" % n)
        right.send(b"%d" % n)
    await left.wait_frames(50)
    await right.wait_frames(50)
    await left.link.ping(10.0)
    await right.link.ping(10.0)
    before = [end.link.statistics().packets_sent for end in (left, right)]
    await until(lambda: left.link.idle_s > 0.02 and right.link.idle_s > 0.02)
    after = [end.link.statistics().packets_sent for end in (left, right)]
    assert sum(after) - sum(before) <= 2, (before, after)


async def slow_consumer_stops_the_sender(rig: LinkRig) -> None:
    """Its memory is bounded, other links go on, and all arrives once it consumes."""
    left, slow = await pair(rig, FEW)
    other, quick = await pair(rig, FEW)
    slow.consume = False
    for n in range(100):
        left.send(pattern(2000, n))
        other.send(pattern(2000, n))
    await quick.wait_frames(100)
    # What arrives beyond the bound is at most what the window let through before it was reached.
    limit = FEW.inbound_bytes_max + FEW.windows.messages * (FEW.ceiling_bytes + 600)
    await until(lambda: slow.link.statistics().unconsumed_bytes >= FEW.inbound_bytes_max)
    await left.link.ping(10.0)
    assert slow.link.statistics().unconsumed_bytes <= limit
    arrived = len(slow.frames)
    assert arrived < 20
    assert left.link.statistics().queued_frames >= 100 - arrived - FEW.windows.messages
    assert payloads(quick.frames) == [pattern(2000, n) for n in range(100)]
    slow.give_back()
    await slow.wait_frames(100)
    assert payloads(slow.frames) == [pattern(2000, n) for n in range(100)]


async def replies_pass_a_full_window(rig: LinkRig) -> None:
    """While messages are withheld, replies, pings and drain echoes go through both ways."""
    left, right = await pair(rig, FEW)
    right.consume = False
    for n in range(40):
        left.send(pattern(1500, n))
    await until(lambda: left.link.statistics().credits == 0 and len(right.charges) >= 4)
    replies = (
        PacketKind.RESPONSE,
        PacketKind.ACK,
        PacketKind.EVENT,
        PacketKind.SHUTTING_DOWN,
    )
    for n in range(40):
        left.send(b"%d" % n, kind=replies[n % 4])
        right.send(b"%d" % n, kind=replies[n % 4])
    await until(lambda: len(right.of(*replies)) == len(left.of(*replies)) == 40)
    assert await left.link.ping(10.0) >= 0
    assert await right.link.ping(10.0) >= 0
    assert len(right.of(PacketKind.MESSAGE)) < 40
    right.give_back()
    await right.wait_frames(80)


async def a_reply_passes_between_segments(rig: LinkRig) -> None:
    left, right = await pair(rig, ONE)
    left.send(pattern(8000))
    left.send(b"reply", kind=PacketKind.RESPONSE)
    await right.wait_frames(2)
    kinds = [frame.kind for frame in right.frames]
    segmented = [PacketKind.RESPONSE, PacketKind.MESSAGE]
    assert kinds == (segmented if rig.segments else segmented[::-1])


async def bursts_find_their_slabs(rig: LinkRig) -> None:
    """Several peers' bursts at once: no packet arrives without a slab (the rig looks)."""
    links = [await pair(rig, FEW) for _ in range(4)]
    for left, right in links:
        for n in range(60):
            left.send(pattern(1800, n))
            left.send(b"%d" % n, kind=PacketKind.EVENT)
            right.send(b"%d" % n, kind=PacketKind.ACK)
    for left, right in links:
        await right.wait_frames(120)
        await left.wait_frames(60)


async def issue_order_under_pressure(rig: LinkRig) -> None:
    """Far more than the window at once: every frame is admitted once, in the order of issue."""
    left, right = await pair(rig, FEW)
    for n in range(1100):
        left.send(b"%d" % n)
    assert 1 <= len(left.posted) <= FEW.windows.messages
    assert left.link.statistics().queued_frames == 1100 - len(left.posted)
    await right.wait_frames(1100)
    await left.wait_settled()
    assert left.posted == left.sent
    assert payloads(right.frames) == [b"%d" % n for n in range(1100)]


CREDIT_CASES: Final[tuple[MessageLinkCase, ...]] = (
    one_credit_both_ways,
    nested_answers_with_one_credit,
    grants_alone_make_progress,
    a_quiet_link_says_nothing,
    slow_consumer_stops_the_sender,
    replies_pass_a_full_window,
    a_reply_passes_between_segments,
    bursts_find_their_slabs,
    issue_order_under_pressure,
)
