"""Staged payloads and the authority over them: carries out what the slot machine decides.

It exposes a payload under a lease, takes the authority back when the lease ends, frees memory only
after that was proven, and keeps one timer for lease deadlines, armed only while a lease has one. It
knows no calls and takes no path decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import Unquiesced
from ..events import LeaseEnded, MemoryRetained, Recorder
from ..model import Handle, LeaseId, SlotId, WorkerId
from ..protocol.slots import FreeSlot, RetainSlot, RetractLease, SlotEffect, SlotStore
from ..transport.interface import DataPath, Exposure, Session
from ..transport.timer import DeadlineTimer
from .retained import retain
from .runner import TaskRunner
from .staging import Staged

_log = logging.getLogger("orbit")


@dataclass(slots=True, eq=False)
class _Exposed:
    """One lease's authority. `settled` is done when `expose` has returned or raised; `live`: it
    returned.
    """

    path: DataPath
    session: Session
    settled: asyncio.Future[None]
    live: bool = False


class Shelf:
    """`store` may be asked and told whatever has no effects; what has goes through here."""

    def __init__(
        self, worker_id: WorkerId, lease_timeout_s: float, recorder: Recorder, runner: TaskRunner
    ) -> None:
        self.store = SlotStore(worker_id, lease_timeout_s)
        self._worker_id = worker_id
        self._recorder = recorder
        self._runner = runner
        self._staged: dict[SlotId, Staged] = {}
        self._exposed: dict[LeaseId, _Exposed] = {}
        self._retracting: dict[bytes, set[asyncio.Task[None]]] = {}  # by epoch
        self._freed: dict[SlotId, asyncio.Future[None]] = {}  # who waits for a slot's memory
        self._reaper = DeadlineTimer(self._reap)
        self._loop = asyncio.get_running_loop()

    def register(self, staged: Staged, *, retain_slot: bool) -> Handle:
        """Take `staged` over under a fresh handle."""
        handle = self.store.register(staged.nbytes, pinned=staged.pinned, retain=retain_slot)
        self._staged[handle.slot_id] = staged
        return handle

    def staged(self, handle: Handle) -> Staged:
        """The payload of a handle on which a lease is held."""
        return self._staged[handle.slot_id]

    def arm(self, lease_id: LeaseId) -> bool:
        """Give a lease its deadline. False when it has ended meanwhile."""
        armed = self.store.arm(lease_id, self._loop.time())
        self._reaper.arm(self.store.next_deadline)
        return armed

    def renew(self, handle: Handle, lease_id: LeaseId, epoch: bytes) -> None:
        """Move a lease's deadline. Raises LeaseError for a lease of somebody else."""
        self.store.renew(handle, lease_id, epoch, self._loop.time())

    def detach(
        self, handle: Handle, lease_id: LeaseId, epoch: bytes, *, transferred: bool = True
    ) -> None:
        """Raises LeaseError for a lease of somebody else."""
        self._carry_out(self.store.detach(handle, lease_id, epoch, transferred=transferred))

    def release(
        self, handle: Handle, lease_id: LeaseId, epoch: bytes, *, transferred: bool = True
    ) -> None:
        """Raises LeaseError for a lease of somebody else."""
        self._carry_out(self.store.release(handle, lease_id, epoch, transferred=transferred))

    async def expose(
        self, path: DataPath, session: Session, lease_id: LeaseId, staged: Staged, array: int = 0
    ) -> Exposure:
        """Noted before the first await: a lease which ends meanwhile waits for the outcome. Raises
        PathUnavailable; nothing was exposed then.
        """
        exposed = _Exposed(path, session, self._loop.create_future())
        self._exposed[lease_id] = exposed
        try:
            exposure = await path.expose(session, staged.span, lease_id, array)
            exposed.live = True
            return exposure
        finally:
            if not exposed.live and self._exposed.get(lease_id) is exposed:
                del self._exposed[lease_id]
            exposed.settled.set_result(None)

    async def withdraw(self, handle: Handle) -> None:
        """Returns when the payload's memory is free. Raises UnknownHandle, Unquiesced."""
        effects = self.store.withdraw(handle)
        freed: asyncio.Future[None] = self._loop.create_future()
        self._freed[handle.slot_id] = freed
        self._carry_out(effects)
        await asyncio.shield(freed)

    async def end_epoch(self, epoch: bytes) -> None:
        """End its leases by force. Returns when each retraction has its verdict."""
        self._carry_out(self.store.end_epoch(epoch))
        while tasks := self._retracting.get(epoch):
            await asyncio.wait(set(tasks))

    async def close(self) -> None:
        """Withdraw everything. Returns when each retraction has its verdict. Idempotent."""
        self._reaper.arm(None)
        self._carry_out(self.store.close())
        while tasks := [task for group in self._retracting.values() for task in group]:
            await asyncio.wait(tasks)

    def _reap(self) -> None:
        due = self.store.next_deadline
        if due is not None:
            self._carry_out(self.store.due(max(self._loop.time(), due)))
        self._reaper.arm(self.store.next_deadline)

    def _carry_out(self, effects: Iterable[SlotEffect]) -> None:
        for effect in effects:
            match effect:
                case RetractLease():
                    self._retract(effect)
                case FreeSlot(slot_id):
                    self._staged.pop(slot_id).free()
                    self._wake(slot_id, None)
                case RetainSlot(slot_id, _, cause):
                    self._retain(slot_id, cause)

    def _retract(self, effect: RetractLease) -> None:
        handle = Handle(self._worker_id, effect.slot_id)
        self._recorder.record(LeaseEnded(handle, effect.lease_id, effect.how))
        exposed = self._exposed.pop(effect.lease_id, None)
        if exposed is None:  # a local lease, or the payload travelled inline
            self._carry_out(self.store.quiesced(effect.lease_id))
            return
        task = self._runner.spawn(
            self._retract_exposed(exposed, effect), f"retract lease {effect.lease_id}"
        )
        self._retracting.setdefault(effect.epoch, set()).add(task)
        task.add_done_callback(lambda done: self._retracted(effect.epoch, done))

    async def _retract_exposed(self, exposed: _Exposed, effect: RetractLease) -> None:
        lease_id = effect.lease_id
        try:
            await exposed.settled
            if exposed.live:
                await exposed.path.retract(
                    exposed.session, lease_id, transferred=effect.transferred
                )
        except BaseException as error:
            # Only a return proves that nothing reads any more; whatever else it was proves nothing.
            if not isinstance(error, Unquiesced):
                _log.error("retracting lease %s failed", lease_id, exc_info=error)
            cause = error.cause if isinstance(error, Unquiesced) else repr(error)
            self._carry_out(self.store.unquiesced(lease_id, cause))
            if not isinstance(error, Exception):
                raise
        else:
            self._carry_out(self.store.quiesced(lease_id))

    def _retracted(self, epoch: bytes, task: asyncio.Task[None]) -> None:
        group = self._retracting[epoch]
        group.discard(task)
        if not group:
            del self._retracting[epoch]

    def _retain(self, slot_id: SlotId, cause: str) -> None:
        staged = self._staged[slot_id]
        handle = Handle(self._worker_id, slot_id)
        error = Unquiesced(f"payload of {handle}", staged.nbytes, cause)
        retain(error, staged)
        self._recorder.record(MemoryRetained(error.what, staged.nbytes, cause))
        self._wake(slot_id, error)

    def _wake(self, slot_id: SlotId, error: Unquiesced | None) -> None:
        freed = self._freed.pop(slot_id, None)
        if freed is None or freed.done():
            return
        if error is None:
            freed.set_result(None)
        else:
            freed.set_exception(error)
            freed.exception()  # its waiter may have been cancelled
