"""Registered memory without a device: arenas of plain bytes that behave as those of the real pool.

Registering and deregistering take a few turns of the loop and can be refused, as a device does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import NamedTuple

from ..errors import BudgetExceeded, BusyError, ClosedError, DeviceError, InternalError, UsageError
from ..memory.arena import Allocation, OffsetAllocator
from ..memory.budget import Budget, Charge
from ..memory.buffer import address_of
from ..memory.pages import cut, page_range, whole_pages
from ..memory.pool_policy import ArenaUse, PoolPolicy, surplus
from ..model import Address, PathReason
from ..transport.interface import MemoryStatistics, PinnedBuffer, RegisteredRange
from ..transport.timer import DeadlineTimer

_TURNS = 3  # of the loop that a device takes to answer
_NO_LIMIT = 1 << 48


class SimArena:
    """What `PinnedBuffer.arena` is here."""

    def __init__(self, nbytes: int, charge: Charge) -> None:
        self.nbytes = nbytes
        self.charge = charge
        self.allocator = OffsetAllocator(nbytes)
        self.view = memoryview(bytearray(nbytes))
        self.address = address_of(self.view)
        self.dedicated = False
        self.idle_since: float | None = None

    def allocate(self, nbytes: int) -> PinnedBuffer | None:
        token = self.allocator.allocate(nbytes)
        if token is None:
            return None
        self.idle_since = None
        view = self.view[token.offset : token.offset + nbytes]
        return PinnedBuffer(view, Address(self.address + token.offset), self, token)


class SimPart:
    """What `PinnedBuffer.arena` is for memory that is registered in place."""

    def __init__(self, address: Address, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


class _Shared:
    """One registration in place and its holders."""

    def __init__(self, key: tuple[int, int, bool], charge: Charge, limit_bytes: int) -> None:
        self.key = key
        self.parts = tuple(SimPart(*part) for part in cut(*key[:2], limit_bytes))
        self.charge = charge
        self.holders = 0
        self.opened: asyncio.Future[None] | None = None


class Refusals(NamedTuple):
    """How many of the next calls a device refuses."""

    registrations: int = 0
    deregistrations: int = 0


class SimPinnedMemory:
    """PinnedMemory. `ensure_reason`, `over_budget` and `refusals` may be changed at any time.

    `limit_bytes` cuts registrations in place into parts and bounds arenas.
    """

    def __init__(
        self,
        arena_bytes: int = 1 << 20,
        *,
        max_bytes: int = 1 << 30,
        budget_bytes: int = 1 << 30,
        dedicated_min_bytes: int = 64 << 20,
        limit_bytes: int = _NO_LIMIT,
        reclaim_after_s: float | None = None,
        retain_bytes: int = 64 << 20,
    ) -> None:
        self.ensure_reason = PathReason.OK
        self.over_budget = False
        self.refusals = Refusals()
        self.budget = Budget("registered memory", budget_bytes, "rdma.pool.registered_bytes_budget")
        self._policy = PoolPolicy(
            whole_pages(arena_bytes), max_bytes, dedicated_min_bytes, limit_bytes
        )
        self._reclaim_after_s = reclaim_after_s
        self._retain_bytes = retain_bytes
        self._arenas: list[SimArena] = []  # usable ones, oldest first
        self._kept: list[SimArena] = []  # whose end was refused
        self._external = _External(self, limit_bytes)
        self._growing: asyncio.Lock = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()
        self._timer: DeadlineTimer | None = None
        self._mapped_count = 0
        self.gated = False

    @property
    def registered_bytes(self) -> int:
        return self.budget.charged_bytes

    @property
    def allocated_count(self) -> int:
        """Pieces that nobody has freed: 0 at the end of every test."""
        return sum(arena.allocator.live_count for arena in self._arenas)

    async def ensure(self) -> PathReason:
        await asyncio.sleep(0)
        if self.ensure_reason is not PathReason.OK:
            return self.ensure_reason
        if self.gated:
            return PathReason.DRAINING
        try:
            if not any(not arena.dedicated for arena in self._arenas):
                await self._grow(1)
        except BudgetExceeded:
            return PathReason.BUDGET
        except BusyError:
            return PathReason.POOL_EXHAUSTED
        return PathReason.OK

    def allocate_nowait(self, nbytes: int) -> PinnedBuffer:
        self._policy.check(nbytes)
        if self.gated:
            raise BusyError("the pool is closing")
        self._check_budget(nbytes)
        pooled = [arena for arena in self._arenas if not arena.dedicated]
        for arena in pooled:
            piece = arena.allocate(nbytes)
            if piece is not None:
                self._arm_timer()
                return piece
        raise BusyError("no arena has room" if pooled else "no arena is mapped")

    async def allocate(self, nbytes: int) -> PinnedBuffer:
        self._policy.check(nbytes)
        while True:
            try:
                if self._policy.dedicated(nbytes):
                    return await self._allocate_dedicated(nbytes)
                with contextlib.suppress(BusyError):
                    return self.allocate_nowait(nbytes)
                if self.gated:
                    raise BusyError("the pool is closing")
                await self._grow(nbytes)
            except BudgetExceeded:
                if not self._work:
                    raise
                await asyncio.wait(set(self._work), return_when=asyncio.FIRST_COMPLETED)

    def free(self, buffer: PinnedBuffer) -> None:
        arena = buffer.arena
        if not isinstance(arena, SimArena) or not isinstance(buffer.token, Allocation):
            raise InternalError("a piece of another pool")
        # Whoever still reads it must notice.
        start = buffer.token.offset
        arena.view[start : start + buffer.token.nbytes] = b"\xdd" * buffer.token.nbytes
        arena.allocator.free(buffer.token)
        if arena.allocator.live_count or arena not in self._arenas:
            return
        if arena.dedicated:
            self._start_unmapping(arena)
        else:
            arena.idle_since = asyncio.get_running_loop().time()
            self._arm_timer()

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        if self.gated:
            raise ClosedError("the registered memory")
        if view.readonly or not view.nbytes:
            raise UsageError("only writable memory of at least one byte can be registered")
        self._check_budget(view.nbytes)
        while True:
            try:
                return await self._external.register(view.cast("B"), remote=remote)
            except BudgetExceeded:
                if not self._work:
                    raise
                await asyncio.wait(set(self._work), return_when=asyncio.FIRST_COMPLETED)

    async def deregister(self, registered: RegisteredRange) -> None:
        await self._external.deregister(registered)

    def gate(self) -> None:
        self.gated = True
        if self._timer is not None:
            self._timer.arm(None)

    async def drain(self) -> None:
        async with self._growing:
            pass
        while self._work:
            await asyncio.wait(set(self._work))
        await self._external.drain()

    async def close(self) -> None:
        """As the real pool's. Raises DeviceError."""
        self.gate()
        await self.drain()
        for arena in [*self._arenas, *self._kept]:
            await self.refusable("deregistrations")
            self._forget(arena)
        await self._external.close()

    def statistics(self) -> MemoryStatistics:
        return MemoryStatistics(
            registered_bytes=self.registered_bytes,
            budget_bytes=self.budget.limit_bytes,
            arena_bytes=sum(arena.nbytes for arena in self._arenas),
            arena_bytes_used=sum(arena.allocator.allocated_bytes for arena in self._arenas),
            arenas=len(self._arenas),
            regions=self._external.live_count,
            registrations={
                "arena": self._mapped_count,
                "external": self._external.registered_count,
            },
        )

    async def refusable(self, kind: str) -> None:
        """The device's answer, some turns later. Raises DeviceError when it is to be a refusal."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        left = getattr(self.refusals, kind)
        if left:
            self.refusals = self.refusals._replace(**{kind: left - 1})
            raise DeviceError("simulated", kind, errno.ENOMEM)

    def _check_budget(self, nbytes: int) -> None:
        if self.over_budget:
            raise BudgetExceeded(self.budget.name, nbytes, 0, 0, self.budget.knob)

    def _check_arena(self, nbytes: int) -> None:
        """Whether another arena is to be had."""
        self._check_budget(nbytes)
        if self.ensure_reason is PathReason.BUDGET:
            raise BudgetExceeded(self.budget.name, nbytes, 0, 0, self.budget.knob)
        if self.ensure_reason is not PathReason.OK:
            raise BusyError(f"no arena can be had: {self.ensure_reason}")

    async def _allocate_dedicated(self, nbytes: int) -> PinnedBuffer:
        if self.gated:
            raise BusyError("the pool is closing")
        self._check_arena(nbytes)
        try:
            charge = self.budget.charge(whole_pages(nbytes))
        except BudgetExceeded:
            with contextlib.suppress(BusyError):
                return self.allocate_nowait(nbytes)
            raise
        arena = await self._mapped(whole_pages(nbytes), charge)
        arena.dedicated = True
        piece = arena.allocate(nbytes)
        assert piece is not None
        return piece

    async def _grow(self, nbytes: int) -> None:
        count = self._mapped_count
        async with self._growing:
            if self._mapped_count != count:
                return  # somebody else was faster
            self._check_arena(nbytes)
            pooled = [arena.nbytes for arena in self._arenas if not arena.dedicated]
            sizes = list(self._policy.pooled_sizes(nbytes, max(pooled, default=0)))
            fitting = [size for size in sizes if size <= self.budget.free_bytes]
            size = fitting[0] if fitting else sizes[-1]
            await self._mapped(size, self.budget.charge(size))

    async def _mapped(self, nbytes: int, charge: Charge) -> SimArena:
        try:
            await self.refusable("registrations")
        except DeviceError as error:
            charge.repay()
            raise BusyError(str(error)) from error
        except asyncio.CancelledError:
            charge.repay()
            raise
        arena = SimArena(nbytes, charge)
        arena.idle_since = asyncio.get_running_loop().time()
        self._arenas.append(arena)
        self._mapped_count += 1
        self._arm_timer()
        return arena

    def _start_unmapping(self, arena: SimArena) -> None:
        self._arenas.remove(arena)
        self._kept.append(arena)
        task = asyncio.get_running_loop().create_task(self._unmap(arena))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _unmap(self, arena: SimArena) -> None:
        try:
            await self.refusable("deregistrations")
        except DeviceError:
            return  # kept and charged
        self._forget(arena)

    def _forget(self, arena: SimArena) -> None:
        if arena.charge.live:
            arena.charge.repay()
        for arenas in (self._arenas, self._kept):
            if arena in arenas:
                arenas.remove(arena)

    def _surplus(self) -> list[SimArena]:
        pooled = [arena for arena in self._arenas if not arena.dedicated]
        uses = [ArenaUse(arena.nbytes, arena.idle_since) for arena in pooled]
        return [pooled[index] for index in surplus(uses, self._retain_bytes)]

    def _arm_timer(self) -> None:
        if self._reclaim_after_s is None or self.gated:
            return
        if self._timer is None:
            self._timer = DeadlineTimer(self._reclaim)
        idle = [arena.idle_since for arena in self._surplus() if arena.idle_since is not None]
        self._timer.arm(min(idle) + self._reclaim_after_s if idle else None)

    def _reclaim(self) -> None:
        due = asyncio.get_running_loop().time() - (self._reclaim_after_s or 0.0)
        for arena in self._surplus():
            if arena.idle_since is not None and arena.idle_since <= due:
                self._start_unmapping(arena)
        self._arm_timer()


class _External:
    """Registrations in place: the same bytes share one."""

    def __init__(self, memory: SimPinnedMemory, limit_bytes: int) -> None:
        self.registered_count = 0
        self._limit_bytes = limit_bytes
        self._memory = memory
        self._shared: dict[tuple[int, int, bool], _Shared] = {}
        self._live: set[_Shared] = set()
        self._holders: dict[RegisteredRange, _Shared] = {}

    @property
    def live_count(self) -> int:
        return len(self._live)

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        key = int(address_of(view)), view.nbytes, remote
        first_page, page_bytes = page_range(*key[:2])
        shared = self._shared.get(key)
        if shared is None:
            charge = self._memory.budget.charge(page_bytes)
            shared = _Shared(key, charge, self._limit_bytes)
            self._shared[key] = shared
            self._live.add(shared)
            shared.opened = asyncio.ensure_future(self._open())
        shared.holders += 1
        opened = shared.opened
        assert opened is not None
        try:
            await asyncio.wait([opened])
            opened.result()
        except BaseException:
            shared.holders -= 1
            if not shared.holders:
                self._close_to_others(shared)
                while not opened.done():  # rolled back before the caller has its memory again
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([opened])
                opened.exception()
                self._gone(shared)
            raise
        parts, start = [], 0
        for part in shared.parts:
            piece = view[start : start + part.nbytes]
            parts.append(PinnedBuffer(piece, part.address, part, shared))
            start += part.nbytes
        registered = RegisteredRange(tuple(parts), first_page, page_bytes)
        self._holders[registered] = shared
        return registered

    def is_live(self, shared: _Shared) -> bool:
        return shared in self._live

    async def _open(self) -> None:
        await self._memory.refusable("registrations")
        self.registered_count += 1

    async def deregister(self, registered: RegisteredRange) -> None:
        shared = self._holders.get(registered)
        if shared is None:
            raise UsageError("this range is not registered any more")
        if shared.holders > 1:
            shared.holders -= 1
            del self._holders[registered]
            return
        self._close_to_others(shared)
        if shared in self._live:
            await self._memory.refusable("deregistrations")
            self._gone(shared)
        self._holders.pop(registered, None)

    async def drain(self) -> None:
        while opening := [s.opened for s in self._live if s.opened and not s.opened.done()]:
            await asyncio.wait(opening)

    async def close(self) -> None:
        for shared in list(self._live):
            self._close_to_others(shared)
            await self._memory.refusable("deregistrations")
            self._gone(shared)

    def _close_to_others(self, shared: _Shared) -> None:
        if self._shared.get(shared.key) is shared:
            del self._shared[shared.key]

    def _gone(self, shared: _Shared) -> None:
        self._live.discard(shared)
        if shared.charge.live:
            shared.charge.repay()


def is_live(memory: SimPinnedMemory, piece: PinnedBuffer, *, remote: bool = False) -> bool:
    """Whether it is registered at this moment; with `remote`, so that peers can be let in."""
    if isinstance(piece.token, _Shared):
        return memory._external.is_live(piece.token) and (piece.token.key[2] or not remote)
    return piece.arena in (*memory._arenas, *memory._kept)
