"""The owner's half of rendezvous: handles for staged payloads, and the calls that serve them.

It decides the path of each acquire and answers; what follows from that for memory and authority is
the shelf's. It knows no backend. The seed's seventh call, the chunk pull, is answered by the TCP
path on its own connections.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config import RendezvousConfig
from ..errors import ClosedError, LeaseError, PathUnavailable
from ..events import PathDecided, Recorder, Side
from ..model import Handle, LeaseId, Metadata, PathName, PathReason, WorkerId
from ..protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    EmptyReply,
    LeaseRenewRequest,
    Message,
    MetadataReply,
    MetadataRequest,
    RdmaAnswer,
    ReadyAnswer,
    RefRequest,
    ReleaseRequest,
)
from ..protocol.paths import OwnerFacts, decide_owner
from ..protocol.slots import LOCAL_EPOCH, SlotStatistics
from ..transport.interface import CallHandler, Session
from .options import RegisterOptions
from .paths import Paths
from .runner import TaskRunner
from .shelf import Shelf
from .staging import Staged


class Owner:
    """All that this node serves. Methods are for the node's own task; `handlers` for its peers."""

    def __init__(
        self,
        worker_id: WorkerId,
        paths: Paths,
        config: RendezvousConfig,
        recorder: Recorder,
        runner: TaskRunner,
    ) -> None:
        self._paths = paths
        self._config = config
        self._recorder = recorder
        self._shelf = Shelf(worker_id, config.lease_timeout, recorder, runner)
        self._store = self._shelf.store
        self._draining = False

    def handlers(self) -> Mapping[str, CallHandler]:
        """The calls of peers, by method name."""
        return {
            MetadataRequest.METHOD: self._on_metadata,
            AcquireRequest.METHOD: self._on_acquire,
            RefRequest.METHOD: self._on_ref,
            DetachRequest.METHOD: self._on_detach,
            ReleaseRequest.METHOD: self._on_release,
            LeaseRenewRequest.METHOD: self._on_renew,
        }

    # --- this node's own calls --------------------------------------------------------------------

    def register(self, staged: Staged, options: RegisterOptions) -> Handle:
        """Take `staged` over under a fresh handle."""
        return self._shelf.register(staged, retain_slot=options.retain)

    def staging_decided(self, reason: PathReason) -> None:
        """Count why a pinned registration went to plain memory."""
        if reason not in (PathReason.OK, PathReason.NOT_PINNED):
            self._recorder.record(PathDecided(Side.OWNER, PathName.TCP, reason))

    def metadata(self, handle: Handle) -> Metadata:
        return self._store.metadata(handle)

    def ref(self, handle: Handle) -> None:
        self._store.ref(handle)

    def acquire_local(self, handle: Handle) -> tuple[LeaseId, memoryview]:
        """A lease of this node on its own slot, and the bytes, which live as long as the lease."""
        lease_id = self._store.acquire(handle, LOCAL_EPOCH)
        return lease_id, self._shelf.staged(handle).span.view

    def detach_local(self, handle: Handle, lease_id: LeaseId) -> None:
        self._shelf.detach(handle, lease_id, LOCAL_EPOCH)

    def release_local(self, handle: Handle, lease_id: LeaseId) -> None:
        self._shelf.release(handle, lease_id, LOCAL_EPOCH)

    async def withdraw(self, handle: Handle) -> None:
        """Take a payload back, from its readers too. Returns when its memory is the caller's again.

        Raises UnknownHandle; Unquiesced when that could not be proven: the memory then stays held.
        """
        await self._shelf.withdraw(handle)

    def statistics(self) -> SlotStatistics:
        return self._store.statistics()

    # --- epochs and the end -----------------------------------------------------------------------

    def gate(self) -> None:
        """From now on nothing new is exposed for RDMA."""
        self._draining = True

    async def end_session(self, session: Session) -> None:
        """End the leases of an epoch that is over. Returns when each retraction has its verdict."""
        await self._shelf.end_epoch(session.attempt)

    async def close(self) -> None:
        """Withdraw everything. Returns when each retraction has its verdict. Idempotent."""
        self._draining = True
        await self._shelf.close()

    # --- calls of peers ---------------------------------------------------------------------------

    async def _on_metadata(self, session: Session, body: object) -> Message:
        found = self._store.metadata(MetadataRequest.from_wire(body).handle)
        return MetadataReply(found.total_bytes, found.refcount, found.pinned)

    async def _on_ref(self, session: Session, body: object) -> Message:
        self._store.ref(RefRequest.from_wire(body).handle)
        return EmptyReply()

    async def _on_acquire(self, session: Session, body: object) -> Message:
        request = AcquireRequest.from_wire(body)
        if session.closed:
            # Its leases were ended already; another one would stay for ever.
            raise ClosedError("the session")
        lease_id = self._store.acquire(request.handle, session.attempt)
        try:
            return await self._answer(session, lease_id, request)
        except BaseException:
            # Nobody learns of this lease, so nobody would give it back.
            if self._store.is_held(lease_id):
                self._shelf.detach(request.handle, lease_id, session.attempt, transferred=False)
            raise

    async def _on_detach(self, session: Session, body: object) -> Message:
        end = DetachRequest.from_wire(body)
        lease_id = LeaseId(end.lease_id)
        self._shelf.detach(end.handle, lease_id, session.attempt, transferred=end.transferred)
        return EmptyReply()

    async def _on_release(self, session: Session, body: object) -> Message:
        end = ReleaseRequest.from_wire(body)
        lease_id = LeaseId(end.lease_id)
        self._shelf.release(end.handle, lease_id, session.attempt, transferred=end.transferred)
        return EmptyReply()

    async def _on_renew(self, session: Session, body: object) -> Message:
        renewal = LeaseRenewRequest.from_wire(body)
        self._shelf.renew(renewal.handle, LeaseId(renewal.lease_id), session.attempt)
        return EmptyReply()

    # --- the answer to an acquire -----------------------------------------------------------------

    async def _answer(
        self, session: Session, lease_id: LeaseId, request: AcquireRequest
    ) -> AcquireReply:
        staged = self._shelf.staged(request.handle)
        reason = decide_owner(request, self._facts(staged))
        if reason is PathReason.OK and request.rdma is not None:
            try:
                return await self._answer_rdma(session, lease_id, staged, request.rdma.array)
            except PathUnavailable as refused:
                reason = PathReason(refused.reason)
        self._recorder.record(PathDecided(Side.OWNER, PathName.TCP, reason))
        return await self._answer_ready(session, lease_id, staged, request.inline_max, reason)

    def _facts(self, staged: Staged) -> OwnerFacts:
        return OwnerFacts(
            rdma=self._paths.rdma_reason if self._paths.rdma is None else PathReason.OK,
            kill_switch=not self._config.enabled,
            pinned=staged.pinned,
            total_bytes=staged.nbytes,
            draining=self._draining,
            rdma_bytes_min=self._config.rdma_min_bytes,
        )

    async def _answer_rdma(
        self, session: Session, lease_id: LeaseId, staged: Staged, array: int
    ) -> AcquireReply:
        path = self._paths.by_name(PathName.RDMA)
        exposure = await self._shelf.expose(path, session, lease_id, staged, array)
        if not self._shelf.arm(lease_id):
            raise LeaseError(f"lease {lease_id} ended before its answer was sent")
        self._recorder.record(PathDecided(Side.OWNER, PathName.RDMA, PathReason.OK))
        timeout_ms = max(1, round(self._store.lease_timeout_s * 1000))
        answer = RdmaAnswer(
            lease_id, exposure.descriptor, exposure.grant, timeout_ms, staged.nbytes
        )
        return AcquireReply(rdma=answer)

    async def _answer_ready(
        self,
        session: Session,
        lease_id: LeaseId,
        staged: Staged,
        inline_max: int,
        reason: PathReason,
    ) -> AcquireReply:
        if not self._store.is_held(lease_id):
            raise LeaseError(f"lease {lease_id} ended before its answer was sent")
        inline, transfer_id = None, 0
        if staged.nbytes <= min(inline_max, self._config.inline_max_bytes):
            inline = bytes(staged.span.view)
        else:
            exposure = await self._shelf.expose(self._paths.tcp, session, lease_id, staged)
            transfer_id = exposure.transfer_id
        ready = ReadyAnswer(lease_id, transfer_id, staged.nbytes, reason.value, inline)
        return AcquireReply(ready=ready)
