"""What a stream's end needs from the rest of the node: a store for items that are too long for a
message, and frames that carry its notes. It decides nothing.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...model import Handle, Lease, Transport
from ...protocol.messaging.packets import PacketKind
from ...protocol.streams.frames import ORDERED, Note, pack_note
from ...transport.messages import OutgoingFrame
from ..options import RegisterOptions


class ItemStore(Protocol):
    """The node's rendezvous."""

    async def register_data_pinned(
        self, buffer: object, options: RegisterOptions | None = None
    ) -> Handle: ...

    async def withdraw(self, handle: Handle) -> None: ...

    async def get(
        self, handle: Handle, *, transport: Transport | str | None, timeout: float | None
    ) -> tuple[memoryview, Lease]: ...

    async def release(self, handle: Handle, lease: Lease) -> None: ...


class FrameOwner(Protocol):
    """Whose frame it is."""

    def frame_failed(self, text: str) -> None:
        """Called in the loop's next round, since a frame's verdict may not send."""


class StreamFrame(OutgoingFrame):
    """One note on its way. Items and ends are messages, in one order; all the rest are events."""

    __slots__ = ("_owner", "note")

    def __init__(self, owner: FrameOwner, note: Note, payload: bytes = b"") -> None:
        kind = PacketKind.MESSAGE if note.kind in ORDERED else PacketKind.EVENT
        super().__init__(kind, pack_note(note), payload)
        self._owner = owner
        self.note = note

    def failed(self, error: Exception) -> None:
        asyncio.get_running_loop().call_soon(self._owner.frame_failed, str(error))
