"""The regions of one engine: registered together or not at all, and named to peers together.

What registrations cost is charged before a device is asked, and repaid when every device has let
go. How one region lives is the node's business (regions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import BudgetExceeded, ClosedError, Unquiesced, UsageError
from ...memory.budget import Budget, Charge
from ...memory.buffer import BufferExport
from ...memory.pages import page_range
from ...model import Direction, Handle, RegionAccess
from ...transport.interface import Span
from ..ranged import DirectSource, Hold, Source
from ..region import Region, end_regions
from .budgets import SharedBudget
from .ground import Ground
from .region import EngineRegion, region_of
from .staging import StagedSource
from .tally import Tally


class RegionRegistry:
    """`devices`: how many of them a registration is made on. For the event loop's thread."""

    def __init__(self, ground: Ground, devices: int) -> None:
        config = ground.config
        self._ground = ground
        self._devices = devices
        self._count = Budget("max_cached_mrs", config.max_cached_mrs, "engine.max_cached_mrs")
        self._bytes = Budget(
            "max_cached_mr_bytes", config.max_cached_mr_bytes, "engine.max_cached_mr_bytes"
        )
        budgets, memory = ground.budgets, ground.node.paths.memory
        self.reached = Tally("what peers reach of an engine's regions")
        source: Source = DirectSource(budgets.source_direct)
        if ground.staged:
            source = StagedSource(memory, budgets.source_staging, budgets.source_direct)
        self._source = _Counted(source, budgets.source_grants, self.reached)
        self._handles: dict[EngineRegion, Handle | None] = {}  # until they are released
        self._hidden = False  # no further region is for peers
        self._gated = False

    def __len__(self) -> int:
        """Regions that are not released."""
        return len(self._handles)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Of registrations on all devices together, both views: their count, and whole pages."""
        return self._count, self._bytes

    async def register(
        self, buffers: Iterable[object], access: RegionAccess | str
    ) -> list[EngineRegion]:
        """All of them or none. Raises UsageError, BudgetExceeded, DeviceError, ClosedError;
        Unquiesced when what had been registered does not come off a device again.
        """
        kind = _checked_access(access)
        held = list(buffers)
        charges = self._charge([_pinned_bytes(buffer) for buffer in held], kind)
        # A staged engine's regions are known to no device: their bytes are copied.
        own = not self._ground.staged
        try:
            self._check_open(kind)
            opened = await self._ground.node.regions.open_many(
                held, own=own, peers=own and bool(kind.directions)
            )
        except Unquiesced:
            raise  # what stays on a device stays charged
        except BaseException:
            for charge in charges:
                charge.repay()
            raise
        for region, charge in zip(opened, charges, strict=True):
            region.when_ended(charge.repay)
        return await self._publish(opened, kind)

    async def unregister(self, region: EngineRegion, timeout: float | None) -> None:
        """See EngineRegion.unregister."""
        self.hide(region)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        await region_of(region).unregister(deadline)

    def hide(self, region: EngineRegion) -> None:
        """From now on no peer begins with it. Idempotent."""
        handle = self._handles.get(region)
        if handle is not None:
            self._ground.node.registering.retire_region(handle)

    def hide_all(self) -> None:
        """As `hide`, of every region; and no further one is registered for peers."""
        self._hidden = True
        for region in self._handles:
            self.hide(region)

    def gate(self) -> None:
        """From now on nothing is registered. Idempotent."""
        self._gated = True

    async def unregister_all(self, deadline: float | None) -> None:
        """Returns when every one is released. Raises Unquiesced, when all have their verdict."""
        ends = []
        for region in list(self._handles):
            self.hide(region)
            ends.append(region_of(region).unregister(deadline))
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    # --- within -----------------------------------------------------------------------------------

    async def _publish(self, opened: list[Region], kind: RegionAccess) -> list[EngineRegion]:
        """Visible together: nothing is awaited between the first and the last, unless it fails."""
        made: list[EngineRegion] = []
        registering = self._ground.node.registering
        try:
            self._check_open(kind)
            for region in opened:
                handle = None
                if kind.directions:
                    handle = registering.register_region(region, kind.directions, self._source)
                made.append(EngineRegion(self, region, kind, handle))
                self._handles[made[-1]] = handle
        except BaseException as error:
            for one in made:
                self.hide(one)
                del self._handles[one]
            await end_regions(opened, error)
            raise
        for one, region in zip(made, opened, strict=True):
            region.when_ended(functools.partial(self._handles.pop, one, None))
        return made

    def _check_open(self, kind: RegionAccess) -> None:
        if self._gated or (self._hidden and kind.directions):
            raise ClosedError("the engine")

    def _charge(self, sizes: list[int], kind: RegionAccess) -> list[_Charges]:
        """Of each region. `sizes`: whole pages. Raises BudgetExceeded; nothing is charged then."""
        views = 0 if self._ground.staged else 1 + bool(kind.directions)
        copies = views * self._devices
        made: list[_Charges] = []
        try:
            for size in sizes:
                count = self._count.charge(copies)
                made.append(_Charges(count))
                made[-1].nbytes = self._bytes.charge(size * copies)
        except BudgetExceeded as error:
            for charges in made:
                charges.repay()
            total = sum(sizes)
            error.hint = (
                f"each region has {views} registrations on each of {self._devices} devices: raise"
                f" {error.knob}, or take EngineConfig.for_bytes({total}, rails={self._devices},"
                f" regions={len(sizes)})"
            )
            raise
        return made


class _Counted:
    """A source of which is known how many leases have its room, or wait for it; and which does not
    grant more at once than its engine may.
    """

    def __init__(self, source: Source, grants: SharedBudget, tally: Tally) -> None:
        self._source = source
        self._grants = grants
        self._tally = tally

    async def admit(self, part: Span, direction: Direction, grants: int, deadline: float) -> Hold:
        """See ranged.Source."""
        with contextlib.ExitStack() as holds:
            self._tally.enter()
            holds.callback(self._tally.leave)
            taken = await self._grants.take(grants, deadline)
            holds.callback(taken.give_back)
            hold = await self._source.admit(part, direction, grants, deadline)
            return _CountedHold(hold, holds.pop_all())


class _CountedHold:
    def __init__(self, hold: Hold, holds: contextlib.ExitStack) -> None:
        self._hold = hold
        self._holds = holds

    @property
    def span(self) -> Span:
        return self._hold.span

    async def finish(self) -> None:
        await self._hold.finish()

    def give_back(self) -> None:
        self._hold.give_back()
        self._holds.close()


@dataclass(slots=True)
class _Charges:
    """Of one region."""

    count: Charge
    nbytes: Charge | None = None

    def repay(self) -> None:
        self.count.repay()
        if self.nbytes is not None:
            self.nbytes.repay()


def _pinned_bytes(buffer: object) -> int:
    """Of the whole pages that it lies in. Raises UsageError."""
    with BufferExport(buffer, writable=True) as export:
        return page_range(export.address(), export.nbytes)[1]


def _checked_access(access: RegionAccess | str) -> RegionAccess:
    try:
        return RegionAccess(access)
    except ValueError:
        accepted = ", ".join(RegionAccess)
        raise UsageError(f"access={access!r} must be one of {accepted}") from None
