"""The owner's half of rendezvous: handles for staged payloads, and the calls that serve them.

Here is what its own node asks of it; `peer_calls` has what peers do. It knows no backend.
"""

from __future__ import annotations

from ..config import RendezvousConfig
from ..errors import LeaseError
from ..events import PathDecided, Recorder, Side
from ..model import (
    Direction,
    Handle,
    LeaseId,
    Metadata,
    PathName,
    PathReason,
    WorkerId,
)
from ..protocol.slots import LOCAL_EPOCH, SlotStatistics
from ..transport.interface import Session, Span
from .options import Put, RegisterOptions
from .paths import Paths
from .peer_calls import PeerCalls
from .ranged import RangedMemory
from .runner import TaskRunner
from .shelf import Shelf
from .staging import Staged


class Owner(PeerCalls):
    """All that this node serves. Methods are for the node's own task; `handlers` for its peers."""

    def __init__(
        self,
        worker_id: WorkerId,
        paths: Paths,
        config: RendezvousConfig,
        recorder: Recorder,
        runner: TaskRunner,
    ) -> None:
        shelf = Shelf(worker_id, config.lease_timeout, recorder, runner)
        super().__init__(shelf, paths, config, recorder)

    # --- this node's own calls --------------------------------------------------------------------

    def register(
        self,
        staged: Staged,
        options: RegisterOptions,
        *,
        direction: Direction = Direction.READ,
    ) -> Handle:
        """Take `staged` over under a fresh handle, as a payload or as a destination of puts. Raises
        ClosedError; it stays the caller's then.
        """
        return self._shelf.register(
            staged, retain_slot=options.retain, ttl_s=options.ttl, direction=direction
        )

    def register_ranged(self, staged: Staged, ranged: RangedMemory) -> Handle:
        """As `register`, of memory that peers reach by ranges, many at once."""
        return self._shelf.register(staged, retain_slot=True, ranged=ranged)

    def retire(self, handle: Handle, *, force: bool = False) -> None:
        """See Shelf.retire."""
        self._shelf.retire(handle, force=force)

    def staging_decided(self, reason: PathReason) -> None:
        """Count why a pinned registration went to plain memory."""
        if reason not in (PathReason.OK, PathReason.NOT_PINNED):
            self._recorder.record(PathDecided(Side.OWNER, PathName.TCP, reason))

    def metadata(self, handle: Handle) -> Metadata:
        return self._store.metadata(handle)

    def ref(self, handle: Handle) -> None:
        self._store.ref(handle)

    def acquire_local(self, handle: Handle) -> tuple[LeaseId, Span]:
        """A lease of this node on its own slot, and the bytes. They may be read until `local_done`,
        whatever becomes of the lease: the memory is not freed before. Raises UnknownHandle,
        WrongDirection.
        """
        access = self._shelf.acquire(handle, LOCAL_EPOCH)
        return access.lease_id, access.begin_copy()

    def acquire_local_put(self, handle: Handle, offset: int, nbytes: int) -> tuple[LeaseId, Span]:
        """As `acquire_local`, of those bytes of a destination, to be written; end it by
        `finish_local_put`. Raises UnknownHandle, WrongDirection, OutOfRange, BusyError.
        """
        access = self._shelf.acquire(handle, LOCAL_EPOCH, Direction.WRITE)
        try:
            access.restrict(offset, nbytes)
        except BaseException:
            self._end_local(handle, access.lease_id, drop=False, transferred=False)
            raise
        access.put = Put(handle, handle.worker_id, PathName.LOCAL, PathReason.OK, offset, nbytes)
        return access.lease_id, access.begin_copy()

    def local_done(self, lease_id: LeaseId) -> None:
        """The copy is over, well or not. Idempotent."""
        access = self._shelf.access(lease_id)
        if access is not None:
            access.copied()

    def detach_local(self, handle: Handle, lease_id: LeaseId) -> None:
        """Drop the lock; implies `local_done`."""
        self._end_local(handle, lease_id, drop=False, transferred=True)

    def release_local(self, handle: Handle, lease_id: LeaseId) -> None:
        """Drop the lock and one reference; implies `local_done`."""
        self._end_local(handle, lease_id, drop=True, transferred=True)

    def finish_local_put(self, handle: Handle, lease_id: LeaseId, *, transferred: bool) -> None:
        """The write is over; implies `local_done`. `transferred`: every byte is in place, which
        `wait_put` reports. Raises LeaseError when the lease had ended before.
        """
        ended = self._end_local(handle, lease_id, drop=False, transferred=transferred)
        if transferred and not ended:
            raise LeaseError(f"lease {lease_id} had ended before the write was finished")

    async def wait_put(self, handle: Handle, timeout: float | None) -> Put:
        """See Shelf.wait_put. `timeout` in seconds."""
        return await self._shelf.wait_put(handle, timeout)

    async def withdraw(self, handle: Handle) -> None:
        """Take a payload back, from its readers too. Returns when its memory is the caller's again.

        Raises UnknownHandle; Unquiesced when that could not be proven: the memory then stays held.
        """
        await self._shelf.withdraw(handle)

    def statistics(self) -> SlotStatistics:
        return self._store.statistics()

    # --- epochs and the end -----------------------------------------------------------------------

    def gate(self) -> None:
        """From now on nothing new is exposed for RDMA."""
        self._draining = True

    def stop_reaper(self) -> None:
        """From now on no lease and no slot ends by its deadline. Idempotent."""
        self._shelf.stop_reaper()

    async def demote_all(self) -> None:
        """See Shelf.demote_all."""
        await self._shelf.demote_all()

    async def wait_unexposed(self, path: PathName) -> None:
        """See Shelf.wait_unexposed."""
        await self._shelf.wait_unexposed(path)

    async def end_exposures(self, path: PathName) -> None:
        """See Shelf.end_exposures."""
        await self._shelf.end_exposures(path)

    async def end_session(self, session: Session) -> None:
        """End the leases of an epoch that is over. Returns when each retraction has its verdict."""
        await self._shelf.end_epoch(session.attempt)

    async def close(self) -> None:
        """Withdraw everything. Returns when each retraction has its verdict. Idempotent."""
        self._draining = True
        await self._shelf.close()

    # --- within -----------------------------------------------------------------------------------

    def _end_local(
        self, handle: Handle, lease_id: LeaseId, *, drop: bool, transferred: bool
    ) -> bool:
        self.local_done(lease_id)
        ended = self._shelf.end(handle, lease_id, LOCAL_EPOCH, drop=drop, transferred=transferred)
        return ended is not None
