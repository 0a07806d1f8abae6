"""Two RDMA message transports joined by one epoch without a control connection: over the scripted
fabric, or over any two rails of real devices. And what a link's users see, recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from orbit.errors import NotAdmitted, OrbitError
from orbit.memory.budget import Budget
from orbit.protocol.messages import Limits, RailHint
from orbit.transport.interface import Session
from orbit.transport.messages import LinkLimits, MessageLink, OutgoingFrame
from orbit.verbs.device import DeviceContext
from orbit.verbs.messaging.rail import RailParts
from orbit.verbs.messaging.rdma_messages import RdmaMessages
from orbit.verbs.messaging.settings import RdmaMessagesConfig
from orbit.verbs.offload import Offload
from orbit.verbs.provider import Provider
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import NotifyingSession, rail_of

QUICK = RdmaMessagesConfig(
    receive_slabs=128,
    send_slabs=128,
    connect_backoff_s=0.02,
    ready_timeout_s=0.5,
    close_timeout_s=0.5,
    drain_timeout_s=0.5,
    backstop_s=0.05,
)
BUDGET_BYTES = 64 << 20
PATIENCE_S = 10.0


@dataclass(eq=False)
class Received:
    """A LinkClient that keeps what it hears. Charges are consumed at once unless `slow`."""

    slow: bool = False
    frames: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    charges: list[tuple[MessageLink, int]] = field(default_factory=list)
    lost: list[OrbitError | None] = field(default_factory=list)
    opened: list[MessageLink] = field(default_factory=list)
    on_message: Callable[[MessageLink, bytes, bytes], None] | None = None

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        assert link in self.opened, "a frame before its link was announced"
        self.frames.append((kind, bytes(header), bytes(payload)))
        if self.on_message is not None and kind == 0:
            self.on_message(link, bytes(header), bytes(payload))
        if self.slow:
            self.charges.append((link, charge))
        elif charge:
            link.consumed(charge)

    def on_link_lost(self, link: MessageLink, error: OrbitError | None) -> None:
        self.lost.append(error)

    def may_close(self, link: MessageLink) -> bool:
        return True

    def on_opened(self, session: Session, link: MessageLink) -> None:
        self.opened.append(link)


class Frame(OutgoingFrame):
    """One frame that remembers its verdict."""

    __slots__ = ("settled", "verdict")

    def __init__(self, payload: bytes = b"", *, kind: int = 0, header: bytes = b"h") -> None:
        super().__init__(kind, header, payload)
        self.verdict: list[OrbitError | None] = []
        self.settled = asyncio.Event()

    def done(self) -> None:
        self.verdict.append(None)
        self.settled.set()

    def failed(self, error: OrbitError) -> None:
        self.verdict.append(error)
        self.settled.set()

    async def result(self) -> OrbitError | None:
        await asyncio.wait_for(self.settled.wait(), PATIENCE_S)
        assert len(self.verdict) == 1, self.verdict
        return self.verdict[0]

    @property
    def not_admitted(self) -> bool:
        return isinstance(self.verdict[0], NotAdmitted)


@dataclass(eq=False)
class Side:
    """One node's half: its device, its transport, its end of the epoch, and what arrived there."""

    device: DeviceContext
    messages: RdmaMessages
    session: NotifyingSession
    budget: Budget
    received: Received = field(default_factory=Received)

    async def open(self) -> MessageLink:
        return await asyncio.wait_for(self.messages.open(self.session, self.received), PATIENCE_S)

    async def wait_frames(self, count: int) -> None:
        await until(lambda: len(self.received.frames) >= count)

    async def wait_lost(self) -> OrbitError | None:
        await until(lambda: bool(self.received.lost))
        return self.received.lost[-1]

    @property
    def parts(self) -> RailParts:
        """What its device holds; there is a link."""
        (rail,) = self.messages.rails
        assert rail.parts is not None
        return rail.parts


