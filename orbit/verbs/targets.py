"""Where a pull writes: straight into pinned memory, through the bounce pool with one copy, or into
the caller's buffer registered for this operation.

Owns the choice (a copy below the crossover, a registration above, each the other's way out) and
the memory until it is finished with. It posts nothing.
"""

from __future__ import annotations

from ..errors import BusyError, DeviceError, PathFailed
from ..model import PathName, PathReason
from ..transport.interface import PinnedBuffer, Target
from .counters import PathCounters
from .device import DeviceContext
from .registration import PinnedArena, TargetRegistration, address_of
from .requester import LocalMemory


class PreparedTarget:
    """Memory that a transfer may write. `discard` it in the end, but never while unquiesced."""

    def __init__(
        self,
        target: Target,
        address: int,
        lkey: int,
        *,
        bounce: tuple[PinnedArena, PinnedBuffer] | None = None,
        registration: TargetRegistration | None = None,
    ) -> None:
        # Not `self`: a cycle would hold the caller's buffer until the garbage collector runs.
        self.memory = LocalMemory(address, lkey, (target, bounce, registration))
        self._target = target
        self._bounce = bounce
        self._registration = registration

    @property
    def copies(self) -> bool:
        return self._bounce is not None

    def deliver(self, nbytes: int) -> None:
        """The bytes are there: bring them to the target."""
        if self._bounce is not None:
            self._target.view[:nbytes] = self._bounce[1].view[:nbytes]

    async def discard(self) -> None:
        """Nothing can write the memory any more. Raises DeviceError."""
        bounce, self._bounce = self._bounce, None
        if bounce is not None:
            arena, buffer = bounce
            arena.free(buffer)
        if self._registration is not None:
            await self._registration.close()


class Targets:
    """Prepares targets on any of the path's devices."""

    def __init__(self, bounce: PinnedArena, crossover_bytes: int, counters: PathCounters) -> None:
        self._bounce = bounce
        self._crossover_bytes = crossover_bytes
        self._counters = counters

    def prepare_nowait(
        self, device: DeviceContext, target: Target, nbytes: int
    ) -> PreparedTarget | None:
        """Pinned memory, or a piece of the pool where a copy is cheaper; None: `prepare` it."""
        pinned = self._pinned(device, target)
        if pinned is not None or nbytes >= self._crossover_bytes:
            return pinned
        try:
            return self._bounced(device, target, nbytes)
        except BusyError:
            return None

    async def prepare(self, device: DeviceContext, target: Target, nbytes: int) -> PreparedTarget:
        """Raises PathFailed (pool_exhausted) when neither way is open."""
        pinned = self._pinned(device, target)
        if pinned is not None:
            return pinned
        first, second = self._copied, self._registered
        if nbytes >= self._crossover_bytes:
            first, second = second, first
        try:
            return await first(device, target, nbytes)
        except (BusyError, DeviceError, TimeoutError):
            pass  # no room, or the locked-memory limit: the other way may still be open
        try:
            return await second(device, target, nbytes)
        except (BusyError, DeviceError, TimeoutError) as error:
            raise PathFailed(PathName.RDMA, PathReason.POOL_EXHAUSTED, str(error)) from error

    def _pinned(self, device: DeviceContext, target: Target) -> PreparedTarget | None:
        pinned = target.pinned
        if pinned is None or not isinstance(pinned.arena, PinnedArena):
            return None
        region = pinned.arena.region(device)
        if region is None:
            return None
        self._counters.targets_direct += 1
        return PreparedTarget(target, address_of(target.view), region.lkey)

    async def _copied(self, device: DeviceContext, target: Target, nbytes: int) -> PreparedTarget:
        reason = await self._bounce.ensure()
        if reason is not PathReason.OK:
            raise BusyError(f"no bounce pool: {self._bounce.failure or reason}")
        return self._bounced(device, target, nbytes)

    def _bounced(self, device: DeviceContext, target: Target, nbytes: int) -> PreparedTarget:
        region = self._bounce.region(device)
        if region is None:
            raise BusyError("the bounce pool is not registered")
        buffer = self._bounce.allocate_nowait(nbytes)
        self._counters.targets_copied += 1
        return PreparedTarget(target, buffer.address, region.lkey, bounce=(self._bounce, buffer))

    async def _registered(
        self, device: DeviceContext, target: Target, nbytes: int
    ) -> PreparedTarget:
        registration = await TargetRegistration.open(device, target.view[:nbytes])
        self._counters.targets_registered += 1
        return PreparedTarget(
            target, address_of(target.view), registration.lkey, registration=registration
        )
