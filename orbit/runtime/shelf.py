"""Slots and the authority over them: carries out what the slot machine decides.

It takes a lease's authority back when the lease ends, frees memory only after that was proven, and
keeps one timer for leases and times to live, armed only while there are any. It knows no calls and
takes no path decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from ..errors import (
    BudgetExceeded,
    LeaseError,
    OrbitError,
    PathFailed,
    UnknownHandle,
    Unquiesced,
    WrongDirection,
)
from ..events import LeaseEnded, MemoryRetained, Recorder
from ..model import Direction, Handle, LeaseEnd, LeaseId, PathName, SlotId, WorkerId
from ..protocol.slots import (
    LOCAL_EPOCH,
    FreeSlot,
    RetainSlot,
    RetractLease,
    SlotEffect,
    SlotStore,
)
from ..transport.timer import DeadlineTimer
from .options import Put
from .put_queue import PutQueue
from .ranged import RangedMemory
from .retained import retain
from .runner import TaskRunner
from .shelved import Access, Memory, Shelved
from .staging import Staged, copy_to_heap

_log = logging.getLogger("orbit")

_BY_CONSUMER = (LeaseEnd.DETACHED, LeaseEnd.RELEASED)


class Shelf:
    """`store` may be asked and told whatever has no effects; what has goes through here."""

    def __init__(
        self, worker_id: WorkerId, lease_timeout_s: float, recorder: Recorder, runner: TaskRunner
    ) -> None:
        self.store = SlotStore(worker_id, lease_timeout_s)
        self._worker_id = worker_id
        self._recorder = recorder
        self._runner = runner
        self._slots: dict[SlotId, Shelved] = {}
        self._accesses: dict[LeaseId, Access] = {}
        self._retracting: dict[bytes, set[asyncio.Task[None]]] = {}  # by epoch
        self._reaper = DeadlineTimer(self._reap)
        self._reaping = True
        self._loop = asyncio.get_running_loop()

    def register(
        self,
        staged: Staged,
        *,
        retain_slot: bool,
        ttl_s: float | None = None,
        direction: Direction = Direction.READ,
        ranged: RangedMemory | None = None,
    ) -> Handle:
        """Take `staged` over under a fresh handle. `ranged`: it is reached by ranges, and how, in
        place of `direction`. Raises ClosedError; it stays the caller's then.
        """
        handle = self.store.register(
            staged.nbytes,
            pinned=staged.pinned,
            retain=retain_slot,
            direction=direction,
            ranged=None if ranged is None else ranged.directions,
            deadline=None if ttl_s is None else self._loop.time() + ttl_s,
        )
        puts = PutQueue(handle) if direction is Direction.WRITE and ranged is None else None
        self._slots[handle.slot_id] = Shelved(handle, Memory(staged), puts, ranged)
        self._arm_reaper()
        return handle

    def acquire(
        self,
        handle: Handle,
        epoch: bytes,
        direction: Direction = Direction.READ,
        *,
        ranged: bool = False,
    ) -> Access:
        """Take a lease. `ranged`: on a ranged slot, and its ranges are locked next. Raises
        UnknownHandle, UsageError (the slot is of the other kind), WrongDirection, BusyError
        (another writer).
        """
        lease_id = self.store.acquire(handle, epoch, direction, ranged=ranged)
        slot = self._slots[handle.slot_id]
        access = self._accesses[lease_id] = Access(slot, lease_id, direction)
        return access

    def access(self, lease_id: LeaseId) -> Access | None:
        """Of a lease whose end is not proven yet."""
        return self._accesses.get(lease_id)

    def arm(
        self, lease_id: LeaseId, path: PathName = PathName.RDMA, timeout_s: float | None = None
    ) -> float:
        """Give a lease its path and its deadline. Seconds that it lives without a renewal; 0 when
        it has ended meanwhile.
        """
        granted_s = self.store.arm(lease_id, self._loop.time(), timeout_s, path)
        self._arm_reaper()
        return granted_s

    def renew(self, handle: Handle, lease_id: LeaseId, epoch: bytes) -> None:
        """Move a lease's deadline. Raises LeaseError for a lease of somebody else."""
        self.store.renew(handle, lease_id, epoch, self._loop.time())

    def end(
        self,
        handle: Handle,
        lease_id: LeaseId,
        epoch: bytes,
        *,
        drop: bool,
        transferred: bool = True,
    ) -> Access | None:
        """A consumer gives its lease back; `drop`: and a reference with it. None when the lease had
        ended before. Raises LeaseError for a lease of somebody else, and when the bytes of a write,
        or of ranges, are said to have been transferred under a lease that had ended.
        """
        access = self._accesses.get(lease_id) if self.store.is_held(lease_id) else None
        give_back = self.store.release if drop else self.store.detach
        self._carry_out(give_back(handle, lease_id, epoch, transferred=transferred))
        if access is None and transferred:
            slot = self._slots.get(handle.slot_id)
            if slot is not None and (slot.puts is not None or slot.ranged is not None):
                raise LeaseError(f"lease {lease_id} had ended before its transfer was finished")
        return access

    async def withdraw(self, handle: Handle) -> None:
        """Returns when the payload's memory is free. Raises UnknownHandle, Unquiesced."""
        effects = self.store.withdraw(handle)
        slot = self._slots[handle.slot_id]
        freed = slot.freed = self._loop.create_future()
        if slot.puts is not None:
            slot.puts.end()
        self._carry_out(effects)
        if slot.kept is not None:
            slot.wake(slot.kept)
        await asyncio.shield(freed)

    def retire(self, handle: Handle, *, force: bool = False) -> None:
        """Nobody new reaches the payload; it goes with the last lease that it has, and `force` ends
        these. Nothing when it is gone.
        """
        try:
            if force:
                effects = self.store.withdraw(handle, retired=True)
            else:
                effects = self.store.retire(handle)
        except UnknownHandle:
            return
        slot = self._slots.get(handle.slot_id)
        self._carry_out(effects)
        if slot is not None:
            _keep_region(slot, self.store, self._accesses.values())

    async def wait_put(self, handle: Handle, timeout_s: float | None) -> Put:
        """The oldest completed put that nobody waited for yet (of the latest 1024). Raises
        UnknownHandle, also when the slot goes meanwhile, WrongDirection, DeadlineExceeded.
        """
        self.store.metadata(handle)
        puts = self._slots[handle.slot_id].puts
        if puts is None:
            raise WrongDirection(f"{handle} is no destination")
        return await puts.next(timeout_s)

    async def end_epoch(self, epoch: bytes) -> None:
        """End its leases by force. Returns when each retraction has its verdict."""
        self._carry_out(self.store.end_epoch(epoch))
        while tasks := self._retracting.get(epoch):
            await asyncio.wait(set(tasks))

    def stop_reaper(self) -> None:
        """From now on nothing ends by its deadline. Idempotent."""
        self._reaping = False
        self._reaper.arm(None)

    async def close(self) -> None:
        """Withdraw everything. Returns when each retraction has its verdict. Idempotent."""
        self.stop_reaper()
        self._carry_out(self.store.close())
        while tasks := [task for group in self._retracting.values() for task in group]:
            await asyncio.wait(tasks)

    async def wait_unexposed(self, path: PathName) -> None:
        """Until every lease that is exposed on that path has ended and its retraction has its
        verdict.
        """
        while waiting := [a.verdict for a in self._accesses.values() if a.is_on(path)]:
            await asyncio.wait(waiting)

    async def end_exposures(self, path: PathName) -> None:
        """Take back what the old memory of moved payloads is read by on that path; the leases stay,
        without it. Returns when each has its verdict: one that is not proven stays with its lease.
        """
        ends = [a.take_back() for a in self._accesses.values() if a.is_on(path) and a.is_stale]
        for verdict in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(verdict, BaseException):
                _log.error("an exposure on %s could not be taken back: %s", path, verdict)

    # --- demotion ---------------------------------------------------------------------------------

    async def demote_all(self) -> None:
        """Move every payload out of registered memory and out of regions, by copying: leases to
        come read the copy. The old memory goes when nothing reaches it any more.

        A destination's memory, and ranged memory, is what its owner looks at, so it is not moved:
        it takes no further leases, and goes with the last that it has. Idempotent; cancelling it
        leaves the rest as it was.
        """
        for slot in list(self._slots.values()):
            if slot.memory.staged.plain:
                continue
            if slot.puts is None and slot.ranged is None:
                await self._demote(slot)
            else:
                self.retire(slot.handle)

    async def _demote(self, slot: Shelved) -> None:
        try:
            access = self.acquire(slot.handle, LOCAL_EPOCH)
        except UnknownHandle:
            return  # its memory goes with its leases, which are about to end
        try:
            copy = await copy_to_heap(access.begin_copy())
            if self.store.is_held(access.lease_id):
                old, slot.memory = slot.memory, Memory(copy)
                self.store.demote(slot.handle)
                old.replace()
        except BudgetExceeded as error:
            _log.error("%s stays in registered memory: %s", slot.handle, error)
        finally:
            access.copied()
            self.end(slot.handle, access.lease_id, LOCAL_EPOCH, drop=False)

    # --- effects ----------------------------------------------------------------------------------

    def _arm_reaper(self) -> None:
        if self._reaping:
            self._reaper.arm(self.store.next_deadline)

    def _reap(self) -> None:
        self._carry_out(self.store.due(self._loop.time()))
        self._arm_reaper()  # also when a renewal has moved what was due

    def _carry_out(self, effects: Iterable[SlotEffect]) -> None:
        for effect in effects:
            match effect:
                case RetractLease():
                    self._retract(effect)
                case FreeSlot(slot_id):
                    slot = self._slots.pop(slot_id)
                    slot.memory.staged.free()
                    if slot.puts is not None:
                        slot.puts.end()
                    slot.wake(None)
                case RetainSlot(slot_id, lease_id, cause):
                    self._retain(self._slots[slot_id], self._accesses[lease_id], cause)
        if self._reaper.armed and self.store.next_deadline is None:
            self._reaper.arm(None)

    def _retract(self, effect: RetractLease) -> None:
        access = self._accesses[effect.lease_id]
        self._recorder.record(LeaseEnded(access.slot.handle, effect.lease_id, effect.how))
        if access.idle:
            self._over(access, effect, None)
            return
        task = self._runner.start(
            self._retract_access(access, effect), f"retract lease {effect.lease_id}"
        )
        if task is None:
            return
        self._retracting.setdefault(effect.epoch, set()).add(task)
        task.add_done_callback(lambda done: self._retracted(effect.epoch, done))

    async def _retract_access(self, access: Access, effect: RetractLease) -> None:
        failed: OrbitError | None = None
        try:
            await access.end(transferred=effect.transferred)
            if effect.transferred and effect.how in _BY_CONSUMER:
                await access.finish()
        except BaseException as error:
            # Only a return proves that nothing is reached any more; whatever else it was proves
            # nothing. But for a transfer that is over and was not whole (DataPath.retract).
            if not (isinstance(error, PathFailed) and access.says_whole):
                if not isinstance(error, Unquiesced):
                    _log.error("retracting lease %s failed", effect.lease_id, exc_info=error)
                cause = error.cause if isinstance(error, Unquiesced) else repr(error)
                self._carry_out(self.store.unquiesced(effect.lease_id, cause))
                if not isinstance(error, Exception):
                    raise
                return
            failed = error
        self._over(access, effect, failed)

    def _over(self, access: Access, effect: RetractLease, failed: OrbitError | None) -> None:
        """Nothing reaches the payload through that lease any more."""
        del self._accesses[access.lease_id]
        access.leave()
        access.unlock()
        put, puts = access.put, access.slot.puts
        said = effect.transferred and failed is None and effect.how in _BY_CONSUMER
        in_place = said and (put is not None or access.direction is Direction.READ)
        if in_place and put is not None and puts is not None:
            puts.add(put)
        self._carry_out(self.store.quiesced(access.lease_id))
        _keep_region(access.slot, self.store, self._accesses.values())
        if failed is None:
            access.verdict.set_result(in_place)
        else:
            access.verdict.set_exception(failed)
            access.verdict.exception()  # nobody asks when the lease ended by force

    def _retracted(self, epoch: bytes, task: asyncio.Task[None]) -> None:
        group = self._retracting[epoch]
        group.discard(task)
        if not group:
            del self._retracting[epoch]

    def _retain(self, slot: Shelved, access: Access, cause: str) -> None:
        del self._accesses[access.lease_id]
        staged, ranged = access.memory.staged, slot.ranged is not None
        nbytes = access.span.nbytes if ranged else staged.span.nbytes
        error = Unquiesced(f"payload of {slot.handle}", nbytes, cause)
        if ranged or slot.kept is None:
            retain(error, (staged, access) if ranged else staged)
            self._recorder.record(MemoryRetained(error.what, error.retained_bytes, cause))
        slot.kept = slot.kept or error
        if ranged:
            _keep_region(slot, self.store, self._accesses.values())
        else:
            staged.keep(cause)
        slot.wake(error)
        access.verdict.set_exception(error)
        access.verdict.exception()


def _keep_region(slot: Shelved, store: SlotStore, accesses: Iterable[Access]) -> None:
    """What is not proven of some ranges keeps the region under a ranged slot. The others are served
    meanwhile: it is said when nobody new may come, and everybody else is done.
    """
    if slot.kept is None or slot.ranged is None:
        return
    with contextlib.suppress(UnknownHandle):
        store.metadata(slot.handle)
        return
    if not any(access.slot is slot for access in accesses):
        slot.memory.staged.keep(slot.kept.cause)
