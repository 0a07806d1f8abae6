"""Registered memory without a device: one arena of plain bytes, with the real pool's behaviour."""

from __future__ import annotations

import asyncio

from ..errors import BudgetExceeded, BusyError, InternalError
from ..memory.arena import Allocation, OffsetAllocator
from ..model import Address, PathReason
from ..transport.interface import PinnedBuffer


class SimPinnedMemory:
    """PinnedMemory. `ensure_reason` and `over_budget` may be changed at any time."""

    def __init__(self, arena_bytes: int = 1 << 20) -> None:
        self.ensure_reason = PathReason.OK
        self.over_budget = False
        self._arena_bytes = arena_bytes
        self._view = memoryview(b"")
        self._allocator: OffsetAllocator | None = None

    @property
    def registered_bytes(self) -> int:
        return 0 if self._allocator is None else self._arena_bytes

    @property
    def allocated_count(self) -> int:
        """Pieces that nobody has freed: 0 at the end of every test."""
        return 0 if self._allocator is None else self._allocator.live_count

    async def ensure(self) -> PathReason:
        await asyncio.sleep(0)
        if self.ensure_reason is PathReason.OK and self._allocator is None:
            self._allocator = OffsetAllocator(self._arena_bytes)
            self._view = memoryview(bytearray(self._arena_bytes))
        return self.ensure_reason

    def allocate_nowait(self, nbytes: int) -> PinnedBuffer:
        if self._allocator is None:
            raise BusyError("no arena is mapped")
        if self.over_budget:
            raise BudgetExceeded(
                "registered bytes", nbytes, 0, 0, "rdma.pool.registered_bytes_budget"
            )
        token = self._allocator.allocate(nbytes)
        if token is None:
            raise BusyError("the arena is full")
        view = self._view[token.offset : token.offset + nbytes]
        return PinnedBuffer(view, Address(token.offset), self, token)

    def free(self, buffer: PinnedBuffer) -> None:
        if self._allocator is None or not isinstance(buffer.token, Allocation):
            raise InternalError("a piece of another pool")
        # Whoever still reads it must notice.
        buffer.view[:] = b"\xdd" * buffer.view.nbytes
        self._allocator.free(buffer.token)