@dataclass(eq=False)
class MessagePair:
    """`dialer` opened the epoch."""

    dialer: Side
    listener: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.dialer, self.listener

    async def wait_no_links(self) -> None:
        """Every queue pair is gone."""
        await until(lambda: not any(side.messages.statistics().links for side in self.sides))

    async def links(self) -> tuple[MessageLink, MessageLink]:
        """Both ends of a ready link."""
        mine = await self.dialer.open()
        await until(lambda: len(self.listener.received.opened) >= len(self.dialer.received.opened))
        return mine, self.listener.received.opened[-1]


@dataclass(eq=False)
class ScriptedMessagePair(MessagePair):
    """The dialer sits on the fake device `a`, the listener on `b`."""

    a: ScriptedDevice
    b: ScriptedDevice


async def send_all(link: MessageLink, payloads: Sequence[bytes]) -> list[Frame]:
    """Each sent at once, and each with its verdict."""
    frames = [Frame(payload) for payload in payloads]
    for frame in frames:
        link.send(frame)
    for frame in frames:
        await frame.result()
    return frames


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.001)


async def open_side(
    provider: Provider,
    rail: RailHint,
    config: RdmaMessagesConfig,
    offload: Offload,
    *,
    dialer: bool,
    budget_bytes: int = BUDGET_BYTES,
    path_config: RdmaPathConfig | None = None,
) -> Side:
    path_config = path_config or RdmaPathConfig()
    device = await DeviceContext.open(provider, rail, path_config, offload)
    budget = Budget("registered memory", budget_bytes, "test")
    messages = RdmaMessages([device], config, budget)
    side = Side(device, messages, NotifyingSession(1, dialer=dialer), budget)
    messages.watch(side.received, side.received.on_opened)
    return side


def join(dialer: Side, listener: Side, *, limits: Sequence[LinkLimits]) -> None:
    """One epoch between both sides."""
    for side, other, own, theirs in (
        (dialer, listener, limits[0], limits[1]),
        (listener, dialer, limits[1], limits[0]),
    ):
        session = side.session
        session.local_hello = replace(
            session.local_hello, rails=(side.device.rail,), limits=_hello_limits(own)
        )
        session.peer_hello = replace(
            session.peer_hello, rails=(other.device.rail,), limits=_hello_limits(theirs)
        )
        session.handlers = side.messages.handlers()
    dialer.session.connect(listener.session)


def _hello_limits(limits: LinkLimits) -> Limits:
    return Limits(
        message_credits=limits.windows.messages,
        reserve_credits=limits.windows.replies,
        slab_bytes=limits.slab_bytes,
        eager_ceiling_bytes=limits.ceiling_bytes,
    )


async def close_pair(pair: MessagePair) -> None:
    """Both sides share their threads for blocking verbs."""
    for side in pair.sides:
        await side.messages.close_session(side.session)
        await side.messages.close()
        await side.device.close()
        assert side.budget.charged_bytes == 0
    pair.dialer.device.offload.close()


@contextlib.asynccontextmanager
async def message_pair(
    *,
    rxe: bool = False,
    config: RdmaMessagesConfig = QUICK,
    listener_config: RdmaMessagesConfig | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> AsyncIterator[ScriptedMessagePair]:
    """Opened and closed in order; afterwards the fake must have seen no misuse and hold nothing."""
    fabric = ScriptedFabric(rxe=rxe)
    a, b = fabric.add_device("fake_a"), fabric.add_device("fake_b")
    offload = Offload()
    configs = config, listener_config or config
    sides = [
        await open_side(
            ScriptedProvider(fabric, [device.name]),
            rail_of(device),
            own,
            offload,
            dialer=device is a,
            budget_bytes=budget_bytes,
        )
        for device, own in zip((a, b), configs, strict=True)
    ]
    join(sides[0], sides[1], limits=[c.limits for c in configs])
    pair = ScriptedMessagePair(sides[0], sides[1], a, b)
    try:
        yield pair
    finally:
        for device in (a, b):
            device.clear_rules()
            device.release()
        await close_pair(pair)
    for device in (a, b):
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters
