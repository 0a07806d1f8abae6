"""A fresh protection domain for a device whose window keys run out, beside the old one.

Owns the order: the fresh domain has every registration before any work goes to it; then new queue
pairs are made there; the old one ends when the last queue pair has left it. What fails on the way
is undone, and tried again later. Which queue pairs may go, and when, is their arrays' business; no
grant and no transfer is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from ..errors import ClosedError, OrbitError, Unquiesced
from .arena_pool import ArenaPool
from .bulk_context import BulkContext
from .device import DeviceContext
from .domain import Domain
from .registration import REGISTER_TIMEOUT_S

logger = logging.getLogger("orbit.verbs")

_LOOK_S: Final = 0.25  # while a domain is being left: arrays that were in use may be idle by now
_RETRY_S: Final = 1.0  # registering everything costs time; somebody may give back memory meanwhile


class Leaving(Protocol):
    """Arrays of queue pairs, in one role."""

    def leave_old_domains(self) -> None:
        """End what can go of the queue pairs in domains that are left. Called again and again."""


class Rollover:
    """All of it runs on one event loop. One device at a time, so that at most one has all of its
    registrations twice.
    """

    def __init__(
        self,
        devices: Sequence[DeviceContext],
        memory: ArenaPool,
        arrays: Sequence[Leaving],
        context: BulkContext,
    ) -> None:
        self._devices = tuple(devices)
        self._memory = memory
        self._arrays = tuple(arrays)
        self._context = context
        self._soon = asyncio.Event()
        self._retry_at: dict[DeviceContext, float] = {}
        self._kept: set[Domain] = set()  # a device has refused their end
        self._running: asyncio.Task[None] | None = None
        self._gated = False

    def start(self) -> None:
        """Watch the keys from now on. In the running loop."""
        for device in self._devices:
            self._watch(device.domain)
        self._running = asyncio.get_running_loop().create_task(self._run())

    def gate(self) -> None:
        """No further domain; one that is not ready yet is given up."""
        self._gated = True
        self._soon.set()

    async def close(self) -> None:
        """Gate, and wait for what has begun: nothing is registered or ended here any more. Raises
        Unquiesced when a device does not answer. A further call waits again.
        """
        self.gate()
        if self._running is not None:
            await asyncio.wait([self._running], timeout=REGISTER_TIMEOUT_S)
            if not self._running.done():
                raise Unquiesced("a fresh protection domain", 0, "a device does not answer")

    def forget(self) -> None:
        """The devices have closed, and with them what they had refused to let go of."""
        for domain in self._kept:
            self._context.retained.remove(domain)

    def _watch(self, domain: Domain) -> None:
        domain.windows.history.watch(self._soon.set)
        domain.on_unused = self._soon.set

    async def _run(self) -> None:
        while not self._gated:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._look_at()):
                    await self._soon.wait()
            self._soon.clear()
            for device in self._devices:
                try:
                    await self._look(device)
                except Exception:  # the other devices must be looked at all the same
                    logger.exception("%s: replacing the protection domain failed", device.state)

    def _look_at(self) -> float | None:
        """When to look without being told; None: not at all."""
        now = asyncio.get_running_loop().time()
        leaving = any(set(device.old_domains) - self._kept for device in self._devices)
        times = [self._retry_at[device] for device in self._devices if device in self._retry_at]
        return min([*times, now + _LOOK_S] if leaving else times, default=None)

    async def _look(self, device: DeviceContext) -> None:
        if device.old_domains:
            await self._leave(device)
        if self._gated or device.closed or device.state.dead:
            self._retry_at.pop(device, None)
            return
        now = asyncio.get_running_loop().time()
        if device.domain.windows.history.scarce and now >= self._retry_at.get(device, now):
            await self._replace(device)
            if device.old_domains:
                await self._leave(device)

    # --- the fresh one ---

    async def _replace(self, device: DeviceContext) -> None:
        self._retry_at.pop(device, None)
        try:
            fresh = device.open_domain()
            try:
                await self._register_all(fresh)
            except BaseException:
                await self._end(device, fresh)
                raise
        except (OrbitError, TimeoutError) as error:
            if not self._gated:
                self._context.counters.key_rollovers_failed += 1
                self._retry_at[device] = asyncio.get_running_loop().time() + _RETRY_S
                logger.warning("%s: no fresh window keys yet: %s", device.state, error)
            return
        device.enter(fresh)
        self._watch(fresh)
        self._context.counters.key_rollovers += 1
        logger.info("%s: window keys were running out: a fresh protection domain", device.state)

    async def _register_all(self, fresh: Domain) -> None:
        """Returns when there is no registration that is not in `fresh`, without giving way to the
        loop after that. Raises BudgetExceeded, DeviceError, ClosedError.
        """
        while missing := [one for one in self._memory.registrations if one.lacks(fresh)]:
            whole = self._memory.budget.charge(sum(one.page_bytes for one in missing))
            try:
                for registration in missing:
                    if self._gated:
                        raise ClosedError("the RDMA path")
                    await registration.extend(fresh, whole.split(registration.page_bytes))
            finally:
                whole.repay()  # what is left of it

    # --- the old ones ---

    async def _leave(self, device: DeviceContext) -> None:
        for arrays in self._arrays:
            arrays.leave_old_domains()
        for domain in device.old_domains:
            if not domain.queue_pairs and domain not in self._kept and not self._gated:
                await self._end(device, domain)

    async def _end(self, device: DeviceContext, domain: Domain) -> None:
        """Of one without queue pairs. What a device refuses to let go of stays charged, and is
        tried again when the device closes.
        """
        try:
            for registration in self._memory.registrations:
                await registration.withdraw(domain)
            await device.close_domain(domain)
        except (OrbitError, TimeoutError) as error:
            self._kept.add(domain)
            now = asyncio.get_running_loop().time()
            self._context.retained.add(domain, str(domain), 0, str(error), now)
            logger.error("%s is kept: %s", domain, error)
