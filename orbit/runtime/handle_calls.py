"""The handle API of a node, as its user calls it: register, fetch, put, give back.

A base class of Node: names, types and what each call promises. The work is registering.py's and
getting.py's.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ..model import Handle, Lease, Metadata, Transport
from ..transport.interface import Progress
from .options import Put, RegisterOptions
from .region_guards import RegionGuard
from .sinks import PinnedPayload, PinnedWriter

if TYPE_CHECKING:
    from .rendezvous import Rendezvous


class HandleCalls:
    """What a *buffer* is below: anything contiguous with the buffer protocol, a RegionSlice, or a
    PinnedWriter; a *list of buffers* stands for their bytes one after another.
    """

    def _open(self, *, even_closed: bool = False) -> Rendezvous:
        raise NotImplementedError  # Node has it

    # --- owner ------------------------------------------------------------------------------------

    async def register_data(self, buffer: object, options: RegisterOptions | None = None) -> Handle:
        """Serve a buffer, or a list of buffers under one handle, without copying.

        The node holds the buffer exports, so dropping every other reference is fine; changing the
        bytes is not, until the slot is gone. One reference. Slices of regions keep their
        registration: where all pieces lie in regions the payload can be read by RDMA. Raises
        UsageError.
        """
        return await self._open().owner.register_data(buffer, options)

    async def register_data_pinned(
        self, buffer: object, options: RegisterOptions | None = None
    ) -> Handle:
        """Copy a buffer into registered memory, from where it can be read by RDMA. A PinnedWriter
        is taken over as it is, without a copy.

        Where registered memory cannot be had the copy goes to plain memory, and the reason is
        counted (budget, pool_exhausted, kill_switch, or why there is no device). The buffer is the
        caller's again when this returns. Raises UsageError for what is no contiguous buffer, and
        nothing else.
        """
        return await self._open().owner.register_data_pinned(buffer, options)

    async def register_data_in_region(
        self,
        guard: RegionGuard,
        byte_range: range | None = None,
        options: RegisterOptions | None = None,
    ) -> Handle:
        """Serve a range of a registered region, in place. `byte_range` is relative to the region's
        first byte (not to the pages around it), with step 1; None: all of it.

        The slot holds the region: `unregister` waits for it. Nothing is ever copied instead: raises
        OutOfRange, ClosedError (the region is being unregistered), UsageError. The kill switch does
        not matter here; it decides what an acquire answers.
        """
        return await self._open().owner.register_data_in_region(guard, byte_range, options)

    async def register_data_in_place(
        self, buffer: object, options: RegisterOptions | None = None
    ) -> Handle:
        """Register a large buffer where it is, for as long as its slot lives: no copy, but its
        pages are pinned, and registering costs time in proportion to its size.

        Raises RegisterOwnedError (which gives the buffer back: budget, device, no RDMA here),
        UsageError for memory that is read-only or not contiguous.
        """
        return await self._open().owner.register_data_in_place(buffer, options)

    async def register_destination(
        self, where: object, options: RegisterOptions | None = None
    ) -> Handle:
        """Offer a writable buffer, or a list of them, to be filled by `put` of whoever gets the
        handle. It cannot be read through the handle. One writer at a time.

        The memory is the node's until `withdraw` has returned or the slot is gone; after `wait_put`
        it may be read. A plain buffer is registered in place where this node has RDMA, else puts
        come by TCP. Raises UsageError.
        """
        return await self._open().owner.register_destination(where, options)

    async def wait_put(self, handle: Handle, *, timeout: float | None = None) -> Put:
        """On the owner of a destination: the oldest completed put that nobody waited for yet, of
        the latest 1024. Its bytes are in place. Raises UnknownHandle (also when the slot goes
        meanwhile), WrongDirection, DeadlineExceeded.
        """
        return await self._open().owner.wait_put(handle, timeout)

    def withdraw(self, handle: Handle) -> Coroutine[Any, Any, None]:
        """Take a payload of this node back, whoever still reads it. Its memory is free when the
        await is over. It is taken back without an await too, in the background and in silence.

        Raises UnknownHandle; Unquiesced when a reader's end could not be proven, and the memory
        stays held then.
        """
        rendezvous = self._open()
        return rendezvous.give_back(rendezvous.owner.withdraw(handle))

    # --- memory -----------------------------------------------------------------------------------

    async def register_owned(self, buffer: object) -> RegionGuard:
        """Register a writable buffer of the caller's with every device, and hold its export until
        its registration has provably ended. Identical memory that is registered already is shared
        and counted; other overlaps are registered on their own.

        Raises RegisterOwnedError with the buffer (budget, device, closed), UsageError (no bytes,
        read-only, not contiguous). On a node without RDMA the region works, unregistered.
        """
        return await self._open().regions.register_owned(buffer)

    async def register_external_memory(
        self, address: int, nbytes: int, *, keep: object = None
    ) -> RegionGuard:
        """As `register_owned`, for memory that no Python object exports. `keep` is held like a
        buffer.

        The caller guarantees, until `RegionGuard.deregistered` resolves: all of it may be read and
        written, and it is not freed, moved, remapped or cut. Raises BudgetExceeded, DeviceError,
        UsageError.
        """
        return await self._open().regions.register_external_memory(address, nbytes, keep)

    async def alloc_pinned_writer(self, nbytes: int) -> PinnedWriter:
        """A piece of registered memory to write into: `get_into` fills it without a copy,
        `register_data_pinned` serves it without a copy, `put` sends it. The caller frees it.
        Raises PathUnavailable where there is no registered memory, BudgetExceeded, BusyError.
        """
        return await self._open().owner.alloc_pinned_writer(nbytes)

    # --- consumer ---------------------------------------------------------------------------------

    async def metadata(self, handle: Handle) -> Metadata:
        """Size, references and whether it is pinned, as of now. Takes no lock. Raises
        UnknownHandle.
        """
        return await self._open().consumer.metadata(handle)

    async def get(
        self,
        handle: Handle,
        *,
        transport: Transport | str | None = None,
        timeout: float | None = None,
    ) -> tuple[memoryview, Lease]:
        """The payload in fresh memory, read-only, and the lease that keeps it staged at its owner.

        `transport` None: the node's. "rdma" and "tcp" are demands, "auto" may fall back once; the
        lease tells path and reason. A handle of this node is copied, whatever the transport.
        `timeout` (seconds, for all of it) None: only silence ends it.
        The lease ends by itself when it is not given back within the owner's `lease_timeout`.
        Raises UnknownPeer, UnknownHandle, WrongDirection, PeerError, PathUnavailable, PathFailed,
        DeadlineExceeded, TransferFailed. No lease is left behind then, nor when the caller is
        cancelled.
        """
        return await self._open().consumer.get(handle, transport=transport, timeout=timeout)

    async def get_into(
        self,
        handle: Handle,
        dest: object,
        *,
        transport: Transport | str | None = None,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> Lease:
        """As `get`, into the front of `dest`: a writable buffer, or a list of them filled in order,
        at least as long as the payload. PinnedWriters and slices of regions are read into without
        a copy or a registration.

        `dest` is in use until this returns or raises, also after a cancellation, and its bytes are
        undefined after an error. `progress` is told the bytes that have arrived so far.
        """
        return await self._open().consumer.get_into(
            handle, dest, transport=transport, timeout=timeout, progress=progress
        )

    async def get_pinned(
        self,
        handle: Handle,
        *,
        transport: Transport | str | None = None,
        timeout: float | None = None,
    ) -> tuple[PinnedPayload, Lease]:
        """As `get`, into this node's registered memory, which the caller frees. Raises
        PathUnavailable where there is none.
        """
        return await self._open().consumer.get_pinned(handle, transport=transport, timeout=timeout)

    async def get_many(
        self,
        handles: Sequence[Handle],
        *,
        into: Sequence[object] | None = None,
        transport: Transport | str | None = None,
        timeout: float | None = None,
        concurrency: int = 32,
    ) -> list[tuple[memoryview | None, Lease]]:
        """Several `get`s (with `into`: `get_into`s, and None in place of a view) at a time, results
        in the order of `handles`. All or nothing: on the first error the others are cancelled,
        every lease is given back, and that error is raised.
        """
        return await self._open().consumer.get_many(
            handles, into=into, transport=transport, timeout=timeout, concurrency=concurrency
        )

    async def put(
        self,
        handle: Handle,
        source: object,
        *,
        offset: int = 0,
        transport: Transport | str | None = None,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> Put:
        """Write a buffer, or a list of buffers, into the destination that `handle` names, from its
        byte `offset` on. When this returns the bytes are in place at the owner.

        Transports, timeouts and errors as of `get`; further raises OutOfRange, BusyError (another
        writer is at it), PathUnavailable (the owner is too old to be written to). After an error
        the destination's bytes are undefined; the source is the caller's again in any case.
        """
        return await self._open().consumer.put(
            handle, source, offset=offset, transport=transport, timeout=timeout, progress=progress
        )

    async def ref_handle(self, handle: Handle) -> None:
        """Add one reference, for one more consumer that will release. Raises UnknownHandle."""
        await self._open().consumer.ref_handle(handle)

    def detach(self, handle: Handle, lease: Lease) -> Coroutine[Any, Any, None]:
        """Give the lease back; the handle stays usable. When the connection to the owner has ended,
        so has the lease, and nothing happens. Raises LeaseError for one that was given back before.
        Without an await it is given back too, in the background and in silence.
        """
        rendezvous = self._open()
        return rendezvous.give_back(rendezvous.consumer.detach(handle, lease))

    def release(self, handle: Handle, lease: Lease) -> Coroutine[Any, Any, None]:
        """As `detach`, and drop one reference: at zero the owner frees the slot."""
        rendezvous = self._open()
        return rendezvous.give_back(rendezvous.consumer.release(handle, lease))
