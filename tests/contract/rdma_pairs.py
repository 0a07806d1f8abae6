"""Two RDMA paths joined by one epoch without a control connection: over the scripted fabric, or
over any two rails of real devices. And one payload on its way between them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from orbit.config import RdmaPoolConfig
from orbit.errors import PathFailed
from orbit.model import Direction, LeaseId, PathReason
from orbit.protocol.binding import GrantRecord
from orbit.protocol.descriptor import Descriptor, encode_descriptor
from orbit.protocol.messages import Message, RailHint
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession
from orbit.transport.interface import Exposure, PinnedBuffer, PullReport, Span, Target
from orbit.verbs.opening import open_rdma_path
from orbit.verbs.provider import Provider
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.requester_arrays import RequesterArray
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig

QUICK = RdmaPathConfig(
    pool=RdmaPoolConfig(initial_arena_bytes=24 << 20),
    connect_backoff_s=0.05,
    receipt_timeout_s=0.5,
    bind_timeout_s=0.5,
    drain_timeout_s=0.5,
    progress_timeout_s=1.0,
)
UNWRITTEN = b"\xa5"
_AROUND = 4096  # bytes of other data on either side


class NotifyingSession(StubSession):
    """A StubSession whose notifications arrive, too."""

    def __init__(self, number: int, *, dialer: bool) -> None:
        super().__init__(number, dialer=dialer)
        self.other: StubSession = self
        self._arriving: set[asyncio.Future[Message | None]] = set()

    def connect(self, other: StubSession) -> None:
        super().connect(other)
        self.other = other
        if isinstance(other, NotifyingSession):
            other.other = self

    def notify(self, request: Message) -> None:
        method: str = getattr(request, "METHOD", "")
        handler = self.other.handlers.get(method)
        if handler is not None and not self.closed:
            arriving = asyncio.ensure_future(handler(self.other, request.to_wire()))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)


@dataclass(eq=False)
class PathPair:
    """An owner and a consumer, as the contract suite wants them."""

    owner: RdmaPath
    consumer: RdmaPath
    owner_session: NotifyingSession
    consumer_session: NotifyingSession
    pinned_targets: bool
    big_bytes: int = 8 << 20

    def allocate_source(self, nbytes: int) -> Target:
        return self._allocate(self.owner, nbytes)

    def allocate_target(self, nbytes: int) -> Target:
        if self.pinned_targets:
            return self._allocate(self.consumer, nbytes)
        return Target(memoryview(bytearray(nbytes)))

    def _allocate(self, path: RdmaPath, nbytes: int) -> Target:
        buffer = path.memory.allocate_nowait(nbytes)
        return Target(buffer.view, buffer)

    def free(self, memory: Target) -> None:
        if memory.pinned is not None:
            arena = memory.pinned.arena
            arena.free(memory.pinned)  # type: ignore[attr-defined]

    async def kill_owner(self) -> None:
        self.owner_session.close()
        await self.owner.close()


@dataclass(eq=False)
class ScriptedPair(PathPair):
    """The owner's first rail is the fake device `a`, the consumer's is `b`."""

    a: ScriptedDevice = None  # type: ignore[assignment]
    b: ScriptedDevice = None  # type: ignore[assignment]
    more: tuple[
        ScriptedDevice, ...
    ] = ()  # of further rails: the owner's and the consumer's by turns


class Get:
    """One payload on its way: the owner's bytes, and a target at the consumer."""

    def __init__(self, pair: PathPair, nbytes: int, lease: int = 1, *, room: int = 0) -> None:
        self.pair = pair
        self.lease = LeaseId(lease)
        self.payload = pattern(nbytes, lease)
        # A page of other data around the span: what a window must not open.
        self.memory = pair.owner.memory.allocate_nowait(nbytes + 2 * _AROUND)
        self.memory.view[:] = b"S" * len(self.memory.view)
        self.span = slice_pinned(self.memory, _AROUND, nbytes)
        self.span.view[:] = self.payload
        self.buffer = bytearray(UNWRITTEN * (nbytes + room))
        self.target = Target(memoryview(self.buffer))

    @property
    def untouched(self) -> bool:
        return self.buffer == UNWRITTEN * len(self.buffer)

    async def expose(self) -> Exposure:
        return await self.pair.owner.expose(self.pair.owner_session, self.span, self.lease)

    async def pull(self, exposure: Exposure) -> None:
        session = self.pair.consumer_session
        await self.pair.consumer.pull(session, exposure, self.lease, self.target)

    async def retract(self, *, transferred: bool = True) -> None:
        session = self.pair.owner_session
        await self.pair.owner.retract(session, self.lease, transferred=transferred)
        self.pair.owner.memory.free(self.memory)

    async def run(self) -> None:
        await self.pull(await self.expose())
        assert self.buffer == self.payload
        await self.retract()

    async def fails(self, exposure: Exposure, reason: PathReason) -> PathFailed:
        with pytest.raises(PathFailed) as caught:
            await self.pull(exposure)
        assert caught.value.reason == reason, caught.value
        return caught.value


