"""Nodes that know nothing but streams, on links of simulated delay that can be cut.

The streams are real; the messenger, the links and the staging store are as small as they can be.
Meant for `run_virtual`, where heartbeats cost nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine, Generator, Iterable, Mapping
from typing import Any, cast

from ..config import MessagingConfig
from ..errors import (
    BudgetExceeded,
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    PeerLost,
    UnknownHandle,
)
from ..events import Recorder
from ..model import (
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
from ..protocol.messaging.packets import PacketKind
from ..runtime.messaging.contract import Charge
from ..runtime.messaging.results import SendResult
from ..runtime.messaging.routes import Route
from ..runtime.messaging.streams import Streams
from ..runtime.runner import TaskRunner
from ..transport.interface import Session
from ..transport.messages import MessageLink, OutgoingFrame

CEILING_BYTES = 256 << 10


class StreamLink:
    """One direction's end of a link: what is sent arrives at `far` in order, some time later.
    Messages and events are ordered among themselves only.
    """

    transport = PathName.TCP

    def __init__(self, rng: random.Random, delay_max_s: float) -> None:
        self.closed = False
        self.ceiling_bytes = CEILING_BYTES
        self.consumed_bytes = 0
        self.sent: list[OutgoingFrame] = []
        self.node: StreamNode | None = None
        self.far: StreamLink | None = None
        self.route: Route | None = None
        self._random = rng
        self._delay_max_s = delay_max_s
        self._not_before = {True: 0.0, False: 0.0}
        self._loop = asyncio.get_running_loop()

    def send(self, frame: OutgoingFrame) -> None:
        if self.closed:
            frame.failed(NotAdmitted("peer", "the link is closed"))
            return
        self.sent.append(frame)
        due = self.arrival(ordered=frame.kind == PacketKind.MESSAGE)
        self._loop.call_at(due, self._arrive, frame)

    def arrival(self, *, ordered: bool) -> float:
        """When what is sent now arrives: behind what was sent before."""
        delay_s = self._random.uniform(0, self._delay_max_s)
        due = max(self._not_before[ordered] + 1e-9, self._loop.time() + delay_s)
        self._not_before[ordered] = due
        return due

    def _arrive(self, frame: OutgoingFrame) -> None:
        far = self.far
        if self.closed or far is None or far.node is None or far.route is None:
            return
        frame.posted()
        frame.done()
        payload = memoryview(bytes(frame.payload)).toreadonly()
        if frame.kind == PacketKind.MESSAGE:
            nbytes = frame.nbytes
            charge = Charge(cast(MessageLink, far), nbytes)
            far.node.streams.on_item(far.route, frame.header, payload, charge)
            assert charge._link is None, "an item stays in its link's count"
        else:
            far.node.streams.on_event(far.route, frame.header, payload)

    def consumed(self, charge: int) -> None:
        self.consumed_bytes += charge

    def renewed(self, charge: int) -> None:
        self.consumed_bytes -= charge

    def cut(self) -> None:
        """This end learns that the link is gone."""
        if not self.closed:
            self.closed = True
            assert self.node is not None
            assert self.route is not None
            self.node.lose(self.route)


class StreamCall:
    """What the pair's `call` returns: the part of a SendResult that streams use."""

    def __init__(self, work: asyncio.Task[memoryview]) -> None:
        self._work = work
        self.route: Route | None = None

    def withdraw(self) -> bool:
        return False

    def __await__(self) -> Generator[Any, None, memoryview]:
        return asyncio.shield(self._work).__await__()


class StagedItems:
    """The rendezvous of all nodes: payloads by handle, with a delay, and failures on demand. One of
    more than `payload_max` bytes is refused, which releases it.
    """

    def __init__(self, rng: random.Random, delay_max_s: float) -> None:
        self.payloads: dict[Handle, bytes] = {}
        self.leases = 0
        self.payload_max: int | None = None
        self.fail_next_get: OrbitError | None = None
        self.fail_next_register: OrbitError | None = None
        self._random = rng
        self._delay_max_s = delay_max_s
        self._ids = itertools.count(1)

    async def register(self, worker_id: WorkerId, buffer: object) -> Handle:
        await asyncio.sleep(self._random.uniform(0, self._delay_max_s))
        error, self.fail_next_register = self.fail_next_register, None
        if error is not None:
            raise error
        handle = Handle(worker_id, SlotId(next(self._ids)))
        self.payloads[handle] = bytes(cast(bytes, buffer))
        return handle

    async def get(self, handle: Handle) -> tuple[memoryview, Lease]:
        await asyncio.sleep(self._random.uniform(0, self._delay_max_s))
        error, self.fail_next_get = self.fail_next_get, None
        if error is not None:
            raise error
        if handle not in self.payloads:
            raise UnknownHandle(str(handle))
        data = memoryview(self.payloads[handle])
        if self.payload_max is not None and len(data) > self.payload_max:
            del self.payloads[handle]
            raise BudgetExceeded("payload of a peer", len(data), self.payload_max, 0, "its knob")
        self.leases += 1
        return data, Lease(handle, LeaseId(1), PathName.TCP, PathReason.OK, len(data))

    async def release(self, handle: Handle) -> None:
        await asyncio.sleep(self._random.uniform(0, self._delay_max_s))
        self.leases -= 1
        self.payloads.pop(handle, None)


