"""What an owner answers its peers: the rendezvous calls, and the path of each acquire.

What follows from an answer for memory and authority is the shelf's. It knows no backend. The seed's
seventh call, the chunk pull, is answered by the TCP path on its own connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from ..config import RendezvousConfig
from ..errors import ClosedError, LeaseError, PathUnavailable, PeerRefused, WrongDirection
from ..events import PathDecided, Recorder, Side
from ..model import Direction, LeaseId, PathName, PathReason
from ..protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    EmptyReply,
    EndReply,
    GrantPiece,
    LeaseRenewRequest,
    Message,
    MetadataReply,
    MetadataRequest,
    RdmaAnswer,
    RdmaOffer,
    ReadyAnswer,
    RefRequest,
    ReleaseRequest,
    SliceRun,
)
from ..protocol.paths import OwnerFacts, count_grants, decide_owner, refused_path, spread_runs
from ..protocol.range_list import PAIR_BYTES, unpack
from ..transport.interface import CallHandler, Session
from ..transport.rails import railed
from .options import Put
from .paths import Paths
from .shelf import Shelf
from .shelved import Access

# An acquire may wait so long for its source's room. Who asked waits longer, or it would take this
# node for dumb, and end the epoch.
ADMIT_S_MAX: Final = 10.0
# A quarter of what a link takes before it breaks; the largest answer is an eighth.
INLINE_BACKLOG_MAX: Final = 1 << 20
RANGES_MAX: Final = 4096  # of one lease: looking at them holds the event loop


class PeerCalls:
    """The half of Owner that peers see. Nothing is exposed for RDMA any more once it drains."""

    def __init__(
        self, shelf: Shelf, paths: Paths, config: RendezvousConfig, recorder: Recorder
    ) -> None:
        self._shelf = shelf
        self._store = shelf.store
        self._paths = paths
        self._config = config
        self._recorder = recorder
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
        direction = _direction(request)
        access = self._shelf.acquire(
            request.handle, session.attempt, direction, ranged=request.ranged
        )
        try:
            if request.ranged:
                await self._admit(access, request)
            elif direction is Direction.WRITE:
                access.restrict(request.offset, request.nbytes)
            return await self._answer(session, access, request)
        except BaseException:
            # Nobody learns of this lease, so nobody would give it back.
            if self._store.is_held(access.lease_id):
                self._shelf.end(
                    request.handle, access.lease_id, session.attempt, drop=False, transferred=False
                )
            raise

    async def _on_detach(self, session: Session, body: object) -> Message:
        end = DetachRequest.from_wire(body)
        return await self._on_end(session, end, drop=False)

    async def _on_release(self, session: Session, body: object) -> Message:
        end = ReleaseRequest.from_wire(body)
        return await self._on_end(session, end, drop=True)

    async def _on_end(
        self, session: Session, end: DetachRequest | ReleaseRequest, *, drop: bool
    ) -> Message:
        """A reader is answered at once. A writer when nothing writes any more, with whether all of
        it is in place, so that it may look elsewhere, or try again under another lease; and so is
        a reader that wants it confirmed.
        """
        confirm = isinstance(end, DetachRequest) and end.confirm
        access = self._shelf.end(
            end.handle,
            LeaseId(end.lease_id),
            session.attempt,
            drop=drop,
            transferred=end.transferred,
        )
        if access is None and confirm:
            access = self._shelf.access(LeaseId(end.lease_id))  # ended, and may not be over
        if access is None or not (confirm or access.direction is Direction.WRITE):
            return EndReply()
        return EndReply(in_place=await asyncio.shield(access.verdict))

    async def _on_renew(self, session: Session, body: object) -> Message:
        renewal = LeaseRenewRequest.from_wire(body)
        self._shelf.renew(renewal.handle, LeaseId(renewal.lease_id), session.attempt)
        return EmptyReply()

    # --- the answer to an acquire -----------------------------------------------------------------

    async def _admit(self, access: Access, request: AcquireRequest) -> None:
        """Lock the ranges, and have the source's room for them."""
        access.lock(_ranges(request, access.slot.memory.staged.nbytes))
        offer, grants = request.rdma, 0
        if offer is not None:
            grants = count_grants((piece.view.nbytes for piece in access.span.pieces), offer.runs)
        wait_s = min(self._config.lease_timeout / 2, ADMIT_S_MAX)
        await access.admit(grants, asyncio.get_running_loop().time() + wait_s)
        if not self._store.is_held(access.lease_id):
            raise _ended_early(access)

    async def _answer(
        self, session: Session, access: Access, request: AcquireRequest
    ) -> AcquireReply:
        """For ranges an offer is a demand, and is refused in place of another path."""
        offer = request.rdma
        runs = () if offer is None else self._runs(access, request, offer)
        reason = decide_owner(request, self._facts(access, runs))
        if reason is PathReason.OK and offer is not None:
            try:
                return await self._answer_rdma(session, access, request, offer.array, runs)
            except PathUnavailable as refused:
                reason = PathReason(refused.reason)
            if runs and not offer.runs:  # spread by this side's choice: one array may still do
                try:
                    return await self._answer_rdma(session, access, request, offer.array, ())
                except PathUnavailable as refused:
                    reason = PathReason(refused.reason)
        if request.ranged and offer is not None:
            raise refused_path(reason)
        self._recorder.record(PathDecided(Side.OWNER, PathName.TCP, reason))
        return await self._answer_ready(session, access, request, reason)

    def _runs(
        self, access: Access, request: AcquireRequest, offer: RdmaOffer
    ) -> tuple[SliceRun, ...]:
        """What goes through which array; () for all through one."""
        if request.ranged and not offer.runs:
            raise PeerRefused("bad_request", "an offer for ranges names its runs")
        if railed(self._paths.rdma) is None:
            return ()
        if offer.runs or access.direction is Direction.WRITE:
            return offer.runs
        span = access.span
        runs = spread_runs(span.nbytes, offer.arrays)
        grants = count_grants((piece.view.nbytes for piece in span.pieces), runs)
        return runs if grants <= offer.pieces_max else ()

    def _facts(self, access: Access, runs: Sequence[SliceRun]) -> OwnerFacts:
        span = access.span
        return OwnerFacts(
            rdma=self._paths.rdma_reason if self._paths.rdma is None else PathReason.OK,
            kill_switch=not self._config.enabled,
            pinned=access.pinned,
            total_bytes=span.nbytes,
            draining=self._draining,
            rdma_bytes_min=self._config.rdma_min_bytes,
            pieces=count_grants((piece.view.nbytes for piece in span.pieces), runs),
        )

    async def _answer_rdma(
        self,
        session: Session,
        access: Access,
        request: AcquireRequest,
        array: int,
        runs: Sequence[SliceRun],
    ) -> AcquireReply:
        nbytes = access.span.nbytes
        rdma = self._paths.by_name(PathName.RDMA)
        exposure = await access.expose(rdma, session, array, runs)
        timeout_s = self._shelf.arm(access.lease_id, PathName.RDMA)
        if not timeout_s:
            raise _ended_early(access)
        self._recorder.record(PathDecided(Side.OWNER, PathName.RDMA, PathReason.OK))
        _note_put(access, session, request, PathName.RDMA, PathReason.OK)
        answer = RdmaAnswer(
            access.lease_id,
            exposure.descriptor,
            exposure.grant,
            _milliseconds(timeout_s),
            nbytes,
            tuple(GrantPiece(descriptor, grant) for descriptor, grant in exposure.rest),
            int(access.direction),
        )
        return AcquireReply(rdma=answer)

    async def _answer_ready(
        self, session: Session, access: Access, request: AcquireRequest, reason: PathReason
    ) -> AcquireReply:
        if not self._store.is_held(access.lease_id):
            raise _ended_early(access)
        span, reads = access.span, access.direction is Direction.READ
        nbytes, inline, transfer_id = span.nbytes, None, 0
        if reads and nbytes <= self._inline_max(session, request):
            inline = b"".join(piece.view for piece in span.pieces)
        elif nbytes:
            transfer_id = (await access.expose(self._paths.tcp, session)).transfer_id
        timeout_s = 0.0
        # Only a reader from before deadlines asks for none; it would not renew either.
        if request.lease_ms or not reads:
            wanted_s = request.lease_ms / 1000 if request.lease_ms else None
            timeout_s = self._shelf.arm(access.lease_id, PathName.TCP, wanted_s)
        if not self._store.is_held(access.lease_id):
            raise _ended_early(access)
        _note_put(access, session, request, PathName.TCP, reason)
        ready = ReadyAnswer(
            access.lease_id,
            transfer_id,
            nbytes,
            reason.value,
            inline,
            _milliseconds(timeout_s) if timeout_s else 0,
            int(access.direction),
        )
        return AcquireReply(ready=ready)

    def _inline_max(self, session: Session, request: AcquireRequest) -> int:
        """The largest payload for the answer itself. None while answers pile up: a link that is
        over its backlog breaks, and the payload has a road that waits.
        """
        if session.backlog_bytes > INLINE_BACKLOG_MAX:
            return 0
        return min(request.inline_max, self._config.inline_max_bytes)


