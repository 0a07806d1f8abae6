"""The contract of ControlLink as cases over a pair of connected, unstarted links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

from .. import errors
from ..protocol.framing import FRAME_BYTES_MAX, FrameKind, encode_frame
from ..transport.interface import ControlLink
from .leftovers import nothing_left
from .pattern import pattern

LinkPairFactory = Callable[[], AbstractAsyncContextManager[tuple[ControlLink, ControlLink]]]
LinkCase = Callable[[ControlLink, ControlLink], Awaitable[None]]


async def check_control_link(case: str, open_pair: LinkPairFactory) -> None:
    """Run one of LINK_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left(), open_pair() as (left, right):
        await LINK_CASES[case](left, right)


class Recorder:
    """Handlers that remember. `ended` counts the reports of the end, `cause` is the last one's."""

    def __init__(self, link: ControlLink, answer: Callable[[bytes], None] | None = None) -> None:
        self.frames: list[bytes] = []
        self.passed = 0  # frames whose pass has ended
        self.ended = 0
        self.cause: BaseException | None = None
        self._answer = answer
        self._news = asyncio.Event()
        link.start(self.on_frame, self.on_closed, self.on_pass_end)

    def on_frame(self, frame: memoryview) -> None:
        assert not self.ended, "a frame after the end"
        self.frames.append(bytes(frame))
        self._news.set()
        if self._answer is not None:
            self._answer(self.frames[-1])

    def on_pass_end(self) -> None:
        self.passed = len(self.frames)

    def on_closed(self, cause: BaseException | None) -> None:
        self.ended += 1
        self.cause = cause
        self._news.set()

    async def wait(self, reached: Callable[[Recorder], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not reached(self):
                self._news.clear()
                await self._news.wait()

    async def wait_frames(self, count: int) -> None:
        await self.wait(lambda r: len(r.frames) >= count)

    async def wait_ended(self) -> None:
        await self.wait(lambda r: r.ended > 0)


def make_frame(nbytes: int, seed: int = 0) -> bytes:
    """A valid frame of exactly `nbytes`."""
    return encode_frame(FrameKind.NOTIFY, pattern(nbytes - 1, seed))


async def order_both_ways(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right)
    frames = [make_frame(1 + (i * 37) % 5000, i) for i in range(500)]
    for frame in frames:
        left.send_nowait(frame)
        right.send_nowait(frame)
        if len(frame) % 7 == 0:
            await asyncio.sleep(0)
    await a.wait_frames(len(frames))
    await b.wait_frames(len(frames))
    assert a.frames == frames
    assert b.frames == frames


async def sizes(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right)
    for nbytes in (1, 2, 5, 4095, 4096, 4097, 65535, 65536, 65537, FRAME_BYTES_MAX - 1):
        left.send_nowait(make_frame(nbytes, nbytes))
        await b.wait_frames(1)
        assert b.frames.pop() == make_frame(nbytes, nbytes)
    left.send_nowait(make_frame(FRAME_BYTES_MAX))
    await b.wait_frames(1)
    for wrong in (make_frame(FRAME_BYTES_MAX) + b"x", b""):
        try:
            left.send_nowait(wrong)
        except errors.UsageError:
            continue
        raise AssertionError(f"a frame of {len(wrong)} bytes was taken")
    left.send_nowait(make_frame(3))  # and the link is none the worse for it
    await b.wait_frames(2)
    assert not a.ended
    assert not b.ended


async def gathered_frames(left: ControlLink, right: ControlLink) -> None:
    """Frames in two pieces arrive whole, in order with the others, and are accounted as taken."""
    a, b = Recorder(left), Recorder(right)
    taken: list[int] = []
    left.watch_taken(lambda: taken.append(left.taken_bytes))
    frames: list[bytes] = []
    for n in range(30):
        batch = [make_frame(2 + (n * 7919 + i * 5_021) % 50_000, n + i) for i in range(n % 4)]
        left.send_gathered([(f[: 1 + n % len(f)], memoryview(f)[1 + n % len(f) :]) for f in batch])
        frames += batch
        if n % 3 == 0:
            frames.append(make_frame(10, n))
            left.send_nowait(frames[-1])
        if n % 5 == 0:
            await b.wait_frames(len(frames))
    await b.wait_frames(len(frames))
    assert b.frames == frames
    assert left.accepted_bytes >= sum(map(len, frames))
    await b.wait(lambda r: r.passed == len(r.frames))
    assert left.taken_bytes == left.accepted_bytes
    assert taken == sorted(taken)
    for wrong in ([(make_frame(3), memoryview(b"")), (b"", memoryview(b""))],):
        try:
            left.send_gathered(wrong)
        except errors.UsageError:
            continue
        raise AssertionError("an empty frame was taken")
    left.close()
    try:
        left.send_gathered([(make_frame(4), memoryview(b"x"))])
    except errors.ClosedError:
        pass
    else:
        raise AssertionError("a closed link took a frame")
    await b.wait_ended()
    assert b.frames == frames, "all or none of a batch"
    assert a.ended == b.ended == 1


async def sent_before_start(left: ControlLink, right: ControlLink) -> None:
    a = Recorder(left)
    frames = [make_frame(100 + i, i) for i in range(20)]
    for frame in frames:
        left.send_nowait(frame)
    await asyncio.sleep(0.01)
    b = Recorder(right)
    await b.wait_frames(len(frames))
    assert b.frames == frames
    assert not a.ended


async def answers_from_the_handler(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right, answer=right.send_nowait)
    for i in range(50):
        left.send_nowait(make_frame(10 + i, i))
    await a.wait_frames(50)
    assert a.frames == b.frames


async def close_flushes(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right)
    frames = [make_frame(300_000, i) for i in range(8)]  # more than socket buffers start with
    for frame in frames:
        left.send_nowait(frame)
    left.close()
    left.close()
    await b.wait_ended()
    assert b.frames == frames
    assert isinstance(b.cause, errors.PeerLost)
    await left.wait_closed()
    await right.wait_closed()
    await a.wait_ended()
    assert a.cause is None
    assert a.ended == b.ended == 1


async def closed_refuses_sends(left: ControlLink, right: ControlLink) -> None:
    a = Recorder(left)
    left.close()
    try:
        left.send_nowait(make_frame(4))
    except errors.ClosedError:
        pass
    else:
        raise AssertionError("a closed link took a frame")
    await left.wait_closed()
    await a.wait_ended()
    left.abort()
    left.close()
    await asyncio.sleep(0.01)
    assert a.ended == 1


async def abort_ends_both(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right)
    left.abort()
    left.abort()
    await a.wait_ended()
    await b.wait_ended()
    assert a.cause is None
    assert isinstance(b.cause, errors.PeerLost)
    try:
        right.send_nowait(make_frame(4))
    except errors.ClosedError:
        pass
    else:
        raise AssertionError("a lost link took a frame")
    right.close()
    await right.wait_closed()
    assert a.ended == b.ended == 1


async def closed_before_start(left: ControlLink, right: ControlLink) -> None:
    left.close()
    a = Recorder(left)
    await a.wait_ended()
    assert a.cause is None
    b = Recorder(right)
    await b.wait_ended()
    assert isinstance(b.cause, errors.PeerLost)
    assert a.ended == b.ended == 1


async def close_inside_a_handler(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right, answer=lambda frame: right.close())
    for i in range(10):
        left.send_nowait(make_frame(50, i))
    await b.wait_ended()
    assert b.frames == [make_frame(50, 0)]
    assert b.cause is None
    await a.wait_ended()
    assert isinstance(a.cause, errors.PeerLost)


async def failing_handler_ends_the_link(left: ControlLink, right: ControlLink) -> None:
    def fail(frame: bytes) -> None:
        raise RuntimeError("a bug")

    a, b = Recorder(left), Recorder(right, answer=fail)
    left.send_nowait(make_frame(50))
    await b.wait_ended()
    assert isinstance(b.cause, errors.InternalError)
    await a.wait_ended()


async def backlog_is_bounded(left: ControlLink, right: ControlLink) -> None:
    a = Recorder(left)
    frame = make_frame(FRAME_BYTES_MAX)
    accepted = 0
    try:
        for _ in range(200):  # the other end does not read
            left.send_nowait(frame)
            accepted += 1
    except errors.BusyError:
        pass
    assert 1 <= accepted < 100, f"{accepted} frames of 1 MiB piled up"
    b = Recorder(right)
    await b.wait_frames(accepted)
    assert b.frames == [frame] * accepted
    left.send_nowait(make_frame(9))
    await b.wait_frames(accepted + 1)
    assert not a.ended


async def unknown_kind_ends_the_link(left: ControlLink, right: ControlLink) -> None:
    a, b = Recorder(left), Recorder(right)
    left.send_nowait(b"\xeejunk")
    await b.wait_ended()
    assert isinstance(b.cause, errors.PeerProtocolError)
    await a.wait_ended()
    assert not b.frames


LINK_CASES: Final[Mapping[str, LinkCase]] = {
    case.__name__: case
    for case in (
        order_both_ways,
        sizes,
        gathered_frames,
        sent_before_start,
        answers_from_the_handler,
        close_flushes,
        closed_refuses_sends,
        abort_ends_both,
        closed_before_start,
        close_inside_a_handler,
        failing_handler_ends_the_link,
        backlog_is_bounded,
        unknown_kind_ends_the_link,
    )
}
