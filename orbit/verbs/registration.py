"""Memory that a device may touch: page blocks of our own, a caller's target for one operation, and
the arena behind pinned registrations.

Owns mappings, registrations and real buffer exports, so that memory outlives every operation on
it. It does not know who reads or writes.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Sequence

from ..errors import BudgetExceeded, BusyError, DeviceError, UsageError
from ..memory.arena import Allocation, OffsetAllocator
from ..memory.budget import Budget, Charge
from ..model import Address, PathReason
from ..transport.interface import PinnedBuffer
from . import records
from .device import DeviceContext
from .provider import NativeRegion

# Nothing is ever readable from outside through a parent's own key (D1).
PARENT_ACCESS = records.ACCESS_LOCAL_WRITE | records.ACCESS_MW_BIND


def address_of(view: memoryview) -> Address:
    """Where the bytes of a writable view lie. Valid as long as the view (or its owner) lives."""
    if view.nbytes == 0:
        return Address(0)
    return Address(ctypes.addressof(ctypes.c_char.from_buffer(view)))


class RegisteredBlock:
    """Whole anonymous pages registered on one device, for orbit's own use."""

    def __init__(self, device: DeviceContext, memory: mmap.mmap, region: NativeRegion) -> None:
        self._device = device
        self._region = region
        self.view = memoryview(memory)
        self.address = address_of(self.view)

    @classmethod
    async def open(cls, device: DeviceContext, nbytes: int, access: int) -> RegisteredBlock:
        """Raises DeviceError."""
        memory = mmap.mmap(-1, _whole_pages(nbytes))
        address = address_of(memoryview(memory))
        region = await device.register(address, len(memory), access)
        return cls(device, memory, region)

    @property
    def lkey(self) -> int:
        return self._region.lkey

    @property
    def native(self) -> int:
        return self._region.native

    async def close(self) -> None:
        """Raises DeviceError; the memory stays then."""
        await self._device.deregister(self._region)


class TargetRegistration:
    """A caller's buffer, registered on one device for one operation. Holds the buffer's export."""

    def __init__(self, device: DeviceContext, view: memoryview, region: NativeRegion) -> None:
        self._device = device
        self._view: memoryview | None = view
        self._region = region

    @classmethod
    async def open(cls, device: DeviceContext, view: memoryview) -> TargetRegistration:
        """Raises DeviceError (ENOMEM: the locked-memory limit)."""
        held = memoryview(view)
        region = await device.register(address_of(held), held.nbytes, records.ACCESS_LOCAL_WRITE)
        return cls(device, held, region)

    @property
    def lkey(self) -> int:
        return self._region.lkey

    async def close(self) -> None:
        """No operation on it is in flight any more. Raises DeviceError; the export stays then."""
        await self._device.deregister(self._region)
        self._view = None


class PinnedArena:
    """PinnedMemory of the RDMA path: one arena, mapped and registered at its first use.

    It is registered on every device, since the consumer chooses the rail. What the arena's
    allocator calls granules are 4 KiB.
    """

    def __init__(self, devices: Sequence[DeviceContext], arena_bytes: int, budget: Budget) -> None:
        self._devices = tuple(devices)
        self._arena_bytes = _whole_pages(arena_bytes)
        self.budget = budget
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._address = Address(0)
        self._allocator: OffsetAllocator | None = None
        self._charge: Charge | None = None
        self._regions: dict[DeviceContext, NativeRegion] = {}
        self._mapping = asyncio.Lock()
        self._closed = False
        self.failure = ""  # why the arena could not be had, for people

    @property
    def registered_bytes(self) -> int:
        return self._arena_bytes if self._allocator is not None else 0

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._allocator is None else self._allocator.allocated_bytes

    async def ensure(self) -> PathReason:
        """Map and register the arena if there is none. OK, budget or pool_exhausted."""
        async with self._mapping:
            if self._closed:
                return PathReason.DRAINING
            if self._allocator is not None:
                return PathReason.OK
            try:
                charge = self.budget.charge(self._arena_bytes * len(self._devices))
            except BudgetExceeded as error:
                self.failure = str(error)
                return PathReason.BUDGET
            try:
                await self._map()
            except (DeviceError, OSError, TimeoutError) as error:
                charge.repay()
                self.failure = str(error)
                return PathReason.POOL_EXHAUSTED
            self._charge = charge
            return PathReason.OK

    def allocate_nowait(self, nbytes: int) -> PinnedBuffer:
        """Raises BusyError (no room now, or no arena), UsageError (never fits)."""
        if self._allocator is None:
            raise BusyError("no arena is mapped")
        if nbytes > self._arena_bytes:
            raise BusyError(f"{nbytes} bytes do not fit an arena of {self._arena_bytes}")
        if nbytes <= 0:
            raise UsageError("a pinned buffer has at least one byte")
        allocation = self._allocator.allocate(nbytes)
        if allocation is None:
            raise BusyError(f"the arena has no room for {nbytes} bytes now")
        start = allocation.offset
        return PinnedBuffer(
            view=self._view[start : start + nbytes],
            address=Address(self._address + start),
            arena=self,
            token=allocation,
        )

    def free(self, buffer: PinnedBuffer) -> None:
        """The caller has proven that nothing accesses it any more."""
        if buffer.arena is not self or not isinstance(buffer.token, Allocation):
            raise UsageError("this buffer is not of this arena")
        if self._allocator is not None:
            self._allocator.free(buffer.token)

    def region(self, device: DeviceContext) -> NativeRegion | None:
        """The arena's registration on that device."""
        return self._regions.get(device)

    async def close(self) -> None:
        """Deregister. No window is bound in it any more. Raises DeviceError; the rest stays."""
        self._closed = True
        async with self._mapping:
            await self._unregister()
            self._allocator = None
            if self._charge is not None:
                self._charge.repay()
                self._charge = None
            # Views that are still out keep the mapping alive; it goes with the last of them.
            self._view = memoryview(b"")
            self._memory = None

    async def _map(self) -> None:
        memory = mmap.mmap(-1, self._arena_bytes)
        view = memoryview(memory)
        address = address_of(view)
        try:
            for device in self._devices:
                self._regions[device] = await device.register(
                    address, self._arena_bytes, PARENT_ACCESS
                )
        except BaseException:
            await self._unregister()
            raise
        self._memory, self._view, self._address = memory, view, address
        self._allocator = OffsetAllocator(self._arena_bytes)

    async def _unregister(self) -> None:
        for device in self._devices:
            region = self._regions.get(device)
            if region is not None:
                await device.deregister(region)
                del self._regions[device]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
