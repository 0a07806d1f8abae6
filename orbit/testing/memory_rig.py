"""What the contract suite of PinnedMemory works with: opened memory with its limits, and how its
figures and refusals are looked at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ..errors import BudgetExceeded, BusyError, DeviceError
from ..memory.budget import Budget
from ..transport.interface import MemoryStatistics, PinnedMemory

KIB, MIB = 1 << 10, 1 << 20
TAKEN = (BudgetExceeded, BusyError, DeviceError)  # what a refusal may be


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Small enough that growth shows. The budget is for each device."""

    initial_bytes: int = 256 * KIB
    max_bytes: int = MIB
    dedicated_min_bytes: int = 2 * MIB
    budget_bytes: int = 8 * MIB
    limit_bytes: int = 6 * MIB  # of one registration
    reclaim_after_s: float | None = None
    retain_bytes: int = 256 * KIB


class MemoryRig(Protocol):
    """Open memory and the strings of its devices."""

    @property
    def memory(self) -> ClosableMemory: ...

    @property
    def devices(self) -> int:
        """How often the budget pays for a page."""

    def refuse(self, *, registrations: int = 0, deregistrations: int = 0) -> None:
        """As many of the next calls of one device fail."""


class ClosableMemory(PinnedMemory, Protocol):
    """What the composition root has of PinnedMemory."""

    budget: Budget

    async def close(self) -> None: ...


OpenMemory = Callable[[PoolSettings], AbstractAsyncContextManager[MemoryRig]]
MemoryCase = Callable[[OpenMemory], Awaitable[None]]


def raised(call: Callable[[], object], *kinds: type[BaseException]) -> BaseException:
    """The error that `call` raises, of one of `kinds`."""
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"nothing was raised, {kinds} was expected")


async def failed(work: Awaitable[object], *kinds: type[BaseException]) -> BaseException:
    """As `raised`, of what is awaited."""
    try:
        await work
    except kinds as error:
        return error.with_traceback(None)  # whose frames hold what was to be registered
    raise AssertionError(f"nothing was raised, {kinds} was expected")


def figures(rig: MemoryRig) -> MemoryStatistics:
    found = rig.memory.statistics()
    assert found.registered_bytes == rig.memory.registered_bytes <= found.budget_bytes
    assert found.arena_bytes_used <= found.arena_bytes
    return found
