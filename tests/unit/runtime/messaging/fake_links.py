"""A message transport whose links do what a test says, and a messenger on top of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from orbit.config import MessagingConfig, NodeConfig, RendezvousConfig
from orbit.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    PathUnavailable,
    UnknownHandle,
)
from orbit.events import Event, Recorder
from orbit.model import (
    Handle,
    Incarnation,
    Lease,
    LeaseId,
    PathName,
    PathReason,
    PeerIdentity,
    SlotId,
    WorkerId,
)
from orbit.protocol.messaging.call_header import Outcome, Wants, pack_call, parse_request
from orbit.protocol.messaging.packets import PacketKind
from orbit.runtime.messaging.contract import Charge, Request
from orbit.runtime.messaging.link_choice import Missing
from orbit.runtime.messaging.messenger import Messenger, Sinks, Surroundings
from orbit.runtime.messaging.results import SendResult
from orbit.runtime.messaging.routes import Route
from orbit.runtime.runner import TaskRunner
from orbit.testing.clock import run_virtual
from orbit.transport.interface import CallHandler, Session
from orbit.transport.messages import (
    LinkClient,
    LinkOpened,
    LinkStatistics,
    MessageLink,
    OutgoingFrame,
)

OWN = PeerIdentity(WorkerId(1), Incarnation(10))
PEER = PeerIdentity(WorkerId(2), Incarnation(20))


@dataclass(eq=False)
class FakeSession:
    peer: PeerIdentity
    attempt: bytes
    closed: bool = False


class FakeLink:
    """Posts what it is given at once, or, with `hold`, when told. It delivers nothing by itself."""

    def __init__(self, client: LinkClient, name: PathName, ceiling_bytes: int) -> None:
        self.transport = name
        self.ceiling_bytes = ceiling_bytes
        self.closed = False
        self.hold = False
        self.queue: list[OutgoingFrame] = []
        self.posted: list[OutgoingFrame] = []  # and not confirmed
        self.confirmed: list[OutgoingFrame] = []
        self.consumed_bytes = 0
        self.says_goodbye = True
        self._client = client

    @property
    def idle_s(self) -> float:
        return 0.0

    def send(self, frame: OutgoingFrame) -> None:
        assert not self.closed
        self.queue.append(frame)
        if not self.hold:
            self.post(1)

    def post(self, count: int) -> None:
        """The oldest of the queue leave."""
        for _ in range(count):
            frame = self.queue.pop(0)
            self.posted.append(frame)
            frame.posted()

    def confirm(self) -> None:
        while self.posted:
            frame = self.posted.pop(0)
            self.confirmed.append(frame)
            frame.done()

    def withdraw(self, frame: OutgoingFrame) -> bool:
        if frame in self.queue:
            self.queue.remove(frame)
            return True
        return False

    def consumed(self, charge: int) -> None:
        self.consumed_bytes += charge

    def renewed(self, charge: int) -> None:
        self.consumed_bytes -= charge

    async def ping(self, timeout_s: float) -> float:
        return 0.0

    async def goodbye(self, timeout_s: float) -> bool:
        await asyncio.sleep(0)
        if self.says_goodbye:
            self.leave()
        return self.says_goodbye

    def abort(self, error: OrbitError | None = None) -> None:
        if not self.closed:
            self.die(error)

    def die(self, error: OrbitError | None) -> None:
        """Unconfirmed frames are ambiguous, the rest has not left."""
        self.closed = True
        for frame in self.posted:
            frame.failed(OutcomeUnknown(str(PEER), str(error)))
        for frame in self.queue:
            frame.failed(NotAdmitted(str(PEER), str(error)))
        self.posted.clear()
        self.queue.clear()
        self._client.on_link_lost(self, error)

    def leave(self) -> None:
        """Closed by agreement."""
        self.closed = True
        for frame in self.queue:
            frame.given_back(NotAdmitted(str(PEER), "closed by agreement"))
        self.queue.clear()
        self._client.on_link_lost(self, None)

    def receive(
        self, kind: int, header: bytes, payload: bytes = b"", charge: int | None = None
    ) -> None:
        message = kind == PacketKind.MESSAGE
        bytes_ = (len(header) + len(payload) if message else 0) if charge is None else charge
        self._client.on_frame(self, kind, header, memoryview(payload), bytes_)

    def answer(self, frame: OutgoingFrame, payload: bytes = b"", kind: int = 1) -> None:
        """As the peer's handler would."""
        self.receive(kind, pack_call(Outcome.OK, parse_request(frame.header).id), payload)

    async def wait_closed(self) -> None:
        return

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(frames_sent=len(self.confirmed) + len(self.posted))


@dataclass(eq=False)
class FakeTransport:
    name: PathName = PathName.TCP
    reason: PathReason = PathReason.OK
    refuse: OrbitError | None = None
    gate: asyncio.Event | None = None
    ceiling_bytes: int = 1 << 10
    hold: bool = False
    links: list[FakeLink] = field(default_factory=list)

    def availability(self, session: Session) -> PathReason:
        return self.reason

    async def open(self, session: Session, client: LinkClient) -> MessageLink:
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.refuse is not None:
            raise self.refuse
        if not self.links or self.links[-1].closed:
            self.links.append(FakeLink(client, self.name, self.ceiling_bytes))
            self.links[-1].hold = self.hold
        return self.links[-1]

    def watch(self, client: LinkClient, on_opened: LinkOpened) -> None:
        self.on_opened = on_opened
        self.client = client

    def handlers(self) -> Mapping[str, CallHandler]:
        return {}

    async def close_session(self, session: Session) -> None:
        return

    async def close(self) -> None:
        return


