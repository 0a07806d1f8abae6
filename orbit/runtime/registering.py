"""The owner's calls of the handle API: what callers pass is checked, staged and put under a handle.

It decides where a payload is staged; slots and leases are the owner's, regions the regions'.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import NodeConfig
from ..errors import ClosedError
from ..model import Handle, PathReason
from .options import NO_OPTIONS, Put, RegisterOptions
from .owner import Owner
from .paths import Paths
from .regions import RegionGuard, Regions
from .sinks import PinnedWriter
from .staging import stage_held, stage_pinned
from .usage import checked_handle


class Registering:
    """`check_open` raises ClosedError once the node closes."""

    def __init__(
        self,
        config: NodeConfig,
        paths: Paths,
        owner: Owner,
        regions: Regions,
        check_open: Callable[[], None],
    ) -> None:
        self._config = config
        self._paths = paths
        self._owner = owner
        self._regions = regions
        self._check_open = check_open

    async def register_data(self, buffer: object, options: RegisterOptions | None = None) -> Handle:
        """See Node.register_data."""
        return self.register_held(buffer, options)

    def register_held(self, buffer: object, options: RegisterOptions | None = None) -> Handle:
        """As `register_data`, at once. Raises UsageError, ClosedError."""
        self._check_open()
        return self._owner.register(stage_held(buffer), options or NO_OPTIONS)

    async def register_data_pinned(
        self, buffer: object, options: RegisterOptions | None = None
    ) -> Handle:
        """See Node.register_data_pinned."""
        self._check_open()
        refused = PathReason.OK if self._paths.memory is not None else self._paths.rdma_reason
        if refused is PathReason.OK and not self._config.rendezvous.enabled:
            refused = PathReason.KILL_SWITCH
        staging = await stage_pinned(buffer, self._paths.memory, refused)
        try:
            self._check_open()
        except ClosedError:
            staging.staged.free()
            raise
        self._owner.staging_decided(staging.reason)
        return self._owner.register(staging.staged, options or NO_OPTIONS)

    async def register_data_in_region(
        self, guard: RegionGuard, byte_range: range | None, options: RegisterOptions | None
    ) -> Handle:
        """See Node.register_data_in_region."""
        raise NotImplementedError

    async def register_data_in_place(
        self, buffer: object, options: RegisterOptions | None
    ) -> Handle:
        """See Node.register_data_in_place."""
        raise NotImplementedError

    async def register_destination(self, where: object, options: RegisterOptions | None) -> Handle:
        """See Node.register_destination."""
        raise NotImplementedError

    async def wait_put(self, handle: Handle, timeout: float | None) -> Put:
        """See Node.wait_put."""
        raise NotImplementedError

    async def alloc_pinned_writer(self, nbytes: int) -> PinnedWriter:
        """See Node.alloc_pinned_writer."""
        raise NotImplementedError

    async def withdraw(self, handle: Handle) -> None:
        """See Node.withdraw."""
        self._check_open()
        await self._owner.withdraw(checked_handle(handle))
