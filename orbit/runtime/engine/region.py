"""What a caller has of memory that an engine registered: the region, ranges of it, and access by
the CPU under the same locks that transfers take.

How it is registered and unregistered is registry.py's; it knows no request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from ...errors import UsageError
from ...memory.range_locks import LOCKS
from ...model import Handle, RegionAccess
from ...protocol.remote_region import RemoteRegion, byte_range
from ...transport.pieces import check_range
from ..live import Live
from ..region import Region


class RegionHome(Protocol):
    """The engine that a region belongs to, as the region knows it."""

    async def unregister(self, region: EngineRegion, timeout: float | None) -> None: ...


class EngineRegion(Live):
    """Memory of the caller's under an engine's registration, which `async with` ends.
    `region[a:b]` names a range of it.

    Writing to the memory without asking (`cpu`) while a transfer uses it is a race that nobody
    sees.
    """

    _instead = "send region.remote()"

    def __init__(
        self, home: RegionHome, region: Region, access: RegionAccess, handle: Handle | None
    ) -> None:
        self._home = home
        self._region = region
        self._handle = handle
        self.nbytes = region.nbytes
        self.access = access

    @property
    def live(self) -> bool:
        """Whether transfers may use it."""
        return self._region.live

    def __getitem__(self, part: slice) -> RegionRange:
        """Bytes [start, stop) of it. Raises OutOfRange, UsageError (a step, no slice)."""
        return RegionRange(self, *byte_range(part, self.nbytes))

    def __len__(self) -> int:
        return self.nbytes

    def remote(self) -> RemoteRegion:
        """What peers use it by. Raises UsageError for a region that peers cannot reach."""
        if self._handle is None:
            raise UsageError(
                "no peer may reach this region", hint='register it with access "read" or "write"'
            )
        return RemoteRegion(self._handle, self.nbytes, self.access)

    @contextlib.contextmanager
    def cpu(
        self, offset: int = 0, nbytes: int | None = None, *, write: bool = False
    ) -> Iterator[memoryview]:
        """Those bytes (None: the rest), for this process alone while `write`, else beside others
        that read. The view ends with the block. Raises RangeBusy (a transfer, or other CPU access,
        is at it), OutOfRange, ClosedError.
        """
        size = self.nbytes - offset if nbytes is None else nbytes
        check_range(offset, max(size, 0) if nbytes is None else size, self.nbytes)
        lock = LOCKS.lock(self._region.memory.address + offset, size, not write, "CPU access")
        try:
            use = self._region.use(offset, size, _nothing)
            try:
                with self._region.view[offset : offset + size] as whole:
                    yield whole if write else whole.toreadonly()
            finally:
                use.end()
        finally:
            lock.release()

    async def unregister(self, timeout: float | None = None) -> None:
        """No more transfers begin with it; those that use it are waited for, at most `timeout`
        seconds, then ended by force; then every device lets go. Raises Unquiesced: that could not
        be proven, and the memory stays held.
        """
        await self._home.unregister(self, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.unregister()

    def __repr__(self) -> str:
        return f"<EngineRegion {self.nbytes} bytes, {self.access}, {self._region.state}>"


@dataclass(frozen=True, slots=True, eq=False)
class RegionRange(Live):
    """`nbytes` bytes of a region here from its byte `offset` on. It holds nothing."""

    _instead = "send a range of region.remote()"

    region: EngineRegion
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return region_of(self.region).memory.address + self.offset


def region_of(region: EngineRegion) -> Region:
    """What is behind it, for the engine."""
    return region._region


def home_of(region: EngineRegion) -> RegionHome:
    """The engine that it belongs to."""
    return region._home


def _nothing() -> None:
    """The end by force cannot hurry it."""
