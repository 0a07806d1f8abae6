"""The owner's calls of the handle API: what callers pass is checked, staged and put under a handle.

It decides where a payload is staged; slots and leases are the owner's, regions the regions'.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

from ..config import NodeConfig
from ..errors import (
    BudgetExceeded,
    ClosedError,
    DeviceError,
    OrbitError,
    OutOfRange,
    RegisterOwnedError,
    UnknownHandle,
    Unquiesced,
    UsageError,
)
from ..memory.buffer import BufferExport
from ..model import Direction, Handle, PathReason, SlotId
from ..transport.interface import Span
from ..transport.pieces import check_range, join_spans
from .options import NO_OPTIONS, Put, RegisterOptions
from .owner import Owner
from .paths import Paths
from .ranged import RangedMemory, Source
from .region import Region
from .region_guards import RegionGuard, RegionSlice
from .regions import Regions
from .runner import TaskRunner
from .sinks import PinnedWriter
from .staging import Holding, Staged, Stop, stage_held, stage_pinned
from .usage import checked_handle, checked_timeout


class Registering:
    """`check_open` raises ClosedError once the node closes."""

    def __init__(
        self,
        config: NodeConfig,
        paths: Paths,
        owner: Owner,
        regions: Regions,
        runner: TaskRunner,
        check_open: Callable[[], None],
    ) -> None:
        self._config = config.rendezvous
        self._paths = paths
        self._owner = owner
        self._regions = regions
        self._runner = runner
        self._check_open = check_open
        self._in_place: dict[SlotId, tuple[Region, ...]] = {}  # until their slot's memory is free

    # --- payloads ---------------------------------------------------------------------------------

    async def register_data(self, buffer: object, options: RegisterOptions | None = None) -> Handle:
        """See Node.register_data."""
        self._check_open()
        return self._serve(stage_held(buffer, self._paths.memory), options)

    async def register_data_pinned(
        self, buffer: object, options: RegisterOptions | None = None
    ) -> Handle:
        """See Node.register_data_pinned."""
        self._check_open()
        staging = await stage_pinned(buffer, self._paths.memory, self._refused())
        handle = self._serve(staging.staged, options)
        self._owner.staging_decided(staging.reason)
        return handle

    async def register_data_in_region(
        self, guard: RegionGuard, byte_range: range | None, options: RegisterOptions | None
    ) -> Handle:
        """See Node.register_data_in_region."""
        self._check_open()
        if not isinstance(guard, RegionGuard) or not self._regions.owns(guard):
            raise UsageError(f"no region of this node: {guard!r}")
        offset, nbytes = _checked_range(byte_range, guard.nbytes)
        part = RegionSlice(guard, offset, nbytes)
        return self._serve(stage_held(part, self._paths.memory), options)

    async def register_data_in_place(
        self, buffer: object, options: RegisterOptions | None
    ) -> Handle:
        """See Node.register_data_in_place."""
        self._check_open()
        if self._paths.memory is None:
            unavailable = self._paths.unavailable(self._paths.rdma_reason)
            _refuse_unregistrable(buffer)
            raise RegisterOwnedError(unavailable, buffer)
        with Holding(self._paths.memory) as holding:
            try:
                region = await self._regions.open(buffer)
            except UsageError:
                raise
            except OrbitError as error:
                raise RegisterOwnedError(error, buffer) from error
            holding.add_region(region)
            return self._serve(holding.staged(), options, regions=(region,))

    # --- destinations -----------------------------------------------------------------------------

    async def register_destination(self, where: object, options: RegisterOptions | None) -> Handle:
        """See Node.register_destination."""
        self._check_open()
        pieces = list(where) if isinstance(where, list | tuple) else [where]
        plain = [piece for piece in pieces if not isinstance(piece, RegionSlice | PinnedWriter)]
        reason = PathReason.NOT_PINNED
        if plain and self._worth_registering(pieces):
            reason = self._refused()
            if reason is PathReason.OK:
                try:
                    return await self._offer(pieces, options, register=True)
                except BudgetExceeded:
                    reason = PathReason.BUDGET
                except DeviceError:
                    reason = PathReason.POOL_EXHAUSTED
        handle = await self._offer(pieces, options, register=False)
        self._owner.staging_decided(reason)
        return handle

    # --- regions that peers reach by ranges -------------------------------------------------------

    def register_region(
        self, region: Region, directions: Iterable[Direction], source: Source | None = None
    ) -> Handle:
        """Let peers lease ranges of `region` in those directions, under a fresh handle; `source`
        (None: no limit) gives the room for it. The region stays its caller's to unregister, which
        ends these leases by force when its time is over. Nothing is awaited. Raises ClosedError.
        """
        self._check_open()
        stop = Stop()
        use = region.use(0, region.nbytes, stop)
        try:
            # Writable: peers that write reach it through the same span.
            span = join_spans([Span(piece.view, piece.pinned) for piece in use.target.pieces])
            staged = Staged(span, give_back=use.end, uses=[use], stop=stop)
            memory = RangedMemory(region.memory.address, tuple(directions), source)
            handle = self._owner.register_ranged(staged, memory)
        except BaseException:
            use.end()
            raise
        stop.then(functools.partial(self._owner.retire, handle, force=True))
        return handle

    def retire_region(self, handle: Handle) -> None:
        """No new lease on it: those that it has go on, and the region is out of use with the last.
        Also while the node closes; nothing when it has ended.
        """
        self._owner.retire(handle)

    async def wait_put(self, handle: Handle, timeout: float | None) -> Put:
        """See Node.wait_put."""
        self._check_open()
        return await self._owner.wait_put(checked_handle(handle), checked_timeout(timeout))

    async def _offer(
        self, pieces: list[object], options: RegisterOptions | None, *, register: bool
    ) -> Handle:
        """With `register`, plain buffers are registered in place, all of them or none. Raises
        UsageError, ClosedError, BudgetExceeded, DeviceError.
        """
        regions: list[Region] = []
        with Holding(self._paths.memory, writable=True) as holding:
            for piece in pieces:
                kept = isinstance(piece, RegionSlice | PinnedWriter)
                if register and not kept and _size_of(piece):
                    region = await self._regions.open(piece)
                    holding.add_region(region)
                    regions.append(region)
                else:
                    holding.add(piece)
            return self._serve(
                holding.staged(), options, direction=Direction.WRITE, regions=tuple(regions)
            )

    def _worth_registering(self, pieces: list[object]) -> bool:
        return sum(map(_size_of, pieces)) >= max(self._config.rdma_min_bytes, 1)

    # --- memory, and the end of a slot ------------------------------------------------------------

    async def alloc_pinned_writer(self, nbytes: int) -> PinnedWriter:
        """See Node.alloc_pinned_writer."""
        self._check_open()
        memory = self._paths.memory
        if memory is None:
            raise self._paths.unavailable(self._paths.rdma_reason)
        if not isinstance(nbytes, int) or nbytes < 1:
            raise UsageError(f"a pinned writer of {nbytes!r} bytes")
        writer = PinnedWriter(memory, await memory.allocate(nbytes))
        try:
            self._check_open()
        except ClosedError:
            writer.free()
            raise
        return writer

    async def withdraw(self, handle: Handle) -> None:
        """See Node.withdraw."""
        self._check_open()
        regions = self._in_place.get(checked_handle(handle).slot_id, ())
        await self._owner.withdraw(handle)
        for region in regions:  # which the end of the slot began to deregister
            await region.unregister()

    # --- within -----------------------------------------------------------------------------------

    def _refused(self) -> PathReason:
        """Why nothing may be put into registered memory; OK otherwise."""
        if self._paths.memory is None:
            return self._paths.rdma_reason
        return PathReason.OK if self._config.enabled else PathReason.KILL_SWITCH

    def _serve(
        self,
        staged: Staged,
        options: RegisterOptions | None,
        *,
        direction: Direction = Direction.READ,
        regions: tuple[Region, ...] = (),
    ) -> Handle:
        """Put `staged` under a handle, or free it. `regions`: they end with the slot."""
        try:
            self._check_open()  # again: staging may have taken its time
            stop = staged.stop
            if stop is not None and stop.given:
                raise ClosedError("the region")
            handle = self._owner.register(staged, options or NO_OPTIONS, direction=direction)
        except BaseException:
            staged.free()
            raise
        if stop is not None:
            stop.then(functools.partial(self._withdraw_soon, handle))
        if regions:
            self._note_in_place(handle, regions)
        return handle

    def _note_in_place(self, handle: Handle, regions: tuple[Region, ...]) -> None:
        self._in_place[handle.slot_id] = regions
        for region in regions:
            region.when_ended(lambda: self._in_place.pop(handle.slot_id, None))

    def _withdraw_soon(self, handle: Handle) -> None:
        """The memory under a payload is wanted back."""
        self._runner.spawn(self._withdraw_quietly(handle), f"withdraw {handle}")

    async def _withdraw_quietly(self, handle: Handle) -> None:
        # It is gone already; or it is kept, which was logged.
        with contextlib.suppress(UnknownHandle, Unquiesced):
            await self._owner.withdraw(handle)


def _size_of(piece: object) -> int:
    """Bytes of one piece. Raises UsageError."""
    if isinstance(piece, RegionSlice | PinnedWriter):
        return piece.nbytes
    with BufferExport(piece, writable=True) as export:
        return export.nbytes


def _refuse_unregistrable(buffer: object) -> None:
    """Raises UsageError for what can be registered nowhere."""
    if not _size_of(buffer):
        raise UsageError("no bytes cannot be registered in place")


def _checked_range(byte_range: range | None, total_bytes: int) -> tuple[int, int]:
    """Offset and size. Raises UsageError, OutOfRange."""
    if byte_range is None:
        return 0, total_bytes
    if not isinstance(byte_range, range) or byte_range.step != 1:
        raise UsageError(f"{byte_range!r} is no range of bytes with step 1")
    if byte_range.stop < byte_range.start:
        raise OutOfRange(f"{byte_range!r} ends before it begins")
    check_range(byte_range.start, byte_range.stop - byte_range.start, total_bytes)
    return byte_range.start, byte_range.stop - byte_range.start
