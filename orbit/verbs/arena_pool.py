"""PinnedMemory of the RDMA path: a growing pool of registered arenas, beside the registrations of
memory that others own, under one budget.

Owns who gets which piece, when an arena is added, and the timer that gives empty ones back; sizes
and what may go are the policy's. Every arena is registered on every device, since the consumer of a
payload chooses the rail, in the protection domain that new work goes to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..config import RdmaPoolConfig
from ..errors import BudgetExceeded, BusyError, UsageError
from ..memory.budget import Budget
from ..memory.pages import whole_pages
from ..memory.pool_policy import ArenaUse, PoolPolicy, surplus
from ..model import PathReason
from ..transport.interface import MemoryStatistics, PinnedBuffer, RegisteredRange
from ..transport.timer import DeadlineTimer
from .arena_mapping import ArenaMapping, Growth
from .arenas import Arena
from .device import DeviceContext
from .domain import Domain
from .external import ExternalRegistrations
from .registration import REGISTER_TIMEOUT_S, Registration, TargetRegistration
from .retention import Retained


class ArenaPool:
    """All methods belong to one event loop."""

    def __init__(
        self,
        devices: Sequence[DeviceContext],
        config: RdmaPoolConfig,
        budget: Budget,
        retained: Retained,
    ) -> None:
        self.budget = budget
        self.retained = retained
        self.failure = ""  # why memory could not be had the last time, for people
        self._devices = tuple(devices)
        self._config = config
        self._policy = PoolPolicy(
            initial_bytes=whole_pages(config.initial_arena_bytes),
            max_bytes=whole_pages(config.max_arena_bytes),
            dedicated_min_bytes=config.dedicated_arena_min,
            limit_bytes=min((d.region_bytes_max for d in self._devices), default=1 << 63),
        )
        self._pooled: list[Arena] = []  # oldest first
        self._dedicated: set[Arena] = set()
        self._mapping = ArenaMapping(self._devices, budget, retained, self._forget)
        self._growth: Growth | None = None  # of the pooled ones: at most one at a time
        self._timer: DeadlineTimer | None = None
        self._external = ExternalRegistrations(self._devices, budget, retained)
        self._gated = False

    # --- pieces ---

    async def ensure(self) -> PathReason:
        """OK, budget, pool_exhausted, draining; `failure` has the text."""
        while not self._pooled:
            if self._gated:
                return PathReason.DRAINING
            try:
                await self._grow(1)
            except BudgetExceeded as error:
                self.failure = str(error)
                return PathReason.BUDGET
            except BusyError as error:
                self.failure = str(error)
                return PathReason.POOL_EXHAUSTED
        return PathReason.DRAINING if self._gated else PathReason.OK

    def allocate_nowait(self, nbytes: int) -> PinnedBuffer:
        """See PinnedMemory. Also raises UsageError (no bytes)."""
        self._policy.check(nbytes)
        if self._gated:
            raise BusyError("the pool is closing")
        # The oldest first, which are the smallest: so the large ones run empty, and can be given
        # back. Sizes double, so there are few, and a full one costs one comparison.
        for arena in self._pooled:
            piece = arena.allocate(nbytes)
            if piece is not None:
                if arena.idle_since is not None:
                    arena.idle_since = None
                    self._arm_timer()
                return piece
        if not self._pooled:
            raise BusyError("no arena is mapped")
        raise BusyError(f"no arena has room for {nbytes} bytes now")

    async def allocate(self, nbytes: int) -> PinnedBuffer:
        """See PinnedMemory. Also raises UsageError (no bytes). Cancelled: a mapping that nobody
        else waits for is undone.
        """
        self._policy.check(nbytes)
        while True:
            try:
                return await self._allocate(nbytes)
            except BudgetExceeded:
                if not await self._mapping.wait_unmapped():
                    raise

    def free(self, buffer: PinnedBuffer) -> None:
        """See PinnedMemory. A dedicated arena goes with its piece, in the background."""
        arena = buffer.arena
        if not isinstance(arena, Arena):
            raise UsageError("this buffer is not a piece of this pool")
        arena.free(buffer)
        if not arena.empty:
            return
        if arena in self._dedicated:
            self._dedicated.discard(arena)
            self._mapping.unmap(arena)
        elif arena in self._pooled:
            arena.idle_since = asyncio.get_running_loop().time()
            self._arm_timer()

    def owns(self, buffer: PinnedBuffer) -> bool:
        """Whether it is a piece of one of this pool's arenas."""
        return buffer.arena in self._mapping.arenas

    # --- memory of others ---

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        """See PinnedMemory. The same bytes registered again share one registration."""
        while True:
            try:
                return await self._external.register(view, remote=remote)
            except BudgetExceeded:
                if not await self._mapping.wait_unmapped():
                    raise

    async def deregister(self, registered: RegisteredRange) -> None:
        """See PinnedMemory. Raises UsageError the second time."""
        await self._external.deregister(registered)

    async def register_target(self, domain: Domain, view: memoryview) -> TargetRegistration:
        """For one operation in one domain. Raises as TargetRegistration.open."""
        return await TargetRegistration.open(domain, view, self.budget, self.retained)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Of arenas and regions: all but those for one operation."""
        arenas = (arena.registration for arena in self._mapping.arenas)
        return (*arenas, *self._external.registrations)

    # --- the end ---

    def gate(self) -> None:
        self._gated = True
        self._external.gate()
        if self._timer is not None:
            self._timer.arm(None)

    async def drain(self) -> None:
        await self._mapping.drain()
        await self._external.drain()

    async def close(self) -> None:
        """Gate, drain, deregister everything, also what is still in use elsewhere: the caller has
        proven that no device accesses it. Raises the first DeviceError, TimeoutError; what is left
        stays registered, charged and retained, and closing again goes on there.
        """
        self.gate()
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            await self.drain()
            try:
                await self._mapping.close()
            finally:
                await self._external.close()

    # --- figures ---

    @property
    def registered_bytes(self) -> int:
        """Of arenas and regions, once per device; what is retained counts."""
        return self._mapping.charged_bytes + self._external.charged_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of the pieces that are out, in whole granules."""
        return sum(arena.used_bytes for arena in (*self._pooled, *self._dedicated))

    def statistics(self) -> MemoryStatistics:
        arenas = [*self._pooled, *self._dedicated]
        return MemoryStatistics(
            registered_bytes=self.registered_bytes,
            budget_bytes=self.budget.limit_bytes,
            arena_bytes=sum(arena.nbytes for arena in arenas),
            arena_bytes_used=self.allocated_bytes,
            arenas=len(arenas),
            regions=self._external.live_count,
            registrations={
                "arena": self._mapping.mapped_count,
                "external": self._external.registered_count,
            },
        )

    # --- parts ---

    async def _allocate(self, nbytes: int) -> PinnedBuffer:
        if self._policy.dedicated(nbytes):
            try:
                return await self._allocate_dedicated(nbytes)
            except BudgetExceeded:
                # A pooled one that has the room is better than nothing.
                piece = _piece_or_none(self, nbytes)
                if piece is None:
                    raise
                return piece
        while True:
            piece = _piece_or_none(self, nbytes)
            if piece is not None:
                return piece
            if self._gated:
                raise BusyError("the pool is closing")
            await self._grow(nbytes)

    async def _allocate_dedicated(self, nbytes: int) -> PinnedBuffer:
        if self._gated:
            raise BusyError("the pool is closing")
        piece: list[PinnedBuffer] = []

        def take(arena: Arena) -> None:
            self._dedicated.add(arena)
            piece.append(arena.allocate_whole(nbytes))

        try:
            await self._mapping.start(whole_pages(nbytes), take).wait()
        except BaseException:
            if piece:  # cancelled at the last moment
                self.free(piece[0])
            raise
        return piece[0]

    async def _grow(self, nbytes: int) -> None:
        """Map the next pooled arena, or wait for the one that is being mapped. Raises
        BudgetExceeded, BusyError.
        """
        growth = self._growth
        if growth is None or growth.ended:
            growth = self._growth = self._begin_growth(nbytes)
        if growth.abandoned:
            await growth.wait_undone()  # then the caller begins anew
        else:
            await growth.wait()

    def _begin_growth(self, nbytes: int) -> Growth:
        largest = max((arena.nbytes for arena in self._pooled), default=0)
        refused: BudgetExceeded | None = None
        for size in self._policy.pooled_sizes(nbytes, largest):
            try:
                return self._mapping.start(size, self._take_pooled)
            except BudgetExceeded as error:
                refused = refused or error
        assert refused is not None  # there is always one size
        raise refused

    def _take_pooled(self, arena: Arena) -> None:
        self._pooled.append(arena)
        arena.idle_since = asyncio.get_running_loop().time()
        self._arm_timer()

    def _forget(self, arena: Arena) -> None:
        self._dedicated.discard(arena)
        if arena in self._pooled:
            self._pooled.remove(arena)

    # --- reclamation ---

    def _surplus(self) -> list[Arena]:
        uses = [ArenaUse(arena.nbytes, arena.idle_since) for arena in self._pooled]
        return [self._pooled[index] for index in surplus(uses, self._config.retain_arena_bytes)]

    def _arm_timer(self) -> None:
        """It runs only while there is an empty arena above the floor."""
        after_s = self._config.arena_reclaim_after
        if after_s is None or self._gated:
            return
        if self._timer is None:
            self._timer = DeadlineTimer(self._reclaim)
        idle = [arena.idle_since for arena in self._surplus() if arena.idle_since is not None]
        self._timer.arm(min(idle) + after_s if idle else None)

    def _reclaim(self) -> None:
        after_s = self._config.arena_reclaim_after or 0.0
        now = asyncio.get_running_loop().time()
        for arena in self._surplus():
            if arena.idle_since is not None and arena.idle_since + after_s <= now:
                self._pooled.remove(arena)
                self._mapping.unmap(arena)
        self._arm_timer()


def _piece_or_none(pool: ArenaPool, nbytes: int) -> PinnedBuffer | None:
    try:
        return pool.allocate_nowait(nbytes)
    except BusyError:
        return None
