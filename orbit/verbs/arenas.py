"""One arena: mapped memory, its registration on every device, and who has which piece of it."""

from __future__ import annotations

from ..errors import BusyError, UsageError
from ..memory.arena import Allocation, OffsetAllocator
from ..model import Address
from ..transport.interface import PinnedBuffer
from .arena_memory import ArenaMemory
from .domain import Domain
from .provider import NativeRegion
from .registration import Registration


class Arena:
    """The KeyHolder of its pieces."""

    def __init__(self, memory: ArenaMemory, registration: Registration) -> None:
        self.registration = registration
        self.nbytes = memory.view.nbytes
        self.idle_since: float | None = None  # loop time; None while it has pieces
        self._view: memoryview = memory.view
        self._address = memory.address
        self._allocator = OffsetAllocator(self.nbytes)

    @property
    def empty(self) -> bool:
        return not self._allocator.live_count

    @property
    def used_bytes(self) -> int:
        return self._allocator.allocated_bytes

    def region(self, domain: Domain) -> NativeRegion | None:
        """See KeyHolder. An arena is never cut."""
        return self.registration.parts[0].region(domain)

    def allocate(self, nbytes: int) -> PinnedBuffer | None:
        """None when no free run is long enough."""
        if self._allocator.free_bytes < nbytes:
            return None
        token = self._allocator.allocate(nbytes)
        if token is None:
            return None
        view = self._view[token.offset : token.offset + nbytes]
        return PinnedBuffer(view, Address(self._address + token.offset), self, token)

    def allocate_whole(self, nbytes: int) -> PinnedBuffer:
        """The piece of a dedicated arena. Raises BusyError when it has it already."""
        piece = self.allocate(nbytes)
        if piece is None:
            raise BusyError(f"an arena of {self.nbytes} bytes has no room for {nbytes}")
        return piece

    def free(self, buffer: PinnedBuffer) -> None:
        """Also when its registration has ended before. Raises InternalError (freed already)."""
        if not isinstance(buffer.token, Allocation):
            raise UsageError("this buffer is not a piece of an arena")
        self._allocator.free(buffer.token)

    def let_go(self) -> None:
        """The registration has ended: pieces that are still out keep the memory, nothing else."""
        self._view = memoryview(b"")
