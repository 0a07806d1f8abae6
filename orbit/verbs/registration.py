"""Memory that a device may touch: page blocks of our own, ranges registered in several protection
domains in as many parts as their devices allow, and a caller's target for one operation.

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
from .domain import Domain
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

    def region(self, domain: Domain) -> NativeRegion | None:
        """The registration in that domain; None where there is none, or none any more."""


class Segment(NamedTuple):
    """Bytes under one key of one domain."""

    address: int
    lkey: int
    nbytes: int


class RegisteredBlock:
    """Whole anonymous pages registered in one domain, for orbit's own use."""

    def __init__(self, domain: Domain, memory: mmap.mmap, region: NativeRegion) -> None:
        self._domain = domain
        self._region = region
        self.view = memoryview(memory)
        self.address = address_of(self.view)

    @classmethod
    async def open(cls, domain: Domain, nbytes: int, access: int) -> RegisteredBlock:
        """Raises DeviceError."""
        memory = mmap.mmap(-1, whole_pages(nbytes))
        address = address_of(memoryview(memory))
        region = await domain.register(address, len(memory), access)
        return cls(domain, memory, region)

    @property
    def lkey(self) -> int:
        return self._region.lkey

    @property
    def native(self) -> int:
        return self._region.native

    async def close(self) -> None:
        """Raises DeviceError; the memory stays then."""
        await self._domain.deregister(self._region)


class RangePart:
    """A part of a registration, with one key for each domain. A KeyHolder."""

    __slots__ = ("address", "nbytes", "regions")

    def __init__(self, address: Address, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.regions: dict[Domain, NativeRegion] = {}

    def region(self, domain: Domain) -> NativeRegion | None:
        return self.regions.get(domain)


class Registration:
    """One range in every one of `domains`, or in none. It is cut where a device's limit wants it.

    It keeps `keep` alive and `charge` (of whole pages, for each domain) unpaid until every device
    has confirmed the end; then `on_gone` is called, once. Domains can be added and left meanwhile.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        address: Address,
        nbytes: int,
        access: int,
        charge: Charge,
        retained: Retained,
        keep: object,
    ) -> None:
        self.on_gone: Callable[[], None] | None = None
        limit = min((domain.region_bytes_max for domain in domains), default=nbytes)
        self.parts = tuple(RangePart(*part) for part in cut(address, nbytes, limit))
        self.first_page, self.page_bytes = page_range(address, nbytes)
        self._access = access
        self._charges = {domain: charge.split(self.page_bytes) for domain in domains}
        self._retained = retained
        self._keep: object | None = keep
        self._wanted = True
        self._opened = asyncio.Event()  # or not; decided
        self._step = asyncio.Lock()  # one change at a time
        self._ending: asyncio.Task[None] | None = None

    @property
    def charged_bytes(self) -> int:
        """0 once the last device has confirmed the end."""
        return self.page_bytes * len(self._charges)

    def lacks(self, domain: Domain) -> bool:
        """It is in use, or about to be, and not in that domain."""
        return self._ending is None and domain not in self._charges

    async def open(self) -> None:
        """To be run in a task that nobody cancels. Raises DeviceError, BusyError (abandoned): what
        was registered is deregistered by then, or retained.
        """
        try:
            async with self._step:
                for part in self.parts:
                    if not self._wanted:
                        raise BusyError("the registration is not wanted any more")
                    await self._open_part(part, tuple(self._charges))
        except OrbitError as error:
            await self.give_up(str(error))
            raise
        finally:
            self._opened.set()

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

    async def extend(self, domain: Domain, charge: Charge) -> None:
        """Register it in a further domain, too, or not at all. One that has ended meanwhile, or was
        not opened, stays as it is. Raises DeviceError. Not to be cancelled.
        """
        await self._opened.wait()
        async with self._step:
            if not self.lacks(domain):
                charge.repay()
                return
            self._charges[domain] = charge
            try:
                for part in self.parts:
                    await self._open_part(part, (domain,))
            except OrbitError:
                with contextlib.suppress(OrbitError):  # then it stays in it, and charged
                    await self._leave((domain,))
                raise

    async def withdraw(self, domain: Domain) -> None:
        """No work in that domain uses the range any more, and none will. Raises DeviceError: what
        was refused stays registered and charged.
        """
        async with self._step:
            if domain in self._charges:
                await self._leave((domain,))

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

    async def _open_part(self, part: RangePart, domains: Sequence[Domain]) -> None:
        """In all domains at once, since each takes as long as the part is large. Raises the first
        error, when every device has answered: what the others made is in the part.
        """
        # One thread pool serves all devices: it refuses the first call or none.
        begun = {
            domain: domain.regions.begin_register(part.address, part.nbytes, self._access)
            for domain in domains
        }
        if begun:
            await asyncio.wait(begun.values())
        for domain, future in begun.items():
            if future.exception() is None:
                part.regions[domain] = future.result()
        for future in begun.values():
            future.result()

    async def _close_part(self, part: RangePart, domains: Sequence[Domain]) -> None:
        """As `_open_part`. What a device refuses to let go of stays in the part."""
        begun = {
            domain: domain.regions.begin_deregister(part.regions[domain])
            for domain in domains
            if domain in part.regions
        }
        if begun:
            await asyncio.wait(begun.values())
        for domain, future in begun.items():
            if future.exception() is None:
                part.regions.pop(domain, None)
        for future in begun.values():
            future.result()

    async def _leave(self, domains: Sequence[Domain]) -> None:
        """Every part is tried. Raises the first DeviceError; else the charges are repaid."""
        first: OrbitError | None = None
        for part in self.parts:
            try:
                await self._close_part(part, domains)
            except OrbitError as error:
                first = first or error
        if first is not None:
            raise first
        for domain in domains:
            self._charges.pop(domain).repay()

    async def _deregister(self) -> None:
        async with self._step:
            await self._leave(tuple(self._charges))
        if self._keep is not None:
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
    """A caller's buffer, registered in one domain for one operation. Holds the buffer's export, and
    a charge of the budget for its pages.
    """

    def __init__(self, domain: Domain, registration: Registration) -> None:
        self._domain = domain
        self._registration = registration

    @classmethod
    async def open(
        cls, domain: Domain, view: memoryview, budget: Budget, retained: Retained
    ) -> TargetRegistration:
        """Raises BudgetExceeded, DeviceError (ENOMEM: the locked-memory limit). Cancelled: it is
        rolled back before that shows.
        """
        held = memoryview(view)
        address = address_of(held)
        _, pinned_bytes = page_range(address, held.nbytes)
        registration = Registration(
            (domain,),
            address,
            held.nbytes,
            records.ACCESS_LOCAL_WRITE,
            budget.charge(pinned_bytes),
            retained,
            held,
        )
        loop = asyncio.get_running_loop()
        await wait_opened(loop.create_task(registration.open()), registration, lambda: True)
        return cls(domain, registration)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The buffer in address order, cut where the device's limit wants it."""
        return tuple(
            Segment(part.address, part.regions[self._domain].lkey, part.nbytes)
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