def _direction(request: AcquireRequest) -> Direction:
    try:
        return Direction(request.direction)
    except ValueError:
        raise WrongDirection(f"this node knows no direction {request.direction}") from None


def _ranges(request: AcquireRequest, total_bytes: int) -> list[tuple[int, int]]:
    """Offset and size of each, none of them empty. Raises OutOfRange, UsageError, PeerRefused."""
    if not request.ranges:
        if not request.nbytes:
            raise PeerRefused("bad_request", "no bytes need no lease")
        return [(request.offset, request.nbytes)]
    if len(request.ranges) > RANGES_MAX * PAIR_BYTES:
        raise PeerRefused("bad_request", f"more than {RANGES_MAX} ranges")
    ranges = unpack(request.ranges, total_bytes)
    nbytes = sum(size for _, size in ranges)
    if nbytes != request.nbytes:
        raise PeerRefused("bad_request", f"ranges of {nbytes} bytes, said to be {request.nbytes}")
    return ranges


def _note_put(
    access: Access, session: Session, request: AcquireRequest, path: PathName, reason: PathReason
) -> None:
    if access.direction is Direction.WRITE:
        access.put = Put(
            request.handle,
            session.peer.worker_id,
            path,
            reason,
            request.offset,
            request.nbytes,
        )


def _milliseconds(seconds: float) -> int:
    """As a peer is told; 0 would say that there is no deadline."""
    return max(1, round(seconds * 1000))


def _ended_early(access: Access) -> LeaseError:
    return LeaseError(f"lease {access.lease_id} ended before its answer was sent")
