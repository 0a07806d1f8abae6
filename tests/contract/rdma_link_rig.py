"""What the contract suite of message links needs of RC queue pairs: links by two transports that
share an epoch, over any two rails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from orbit.errors import OrbitError, PeerLost
from orbit.protocol.messaging.credits import REFILL_MAX
from orbit.testing.message_link_rig import LinkEnd
from orbit.transport.interface import Session
from orbit.transport.messages import LinkLimits, MessageLink
from orbit.verbs.messaging.settings import RdmaMessagesConfig
from tests.contract.message_pairs import MessagePair, Side, close_pair

OpenPair = Callable[[RdmaMessagesConfig, RdmaMessagesConfig], Awaitable[MessagePair]]


class Switch:
    """The LinkClient of one transport: each link's frames go to the end it was opened for."""

    def __init__(self) -> None:
        self.next: LinkEnd | None = None
        self._ends: dict[MessageLink, LinkEnd] = {}

    def on_opened(self, session: Session, link: MessageLink) -> None:
        assert self.next is not None
        self._ends[link] = self.next
        self.next.link = link
        self.next = None

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        self._ends[link].on_frame(link, kind, header, payload, charge)

    def on_link_lost(self, link: MessageLink, error: OrbitError | None) -> None:
        self._ends[link].on_link_lost(link, error)

    def may_close(self, link: MessageLink) -> bool:
        return self._ends[link].may_close(link)


class RdmaLinkRig:
    """Implements LinkRig. Closing it closes every pair; `check` is the device's own verdict."""

    segments = True

    def __init__(
        self, config: RdmaMessagesConfig, open_pair: OpenPair, not_ready: Callable[[], int]
    ) -> None:
        self._config = config
        self._open_pair = open_pair
        self._not_ready = not_ready
        self._pairs: list[MessagePair] = []
        self._switches: dict[Side, Switch] = {}
        self._where: dict[LinkEnd, tuple[MessagePair, Side]] = {}

    async def open(self, left: LinkEnd, right: LinkEnd, after: LinkEnd | None = None) -> None:
        if after is None:
            configs = [self._sized(end.limits) for end in (left, right)]
            pair = await self._open_pair(configs[0], configs[1])
            self._pairs.append(pair)
            for side in pair.sides:
                switch = self._switches[side] = Switch()
                side.messages.watch(switch, switch.on_opened)
        else:
            pair = self._where[after][0]
        for side, end in zip(pair.sides, (left, right), strict=True):
            self._where[end] = pair, side
            self._switches[side].next = end
        dialer = pair.dialer
        left.link = await dialer.messages.open(dialer.session, self._switches[dialer])
        assert right.link is not left.link

    def cut(self, end: LinkEnd) -> None:
        _, side = self._where[end]
        for queue_pair in side.parts.lane.ends:
            queue_pair.fail(PeerLost("the peer", "cut"))

    def check(self) -> None:
        assert self._not_ready() == 0, "a packet found no receive slab"
        for pair in self._pairs:
            for side in pair.sides:
                counted = side.messages.statistics()
                assert counted.limit_hits == 0
                assert counted.woken_by_backstop == 0
                assert counted.unknown_completions == 0

    async def close(self) -> None:
        for pair in self._pairs:
            await close_pair(pair)

    def _sized(self, limits: LinkLimits) -> RdmaMessagesConfig:
        """The shared receive queue holds what the peer was granted and one batch: no slab more."""
        slabs = max(32, limits.windows.slabs + REFILL_MAX)
        return replace(self._config, limits=limits, receive_slabs=slabs, send_slabs=slabs)
