"""Memory that a device may touch: page blocks of our own, ranges registered on several devices in
as many parts as those allow, and a caller's target for one operation.

Owns registrations, their charges and whatever keeps the memory alive, so that memory outlives every
operation on it. It does not know who reads or writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno as errnos
import logging
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ..errors import BusyError, DeviceError, OrbitError
from ..memory.budget import Budget, Charge
from ..memory.buffer import address_of
from ..memory.pages import cut, page_range, whole_pages
from ..model import Address
from . import records
from .device import DeviceContext
from .provider import NativeRegion
from .retention import Retained

# Nothing is ever readable from outside through a parent's own key (D1).
PARENT_ACCESS = records.ACCESS_LOCAL_WRITE | records.ACCESS_MW_BIND
LOCAL_ACCESS = records.ACCESS_LOCAL_WRITE  # and no window can be bound in it

# A gigabyte of prefaulted memory takes well under a second; a device that needs longer is dying.
REGISTER_TIMEOUT_S = 60.0

logger = logging.getLogger("orbit.verbs")


@runtime_checkable
class KeyHolder(Protocol):
    """What `PinnedBuffer.arena` is on the RDMA path: the registration that the buffer lies in."""

    def region(self, device: DeviceContext) -> NativeRegion | None:
        """The registration on that device; None where there is none, or none any more."""


class Segment(NamedTuple):
    """Bytes under one key of one device."""

    address: int
    lkey: int
    nbytes: int


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
        memory = mmap.mmap(-1, whole_pages(nbytes))
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


class RangePart:
    """A part of a registration, with one key for each device. A KeyHolder."""

    __slots__ = ("address", "nbytes", "regions")

    def __init__(self, address: Address, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.regions: dict[DeviceContext, NativeRegion] = {}

    def region(self, device: DeviceContext) -> NativeRegion | None:
        return self.regions.get(device)


class Registration:
    """One range on every one of `devices`, or on none. It is cut where a device's limit wants it.

    It keeps `keep` alive and `charge` (of whole pages, for each device) unpaid until every device
    has confirmed the end; then `on_gone` is called, once.
    """

    def __init__(
        self,
        devices: Sequence[DeviceContext],
        address: Address,
        nbytes: int,
        access: int,
        charge: Charge,
        retained: Retained,
        keep: object,
    ) -> None:
        self.on_gone: Callable[[], None] | None = None
        self._devices = tuple(devices)
        limit = min((device.region_bytes_max for device in devices), default=nbytes)
        self.parts = tuple(RangePart(*part) for part in cut(address, nbytes, limit))
        self.first_page, self.page_bytes = page_range(address, nbytes)
        self._access = access
        self._charge = charge
        self._retained = retained
        self._keep: object | None = keep
        self._wanted = True
        self._ending: asyncio.Task[None] | None = None

    @property
    def charged_bytes(self) -> int:
        """0 once the last device has confirmed the end."""
        return self._charge.nbytes if self._charge.live else 0

    async def open(self) -> None:
        """To be run in a task that nobody cancels. Raises DeviceError, BusyError (abandoned): what
        was registered is deregistered by then, or retained.
        """
        try:
            for part in self.parts:
                if not self._wanted:
                    raise BusyError("the registration is not wanted any more")
                await self._open_part(part)
        except OrbitError as error:
            await self.give_up(str(error))
            raise

    def abandon(self) -> None:
        """`open` need not go on: it ends with BusyError, unless it has got everything already."""
        self._wanted = False

    async def close(self) -> None:
        """Nothing uses the range any more. Every device is asked. Raises the first DeviceError:
        what was refused stays registered and charged, and closing again goes on there. Cancelling
        ends the waiting only.
        """
        if self._ending is None or self._ending.done():
            self._ending = asyncio.get_running_loop().create_task(self._deregister())
        await asyncio.shield(self._ending)

    async def give_up(self, cause: str) -> None:
        """Close it for nobody: what cannot be proven to be gone is retained."""
        try:
            await self.close()
        except OrbitError as error:
            self.retain(f"{cause}; {error}")

    def retain(self, cause: str) -> None:
        """A device may still reach it: kept, charged and listed, until it closes after all."""
        logger.error("%d bytes of registered memory are kept: %s", self.page_bytes, cause)
        now = asyncio.get_running_loop().time()
        self._retained.add(self, "registered memory", self.page_bytes, cause, now)

    async def _open_part(self, part: RangePart) -> None:
        """On all devices at once, since each takes as long as the part is large. Raises the first
        error, when every device has answered: what the others made is in the part.
        """
        # One thread pool serves all devices: it refuses the first call or none.
        begun = {
            device: device.regions.begin_register(part.address, part.nbytes, self._access)
            for device in self._devices
        }
        if begun:
            await asyncio.wait(begun.values())
        for device, future in begun.items():
            if future.exception() is None:
                part.regions[device] = future.result()
        for future in begun.values():
            future.result()

    async def _close_part(self, part: RangePart) -> None:
        """As `_open_part`. What a device refuses to let go of stays in the part."""
        begun = {
            device: device.regions.begin_deregister(region)
            for device, region in part.regions.items()
        }
        if begun:
            await asyncio.wait(begun.values())
        for device, future in begun.items():
            if future.exception() is None:
                part.regions.pop(device, None)
        for future in begun.values():
            future.result()

    async def _deregister(self) -> None:
        first: OrbitError | None = None
        for part in self.parts:
            try:
                await self._close_part(part)
            except OrbitError as error:
                first = first or error
        if first is not None:
            raise first
        if self._charge.live:
            self._charge.repay()
            self._keep = None
            self._retained.remove(self)
            on_gone, self.on_gone = self.on_gone, None
            if on_gone is not None:
                on_gone()


async def wait_opened(
    opening: asyncio.Task[None], registration: Registration, alone: Callable[[], bool]
) -> None:
    """Wait for the `open` of memory that is the caller's. Raises DeviceError (ETIMEDOUT: a device
    does not answer; the memory is kept and listed until it does), BusyError.

    Cancelled while nobody else waits (`alone`): it is rolled back before that shows, since the
    memory is the caller's again then.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + REGISTER_TIMEOUT_S
    cancelled = False
    while not opening.done():
        left_s = deadline - loop.time()
        if left_s <= 0:
            _leave(opening, registration)
            raise DeviceError("memory", "reg_mr", errnos.ETIMEDOUT, "a device does not answer")
        try:
            await asyncio.wait([opening], timeout=left_s)
        except asyncio.CancelledError:
            if not alone():
                raise
            cancelled = True
            registration.abandon()
    if not cancelled:
        try:
            opening.result()
        finally:
            # The error's traceback holds this frame, which must not hold the error: a cycle would
            # keep the caller's memory until the garbage collector comes.
            del opening
        return
    if opening.exception() is None:
        undoing = loop.create_task(registration.give_up("cancelled"))
        while not undoing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([undoing])
    raise asyncio.CancelledError