class Put:
    """One payload on its way to the owner: a destination between other data there, and the bytes
    at the consumer.
    """

    def __init__(self, pair: PathPair, nbytes: int, lease: int = 1, *, more: int = 0) -> None:
        self.pair = pair
        self.lease = LeaseId(lease)
        self.payload = pattern(nbytes + more, lease)
        self.memory = pair.owner.memory.allocate_nowait(nbytes + 2 * _AROUND)
        self.memory.view[:] = UNWRITTEN * len(self.memory.view)
        self.span = slice_pinned(self.memory, _AROUND, nbytes)
        self.source = Span(memoryview(self.payload))

    @property
    def landed(self) -> bytes:
        """What the destination holds; the data around it must be as it was."""
        view, end = self.memory.view, _AROUND + self.span.view.nbytes
        assert bytes(view[:_AROUND]) == UNWRITTEN * _AROUND, "written before the destination"
        assert bytes(view[end:]) == UNWRITTEN * _AROUND, "written behind the destination"
        return bytes(self.span.view)

    @property
    def untouched(self) -> bool:
        return self.landed == UNWRITTEN * self.span.view.nbytes

    async def expose(self) -> Exposure:
        session = self.pair.owner_session
        return await self.pair.owner.expose(
            session, self.span, self.lease, direction=Direction.WRITE
        )

    async def push(self, exposure: Exposure) -> PullReport:
        session = self.pair.consumer_session
        return await self.pair.consumer.push(session, exposure, self.lease, self.source)

    async def retract(self, *, transferred: bool = True) -> None:
        session = self.pair.owner_session
        await self.pair.owner.retract(session, self.lease, transferred=transferred)

    async def run(self) -> None:
        await self.push(await self.expose())
        await self.retract()
        assert self.landed == self.payload
        self.pair.owner.memory.free(self.memory)

    async def fails(self, exposure: Exposure, reason: PathReason) -> PathFailed:
        with pytest.raises(PathFailed) as caught:
            await self.push(exposure)
        assert caught.value.reason == reason, caught.value
        return caught.value


def array_of(pair: PathPair, direction: Direction) -> RequesterArray:
    """The consumer's queue pairs of that direction."""
    return pair.consumer._requests.array(pair.consumer_session, direction)


def slice_pinned(buffer: PinnedBuffer, begin: int, nbytes: int) -> Span:
    """A span of a part of it."""
    address = type(buffer.address)(buffer.address + begin)
    part = replace(buffer, view=buffer.view[begin : begin + nbytes], address=address)
    return Span(part.view, part)


def forge(exposure: Exposure, **changes: int) -> Exposure:
    """The same answer with other claims, consistent in descriptor and record."""
    record = replace(GrantRecord.decode(exposure.grant), **changes)  # type: ignore[arg-type]
    descriptor = Descriptor(record.generation, record.address, record.length, record.key)  # type: ignore[arg-type]
    return Exposure(descriptor=encode_descriptor(descriptor), grant=record.encode())


def counts(path: RdmaPath) -> dict[str, int]:
    return dict(path.statistics().counts)


def rail_of(device: ScriptedDevice) -> RailHint:
    return RailHint(device.name, 1, device.gids[1], 1, 4096)


async def open_path(provider: Provider, config: RdmaPathConfig, *rails: RailHint) -> RdmaPath:
    """Fails the test when there is none. Without a rail: what discovery finds under the pins."""
    path, reason, detail = await open_rdma_path(provider, config, rails=rails or None)
    assert path is not None, (reason, detail)
    assert reason is PathReason.OK
    return path


async def open_scripted(
    fabric: ScriptedFabric, *names: str, config: RdmaPathConfig = QUICK
) -> RdmaPath:
    provider = ScriptedProvider(fabric, names)
    return await open_path(provider, config, *(rail_of(fabric.devices[name]) for name in names))


def join(
    owner: RdmaPath, consumer: RdmaPath, number: int = 1
) -> tuple[NotifyingSession, NotifyingSession]:
    """The owner's and the consumer's end of one epoch between two paths."""
    ours = NotifyingSession(number, dialer=False)
    theirs = NotifyingSession(number, dialer=True)
    for session, own, other in ((ours, owner, consumer), (theirs, consumer, owner)):
        session.local_hello = replace(session.local_hello, rails=own.hints, limits=own.limits)
        session.peer_hello = replace(session.peer_hello, rails=other.hints, limits=other.limits)
        session.handlers = own.handlers()
    ours.connect(theirs)
    return ours, theirs


@contextlib.asynccontextmanager
async def rdma_pair(
    *,
    rxe: bool = False,
    config: RdmaPathConfig = QUICK,
    consumer_config: RdmaPathConfig | None = None,
    pinned_targets: bool = True,
    message_bytes_max: int = 0,
    rails: int = 1,
) -> AsyncIterator[ScriptedPair]:
    """Opened and closed in order; afterwards the fakes must have seen no misuse and hold nothing.
    Each rail has a network of its own.
    """
    fabric = ScriptedFabric(rxe=rxe)
    names = [("fake_a", "fake_b"), *((f"fake_a{n}", f"fake_b{n}") for n in range(2, rails + 1))]
    devices = [
        fabric.add_device(name, f"fe80::{rail}:{host}", f"::ffff:198.18.{rail}.{host}")
        for rail, pair in enumerate(names, 1)
        for host, name in enumerate(pair, 1)
    ]
    if message_bytes_max:
        for device in devices:
            device.set_message_bytes_max(message_bytes_max)
    owner = await open_scripted(fabric, *(a for a, _ in names), config=config)
    consumer = await open_scripted(fabric, *(b for _, b in names), config=consumer_config or config)
    assert await owner.memory.ensure() is PathReason.OK
    if pinned_targets:
        assert await consumer.memory.ensure() is PathReason.OK
    ours, theirs = join(owner, consumer)
    try:
        a, b, *more = devices
        yield ScriptedPair(
            owner, consumer, ours, theirs, pinned_targets, a=a, b=b, more=tuple(more)
        )
    finally:
        for device in devices:
            device.clear_rules()
            device.release()
        await consumer.close()
        await owner.close()
    for path in (owner, consumer):
        assert path.rail_statistics().endpoints == 0, "queue pairs are still counted"
    for device in devices:
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters
