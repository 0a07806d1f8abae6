"""Cases of MessageLink about its end: pings, withdrawals, lost wires, aborts and goodbyes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from ..errors import ClosedError, NotAdmitted, OrbitError, PeerError, PeerLost
from ..protocol.messaging.credits import Windows
from ..protocol.messaging.packets import PacketKind
from ..transport.messages import LinkLimits
from .message_link_rig import LIMITS, LinkEnd, LinkRig, MessageLinkCase, Received, pair, payloads
from .pattern import pattern
from .waiting import until

FEW = LinkLimits(windows=Windows(4, 1), slab_bytes=1024, ceiling_bytes=4 << 10)


async def _error_of(waiting: Coroutine[Any, Any, object]) -> OrbitError:
    try:
        await waiting
    except OrbitError as error:
        return error
    raise AssertionError("no error")


async def pings_are_answered_and_shared(rig: LinkRig) -> None:
    left, right = await pair(rig)
    times = await asyncio.gather(*(left.link.ping(10.0) for _ in range(20)), right.link.ping(10.0))
    assert all(0 <= seconds < 10 for seconds in times)
    assert left.link.statistics().packets_sent <= 4  # one ping, one pong, and what they bring home


async def a_frame_is_withdrawn_or_sent(rig: LinkRig) -> None:
    left, right = await pair(rig, FEW)
    frames = [left.send(b"%d" % n) for n in range(20)]
    assert not left.link.withdraw(frames[0])  # with the wire already
    assert left.link.withdraw(frames[10])
    assert left.link.withdraw(frames[19])
    assert not left.link.withdraw(frames[10])
    left.sent = [frame for frame in left.sent if frame not in (frames[10], frames[19])]
    await right.wait_frames(18)
    await left.wait_settled()
    assert payloads(right.frames) == [b"%d" % n for n in range(19) if n != 10]
    assert not frames[10].outcome
    assert not frames[19].outcome


async def a_lost_wire_gives_one_verdict_each(rig: LinkRig) -> None:
    """A burst of 400 in both windows: whatever state a frame is in, it hears exactly once what
    became of it, and only one that had begun to leave may be in doubt.
    """
    left, right = await pair(rig, FEW)
    right.consume = False
    for n in range(200):
        left.send(pattern((n * 701) % 4000, n), b"%d" % n)
        left.send(b"%d" % n, kind=PacketKind.ACK)
        right.send(b"%d" % n)
    await until(lambda: len(right.frames) > 3)
    rig.cut(left)
    assert isinstance(await left.wait_lost(), PeerError)
    assert isinstance(await right.wait_lost(), PeerError)
    for sender, receiver in ((left, right), (right, left)):
        for kind in (PacketKind.MESSAGE, PacketKind.ACK):
            frames = [frame for frame in sender.sent if frame.kind == kind]
            arrived = len(receiver.of(kind))
            assert payloads(receiver.of(kind)) == [bytes(f.payload) for f in frames[:arrived]]
            assert all(len(frame.outcome) == 1 for frame in frames)
            assert not any(frame.unsent for frame in frames[:arrived])
            begun = [f for f in frames if not f.postings and not f.unsent]
            assert len(begun) <= 1, "a frame that never began to leave is in doubt"
            outcomes = ["n" if f.unsent else f.outcome[0][0] for f in frames]
            assert outcomes == sorted(outcomes), "done, then in doubt, then not sent"
    late = left.send(b"late")
    assert late.unsent
    assert isinstance(await _error_of(left.link.ping(1.0)), PeerLost)
    await left.link.wait_closed()
    await right.link.wait_closed()
    fresh_left, fresh_right = await pair(rig, FEW)
    fresh_left.send(b"successor")
    await fresh_right.wait_frames(1)


async def an_abort_ends_both(rig: LinkRig) -> None:
    left, right = await pair(rig)
    waiting = asyncio.ensure_future(_error_of(left.link.ping(10.0)))
    await asyncio.sleep(0)
    left.link.abort()
    left.link.abort()
    assert left.link.closed
    turned_away = left.send(b"x")
    assert turned_away.unsent
    assert isinstance(await waiting, ClosedError | PeerLost)
    await left.wait_lost()
    assert await right.wait_lost() is not None
    await left.link.wait_closed()
    await right.link.wait_closed()
    assert right.send(b"x").unsent


async def a_failing_handler_ends_the_link(rig: LinkRig) -> None:
    left, right = await pair(rig)

    def fail(received: Received) -> None:
        raise ZeroDivisionError(received)

    right.on_message = fail
    left.send(b"x")
    error = await right.wait_lost()
    assert error is not None
    assert "handler" in str(error)
    assert await left.wait_lost() is not None


async def a_goodbye_closes_both(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for n in range(20):
        left.send(b"%d" % n)
        right.send(b"%d" % n, kind=PacketKind.EVENT)
    await right.wait_frames(20)
    await left.wait_frames(20)
    await left.wait_settled()
    await right.wait_settled()
    assert await left.link.goodbye(10.0)
    assert await left.link.goodbye(10.0)
    assert await left.wait_lost() is None
    assert await right.wait_lost() is None
    assert left.link.closed
    assert right.link.closed
    assert all(frame.outcome == ["done"] for frame in left.sent + right.sent)
    late = right.send(b"late")
    assert late.outcome == ["given back"]
    assert isinstance(late.errors[0], NotAdmitted)
    assert isinstance(await _error_of(right.link.ping(1.0)), ClosedError)
    await left.link.wait_closed()
    await right.link.wait_closed()


async def a_link_opens_again_after_a_goodbye(rig: LinkRig) -> None:
    left, right = await pair(rig)
    for n in range(5):
        left.send(b"%d" % n)
        await right.wait_frames(1)
        await left.wait_settled()
        assert await (left, right)[n % 2].link.goodbye(10.0)
        assert await left.wait_lost() is None
        assert await right.wait_lost() is None
        before, left, right = left, LinkEnd(), LinkEnd()
        await rig.open(left, right, after=before)
    right.send(b"end")
    await left.wait_frames(1)


async def a_goodbye_is_refused_by_work(rig: LinkRig) -> None:
    """On either side, unconsumed bytes or a client that needs the link keep it open."""
    left, right = await pair(rig)
    right.consume = False
    left.send(b"x")
    await right.wait_frames(1)
    assert not await right.link.goodbye(5.0)  # at once: this side knows of the work
    assert not await left.link.goodbye(5.0)  # the credit did not come back
    right.give_back()
    right.needed = True
    assert not await right.link.goodbye(5.0)
    assert not await left.link.goodbye(5.0)  # asked, and refused without delay
    right.needed = False
    left.send(b"y")
    right.send(b"z")
    await right.wait_frames(2)
    await left.wait_frames(1)
    await left.wait_settled()
    await right.wait_settled()
    assert await left.link.goodbye(5.0)
    assert await right.wait_lost() is None


async def goodbyes_that_cross_agree(rig: LinkRig) -> None:
    left, right = await pair(rig)
    left.send(b"x")
    right.send(b"y")
    await right.wait_frames(1)
    await left.wait_frames(1)
    await left.wait_settled()
    await right.wait_settled()
    assert await asyncio.gather(*(end.link.goodbye(10.0) for end in (left, right, left, right)))
    assert await left.wait_lost() is None
    assert await right.wait_lost() is None


async def a_frame_revokes_a_goodbye_or_is_given_back(rig: LinkRig) -> None:
    """Sent at any moment of a goodbye, from either side, a frame arrives or is given back."""
    left, right = await pair(rig)
    for turns in range(24):
        asked, sender, receiver = (left, left, right) if turns % 2 else (left, right, left)
        parting = asyncio.ensure_future(asked.link.goodbye(5.0))
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        frame = sender.send(b"%d" % turns)
        parted = await parting
        await sender.wait_settled()
        if frame.outcome == ["done"]:
            await until(partial(_has, receiver, b"%d" % turns))
        else:
            assert frame.outcome == ["given back"]
            assert b"%d" % turns not in payloads(receiver.frames)
            # False is possible here only if the frame was turned away by a link already closed.
            assert parted
        if left.link.closed or right.link.closed:
            assert await left.wait_lost() is None
            assert await right.wait_lost() is None
            before, left, right = left, LinkEnd(LIMITS), LinkEnd(LIMITS)
            await rig.open(left, right, after=before)


def _has(end: LinkEnd, payload: bytes) -> bool:
    return payload in payloads(end.frames)


ENDING_CASES: Final[tuple[MessageLinkCase, ...]] = (
    pings_are_answered_and_shared,
    a_frame_is_withdrawn_or_sent,
    a_lost_wire_gives_one_verdict_each,
    an_abort_ends_both,
    a_failing_handler_ends_the_link,
    a_goodbye_closes_both,
    a_link_opens_again_after_a_goodbye,
    a_goodbye_is_refused_by_work,
    goodbyes_that_cross_agree,
    a_frame_revokes_a_goodbye_or_is_given_back,
)
