"""One parent from its locks to its end: what it takes, in one fixed order, and that all of it goes
back when nothing reaches its memory any more, and not before.

The order is range lock, grants, bytes, rails; waiting for a budget ends at the request's deadline.
How the parent itself runs is parent_run.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ClosedError, OrbitError, PathUnavailable, Unquiesced
from ...model import Direction, PathName, PathReason, Transport
from ...protocol.engine_messages import EngineHelloReply
from ...protocol.messages import SliceRun
from ...protocol.parent import ParentPlan
from ...protocol.remote_region import RemoteRegion
from ...transport.begun import Begun, begin
from ...transport.interface import Session
from ..retained import Retained, proven, retain
from .ground import Ground
from .local_memory import LocalMemory
from .parent_run import Ends, ParentRun, ParentWish, ReadRun, WriteRun
from .planning import RailPlan, RailPlanner
from .region import EngineRegion
from .staging import StagedMemory
from .story import Story


@dataclass(frozen=True, slots=True)
class ParentOrder:
    """What one parent moves. `local` and `remote`: offset and size of each range, in payload order;
    `wire`: the remote ones as they travel, when there are several.
    """

    region: EngineRegion
    there: RemoteRegion
    direction: Direction
    transport: Transport
    local: Sequence[tuple[int, int]]
    offset: int
    nbytes: int
    wire: bytes
    deadline: float | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ParentEnd:
    """`error` None: it succeeded, unless it was `cancelled`. `drained`: nothing of it reaches local
    memory any more.
    """

    error: OrbitError | None
    cancelled: bool = False
    drained: bool = True


class ParentJob:
    """`run` once. What it has taken is given back by then, unless the end is not `drained`; then
    later, in the background, or never.
    """

    def __init__(
        self,
        ground: Ground,
        session: Session,
        facts: EngineHelloReply,
        order: ParentOrder,
        story: Story,
    ) -> None:
        self._ground = ground
        self._session = session
        self._facts = facts
        self._order = order
        self._story = story
        self._holds = contextlib.ExitStack()
        self._staged: StagedMemory | None = None
        self._plan: RailPlan | None = None
        self._private: list[int] = []  # arrays that are this parent's alone
        self._room = contextlib.ExitStack()  # for grants, on arrays that others use, too
        self._late: Retained | None = None  # until its end is proven after all

    async def run(self) -> ParentEnd:
        """Cancelling it gives the parent up; its end is waited for all the same."""
        try:
            run = await self._begin()
        except OrbitError as error:
            self._holds.close()
            return ParentEnd(error)
        except asyncio.CancelledError:
            self._holds.close()
            return ParentEnd(None, cancelled=True)
        except BaseException:
            self._holds.close()
            raise
        cancelled = False
        with self._ground.node.watched(self._session, run):
            run.start()
            while not run.settled.done():
                try:
                    await asyncio.shield(run.settled)
                except asyncio.CancelledError:
                    cancelled = True
                    run.cancel()
        return await self._ended(run, cancelled)

    # --- the beginning ----------------------------------------------------------------------------

    async def _begin(self) -> ParentRun:
        order, ground = self._order, self._ground
        local = LocalMemory(order.region, order.local, order.direction)
        ground.parents.enter()
        self._holds.callback(ground.parents.leave)
        self._holds.callback(local.give_back)
        self._story.parents += 1
        memory: Ends = local
        planner = ground.planner
        if order.transport is Transport.RDMA:
            if planner is None:
                raise ground.node.paths.unavailable(ground.node.paths.rdma_reason)
            sizes = self._sizes(planner)
            await self._take_grants(planner, sizes)
            memory = await self._take_bytes(local)
            self._plan = planner.plan(self._session, sizes)
            self._holds.callback(planner.repay, self._plan)
            self._holds.callback(self._room.close)
            self._story.chose(self._plan.devices, self._plan.plan.reasons)
        else:
            await self._take_direct()
        wish = ParentWish(
            order.there.handle,
            ParentPlan(
                order.transport, PathReason.OK, direction=order.direction, nbytes=order.nbytes
            ),
            order.offset,
            order.wire,
            order.deadline,
            order.timeout_s,
            ground.config.teardown_timeout,
        )
        kind = ReadRun if order.direction is Direction.READ else WriteRun
        return kind(ground.node.context, self._session, wish, memory, self._connect)

    def _sizes(self, planner: RailPlanner) -> tuple[int, ...]:
        facts = self._facts
        peer = (facts.slices_max, facts.grants_max)
        count_max = planner.slices_max(self._order.direction, peer)
        return planner.sizes([nbytes for _, nbytes in self._order.local], count_max)

    async def _take_grants(self, planner: RailPlanner, sizes: Sequence[int]) -> None:
        """One for each range, and one more for each place where a run ends within one."""
        runs = 1  # as a single slice makes
        if len(sizes) > 1:
            lanes = self._ground.config.num_lanes
            runs = max(1, min(len(sizes), len(planner.path.routes(self._session)) * lanes))
        count = len(self._order.local) - 1 + runs
        with self._story.phase("wait for grants"):
            taken = await self._ground.budgets.grants.take(count, self._order.deadline)
        self._holds.callback(taken.give_back)
        self._story.grants += count

    async def _take_bytes(self, local: LocalMemory) -> Ends:
        memory = self._ground.node.paths.memory
        if not self._ground.staged or memory is None:
            await self._take_direct()
            return local
        nbytes = self._order.nbytes
        with self._story.phase("wait for staging"):
            taken = await self._ground.budgets.staging.take(nbytes, self._order.deadline)
        self._holds.callback(taken.give_back)
        buffer = await memory.allocate(nbytes)
        staged = self._staged = StagedMemory(local, memory, buffer)
        self._holds.callback(staged.give_back)
        if self._order.direction is Direction.WRITE:
            with self._story.phase("copy in"):
                await staged.fill()
        return staged

    async def _take_direct(self) -> None:
        with self._story.phase("wait for bytes"):
            taken = await self._ground.budgets.direct.take(self._order.nbytes, self._order.deadline)
        self._holds.callback(taken.give_back)

    async def _connect(self) -> Sequence[SliceRun]:
        planner, plan = self._ground.planner, self._plan
        if planner is None or plan is None:
            raise PathUnavailable(PathName.RDMA, PathReason.NOT_CONFIGURED)
        # The source lost some when this is the second try: those that are left would be in its way.
        unproven = await self._close_private()
        if unproven is not None:
            raise unproven
        private = self._ground.staged or self._facts.host_memory == "staged"
        runs = await planner.connect(
            self._session,
            self._order.direction,
            plan,
            self._order.deadline,
            private=self._private if private else None,
        )
        self._room.close()
        if not private:
            sizes = [nbytes for _, nbytes in self._order.local]
            deadline = self._order.deadline
            with self._story.phase("wait for receives"):
                room = await planner.room.take(self._session, sizes, runs, deadline)
            self._room.enter_context(room)
        return runs

    # --- the end ----------------------------------------------------------------------------------

    async def _ended(self, run: ParentRun, cancelled: bool) -> ParentEnd:
        error = run.failure()
        cancelled = cancelled and isinstance(error, ClosedError)
        if not run.over.done():
            late = self._unquiesced("its end was not proven in time", error)
            self._late = retain(late, self)
            runner = self._ground.node.context.runner
            run.over.add_done_callback(
                lambda _: runner.spawn(self._close(run, succeeded=False), "late end of a transfer")
            )
            return ParentEnd(late, cancelled, drained=False)
        for name, seconds in run.phases.items():
            self._story.add(name, seconds)
        unproven = await self._close(run, succeeded=error is None)
        if unproven is not None:
            unproven.__cause__ = error if error is not unproven else None
            return ParentEnd(unproven, cancelled, drained=False)
        return ParentEnd(error, cancelled)

    async def _close(self, run: ParentRun, *, succeeded: bool) -> Unquiesced | None:
        """Give everything back; or nothing, and say why. Not cut short by a cancellation."""
        if run.unproven:
            error = run.failure()
            self._ground.parents.keep(self._order.nbytes)
            return error if isinstance(error, Unquiesced) else self._unquiesced("its move", error)
        rest = begin(self._give_back(succeeded=succeeded))
        if not isinstance(rest, Begun):
            return rest
        work = asyncio.get_running_loop().create_task(rest)
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(work)
        return work.result()

    async def _give_back(self, *, succeeded: bool) -> Unquiesced | None:
        unproven = await self._close_private()
        if unproven is not None:
            retain(unproven, self)
            self._ground.parents.keep(self._order.nbytes)
            return unproven
        if succeeded and self._staged is not None and self._order.direction is Direction.READ:
            with self._story.phase("copy out"):
                await self._staged.empty()
        if self._late is not None:
            proven(self._late)
        self._holds.close()
        return None

    async def _close_private(self) -> Unquiesced | None:
        """Also while something fails: each array has its verdict. Those that are left are asked
        again by the next call.
        """
        first: Unquiesced | None = None
        planner = self._ground.planner
        private, self._private = self._private, []
        for array in private:
            if planner is None:
                break
            try:
                with self._story.phase("close arrays"):
                    await planner.path.close_array(self._session, self._order.direction, array)
            except OrbitError as error:
                known = error if isinstance(error, Unquiesced) else None
                first = first or known or self._unquiesced("its arrays", error)
                self._private.append(array)
        return first

    def _unquiesced(self, cause: str, error: OrbitError | None) -> Unquiesced:
        made = Unquiesced("memory of a transfer", self._order.nbytes, cause)
        made.__cause__ = error
        return made
