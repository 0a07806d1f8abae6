"""The sending end of a message link: two queues, the packets on the wire, and one verdict a frame.

Replies go before messages, control packets before both; a reply may pass between the segments of a
message. It decides nothing about credit (the book does) and knows no peer, no ping and no goodbye.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..errors import NotAdmitted, OutcomeUnknown, PeerProtocolError
from ..protocol.messaging.credits import CreditBook
from ..protocol.messaging.packets import (
    FIXED_BYTES,
    PacketKind,
    pack_head,
)
from ..protocol.messaging.segments import Cutter
from .messages import OutgoingFrame, PacketWire

_EMPTY: Final = memoryview(b"")
_MESSAGE: Final = int(PacketKind.MESSAGE)  # the only kind of its window


class FrameQueue:
    """The waiting frames of one window. `cutter` belongs to the first one, once it has begun to
    leave in several packets.
    """

    __slots__ = ("cutter", "frames", "stalled")

    def __init__(self) -> None:
        self.frames: deque[OutgoingFrame] = deque()
        self.cutter: Cutter | None = None
        self.stalled = False  # the first frame has waited for credit: counted once

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames)

    def withdraw(self, frame: OutgoingFrame) -> bool:
        if self.cutter is not None and self.cutter.begun and self.frames[0] is frame:
            return False
        try:
            self.frames.remove(frame)
        except ValueError:
            return False
        if not self.frames:
            self.stalled = False
        return True


@dataclass(slots=True)
class SendCounts:
    """Since the link opened. `stalls`: times that a frame had to wait for credit."""

    frames: int = 0
    nbytes: int = 0
    packets: int = 0
    segmented: int = 0
    grants: int = 0
    stalls: int = 0


class Outbox:
    """`on_pushed` hears of each control packet (its kind) and, while `watched`, of each packet of a
    frame (None), before it reaches the wire.
    """

    def __init__(
        self,
        wire: PacketWire,
        book: CreditBook,
        slab_bytes: int,
        on_pushed: Callable[[int | None], None],
    ) -> None:
        self._wire = wire
        self._book = book
        self._slab_bytes = slab_bytes
        self._on_pushed = on_pushed
        self._messages = FrameQueue()
        self._replies = FrameQueue()
        self._control: list[PacketKind] = []  # to be said as soon as they may be
        # One entry a packet on the wire: the frame that its confirmation completes, if any.
        self._unconfirmed: deque[OutgoingFrame | None] = deque()
        self._frames_out = 0
        self._pumping = False
        self._returns_asked = False  # to be looked at when the pump has run
        self.watched = False
        self.counts = SendCounts()

    @property
    def queued_frames(self) -> int:
        return len(self._messages.frames) + len(self._replies.frames)

    @property
    def queued_bytes(self) -> int:
        return self._messages.nbytes + self._replies.nbytes

    @property
    def empty(self) -> bool:
        """Nothing waits, and nothing that was pushed is unconfirmed (control packets apart)."""
        return not (self._messages.frames or self._replies.frames or self._frames_out)

    def queue(self, frame: OutgoingFrame) -> bool:
        """Whether `pump` may send it now: not behind one that waits for credit."""
        queue = self._messages if frame.kind == _MESSAGE else self._replies
        queue.frames.append(frame)
        return not queue.stalled

    def withdraw(self, frame: OutgoingFrame) -> bool:
        return self._messages.withdraw(frame) or self._replies.withdraw(frame)

    def want(self, kind: PacketKind) -> None:
        """Say this control packet as soon as the peer has a slab for it."""
        if kind not in self._control:
            self._control.append(kind)

    def pump(self) -> None:
        """Push all that credit and room allow, and flush it."""
        if self._pumping:  # a frame's callback has queued another one: the loop below finds it
            return
        self._pumping = True
        replies, messages = self._replies, self._messages
        try:
            while True:
                before = self.counts.packets
                while self._control and self._push_wanted():
                    pass
                # A callback of a message may queue a reply: look again until neither moves.
                while (replies.frames and self._push_from(replies)) or (
                    messages.frames and self._push_from(messages)
                ):
                    pass
                if self.counts.packets == before:
                    return
                self._wire.flush()
                if not (replies.frames or messages.frames):
                    return
        finally:
            self._pumping = False
            if self._returns_asked:
                self.return_credit()

    def end_pass(self) -> None:
        """Push what may leave now, and then give back what that has not carried."""
        self._returns_asked = True
        self.pump()

    def say(self, kind: PacketKind) -> None:
        """Now, ahead of everything that waits. Raises PeerProtocolError when the peer, against the
        rules, has not reported the slab that the last one took.
        """
        if not self._book.may_send(kind):
            raise PeerProtocolError(f"control packet {kind} is due before its slab was reported")
        self._push_control(kind)
        self._wire.flush()

    def return_credit(self) -> None:
        """Give back what no frame has carried, once it is worth a packet."""
        if self._pumping:  # a frame's callback has consumed something; more may leave yet
            self._returns_asked = True
            return
        self._returns_asked = False
        due = self._book.due()
        if due is None:
            return
        while due is not None:
            self._push_control(due)
            due = self._book.due()
        self._wire.flush()

    def on_sent(self, count: int) -> bool:
        """The `count` oldest packets are with the peer. Whether a frame was completed."""
        unconfirmed, before = self._unconfirmed, self._frames_out
        for _ in range(count):
            frame = unconfirmed.popleft()
            if frame is not None:
                self._frames_out -= 1
                frame.done()
        return self._frames_out < before

    def fail(self, peer: str, cause: str, *, agreed: bool) -> None:
        """The wire is gone: a verdict for every frame, in the order in which they were sent."""
        on_wire = [frame for frame in self._unconfirmed if frame is not None]
        self._unconfirmed.clear()
        self._frames_out = 0
        for frame in on_wire:
            frame.failed(OutcomeUnknown(peer, cause))
        for queue in (self._replies, self._messages):
            begun = queue.cutter is not None and queue.cutter.begun
            queue.cutter = None
            while queue.frames:
                frame = queue.frames.popleft()
                if begun:
                    frame.failed(OutcomeUnknown(peer, cause))
                    begun = False
                    continue
                error = NotAdmitted(peer, cause)
                if agreed:
                    frame.given_back(error)
                else:
                    frame.failed(error)

    def _push_control(self, kind: PacketKind) -> None:
        self._book.take(kind)
        if kind is PacketKind.GRANT:
            self.counts.grants += 1
        self._on_pushed(kind)
        self._push(pack_head(kind, 0, self._book.stamp(), 0), _EMPTY, None)

    def _push_wanted(self) -> bool:
        for kind in self._control:
            if self._book.may_send(kind):
                self._control.remove(kind)
                self._push_control(kind)
                return True
        return False

    def _push_from(self, queue: FrameQueue) -> bool:
        """Push the next packet of this window. Whether there was credit, and room."""
        frame = queue.frames[0]
        kind = frame.kind
        if not self._wire.room:
            return False
        if not self._book.try_take(kind):
            if not queue.stalled:
                queue.stalled = True
                self.counts.stalls += 1
            return False
        if self.watched:
            self._on_pushed(None)  # before the stamp: it may end a goodbye
        header, payload = frame.header, frame.payload
        body = payload if type(payload) is memoryview else memoryview(payload)
        if FIXED_BYTES + len(header) + len(body) <= self._slab_bytes:
            head = pack_head(kind, 0, self._book.stamp(), len(header)) + header
            self._complete(queue, frame, head, body)
        else:
            self._push_segment(queue, frame, body)
        return True

    def _push_segment(self, queue: FrameQueue, frame: OutgoingFrame, payload: memoryview) -> None:
        cutter = queue.cutter
        if cutter is None:
            self.counts.segmented += 1
            cutter = Cutter(frame.kind, frame.header, payload, self._slab_bytes)
            queue.cutter = cutter
        head, piece = cutter.next(self._book.stamp())
        if cutter.finished:
            self._complete(queue, frame, head, piece)
        else:
            self._push(head, piece, None)

    def _complete(
        self, queue: FrameQueue, frame: OutgoingFrame, head: bytes, body: memoryview
    ) -> None:
        """Push the last packet of the queue's first frame."""
        queue.frames.popleft()
        queue.cutter = None
        queue.stalled = False
        self._frames_out += 1
        self.counts.frames += 1
        self._push(head, body, frame)
        frame.posted()

    def _push(self, head: bytes, body: memoryview, completes: OutgoingFrame | None) -> None:
        self._unconfirmed.append(completes)
        self.counts.packets += 1
        self.counts.nbytes += len(head) + len(body)
        self._wire.push(head, body)
