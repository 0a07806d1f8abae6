"""The memory of one region: the caller's buffer export, and the registrations of it.

Up to two of these: one that only this side's own work requests reach, and one that windows for
peers can be bound in. Both cover all of it. When they begin and end is region.py's to say.
"""

from __future__ import annotations

import contextlib

from ..memory.buffer import BufferExport, address_of
from ..transport.interface import PinnedMemory, RegisteredRange, Target
from ..transport.pieces import join_targets

_NOTHING = Target(memoryview(b""))


class RegionMemory:
    """Takes `export` over."""

    def __init__(self, export: BufferExport) -> None:
        self._export = export
        self.nbytes = export.nbytes
        self.address = address_of(export.view)
        self.effective_range = range(self.address, self.address + self.nbytes)
        self._ranges: list[RegisteredRange] = []
        self._own = self._peers = Target(export.view)

    @property
    def view(self) -> memoryview:
        """All of it. Raises ClosedError after `release`."""
        return self._export.view

    @property
    def registered(self) -> bool:
        """Whether devices can reach it, or may still."""
        return bool(self._ranges)

    def target(self, *, own: bool) -> Target:
        """All of it, in one piece for each registration; plain memory where there is none of that
        kind. `own`: for work requests of this side, else for what peers are granted.
        """
        return self._own if own else self._peers

    async def register(self, memory: PinnedMemory, *, own: bool, peers: bool) -> None:
        """Once. Raises what PinnedMemory.register raises; then what `registered` still says has to
        be deregistered.
        """
        if own:
            self._own = await self._register(memory, remote=False)
        if peers:
            self._peers = await self._register(memory, remote=True)
            if not own:
                self._own = self._peers  # whose key serves this side as well

    async def deregister(self, memory: PinnedMemory) -> None:
        """Raises DeviceError when a device refuses; calling again goes on."""
        while self._ranges:
            await memory.deregister(self._ranges[-1])
            self._ranges.pop()

    def release(self) -> None:
        """No device holds it: let go of the caller's buffer. Idempotent."""
        for piece in (*self._own.pieces, *self._peers.pieces):
            _release(piece.view)
        self._own = self._peers = _NOTHING
        self._ranges.clear()
        with contextlib.suppress(BufferError):
            self._export.release()

    async def _register(self, memory: PinnedMemory, *, remote: bool) -> Target:
        found = await memory.register(self._export.view, remote=remote)
        self._ranges.append(found)
        first = found.first_page
        self.effective_range = range(first, first + found.page_bytes)
        return join_targets([Target(part.view, part) for part in found.parts])


def _release(view: memoryview) -> None:
    # A slice of it that is used no more may still be held; the buffer's export then ends with that.
    with contextlib.suppress(BufferError):
        view.release()
