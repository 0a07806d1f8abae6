"""The consumer's half of rendezvous: fetches by handle, and the leases that they left with the
caller.

It finds the session to a handle's owner, runs one fetch on it, and remembers over which epoch each
lease must be given back. A handle of this node itself never touches a wire. It knows no backend.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ..config import RendezvousConfig
from ..errors import (
    ClosedError,
    LeaseError,
    OrbitError,
    PeerError,
    PeerLost,
    UnknownHandle,
    UsageError,
)
from ..events import Fetched, Recorder
from ..model import Handle, Lease, LeaseId, Metadata, PathName, PathReason, Transport, WorkerId
from ..protocol.fetch import FetchPlan
from ..protocol.messages import (
    DetachRequest,
    EmptyReply,
    Message,
    MetadataReply,
    MetadataRequest,
    RefRequest,
    ReleaseRequest,
)
from ..protocol.paths import decide_offer
from ..transport.interface import Progress, Reply, Session
from .copying import copy_bytes
from .fetching import FetchContext, FetchRun, deadline_error, typed_refusal
from .owner import Owner
from .paths import Paths
from .runner import TaskRunner
from .session import ControlSession
from .sinks import Sink

_log = logging.getLogger("orbit")

SessionTo = Callable[[WorkerId], Awaitable[ControlSession]]


class Consumer:
    """Fetches of one node. `session_to` gives the open session to a worker, dialed if need be."""

    def __init__(
        self,
        worker_id: WorkerId,
        session_to: SessionTo,
        owner: Owner,
        paths: Paths,
        config: RendezvousConfig,
        recorder: Recorder,
        runner: TaskRunner,
    ) -> None:
        self._worker_id = worker_id
        self._session_to = session_to
        self._owner = owner
        self._paths = paths
        self._config = config
        self._recorder = recorder
        self._context = FetchContext(
            paths, recorder, runner, config.inline_max_bytes, self._warn, self._lose
        )
        self._held: dict[tuple[Handle, LeaseId], Session | None] = {}  # None: this node's own slot
        self._runs: dict[Session, set[FetchRun]] = {}
        self._warned: set[tuple[WorkerId, PathReason]] = set()

    @property
    def leases_held(self) -> int:
        return len(self._held)

    async def fetch(
        self,
        handle: Handle,
        sink: Sink,
        transport: Transport,
        timeout_s: float | None,
        progress: Progress | None,
    ) -> Lease:
        """Fill `sink` and hold a lease. `timeout_s` None: only silence ends it. On any error the
        sink is discarded and no lease is left.
        """
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        if handle.worker_id == self._worker_id:
            lease = await self._fetch_own(handle, sink, progress)
        else:
            session = await self._reach(handle, sink, transport, deadline, timeout_s)
            lease = await self._fetch_from(
                session, handle, sink, transport, deadline, timeout_s, progress, started
            )
        self._recorder.record(
            Fetched(handle, lease.path, lease.reason, lease.nbytes, time.perf_counter() - started)
        )
        return lease

    async def metadata(self, handle: Handle) -> Metadata:
        """Raises UnknownHandle, UnknownPeer, PeerError."""
        if handle.worker_id == self._worker_id:
            return self._owner.metadata(handle)
        reply = await self._ask(handle, MetadataRequest(handle), MetadataReply)
        return Metadata(reply.total_len, reply.refcount, reply.pinned)

    async def ref(self, handle: Handle) -> None:
        """One reference more, for one more consumer."""
        if handle.worker_id == self._worker_id:
            self._owner.ref(handle)
        else:
            await self._ask(handle, RefRequest(handle), EmptyReply)

    async def detach(self, handle: Handle, lease: Lease) -> None:
        """Drop the lock."""
        session = self._take(handle, lease)
        if session is None:
            self._owner.detach_local(handle, lease.lease_id)
        else:
            await self._give_back(session, DetachRequest(handle, lease.lease_id), handle)

    async def release(self, handle: Handle, lease: Lease) -> None:
        """Drop the lock and one reference."""
        session = self._take(handle, lease)
        if session is None:
            self._owner.release_local(handle, lease.lease_id)
        else:
            await self._give_back(session, ReleaseRequest(handle, lease.lease_id), handle)

    def session_closed(self, session: ControlSession) -> None:
        """The epoch is over: its fetches end. Leases held from it stay known, so that giving them
        back is no error.
        """
        cause = session.cause or ClosedError("the session")
        for run in list(self._runs.get(session, ())):
            known = isinstance(cause, PeerError | ClosedError)
            run.peer_gone(cause if known else PeerLost(str(session.peer), str(cause)))

    # --- within -----------------------------------------------------------------------------------

    async def _fetch_own(self, handle: Handle, sink: Sink, progress: Progress | None) -> Lease:
        started = time.perf_counter()
        lease_id, view = self._owner.acquire_local(handle)
        try:
            if view.nbytes:
                if sink.capacity_bytes is not None and view.nbytes > sink.capacity_bytes:
                    raise UsageError(
                        f"the payload has {view.nbytes} bytes, "
                        f"the destination holds {sink.capacity_bytes}"
                    )
                target = await sink.open(view.nbytes)
                await copy_bytes(view, target.view)
                if progress is not None:
                    progress(view.nbytes)
        except BaseException:
            sink.discard()
            self._owner.detach_local(handle, lease_id)
            raise
        self._held[handle, lease_id] = None
        seconds = time.perf_counter() - started
        phases = {"copy": seconds, "total": seconds}
        return Lease(handle, lease_id, PathName.LOCAL, PathReason.OK, view.nbytes, phases)

    async def _reach(
        self,
        handle: Handle,
        sink: Sink,
        transport: Transport,
        deadline: float | None,
        timeout_s: float | None,
    ) -> ControlSession:
        """The session, unless the demanded path is known to be missing before anything is sent."""
        try:
            if transport is Transport.RDMA:
                self._demand_rdma(None)
            async with asyncio.timeout_at(deadline):
                session = await self._session_to(handle.worker_id)
            if transport is Transport.RDMA:
                self._demand_rdma(session)
        except TimeoutError as error:
            sink.discard()
            if isinstance(error, OrbitError):
                raise
            raise deadline_error(timeout_s or 0.0) from None
        except BaseException:
            sink.discard()
            raise
        return session

    def _demand_rdma(self, session: Session | None) -> None:
        if session is not None:
            known = self._paths.rdma_availability(session)
        else:
            known = PathReason.OK if self._paths.rdma is not None else self._paths.rdma_reason
        reason = decide_offer(Transport.RDMA, kill_switch=not self._config.enabled, rdma=known)
        if reason is not PathReason.OK:
            raise self._paths.unavailable(reason)

    async def _fetch_from(
        self,
        session: ControlSession,
        handle: Handle,
        sink: Sink,
        transport: Transport,
        deadline: float | None,
        timeout_s: float | None,
        progress: Progress | None,
        started: float,
    ) -> Lease:
        plan = FetchPlan(
            transport,
            rdma=self._paths.rdma_availability(session),
            kill_switch=not self._config.enabled,
            capacity_bytes=sink.capacity_bytes,
            payload_bytes_max=self._config.payload_max_bytes,
        )
        run = FetchRun(
            self._context, session, handle, plan, sink, progress, deadline, timeout_s or 0.0
        )
        runs = self._runs.setdefault(session, set())
        runs.add(run)
        reach_s = time.perf_counter() - started
        try:
            lease = await run.outcome(started)
        finally:
            runs.discard(run)
            if not runs:
                self._runs.pop(session, None)
        self._held[handle, lease.lease_id] = session
        return replace(lease, phases={"reach": reach_s, **lease.phases})

    async def _ask(self, handle: Handle, request: Message, reply: type[Reply]) -> Reply:
        session = await self._session_to(handle.worker_id)
        try:
            return await session.call(request, reply)
        except OrbitError as error:
            typed = typed_refusal(error, handle)
            if typed is error:
                raise
            raise typed from error

    def _take(self, handle: Handle, lease: Lease) -> Session | None:
        """Each lease is given back once, under its own handle; a mistake leaves it as it was."""
        if not isinstance(lease, Lease):
            raise UsageError(f"not a lease: {type(lease).__name__}")
        if lease.handle != handle:
            raise LeaseError(f"lease {lease.lease_id} is of handle {lease.handle}, not {handle}")
        key = (handle, lease.lease_id)
        if key not in self._held:
            raise LeaseError(f"lease {lease.lease_id} on {handle} is not held here (any more)")
        return self._held.pop(key)

    async def _give_back(self, session: Session, request: Message, handle: Handle) -> None:
        # Sent before the first await, so that cancelling the caller leaves no lease behind. When
        # the epoch is over, the owner has ended the lease by itself, and the caller wanted nothing
        # else.
        if session.closed:
            return
        try:
            await session.call(request, EmptyReply)
        except (PeerLost, ClosedError, UnknownHandle) as error:
            _log.debug("lease on %s ended with its epoch: %s", handle, error)
        except OrbitError as error:
            typed = typed_refusal(error, handle)
            if typed is error:
                raise
            raise typed from error

    def _warn(self, session: Session, reason: PathReason) -> None:
        key = (session.peer.worker_id, reason)
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("transfers from %s go over TCP: %s", session.peer, reason.value)

    def _lose(self, session: Session, error: OrbitError) -> None:
        if isinstance(session, ControlSession):
            session.abort(PeerLost(str(session.peer), str(error)))
