"""Registrations of memory that others own, in place.

The same bytes registered several times as the same view share one registration, which goes with the
last holder; ranges that merely overlap are registrations of their own. A registration that is on
its way out is never handed out again: what is registered anew has new keys. It owns no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..errors import ClosedError, OrbitError, UsageError
from ..memory.budget import Budget
from ..memory.buffer import address_of
from ..memory.pages import page_range
from ..transport.interface import PinnedBuffer, RegisteredRange
from .device import DeviceContext
from .registration import LOCAL_ACCESS, PARENT_ACCESS, Registration, wait_opened
from .retention import Retained

_Key = tuple[int, int, bool]  # address, size, remote


class _Shared:
    """One registration and how many hold it."""

    def __init__(self, key: _Key, registration: Registration, opening: asyncio.Task[None]) -> None:
        self.key = key
        self.registration = registration
        self.opening = opening
        self.holders = 0


class ExternalRegistrations:
    """All methods belong to one event loop; what one does before it first waits is atomic."""

    def __init__(
        self, devices: Sequence[DeviceContext], budget: Budget, retained: Retained
    ) -> None:
        self.registered_count = 0  # ever
        self._devices = tuple(devices)
        self._budget = budget
        self._retained = retained
        self._shared: dict[_Key, _Shared] = {}  # those that may be joined
        self._live: set[_Shared] = set()  # until every device has confirmed the end
        self._holders: dict[RegisteredRange, _Shared] = {}
        self._gated = False

    @property
    def live_count(self) -> int:
        """Registrations, however many hold them."""
        return len(self._live)

    @property
    def charged_bytes(self) -> int:
        return sum(shared.registration.charged_bytes for shared in self._live)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Also those that are being made, or whose end a device has refused."""
        return tuple(shared.registration for shared in self._live)

    async def register(self, view: memoryview, *, remote: bool = True) -> RegisteredRange:
        """See PinnedMemory."""
        if self._gated:
            raise ClosedError("the registered memory")
        if view.readonly or not view.nbytes:
            raise UsageError(
                "only writable memory of at least one byte can be registered",
                hint="devices pin memory for writing; read-only memory is copied when it is staged",
            )
        view = view.cast("B")
        key = int(address_of(view)), view.nbytes, remote
        shared = self._shared.get(key) or self._begin(key, view)
        shared.holders += 1
        try:
            await wait_opened(
                shared.opening, shared.registration, lambda: self._abandoned_with(shared)
            )
        except BaseException:
            shared.holders -= 1
            if not shared.holders:
                self._close_to_others(shared)
            del shared  # see `wait_opened`: no cycle with the error that it holds
            raise
        registration = shared.registration
        parts, start = [], 0
        for part in registration.parts:
            piece = view[start : start + part.nbytes]
            parts.append(PinnedBuffer(piece, part.address, part, registration))
            start += part.nbytes
        registered = RegisteredRange(tuple(parts), registration.first_page, registration.page_bytes)
        self._holders[registered] = shared
        return registered

    async def deregister(self, registered: RegisteredRange) -> None:
        """See PinnedMemory. Raises UsageError (not registered here, or given back before)."""
        shared = self._holders.get(registered)
        if shared is None:
            raise UsageError("this range is not registered any more")
        if shared.holders > 1:
            shared.holders -= 1
            del self._holders[registered]
            return
        self._close_to_others(shared)
        await shared.registration.close()
        self._holders.pop(registered, None)

    def gate(self) -> None:
        self._gated = True

    async def drain(self) -> None:
        """Until what had begun to register has ended."""
        while opening := [s.opening for s in self._live if not s.opening.done()]:
            await asyncio.wait(opening)

    async def close(self) -> None:
        """Deregister all, whoever holds it: holders' own `deregister` has nothing left to do.
        Raises the first DeviceError.
        """
        first: OrbitError | None = None
        for shared in list(self._live):
            self._close_to_others(shared)
            try:
                await shared.registration.close()
            except OrbitError as error:
                shared.registration.retain(str(error))
                first = first or error
        if first is not None:
            raise first

    def _begin(self, key: _Key, view: memoryview) -> _Shared:
        """Raises BudgetExceeded, UsageError."""
        address, nbytes = address_of(view), view.nbytes
        _, page_bytes = page_range(address, nbytes)
        charge = self._budget.charge(page_bytes * len(self._devices))
        access = PARENT_ACCESS if key[2] else LOCAL_ACCESS
        domains = [device.domain for device in self._devices]
        registration = Registration(domains, address, nbytes, access, charge, self._retained, view)
        opening = asyncio.get_running_loop().create_task(registration.open())
        shared = self._shared[key] = _Shared(key, registration, opening)
        self._live.add(shared)
        registration.on_gone = lambda: self._live.discard(shared)
        opening.add_done_callback(lambda task: self._opened(shared, task))
        return shared

    def _opened(self, shared: _Shared, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._close_to_others(shared)
        else:
            self.registered_count += 1

    def _abandoned_with(self, shared: _Shared) -> bool:
        """Whether the one who gives up is the last."""
        if shared.holders > 1:
            return False
        self._close_to_others(shared)
        return True

    def _close_to_others(self, shared: _Shared) -> None:
        if self._shared.get(shared.key) is shared:
            del self._shared[shared.key]
