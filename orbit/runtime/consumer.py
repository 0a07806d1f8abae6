"""The consumer's half of rendezvous: gets and puts by handle, and the leases that gets left with
the caller.

It finds the session to a handle's owner, runs one transfer on it, and remembers over which epoch
each lease must be given back. A handle of this node itself never touches a wire. It knows no
backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..config import RendezvousConfig
from ..errors import (
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    PeerError,
    PeerLost,
    UnknownHandle,
    UsageError,
)
from ..events import Fetched, Recorder
from ..model import (
    Direction,
    Handle,
    Lease,
    LeaseId,
    Metadata,
    PathName,
    PathReason,
    Transport,
    WorkerId,
)
from ..protocol.fetch import FetchPlan, check_size, check_staged
from ..protocol.messages import (
    DetachRequest,
    EmptyReply,
    EndReply,
    Message,
    MetadataReply,
    MetadataRequest,
    RefRequest,
    ReleaseRequest,
)
from ..protocol.paths import decide_offer
from ..protocol.put import PutPlan
from ..transport.begun import Begun, begin
from ..transport.copying import copy_pieces
from ..transport.interface import Progress, Reply, Session
from .borrowed import Borrowed, StopScope
from .fetching import FetchRun
from .limited_log import LimitedLog
from .options import Put
from .owner import Owner
from .paths import Paths
from .putting import PutRun
from .runner import TaskRunner
from .session import ControlSession
from .sinks import Sink
from .spreading import Spreading
from .transferring import Held, TransferContext, TransferRun, typed_refusal

_log = logging.getLogger("orbit")

SessionTo = Callable[[WorkerId], Coroutine[Any, Any, ControlSession]]


@dataclass(frozen=True, slots=True)
class Wish:
    """How a caller wants one transfer to be made. `deadline` is a loop time and `timeout_s` what it
    was made of (None: only silence ends it). `staged_payload_max`: see FetchPlan.
    """

    transport: Transport
    timeout_s: float | None = None
    deadline: float | None = None
    progress: Progress | None = None
    staged_payload_max: int | None = None


class Consumer:
    """Gets and puts of one node. `session_to` gives the open session to a worker, dialed if need
    be.
    """

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
        self._context = TransferContext(
            paths,
            recorder,
            runner,
            config.inline_max_bytes,
            max(1, round(config.lease_timeout * 1000)),
            self._warn,
            self._lose,
        )
        # Until they are given back, also when they have ended at their owner meanwhile: then giving
        # them back is no error. A caller that gives back nothing makes it grow. None: an own slot.
        self._held: dict[tuple[Handle, LeaseId], Session | None] = {}
        self._runs: dict[Session, dict[TransferRun, None]] = {}  # oldest first
        self._spreading = Spreading(paths, runner)
        self._limited = LimitedLog(_log)

    @property
    def leases_held(self) -> int:
        return len(self._held)

    @property
    def context(self) -> TransferContext:
        """What all transfers of this node share."""
        return self._context

    async def fetch(self, handle: Handle, sink: Sink, wish: Wish) -> Lease:
        """Fill `sink` and hold a lease. On any error the sink is discarded and no lease is left."""
        started = time.perf_counter()
        if handle.worker_id == self._worker_id:
            lease = await self._fetch_own(handle, sink, wish)
        else:
            session = await self._reach(handle, sink, wish, Direction.READ)
            lease = await self._fetch_from(session, handle, sink, wish, started)
        seconds = time.perf_counter() - started
        read_s = lease.phases.get("pull") if lease.path is PathName.RDMA else None
        self._recorder.record(
            Fetched(handle, lease.path, lease.reason, lease.nbytes, seconds, read_s)
        )
        return lease

    async def put(self, handle: Handle, source: Borrowed, offset: int, wish: Wish) -> Put:
        """Write `source` into the owner's destination, from its byte `offset` on. The source is
        given back in any case, and no lease is left.
        """
        started = time.perf_counter()
        if handle.worker_id == self._worker_id:
            return await self._put_own(handle, source, offset, wish)
        session = await self._reach(handle, source, wish, Direction.WRITE)
        reach_s = time.perf_counter() - started
        plan = PutPlan(
            wish.transport,
            rdma=self._paths.rdma_availability(session, Direction.WRITE),
            kill_switch=not self._config.enabled,
            nbytes=source.nbytes,
        )
        run = PutRun(
            self._context,
            session,
            handle,
            plan,
            source,
            offset,
            wish.progress,
            wish.deadline,
            wish.timeout_s or 0.0,
        )
        with self.watched(session, run):
            return await run.outcome({"reach": reach_s}, started)

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

    def drop(self, lease: Lease) -> None:
        """As `detach`, without waiting for the owner. Silent when it is not held (any more)."""
        key = (lease.handle, lease.lease_id)
        if key not in self._held:
            return
        session = self._held.pop(key)
        if session is None:
            self._owner.detach_local(lease.handle, lease.lease_id)
        else:
            session.notify(DetachRequest(lease.handle, lease.lease_id))

    def session_closed(self, session: ControlSession) -> None:
        """The epoch is over: its fetches end. Leases held from it stay known, so that giving them
        back is no error.
        """
        self._spreading.forget(session)
        cause = session.cause or ClosedError("the session")
        for run in list(self._runs.get(session, ())):
            known = isinstance(cause, PeerError | ClosedError)
            run.peer_gone(cause if known else PeerLost(str(session.peer), str(cause)))

    # --- within -----------------------------------------------------------------------------------

    async def _fetch_own(self, handle: Handle, sink: Sink, wish: Wish) -> Lease:
        started = time.perf_counter()
        lease_id: LeaseId | None = None
        try:
            lease_id, span = self._owner.acquire_local(handle)
            plan = self._fetch_plan(sink, wish, PathReason.OK)
            if (refused := check_staged(plan, span.nbytes)) is not None:
                released, lease_id = lease_id, None
                self._owner.release_local(handle, released)
                raise refused
            check_size(plan, span.nbytes)
            if span.nbytes:
                async with _bounded("get", sink, wish):
                    await copy_pieces(span, await sink.open(span.nbytes))
                if wish.progress is not None:
                    wish.progress(span.nbytes)
        except BaseException:
            sink.discard()
            if lease_id is not None:
                self._owner.detach_local(handle, lease_id)
            raise
        self._owner.local_done(lease_id)
        self._held[handle, lease_id] = None
        seconds = time.perf_counter() - started
        phases = {"copy": seconds, "total": seconds}
        return Lease(handle, lease_id, PathName.LOCAL, PathReason.OK, span.nbytes, phases)

    async def _put_own(self, handle: Handle, source: Borrowed, offset: int, wish: Wish) -> Put:
        started = time.perf_counter()
        nbytes = source.nbytes
        try:
            lease_id, span = self._owner.acquire_local_put(handle, offset, nbytes)
            try:
                async with _bounded("put", source, wish):
                    await copy_pieces(source.span, span)
                if wish.progress is not None and nbytes:
                    wish.progress(nbytes)
            except BaseException:
                self._owner.finish_local_put(handle, lease_id, transferred=False)
                raise
            self._owner.finish_local_put(handle, lease_id, transferred=True)
        finally:
            source.give_back()
        seconds = time.perf_counter() - started
        phases = {"copy": seconds, "total": seconds}
        peer = self._worker_id
        return Put(handle, peer, PathName.LOCAL, PathReason.OK, offset, nbytes, phases)

    async def _reach(
        self, handle: Handle, memory: Held, wish: Wish, direction: Direction
    ) -> ControlSession:
        """The session, unless the demanded path is known to be missing before anything is sent."""
        what = "get" if direction is Direction.READ else "put"
        demanded = wish.transport is Transport.RDMA
        try:
            if demanded:
                self._demand_rdma(None, direction)
            session = begin(self._session_to(handle.worker_id))
            if isinstance(session, Begun):  # none is open
                async with _bounded(what, memory, wish):
                    session = await asyncio.get_running_loop().create_task(session)
            if demanded:
                self._demand_rdma(session, direction)
        except BaseException:
            memory.discard()
            raise
        return session

    def _demand_rdma(self, session: Session | None, direction: Direction) -> None:
        if session is not None:
            known = self._paths.rdma_availability(session, direction)
        else:
            known = PathReason.OK if self._paths.rdma is not None else self._paths.rdma_reason
        reason = decide_offer(Transport.RDMA, kill_switch=not self._config.enabled, rdma=known)
        if reason is not PathReason.OK:
            raise self._paths.unavailable(reason)

    async def _fetch_from(
        self, session: ControlSession, handle: Handle, sink: Sink, wish: Wish, started: float
    ) -> Lease:
        plan = self._fetch_plan(sink, wish, self._paths.rdma_availability(session))
        run = FetchRun(
            self._context,
            session,
            handle,
            plan,
            sink,
            wish.progress,
            wish.deadline,
            wish.timeout_s or 0.0,
            self._spreading.arrays(session),
        )
        reach_s = time.perf_counter() - started
        with self.watched(session, run):
            lease = await run.outcome(started)
        self._spreading.fetched(session, lease)
        self._held[handle, lease.lease_id] = session
        return replace(lease, phases={"reach": reach_s, **lease.phases})

    def _fetch_plan(self, sink: Sink, wish: Wish, rdma: PathReason) -> FetchPlan:
        return FetchPlan(
            wish.transport,
            rdma,
            kill_switch=not self._config.enabled,
            capacity_bytes=sink.capacity_bytes,
            payload_bytes_max=self._config.payload_max_bytes,
            staged_payload_max=wish.staged_payload_max,
        )

    @contextlib.contextmanager
    def watched(self, session: Session, run: TransferRun) -> Iterator[None]:
        """While it runs, the end of its session is told to it."""
        runs = self._runs.setdefault(session, {})
        runs[run] = None
        try:
            yield
        finally:
            runs.pop(run, None)
            if not runs:
                self._runs.pop(session, None)

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
            await session.call(request, EndReply)
        except (PeerLost, ClosedError, UnknownHandle) as error:
            _log.debug("lease on %s ended with its epoch: %s", handle, error)
        except OrbitError as error:
            typed = typed_refusal(error, handle)
            if typed is error:
                raise
            raise typed from error

    def _warn(self, session: Session, reason: PathReason) -> None:
        self._limited.warning(
            (session.peer.worker_id, reason),
            "transfers with %s go over TCP: %s",
            *(session.peer, reason.value),
            event="transfer_by_tcp",
            node=f"{self._worker_id:016x}",
            peer=session.peer,
            path=PathName.TCP,
            reason=reason,
        )

    def _lose(self, session: Session, error: OrbitError) -> None:
        if isinstance(session, ControlSession):
            session.abort(PeerLost(str(session.peer), str(error)))


@contextlib.asynccontextmanager
async def _bounded(what: str, memory: Held, wish: Wish) -> AsyncIterator[None]:
    """What is awaited within ends at the deadline, and when the memory is wanted back."""
    scope = StopScope()
    memory.watch(scope.stop)
    try:
        async with asyncio.timeout_at(wish.deadline), scope:
            yield
    except TimeoutError as error:
        if isinstance(error, OrbitError):
            raise
        raise DeadlineExceeded(what, wish.timeout_s or 0.0) from None
    finally:
        memory.watch(None)
