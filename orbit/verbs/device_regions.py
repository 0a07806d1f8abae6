"""The registrations of one protection domain: begun, ended, and none of them forgotten.

A call of the device runs in a thread and is never cut short: what it made is known here even when
nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
from functools import partial

from ..errors import DeviceError
from ..model import Address
from .offload import Offload, finish
from .provider import NativeDomain, NativeRegion
from .registration_hints import registration_hint
from .turn import Turn

_TIMEOUT_S = 60.0  # a gigabyte of prefaulted memory takes well under a second


class DeviceRegions:
    """All methods belong to one event loop."""

    def __init__(self, turn: Turn, domain: NativeDomain, offload: Offload) -> None:
        self._turn = turn
        self._domain = domain
        self._offload = offload
        self._closed = False
        self._live: dict[int, NativeRegion] = {}  # by id
        self._registering: set[asyncio.Future[NativeRegion]] = set()
        self._deregistering: dict[int, asyncio.Future[None]] = {}  # by id of the region

    def begin_register(
        self, address: Address, length: int, access: int
    ) -> asyncio.Future[NativeRegion]:
        """Fault the pages in, then register, both in a thread. What it returns is the call itself:
        done when the device has answered, however long that takes; the memory must stay until
        then. Its error is a DeviceError. Raises ClosedError, DeviceError (the domain closes).
        """
        if self._closed:
            raise DeviceError("memory", "reg_mr", 0, "the protection domain is closed")

        def register() -> NativeRegion:
            try:
                self._turn.prefault(address, length)
                return self._domain.register(address, length, access)
            except DeviceError as error:
                error.hint = error.hint or registration_hint(error.errno)
                raise

        future = self._offload.start(register)
        self._registering.add(future)
        future.add_done_callback(self._registered)
        return future

    def begin_deregister(self, region: NativeRegion) -> asyncio.Future[None]:
        """As `begin_register`. Who asks again while it runs gets the same call: two at once would
        free the registration twice. Nothing is done to one that is gone.
        """
        running = self._deregistering.get(id(region))
        if running is not None:
            return running
        if id(region) not in self._live:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gone.set_result(None)
            return gone
        running = self._offload.start(region.close)
        self._deregistering[id(region)] = running
        running.add_done_callback(partial(self._deregistered, region))
        return running

    async def register(self, address: Address, length: int, access: int) -> NativeRegion:
        """Raises DeviceError, DeadlineExceeded. One that nobody waits for any more is undone by
        `close`.
        """
        begun = self.begin_register(address, length, access)
        return await finish("registering memory", _TIMEOUT_S, begun)

    async def deregister(self, region: NativeRegion) -> None:
        """Raises DeviceError (a window is still bound in it), DeadlineExceeded; the region stays
        then.
        """
        await finish("deregistering memory", _TIMEOUT_S, self.begin_deregister(region))

    async def settle(self) -> None:
        """Nothing more is registered; until nothing is on its way."""
        self._closed = True
        if self._registering:
            await asyncio.wait(set(self._registering))

    async def close(self) -> None:
        """Deregister what is left. Raises DeviceError."""
        for region in list(self._live.values()):
            await self.deregister(region)

    def _registered(self, future: asyncio.Future[NativeRegion]) -> None:
        self._registering.discard(future)
        if not future.cancelled() and future.exception() is None:
            self._live[id(future.result())] = future.result()

    def _deregistered(self, region: NativeRegion, future: asyncio.Future[None]) -> None:
        del self._deregistering[id(region)]
        if not future.cancelled() and future.exception() is None:
            self._live.pop(id(region), None)
