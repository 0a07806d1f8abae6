"""What messages and streams need of a node's rendezvous: a place for what is too large to ride."""

from __future__ import annotations

from ..model import Handle, Lease, Transport
from .getting import Getting
from .options import RegisterOptions
from .registering import Registering


class PayloadStore:
    """Implements large_payloads.PayloadStore and stream_frames.ItemStore."""

    def __init__(self, registering: Registering, getting: Getting) -> None:
        self._registering = registering
        self._getting = getting

    def register_held(self, buffer: object) -> Handle:
        """Serve the caller's memory as it is. Raises UsageError, ClosedError."""
        return self._registering.register_held(buffer)

    async def register_data_pinned(
        self, buffer: object, options: RegisterOptions | None = None
    ) -> Handle:
        """A copy, in registered memory where that can be had."""
        return await self._registering.register_data_pinned(buffer, options)

    async def withdraw(self, handle: Handle) -> None:
        """Take it back, whoever still reads it."""
        await self._registering.withdraw(handle)

    async def get(
        self, handle: Handle, *, transport: Transport | str | None, timeout: float | None
    ) -> tuple[memoryview, Lease]:
        """The payload in fresh memory."""
        return await self._getting.get(handle, transport=transport, timeout=timeout)

    async def detach(self, handle: Handle, lease: Lease) -> None:
        """Give the lease back."""
        await self._getting.detach(handle, lease)

    async def release(self, handle: Handle, lease: Lease) -> None:
        """Give the lease back, and a reference with it."""
        await self._getting.release(handle, lease)
