"""A messenger, as far as health checks, the sweep and the directory see one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

from orbit.errors import DeadlineExceeded, OrbitError, UnknownPeer
from orbit.events import Recorder
from orbit.model import Incarnation, PathName, PeerIdentity, WorkerId
from orbit.runtime.messaging.contract import Payload
from orbit.runtime.messaging.results import SendResult
from orbit.runtime.messaging.routes import Route
from orbit.runtime.runner import TaskRunner
from orbit.transport.interface import Session
from orbit.transport.messages import LinkStatistics, MessageLink


async def _within(answer: Coroutine[Any, Any, bytes], timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise DeadlineExceeded("the call", timeout_s) from None


class FakeLink:
    transport = PathName.TCP

    def __init__(self) -> None:
        self.closed = False
        self.last_frame_at = asyncio.get_running_loop().time()
        self.ping_answer: float | OrbitError = 0.25
        self.goodbye_answer = True
        self.frames_received = 0

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(frames_received=self.frames_received)

    @property
    def idle_s(self) -> float:
        return asyncio.get_running_loop().time() - self.last_frame_at

    async def ping(self, timeout_s: float) -> float:
        if isinstance(self.ping_answer, OrbitError):
            raise self.ping_answer
        await asyncio.sleep(self.ping_answer)
        return self.ping_answer


class FakeSession:
    def __init__(self, worker_id: int) -> None:
        self.peer = PeerIdentity(WorkerId(worker_id), Incarnation(1))
        self.answer: float | OrbitError = 0.5
        self.aborted: list[OrbitError] = []

    async def ping(self, timeout_s: float) -> float:
        if isinstance(self.answer, OrbitError):
            await asyncio.sleep(0.5)
            raise self.answer
        await asyncio.sleep(self.answer)
        return self.answer

    def abort(self, cause: OrbitError) -> None:
        self.aborted.append(cause)


class FakeCaller:
    """Implements contract.Caller."""

    def __init__(self) -> None:
        self.identity = PeerIdentity(WorkerId(1), Incarnation(1))
        self.recorder = Recorder()
        self.runner = TaskRunner()
        self.sessions: dict[int, FakeSession | OrbitError] = {}
        self.open_routes: list[Route] = []
        self.parted: list[tuple[Route, float]] = []
        self.answer: Callable[[str, bytes], Coroutine[Any, Any, bytes]] | None = None

    def add_route(self, worker_id: int) -> tuple[Route, FakeLink]:
        link = FakeLink()
        session = FakeSession(worker_id)
        route = Route(session.peer, cast(Session, session), cast(MessageLink, link))
        self.open_routes.append(route)
        return route, link

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.runner.spawn(work, name)

    def call(
        self,
        peer: object,
        name: str,
        payload: Payload = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> SendResult[memoryview]:
        assert self.answer is not None
        answered = _within(self.answer(name, bytes(payload)), timeout or 30.0)
        return cast("SendResult[memoryview]", answered)

    def worker_id_of(self, peer: object) -> WorkerId:
        assert isinstance(peer, int)
        return WorkerId(peer)

    def route_to(self, worker_id: WorkerId) -> Route | None:
        found = (r for r in self.open_routes if r.peer.worker_id == worker_id and r.usable)
        return next(found, None)

    def routes(self) -> list[Route]:
        return [route for route in self.open_routes if not route.link.closed]

    async def session_to(self, worker_id: WorkerId) -> Session:
        found = self.sessions.get(worker_id)
        if found is None:
            raise UnknownPeer(worker_id)
        if isinstance(found, OrbitError):
            raise found
        return cast(Session, found)

    async def part(self, route: Route, timeout_s: float) -> bool:
        self.parted.append((route, asyncio.get_running_loop().time()))
        await asyncio.sleep(0.1)
        link = cast(FakeLink, route.link)
        link.closed = link.goodbye_answer
        return link.goodbye_answer
