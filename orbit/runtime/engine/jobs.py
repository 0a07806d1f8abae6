"""One request from its checks to its result: the parents that it is made of, one or many.

Everything that can be known is checked before the first byte moves. A request of many ranges is cut
into parents of which two run beside each other; the first that fails ends the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from ...errors import (
    ClosedError,
    DeadlineExceeded,
    InternalError,
    OrbitError,
    Unquiesced,
    UsageError,
    WrongDirection,
)
from ...memory.range_table import RangeTable
from ...model import PathName, PathReason, Transport
from ...protocol.engine_messages import EngineHelloReply
from ...protocol.messages import MetadataReply, MetadataRequest
from ...protocol.paths import decide_offer
from ...protocol.remote_region import RemoteRegion
from ...protocol.transfer import PIECES_MAX
from ...transport.interface import Session
from ..transferring import typed_refusal
from .array_room import grants_at_once
from .ground import Ground
from .parent_job import ParentEnd, ParentJob, ParentOrder
from .peers import PeerFacts
from .region import EngineRegion, RegionHome, home_of
from .requests import Op, RangeRequest, TransferRequest, TransferResult, TransferState
from .story import RequestExplanation, Story

Request = TransferRequest | RangeRequest

TCP_RANGES_MAX = 1024  # of one parent: their list stays far below what a frame may have
PARENTS_AT_ONCE = 2  # one moves while the next one is being granted


class RequestJob:
    """`run` once; it raises nothing. `result` is None before its end."""

    def __init__(
        self,
        ground: Ground,
        peers: PeerFacts,
        home: RegionHome,
        request: Request,
        deadline: float | None,
        timeout_s: float,
    ) -> None:
        """`deadline` is a loop time and `timeout_s` what it was made of."""
        self.request = request
        self.result: TransferResult | None = None
        self._ground = ground
        self._peers = peers
        self._home = home
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._transport = Transport(request.transport)
        self._story = Story()
        self._nbytes = 0 if isinstance(request, RangeRequest) else request.nbytes  # in all

    async def run(self) -> None:
        """Cancelling it gives the request up; it returns when its end is known."""
        started = time.perf_counter()
        try:
            end = await self._moved()
        except OrbitError as error:
            end = ParentEnd(error)
        except asyncio.CancelledError:
            end = ParentEnd(None, cancelled=True)
        except Exception as error:  # a bug; whoever waits for the batch must hear of it
            end = ParentEnd(InternalError(f"a transfer failed: {error!r}"))
            end.error.__cause__ = error  # type: ignore[union-attr]  # set in the line before
        self._story.add("total", time.perf_counter() - started)
        self.result = self._result(end)

    def explanation(self) -> RequestExplanation:
        """As of now."""
        story, result = self._story, self.result
        return RequestExplanation(
            op=Op(self.request.op).value,
            transport=self._transport.value,
            nbytes=self._nbytes,
            state="running" if result is None else result.state.value,
            phases=dict(story.phases),
            rails=tuple(story.rails),
            reasons=tuple(story.reasons),
            parents=story.parents,
            grants=story.grants,
            error="" if result is None or result.error is None else str(result.error),
        )

    # --- within -----------------------------------------------------------------------------------

    @property
    def _region(self) -> EngineRegion:
        request = self.request
        return request.local if isinstance(request, RangeRequest) else request.here.region

    @property
    def _there(self) -> RemoteRegion:
        request = self.request
        return request.remote if isinstance(request, RangeRequest) else request.there.region

    async def _moved(self) -> ParentEnd:
        """How the last parent ended, or the first that failed."""
        self._check()
        table = self._table()
        async with self._bounded():
            with self._story.phase("reach"):
                session = await self._ground.node.session_to(self._there.handle.worker_id)
            self._check_path(session)
            with self._story.phase("hello"):
                facts = await self._peers.of(session)
            if not self._nbytes:
                return await self._nothing(session)
        if table is not None:
            return await self._groups(session, facts, table)
        request = self.request
        assert isinstance(request, TransferRequest)
        here = (request.here.offset, request.nbytes)
        order = self._order([here], request.there.offset, request.nbytes)
        return await self._parent(session, facts, order)

    def _check(self) -> None:
        """What needs nobody else. Raises UsageError, ClosedError, WrongDirection, PathUnavailable,
        BudgetExceeded.
        """
        request, region, there = self.request, self._region, self._there
        if home_of(region) is not self._home:
            raise UsageError("the local region belongs to another engine")
        if not region.live:
            raise ClosedError("the region")
        if not there.allows(request.direction):
            raise WrongDirection(f"{there.handle}: peers may not {Op(request.op)} this region")
        if there.handle.worker_id == self._ground.node.identity.worker_id:
            raise UsageError("the remote region is of this very node: copy the bytes")
        self._check_path(None)
        if isinstance(request, TransferRequest):
            by_rdma = self._transport is Transport.RDMA
            budgets = self._ground.budgets
            budget = budgets.staging if by_rdma and self._ground.staged else budgets.direct
            budget.check(request.nbytes)

    def _check_path(self, session: Session | None) -> None:
        if self._transport is not Transport.RDMA:
            return
        node = self._ground.node
        if self._ground.planner is None:
            known = node.paths.rdma_reason
            known = PathReason.NOT_CONFIGURED if known is PathReason.OK else known
        elif session is None:
            known = PathReason.OK
        else:
            known = node.paths.rdma_availability(session, self.request.direction)
        reason = decide_offer(Transport.RDMA, kill_switch=node.kill_switch, rdma=known)
        if reason is not PathReason.OK:
            raise node.paths.unavailable(reason)

    def _table(self) -> RangeTable | None:
        request = self.request
        if not isinstance(request, RangeRequest):
            return None
        with self._story.phase("check ranges"):
            table = RangeTable(
                request.direction,
                request.local_offsets,
                request.remote_offsets,
                request.lengths,
                local_bytes=request.local.nbytes,
                remote_bytes=request.remote.nbytes,
            )
        self._nbytes = table.nbytes
        return table

    def _order(
        self, local: list[tuple[int, int]], offset: int, nbytes: int, wire: bytes = b""
    ) -> ParentOrder:
        return ParentOrder(
            self._region,
            self._there,
            self.request.direction,
            self._transport,
            local,
            offset,
            nbytes,
            wire,
            self._deadline,
            self._timeout_s,
        )

    def _orders(
        self, session: Session, facts: EngineHelloReply, table: RangeTable
    ) -> Iterator[ParentOrder]:
        config = self._ground.config
        by_rdma = self._transport is Transport.RDMA
        staged = self._ground.staged and by_rdma
        bytes_max = config.max_staging_bytes if staged else config.max_direct_bytes
        ranges_max = TCP_RANGES_MAX
        if by_rdma:
            # Half of what there is, so that two parents fit; and a run may end within a range.
            theirs = facts.grants_max or config.max_grants
            most = min(config.max_grants, theirs, PIECES_MAX)
            ranges_max = max(1, min(most // 2, self._ranges_with_room(session)))
        for group in table.groups(ranges_max, bytes_max):
            if group.count == 1:
                ((offset, nbytes),) = group.remote_pairs()
                yield self._order(group.local_pairs(), offset, nbytes)
            else:
                yield self._order(group.local_pairs(), 0, group.nbytes, group.remote_bytes())

    def _ranges_with_room(self, session: Session) -> int:
        """Of one parent, so that two have the receives that they need if they are spread evenly
        over the rails, and one has them if all of it goes over one.
        """
        room, planner = grants_at_once(session), self._ground.planner
        if not room or planner is None:
            return PIECES_MAX
        rails = len(planner.path.routes(session))
        return min(room * rails // 2, room - self._ground.config.num_lanes)

    async def _nothing(self, session: Session) -> ParentEnd:
        """No bytes need no lease; that the other region is still there is checked all the same."""
        handle = self._there.handle
        try:
            found = await session.call(MetadataRequest(handle), MetadataReply)
        except OrbitError as error:
            typed = typed_refusal(error, handle)
            if typed is error:
                raise
            raise typed from error
        if found.total_len != self._there.nbytes:
            raise UsageError(f"{handle} has {found.total_len} bytes, not {self._there.nbytes}")
        return ParentEnd(None)

    async def _parent(
        self, session: Session, facts: EngineHelloReply, order: ParentOrder
    ) -> ParentEnd:
        return await ParentJob(self._ground, session, facts, order, self._story).run()

    async def _groups(
        self, session: Session, facts: EngineHelloReply, table: RangeTable
    ) -> ParentEnd:
        orders = self._orders(session, facts, table)
        running: set[asyncio.Task[ParentEnd]] = set()
        worst = ParentEnd(None)
        spawn = self._ground.node.context.runner.spawn
        while True:
            while not _failed(worst) and len(running) < PARENTS_AT_ONCE:
                order = next(orders, None)
                if order is None:
                    break
                running.add(spawn(self._parent(session, facts, order), "parent"))
            if not running:
                return worst
            try:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                worst = _worse(worst, ParentEnd(None, cancelled=True))
                for task in running:
                    task.cancel()
                continue
            for task in done:
                worst = _worse(worst, task.result())

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """What is awaited within ends at the deadline."""
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError as error:
            if isinstance(error, OrbitError):
                raise
            raise DeadlineExceeded(Op(self.request.op).value, self._timeout_s) from None

    def _result(self, end: ParentEnd) -> TransferResult:
        error = end.error
        if end.cancelled and error is None:
            error = ClosedError("the transfer")
        if not end.drained or isinstance(error, Unquiesced):
            state = TransferState.UNQUIESCED
        elif end.cancelled:
            state = TransferState.CANCELLED
        else:
            state = TransferState.SUCCEEDED if error is None else TransferState.FAILED
        return TransferResult(
            Op(self.request.op),
            self._nbytes if state is TransferState.SUCCEEDED else 0,
            PathName(self._transport.value),
            state,
            error,
            end.drained,
            dict(self._story.phases),
            tuple(self._story.rails),
        )


def _failed(end: ParentEnd) -> bool:
    return end.cancelled or end.error is not None


def _worse(one: ParentEnd, other: ParentEnd) -> ParentEnd:
    """The first failure, but for one whose end is not proven."""
    if not other.drained and one.drained:
        return other
    return one if _failed(one) else other
