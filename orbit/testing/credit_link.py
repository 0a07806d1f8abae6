"""One end of a message link in the closed world of credits: what `transport/message_link.py` does
with a credit book, cutters and two queues, without its clock, its wire and its clients.

It can be copied and compared, and each frame carries what its receiver needs to check order and
bytes. It knows nothing of applications and receive queues.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Hashable
from enum import IntEnum
from functools import cache
from operator import attrgetter
from typing import NamedTuple, TypeVar

from ..protocol.messaging.credits import CreditBook
from ..protocol.messaging.packets import (
    WINDOW_OF,
    Packet,
    PacketKind,
    Window,
    pack_head,
    parse_packet,
)
from ..protocol.messaging.segments import Assembler, Cutter
from .pattern import pattern
from .search import require

HEADER_BYTES = 6  # of every frame in this world
SEQUENCE_BYTES = 2  # in front of every payload, counted per window

_HEADER = struct.Struct(">BBHBB")
_SEQUENCE = struct.Struct(">H")
_book_state = attrgetter(*CreditBook.__slots__)
_pattern = cache(pattern)

T = TypeVar("T")


class Op(IntEnum):
    """What a frame means to the applications."""

    CALL = 1
    NOTE = 2  # fire and forget
    ITEM = 3  # of a stream
    ANSWER = 4
    CREDIT = 5  # of a stream; `count` items were read


class Label(NamedTuple):
    """The header of a frame: which call it belongs to, how deep calls nest below it, and how long
    the answer will be (of CREDIT: a count).
    """

    op: Op
    depth: int
    ident: int
    nbytes: int
    answer: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(*self)


class Frame(NamedTuple):
    """`charge`: bytes of the request that count as consumed when this answer has left."""

    kind: int
    header: bytes
    payload: bytes
    charge: int = 0


def unpack_label(header: bytes) -> Label:
    op, depth, ident, nbytes, answer = _HEADER.unpack(header)
    return Label(Op(op), depth, ident, nbytes, answer)


Push = Callable[[bytes], None]


class Link:
    """One end. `wire` holds the packets on their way to the peer; the first `landed` of them lie in
    the peer's slabs already and wait to be polled.
    """

    __slots__ = (
        "book",
        "cutters",
        "landed",
        "partial",
        "queues",
        "received",
        "sent",
        "slab_bytes",
        "wire",
    )

    def __init__(self, book: CreditBook, slab_bytes: int) -> None:
        self.book = book
        self.slab_bytes = slab_bytes
        # By window: messages, replies.
        self.queues: tuple[tuple[Frame, ...], ...] = ((), ())
        self.cutters: tuple[Cutter | None, ...] = (None, None)
        self.sent: tuple[int, ...] = (0, 0)
        self.received: tuple[int, ...] = (0, 0)
        self.partial: tuple[bytes, ...] = ()  # segments of frames that are not whole
        self.wire: tuple[bytes, ...] = ()
        self.landed = 0

    def clone(self) -> Link:
        twin = Link(copy.copy(self.book), self.slab_bytes)
        twin.queues = self.queues
        if any(self.cutters):
            twin.cutters = tuple(copy.copy(cutter) for cutter in self.cutters)
        twin.sent, twin.received = self.sent, self.received
        twin.partial = self.partial
        twin.wire, twin.landed = self.wire, self.landed
        return twin

    def key(self) -> Hashable:
        return (
            _book_state(self.book),
            self.queues,
            tuple(None if cutter is None else cutter.remaining for cutter in self.cutters),
            self.sent,
            self.received,
            self.partial,
            self.wire,
            self.landed,
        )

    @property
    def resting(self) -> bool:
        return (
            not (any(self.queues) or any(self.cutters) or self.partial or self.wire)
            and not self.book.unconsumed_bytes
        )

    # --- sending ---

    def queue(self, kind: int, label: Label, nbytes: int, charge: int = 0) -> None:
        """`nbytes` of payload behind the sequence number."""
        window = WINDOW_OF[kind]
        sequence = self.sent[window]
        payload = _SEQUENCE.pack(sequence & 0xFFFF) + _pattern(nbytes, seed=label.ident % 7)
        self.sent = _replaced(self.sent, window, sequence + 1)
        frame = Frame(kind, label.pack(), payload, charge)
        self.queues = _replaced(self.queues, window, (*self.queues[window], frame))

    def pump(self, room: Callable[[], bool], push: Push) -> None:
        """Push what credit and room allow: a pong, replies, messages, then what is due."""
        book = self.book
        while room() and (self._push_pong(push) or self._push_frame(push)):
            pass
        while room() and (due := book.due()) is not None:
            self._push_control(due, push)

    def _push_pong(self, push: Push) -> bool:
        if not self.book.may_send(PacketKind.PONG):
            return False
        self._push_control(PacketKind.PONG, push)
        return True

    def _push_control(self, kind: PacketKind, push: Push) -> None:
        self.book.take(kind)
        push(pack_head(kind, 0, self.book.stamp(), 0))

    def _push_frame(self, push: Push) -> bool:
        for window in (Window.REPLIES, Window.MESSAGES):
            queue = self.queues[window]
            if not queue or not self.book.may_send(queue[0].kind):
                continue
            cutter = self.cutters[window]
            if cutter is None:
                frame = queue[0]
                view = memoryview(frame.payload)
                cutter = Cutter(frame.kind, frame.header, view, self.slab_bytes)
                self.cutters = _replaced(self.cutters, window, cutter)
            self.book.take(queue[0].kind)
            head, body = cutter.next(self.book.stamp())
            if cutter.finished:
                self.cutters = _replaced(self.cutters, window, None)
                self.queues = _replaced(self.queues, window, queue[1:])
                self.book.on_consumed(queue[0].charge)
            require(len(head) + len(body) <= self.slab_bytes, "a packet longer than a slab")
            push(head + bytes(body))
            return True
        return False

    # --- receiving ---

    def receive(
        self, data: bytes, frame_bytes_max: int, charges_segments: bool
    ) -> tuple[Frame, int] | None:
        """A frame that this packet completes, and its charge."""
        packet = parse_packet(memoryview(data))
        self.book.on_returned(packet.returned)
        if WINDOW_OF[packet.kind] is Window.CONTROL:
            self.book.on_packet(packet.kind, 0)
            return None
        whole = self._assemble(packet, data, frame_bytes_max)
        charge = 0
        if whole is not None and packet.kind == PacketKind.MESSAGE:
            charge = len(whole.header) + len(whole.payload)
        by_packet = charges_segments and packet.kind == PacketKind.MESSAGE
        self.book.on_packet(packet.kind, len(packet.body) if by_packet else charge)
        if whole is None:
            return None
        self._check_frame(whole)
        return whole, charge

    def _assemble(self, packet: Packet, data: bytes, frame_bytes_max: int) -> Frame | None:
        assembler = self._assembler(frame_bytes_max)
        complete = assembler.add(packet)
        if complete is None:
            self.partial = (*self.partial, data)
            return None
        kind, header, payload = complete
        if packet.flags:
            window = WINDOW_OF[kind]
            self.partial = tuple(part for part in self.partial if WINDOW_OF[part[1]] != window)
        return Frame(kind, header, bytes(payload))

    def _assembler(self, frame_bytes_max: int) -> Assembler:
        """Fed again with the segments at hand, so that a link is copied by copying its bytes."""
        assembler = Assembler(frame_bytes_max)
        for part in self.partial:
            assembler.add(parse_packet(memoryview(part)))
        return assembler

    def open_message_bytes(self) -> int:
        """Memory taken for a message that is not whole. A reply takes as much at most."""
        for part in self.partial:
            if part[1] == PacketKind.MESSAGE:  # its first segment, which announces the length
                return parse_packet(memoryview(part)).total
        return 0

    def _check_frame(self, frame: Frame) -> None:
        window = WINDOW_OF[frame.kind]
        (sequence,) = _SEQUENCE.unpack_from(frame.payload)
        require(sequence == self.received[window] & 0xFFFF, "a frame out of its order")
        self.received = _replaced(self.received, window, self.received[window] + 1)
        label = unpack_label(frame.header)
        rest = frame.payload[SEQUENCE_BYTES:]
        # An echo is the request's header and nothing else.
        if frame.kind != PacketKind.SHUTTING_DOWN:
            require(rest == _pattern(len(rest), seed=label.ident % 7), "a payload was changed")


def _replaced(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
