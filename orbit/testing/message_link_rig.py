"""What the cases of MessageLink work with: ends that record, and what a rig must offer.

A rig opens links between two ends over one kind of wire; a case asks it for as many as it needs.
Runs on any event loop, the one with virtual time included.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol

from ..errors import NotAdmitted, OrbitError
from ..protocol.messaging.credits import Windows
from ..protocol.messaging.packets import PacketKind
from ..transport.messages import LinkLimits, MessageLink, OutgoingFrame
from .waiting import until

LIMITS: Final = LinkLimits(
    windows=Windows(8, 2), slab_bytes=1024, ceiling_bytes=16 << 10, inbound_bytes_max=64 << 10
)


class Received(NamedTuple):
    kind: int
    header: bytes
    payload: bytes


class Sent(OutgoingFrame):
    """Remembers its verdicts; there must be one."""

    __slots__ = ("end", "errors", "given", "outcome", "postings")

    def __init__(self, end: LinkEnd, kind: int, header: bytes, payload: memoryview | bytes) -> None:
        super().__init__(kind, header, payload)
        self.end = end
        self.outcome: list[str] = []
        self.errors: list[OrbitError] = []
        self.postings = 0

    @property
    def settled(self) -> bool:
        assert len(self.outcome) <= 1, self.outcome
        return bool(self.outcome)

    @property
    def unsent(self) -> bool:
        """It is certain that no byte left."""
        return bool(self.errors) and isinstance(self.errors[0], NotAdmitted)

    def posted(self) -> None:
        assert not self.outcome, "posted after its verdict"
        self.postings += 1
        assert self.postings == 1, "posted twice"
        self.end.posted.append(self)

    def done(self) -> None:
        assert self.postings, "done before it was posted"
        self.outcome.append("done")

    def failed(self, error: OrbitError) -> None:
        self.outcome.append("failed")
        self.errors.append(error)

    def given_back(self, error: NotAdmitted) -> None:
        self.outcome.append("given back")
        self.errors.append(error)


class LinkEnd:
    """A LinkClient that records. `consume`: charges go back at once; else they pile up in
    `charges`. `on_message` runs for each frame, within its delivery.
    """

    def __init__(self, limits: LinkLimits = LIMITS, *, consume: bool = True) -> None:
        self.limits = limits
        self.consume = consume
        self.frames: list[Received] = []
        self.charges: list[int] = []
        self.sent: list[Sent] = []
        self.posted: list[Sent] = []
        self.lost: list[OrbitError | None] = []
        self.needed = False  # `may_close` says no
        self.on_message: Callable[[Received], None] = _ignore
        self._link: MessageLink | None = None

    @property
    def link(self) -> MessageLink:
        assert self._link is not None, "the rig has not opened this end yet"
        return self._link

    @link.setter
    def link(self, link: MessageLink) -> None:
        self._link = link

    def send(
        self,
        payload: bytes | memoryview = b"",
        header: bytes = b"",
        kind: int = PacketKind.MESSAGE,
    ) -> Sent:
        frame = Sent(self, kind, header, payload)
        self.sent.append(frame)
        self.link.send(frame)
        return frame

    def give_back(self) -> None:
        """Consume what piled up, and from now on everything at once."""
        self.consume = True
        charges, self.charges = self.charges, []
        for charge in charges:
            self.link.consumed(charge)

    def of(self, *kinds: int) -> list[Received]:
        return [frame for frame in self.frames if frame.kind in kinds]

    async def wait_frames(self, count: int) -> None:
        await until(lambda: len(self.frames) >= count or self.lost, 30.0)
        assert not self.lost, self.lost

    async def wait_settled(self) -> None:
        """Until every frame that this end sent has its verdict."""
        await until(lambda: all(frame.settled for frame in self.sent), 30.0)

    async def wait_lost(self) -> OrbitError | None:
        await until(lambda: self.lost, 30.0)
        assert len(self.lost) == 1, "the end was reported twice"
        return self.lost[0]

    # --- LinkClient ---

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        if self._link is None:  # the first packet was quicker than whoever opens this end
            self._link = link
        assert link is self._link
        assert not self.lost, "a frame after the end"
        assert bool(charge) == (kind == PacketKind.MESSAGE)
        received = Received(kind, header, bytes(payload))
        self.frames.append(received)
        if charge and self.consume:
            link.consumed(charge)
        elif charge:
            self.charges.append(charge)
        self.on_message(received)

    def on_link_lost(self, link: MessageLink, error: OrbitError | None) -> None:
        assert all(frame.settled for frame in self.sent), "a frame without a verdict"
        self.lost.append(error)

    def may_close(self, link: MessageLink) -> bool:
        return not self.needed


class LinkRig(Protocol):
    """Opens links over one kind of wire."""

    @property
    def segments(self) -> bool:
        """Frames over a slab travel as several packets."""

    async def open(self, left: LinkEnd, right: LinkEnd, after: LinkEnd | None = None) -> None:
        """A link between two ends, usable from both sides, each granting its own limits. `after` is
        an end of an earlier link that was closed by agreement: the new one belongs to the same
        connection, if the wire has such a thing.
        """

    def cut(self, end: LinkEnd) -> None:
        """The wire under that link is gone; both ends come to know it by themselves."""

    def check(self) -> None:
        """After each case: raises when a packet found no receive slab."""


RigFactory = Callable[[], AbstractAsyncContextManager[LinkRig]]
MessageLinkCase = Callable[[LinkRig], Awaitable[None]]


async def pair(
    rig: LinkRig, left: LinkLimits = LIMITS, right: LinkLimits | None = None
) -> tuple[LinkEnd, LinkEnd]:
    ends = LinkEnd(left), LinkEnd(right or left)
    await rig.open(*ends)
    return ends


def payloads(frames: Iterable[Received]) -> list[bytes]:
    return [frame.payload for frame in frames]


def _ignore(received: Received) -> None:
    pass