def _leave(opening: asyncio.Task[None], registration: Registration) -> None:
    """Nobody waits for it any more: whatever comes of it is undone."""
    registration.abandon()
    registration.retain(f"a device did not answer within {REGISTER_TIMEOUT_S:g} s")
    loop = asyncio.get_running_loop()
    undoing: list[asyncio.Task[None]] = []  # alive as long as the registration's task

    def undo(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            undoing.append(loop.create_task(registration.give_up("it came too late")))

    opening.add_done_callback(undo)


class TargetRegistration:
    """A caller's buffer, registered on one device for one operation. Holds the buffer's export, and
    a charge of the budget for its pages.
    """

    def __init__(self, device: DeviceContext, registration: Registration) -> None:
        self._device = device
        self._registration = registration

    @classmethod
    async def open(
        cls, device: DeviceContext, view: memoryview, budget: Budget, retained: Retained
    ) -> TargetRegistration:
        """Raises BudgetExceeded, DeviceError (ENOMEM: the locked-memory limit). Cancelled: it is
        rolled back before that shows.
        """
        held = memoryview(view)
        address = address_of(held)
        _, pinned_bytes = page_range(address, held.nbytes)
        registration = Registration(
            (device,),
            address,
            held.nbytes,
            records.ACCESS_LOCAL_WRITE,
            budget.charge(pinned_bytes),
            retained,
            held,
        )
        loop = asyncio.get_running_loop()
        await wait_opened(loop.create_task(registration.open()), registration, lambda: True)
        return cls(device, registration)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The buffer in address order, cut where the device's limit wants it."""
        return tuple(
            Segment(part.address, part.regions[self._device].lkey, part.nbytes)
            for part in self._registration.parts
        )

    async def close(self) -> None:
        """No operation on it is in flight any more. Raises DeviceError: the export and the charge
        stay then, and it is listed as retained.
        """
        try:
            await self._registration.close()
        except OrbitError as error:
            self._registration.retain(str(error))
            raise
