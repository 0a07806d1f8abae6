"""What messages and streams need of a node's rendezvous: a place for what is too large to ride.

It decides where such a payload is staged: in registered memory that is mapped already, or where it
lies. It never maps any, since that takes as long as the memory is large, and a send must not wait
for it. So a process that registers nothing by an explicit call never takes the RDMA path here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import RendezvousConfig
from ..errors import BudgetExceeded, BusyError
from ..memory.buffer import BufferExport
from ..model import Handle, Lease, Transport
from ..transport.copying import copy_bytes
from ..transport.interface import PinnedBuffer, Span
from .fresh_memory import fresh_memory
from .getting import Getting
from .options import NO_OPTIONS, RegisterOptions
from .owner import Owner
from .paths import Paths
from .staging import Staged, stage_held

# What a send copies on the event loop at most: some milliseconds.
SEND_COPY_MAX_BYTES = 16 << 20


class PayloadStore:
    """Implements large_payloads.PayloadStore and stream_frames.ItemStore. `check_open` raises
    ClosedError once the node closes.
    """

    def __init__(
        self,
        config: RendezvousConfig,
        paths: Paths,
        owner: Owner,
        getting: Getting,
        check_open: Callable[[], None],
    ) -> None:
        self._config = config
        self._paths = paths
        self._owner = owner
        self._getting = getting
        self._check_open = check_open

    # --- owner ------------------------------------------------------------------------------------

    def stage(self, buffer: object, ttl_s: float | None = None) -> Handle:
        """Serve a payload, at once: from registered memory, into which up to SEND_COPY_MAX_BYTES
        are copied, or else the caller's own memory, which must not change while it is served. It
        goes after `ttl_s` (None: when it was released). Raises UsageError, ClosedError.
        """
        self._check_open()
        options = NO_OPTIONS if ttl_s is None else RegisterOptions(ttl=ttl_s)
        staged = stage_held(buffer)
        piece = self._piece(staged.nbytes) if staged.nbytes <= SEND_COPY_MAX_BYTES else None
        if piece is not None:
            piece.view[:] = staged.span.view
            staged.free()
            staged = self._in_arena(piece)
        return self._register(staged, options)

    async def stage_copy(self, buffer: object) -> Handle:
        """As `stage`, of any size; but the memory is the caller's again when this returns: what
        finds no registered memory is copied into plain memory, unless it cannot change (bytes).
        Raises also BudgetExceeded: this process has no memory left.
        """
        self._check_open()
        with BufferExport(buffer) as export:
            piece = self._piece(export.nbytes)
            if piece is not None:
                try:
                    await copy_bytes(export.view, piece.view)
                except BaseException:
                    self._in_arena(piece).free()  # nobody was told of it
                    raise
                staged = self._in_arena(piece)
            elif type(buffer) is bytes:
                staged = stage_held(buffer)
            else:
                copy = fresh_memory(export.nbytes)
                await copy_bytes(export.view, copy)
                staged = Staged(Span(copy.toreadonly()))
        return self._register(staged, NO_OPTIONS)

    async def withdraw(self, handle: Handle) -> None:
        """Take it back, whoever still reads it. Raises UnknownHandle, ClosedError, Unquiesced."""
        self._check_open()
        await self._owner.withdraw(handle)

    # --- consumer ---------------------------------------------------------------------------------

    async def fetch(self, handle: Handle, timeout_s: float | None) -> tuple[memoryview, Lease]:
        """A payload that a peer staged for this node alone, in fresh memory, by whatever path can
        be had: what a caller demanded concerns the message's link. Above
        `rendezvous.staged_payload_max` BudgetExceeded, before anything of its size is allocated,
        and the peer frees it. Raises as a get.
        """
        return await self._getting.get(
            handle,
            transport=Transport.AUTO,
            timeout=timeout_s,
            payload_max=self._config.staged_payload_max,
        )

    async def release(self, handle: Handle, lease: Lease) -> None:
        """Give the lease back, and the payload with it: nobody else reads it."""
        await self._getting.release(handle, lease)

    # --- within -----------------------------------------------------------------------------------

    def _piece(self, nbytes: int) -> PinnedBuffer | None:
        """Registered memory, where that is mapped, has room, and would be read by RDMA."""
        memory, config = self._paths.memory, self._config
        if memory is None or not config.enabled or not nbytes or nbytes < config.rdma_min_bytes:
            return None
        try:
            return memory.allocate_nowait(nbytes)
        except (BudgetExceeded, BusyError):
            return None

    def _in_arena(self, piece: PinnedBuffer) -> Staged:
        return Staged(Span(piece.view.toreadonly(), piece), memory=self._paths.memory)

    def _register(self, staged: Staged, options: RegisterOptions) -> Handle:
        try:
            self._check_open()  # once more, after a copy
            return self._owner.register(staged, options)
        except BaseException:
            staged.free()
            raise
