"""Mapping arenas and ending them: the tasks, and every arena that a device may still reach.

What is mapped, when and for whom is the pool's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..errors import BusyError, DeviceError, OrbitError
from ..memory.budget import Budget
from .arena_memory import map_arena
from .arenas import Arena
from .device import DeviceContext
from .registration import PARENT_ACCESS, REGISTER_TIMEOUT_S, Registration
from .retention import Retained


class Growth:
    """An arena that is being mapped, and how many wait for it. With nobody left it is undone."""

    def __init__(self, registration: Registration) -> None:
        self.abandoned = False
        self._registration = registration
        self._task: asyncio.Task[None] | None = None
        self._waiting = 0

    def follow(self, task: asyncio.Task[None]) -> None:
        self._task = task

    @property
    def ended(self) -> bool:
        return self._task is None or self._task.done()

    async def wait(self) -> None:
        """Raises BusyError: the devices refuse, or do not answer."""
        task = self._task
        assert task is not None
        self._waiting += 1
        try:
            done, _ = await asyncio.wait([task], timeout=REGISTER_TIMEOUT_S)
        finally:
            self._waiting -= 1
            if not self._waiting and not task.done():
                self.abandoned = True
                self._registration.abandon()
        if not done:
            raise BusyError(f"no device answered within {REGISTER_TIMEOUT_S:g} s")
        task.result()

    async def wait_undone(self) -> None:
        """It is abandoned: until nothing is left of it."""
        if self._task is not None:
            await asyncio.wait([self._task])


class ArenaMapping:
    """All methods belong to one event loop."""

    def __init__(
        self,
        devices: Sequence[DeviceContext],
        budget: Budget,
        retained: Retained,
        on_gone: Callable[[Arena], None],
    ) -> None:
        """`on_gone` is called when every device has confirmed the end of an arena."""
        self.mapped_count = 0  # ever
        # Also those that are being mapped or unmapped, and those whose end a device has refused.
        self.arenas: set[Arena] = set()
        self._devices = tuple(devices)
        self._budget = budget
        self._retained = retained
        self._on_gone = on_gone
        self._work: set[asyncio.Task[None]] = set()
        self._unmapping: set[asyncio.Task[None]] = set()  # of the work

    @property
    def charged_bytes(self) -> int:
        return sum(arena.registration.charged_bytes for arena in self.arenas)

    def start(self, nbytes: int, take: Callable[[Arena], None]) -> Growth:
        """Map and register an arena in the background; `take` gets it when it is usable. Raises
        BudgetExceeded, BusyError (no memory).
        """
        charge = self._budget.charge(nbytes * len(self._devices))
        try:
            memory = map_arena(nbytes)
        except OSError as error:
            charge.repay()
            raise BusyError(f"no memory for an arena of {nbytes} bytes: {error}") from error
        domains = [device.domain for device in self._devices]
        registration = Registration(
            domains, memory.address, nbytes, PARENT_ACCESS, charge, self._retained, memory
        )
        arena = Arena(memory, registration)
        self.arenas.add(arena)
        registration.on_gone = lambda: self._gone(arena)
        growth = Growth(registration)
        growth.follow(self._start(self._map(arena, growth, take)))
        return growth

    def unmap(self, arena: Arena) -> None:
        """In the background: it is empty, and nobody gets a piece of it any more. If a device
        refuses, it is retained.
        """
        ending = arena.registration.give_up("an empty arena could not be deregistered")
        task = self._start(ending)
        self._unmapping.add(task)
        task.add_done_callback(self._unmapping.discard)

    async def wait_unmapped(self) -> bool:
        """Until one of the arenas on their way out is gone, or retained. False: there is none."""
        if not self._unmapping:
            return False
        await asyncio.wait(set(self._unmapping), return_when=asyncio.FIRST_COMPLETED)
        return True

    async def drain(self) -> None:
        """Until what runs in the background has ended."""
        while self._work:
            await asyncio.wait(set(self._work))

    async def close(self) -> None:
        """Deregister all. Raises the first DeviceError, having tried the rest."""
        first: OrbitError | None = None
        for arena in list(self.arenas):
            try:
                await arena.registration.close()
            except OrbitError as error:
                arena.registration.retain(str(error))
                first = first or error
        if first is not None:
            raise first

    async def _map(self, arena: Arena, growth: Growth, take: Callable[[Arena], None]) -> None:
        try:
            await arena.registration.open()
        except DeviceError as error:
            text = f"an arena of {arena.nbytes} bytes: {error}"
            raise BusyError(text, hint=error.hint) from error
        if growth.abandoned:
            await arena.registration.give_up("nobody waits for the arena any more")
            raise BusyError("nobody waits for the arena any more")
        self.mapped_count += 1
        take(arena)

    def _gone(self, arena: Arena) -> None:
        arena.let_go()
        self.arenas.discard(arena)
        self._on_gone(arena)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits for it; nobody may be left