class StreamNode:
    """Implements contract.Caller and ItemStore for its own streams."""

    def __init__(self, world: StreamNodes, worker_id: int, config: MessagingConfig) -> None:
        self.identity = PeerIdentity(WorkerId(worker_id), Incarnation(worker_id))
        self.recorder = Recorder()
        self.runner = TaskRunner()
        self.world = world
        self.links: dict[WorkerId, StreamLink] = {}
        self.streams = Streams(self, self, config)

    # --- Caller ---

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.runner.spawn(work, name)

    def call(
        self,
        peer: object,
        name: str,
        payload: bytes | bytearray | memoryview = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> SendResult[memoryview]:
        assert isinstance(peer, int)
        link = self.world.connect(self, WorkerId(peer))
        due = link.arrival(ordered=True)
        work = asyncio.ensure_future(self._call(link, due, bytes(payload)))
        call = StreamCall(work)
        call.route = link.route
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cast(SendResult[memoryview], call)

    async def _call(self, link: StreamLink, due: float, payload: bytes) -> memoryview:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[memoryview] = loop.create_future()

        def arrive() -> None:
            far = link.far
            if not link.closed and far is not None and not far.closed and far.node is not None:
                reply = far.node.streams.attach_requested(self.identity, payload)
                loop.call_at(far.arrival(ordered=False), answer.set_result, memoryview(reply))

        loop.call_at(due, arrive)
        while not answer.done():
            if link.closed:
                raise OutcomeUnknown(str(self.identity), "cut")
            await asyncio.sleep(self.world.delay_max_s / 4)
        return answer.result()

    def worker_id_of(self, peer: object) -> WorkerId:
        raise NotImplementedError

    def route_to(self, worker_id: WorkerId) -> Route | None:
        raise NotImplementedError

    def routes(self) -> Iterable[Route]:
        return [link.route for link in self.links.values() if link.route is not None]

    async def session_to(self, worker_id: WorkerId) -> Session:
        raise NotImplementedError

    async def part(self, route: Route, timeout_s: float) -> bool:
        raise NotImplementedError

    # --- ItemStore ---

    async def stage_copy(self, buffer: object) -> Handle:
        return await self.world.store.register(self.identity.worker_id, buffer)

    async def withdraw(self, handle: Handle) -> None:
        if self.world.store.payloads.pop(handle, None) is None:
            raise UnknownHandle(str(handle))

    async def fetch(self, handle: Handle, timeout_s: float | None) -> tuple[memoryview, Lease]:
        assert timeout_s is None
        return await self.world.store.get(handle)

    async def release(self, handle: Handle, lease: Lease) -> None:
        await self.world.store.release(handle)

    # --- the world's ---

    def lose(self, route: Route) -> None:
        self.links.pop(route.peer.worker_id, None)
        self.streams.on_route_lost(route, PeerLost(str(route.peer), "cut"))


class StreamNodes:
    """`seed` decides every delay."""

    def __init__(self, seed: int = 0, delay_max_s: float = 0.001) -> None:
        self.random = random.Random(seed)
        self.delay_max_s = delay_max_s
        self.store = StagedItems(self.random, delay_max_s)
        self.nodes: dict[WorkerId, StreamNode] = {}

    def add(self, *, heartbeat_s: float = 5.0) -> StreamNode:
        node = StreamNode(self, len(self.nodes) + 1, MessagingConfig(heartbeat_s=heartbeat_s))
        self.nodes[node.identity.worker_id] = node
        return node

    def delay_s(self) -> float:
        return self.random.uniform(0, self.delay_max_s)

    def connect(self, node: StreamNode, worker_id: WorkerId) -> StreamLink:
        """The link from `node` to that one, made when there is none."""
        link = node.links.get(worker_id)
        if link is not None and not link.closed:
            return link
        far_node = self.nodes[worker_id]
        near, far = (StreamLink(self.random, self.delay_max_s) for _ in range(2))
        near.far, far.far = far, near
        near.node, far.node = node, far_node
        near.route = Route(far_node.identity, None, cast(MessageLink, near))
        far.route = Route(node.identity, None, cast(MessageLink, far))
        node.links[worker_id] = near
        if far_node is not node:
            far_node.links[node.identity.worker_id] = far
        return near

    def cut(self, link: StreamLink) -> None:
        """Both ends hear of it, at different times. What is on its way is lost."""
        loop = asyncio.get_running_loop()
        for end in (link, link.far):
            if end is not None:
                loop.call_later(self.delay_s(), end.cut)

    async def settle(self) -> None:
        """Until no task of any node is left and nothing is on its way."""
        loop = asyncio.get_running_loop()
        for node in self.nodes.values():
            assert await node.runner.drain(loop.time() + 60)
        await asyncio.sleep(4 * self.delay_max_s + 0.001)
        for node in self.nodes.values():
            assert await node.runner.drain(loop.time() + 60)

    def check_nothing_left(self) -> None:
        """No stream, no promise, no hold, no staged item, no task."""
        for node in self.nodes.values():
            found = node.streams.statistics()
            left = (found.inboxes, found.senders, found.promised_bytes, len(node.runner))
            assert left == (0, 0, 0, 0), found
            assert all(route.holds == 0 for route in node.routes())
        assert not self.store.payloads
        assert self.store.leases == 0
