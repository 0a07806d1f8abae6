"""What a stream's end needs from the rest of the node: a store for items that are too long for a
message, and frames that carry its notes. It decides nothing.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...model import Handle, Lease
from ...protocol.messaging.packets import PacketKind
from ...protocol.streams.frames import ORDERED, Note, pack_note
from ...transport.messages import OutgoingFrame


class ItemStore(Protocol):
    """The node's rendezvous."""

    async def stage_copy(self, buffer: object) -> Handle:
        """Serve a payload; the memory is the caller's again when this returns."""

    async def withdraw(self, handle: Handle) -> None:
        """Take it back, whoever still reads it."""

    async def fetch(self, handle: Handle, timeout_s: float | None) -> tuple[memoryview, Lease]:
        """The payload in fresh memory. BudgetExceeded: it is larger than this node takes, and the
        refusal has released it.
        """

    async def release(self, handle: Handle, lease: Lease) -> None:
        """Give the lease back, and the payload with it."""


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