@dataclass(eq=False)
class FakeStore:
    """Handles of payloads, as both ends' rendezvous. A fetch takes `fetch_s`; one of more than
    `payload_max` bytes is refused.
    """

    own: WorkerId = OWN.worker_id
    held: dict[Handle, object] = field(default_factory=dict)
    ttls: dict[Handle, float | None] = field(default_factory=dict)
    withdrawn: list[Handle] = field(default_factory=list)
    released: list[Handle] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)
    fetch_s: float = 0.0
    payload_max: int | None = None

    def stage(self, buffer: object, ttl_s: float | None = None) -> Handle:
        handle = Handle(self.own, SlotId(len(self.ttls) + 1))
        self.held[handle] = buffer
        self.ttls[handle] = ttl_s
        return handle

    async def withdraw(self, handle: Handle) -> None:
        if self.held.pop(handle, None) is None:
            raise UnknownHandle(str(handle))
        self.withdrawn.append(handle)

    async def fetch(self, handle: Handle, timeout_s: float | None) -> tuple[memoryview, Lease]:
        self.timeouts.append(timeout_s)
        if timeout_s is not None and timeout_s < self.fetch_s:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("get", timeout_s)
        await asyncio.sleep(self.fetch_s)
        if handle not in self.held:
            raise UnknownHandle(str(handle))
        view = memoryview(cast(bytes, self.held[handle]))
        if self.payload_max is not None and len(view) > self.payload_max:
            raise BudgetExceeded("payload staged by a peer", len(view), self.payload_max, 0, "knob")
        return view, Lease(handle, LeaseId(1), PathName.TCP, PathReason.OK, len(view))

    async def release(self, handle: Handle, lease: Lease) -> None:
        self.released.append(handle)


@dataclass(eq=False)
class Arrivals:
    """Implements RequestSink and StreamSink."""

    requests: list[Request] = field(default_factory=list)
    notes: list[tuple[str, bytes]] = field(default_factory=list)
    lost: list[Route] = field(default_factory=list)

    def on_request(self, request: Request) -> None:
        self.requests.append(request)

    def on_item(self, route: Route, header: bytes, payload: memoryview, charge: Charge) -> None:
        self.notes.append(("item", header))
        charge.release()

    def on_event(self, route: Route, header: bytes, payload: memoryview) -> None:
        self.notes.append(("event", header))

    def on_route_lost(self, route: Route, error: OrbitError | None) -> None:
        self.lost.append(route)


class Stage:
    """One messenger, a peer that can be reached, and transports that obey."""

    def __init__(
        self,
        *transports: FakeTransport,
        priority: tuple[PathName, ...] = (),
        rendezvous: RendezvousConfig | None = None,
        **messaging: Any,
    ) -> None:
        self.transports = transports or (FakeTransport(),)
        self.store = FakeStore()
        self.arrivals = Arrivals()
        self.opened: list[Route] = []
        self.events: list[Event] = []
        self.recorder = Recorder(self.events.append)
        self.runner = TaskRunner()
        self.session = FakeSession(PEER, b"1" * 16)
        self.unreachable: OrbitError | None = None
        config = NodeConfig(
            messaging=MessagingConfig(**messaging), rendezvous=rendezvous or RendezvousConfig()
        )
        self.messenger = Messenger(
            Surroundings(
                identity=OWN,
                config=config,
                transports=self.transports,
                priority=priority or tuple(t.name for t in self.transports),
                missing={PathName.RDMA: Missing(PathReason.NO_DEVICE, "no device")},
                store=self.store,
                session_to=self._session_to,
                spawn=self.runner.spawn,
                recorder=self.recorder,
            )
        )
        self.messenger.attach(Sinks(self.arrivals, self.arrivals, self.opened.append))

    async def _session_to(self, worker_id: WorkerId) -> Session:
        await asyncio.sleep(0)
        if self.unreachable is not None:
            raise self.unreachable
        return cast(Session, self.session)

    def peer_opened(self) -> FakeLink:
        """One more link of the same epoch, opened by the peer."""
        first = self.transports[0]
        link = FakeLink(self.messenger, first.name, first.ceiling_bytes)
        first.on_opened(cast(Session, self.session), link)
        return link

    def cut(self, error: OrbitError) -> None:
        """The epoch is over."""
        self.messenger.session_closed(cast(Session, self.session), error)

    @property
    def link(self) -> FakeLink:
        """The newest of the first transport."""
        return self.transports[0].links[-1]

    def send(self, wants: int = 0, payload: object = b"x", **options: Any) -> SendResult[Any]:
        peer = options.pop("peer", PEER)
        name = options.pop("name", "f")
        return SendResult(self.messenger.issue(peer, name, payload, Wants(wants), **options))

    async def connect(self) -> FakeLink:
        """With an open link."""
        await self.send()
        link = self.link
        link.confirm()
        link.confirmed.clear()
        return link

    async def close(self) -> None:
        self.messenger.close()
        loop = asyncio.get_running_loop()
        assert await self.runner.drain(loop.time() + 2.0)


def on_stage(
    test: Callable[[Stage], Coroutine[Any, Any, None]],
    *transports: FakeTransport,
    virtual: bool = False,
    **options: Any,
) -> None:
    """Run `test` with a stage that is closed afterwards, and has no task left then. `virtual`: its
    clock jumps.
    """

    async def run() -> None:
        stage = Stage(*transports, **options)
        try:
            await test(stage)
        finally:
            await stage.close()

    if virtual:
        run_virtual(run())
    else:
        asyncio.run(run())


async def settle() -> None:
    """Let every callback and task that is due run."""
    for _ in range(12):
        await asyncio.sleep(0)


def refused(name: PathName, reason: PathReason) -> PathUnavailable:
    return PathUnavailable(name, reason, "says the test")
