"""One request of a transfer engine: all its slices move under one lease, or the request fails.

The transport is a demand, so nothing falls back and nothing is replayed; an acquire alone is asked
a second time, once, when the source says that it had no array for it and so granted nothing. The
request has succeeded when the source's answer to the detach says that every receipt was matched. A
request that failed gives its lease back by the same call, so that the source's range is free again
when the failure is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OrbitError, PathUnavailable, PeerProtocolError
from ..model import Direction, LeaseId, PathReason
from .confirmed import LAST_ROWS, ConfirmedTransfer
from .messages import RdmaAnswer, ReadyAnswer
from .transfer import (
    GIVEN_UP,
    AcquireAnswered,
    AcquireFailed,
    Begin,
    Cancelled,
    DeadlinePassed,
    Deliver,
    End,
    Ended,
    EndFailed,
    Fail,
    Moved,
    MoveFailed,
    PathsReady,
    PeerGone,
    Prepare,
    Step,
    Stopped,
    TransferPlan,
    TransferState,
    TransferTable,
    to,
)

_S = TransferState

PARENT_TABLE: TransferTable = {
    _S.IDLE: {Begin: to(_S.PREPARING, _S.ACQUIRING, _S.FAILED)},
    _S.PREPARING: {
        PathsReady: to(_S.ACQUIRING, _S.FAILED),
        **{kind: to(_S.FAILED) for kind in GIVEN_UP},
    },
    _S.ACQUIRING: {
        AcquireAnswered: to(_S.MOVING, _S.RETURNING, _S.COMPLETING, _S.FAILED),
        AcquireFailed: to(_S.PREPARING, _S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
        PeerGone: to(_S.FAILED),
    },
    _S.MOVING: {
        Moved: to(_S.COMPLETING),
        MoveFailed: to(_S.RETURNING),
        **{kind: to(_S.STOPPING) for kind in GIVEN_UP},
    },
    _S.STOPPING: {
        Moved: to(_S.RETURNING, _S.FAILED),
        MoveFailed: to(_S.RETURNING, _S.FAILED),
        **{kind: to(_S.STOPPING) for kind in GIVEN_UP},
    },
    _S.RETURNING: {
        Ended: to(_S.FAILED),
        EndFailed: to(_S.FAILED),
        Cancelled: to(_S.RETURNING),
        Stopped: to(_S.RETURNING),
        DeadlinePassed: to(_S.RETURNING),
        PeerGone: to(_S.FAILED),
    },
    _S.COMPLETING: {
        Ended: to(_S.FINISHED),
        EndFailed: to(_S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
        PeerGone: to(_S.FAILED),
    },
    **LAST_ROWS,
}


@dataclass(frozen=True, slots=True)
class ParentPlan(TransferPlan):
    """What the caller asked for: `nbytes` in all, not 0. The transport is RDMA or TCP."""

    direction: Direction = Direction.READ
    nbytes: int = 0


class ParentMachine(ConfirmedTransfer):
    """One request, or one group of the ranges of one."""

    def __init__(
        self, plan: ParentPlan, deadline: float | None = None, timeout_s: float = 0.0
    ) -> None:
        super().__init__(plan.direction.name.lower(), PARENT_TABLE, plan, deadline, timeout_s)
        self._direction = plan.direction
        self._nbytes = plan.nbytes
        self._asked_twice = False

    # --- the answer -------------------------------------------------------------------------------

    def _check(self, answer: RdmaAnswer | ReadyAnswer) -> None:
        if answer.direction != self._direction:
            raise PeerProtocolError("the source granted another direction than was asked for")
        if answer.total_len != self._nbytes:
            raise PeerProtocolError(
                f"the source granted {answer.total_len} bytes in place of {self._nbytes}"
            )

    def _take_ready(self, answer: ReadyAnswer) -> Step:
        if answer.inline is None:
            return self._move(answer)
        if self._direction is not Direction.READ or len(answer.inline) != self._nbytes:
            count = len(answer.inline)
            return self._fail(PeerProtocolError(f"{count} inline bytes of {self._nbytes}"))
        state, effects = self._complete()
        return state, [Deliver(answer.inline), *effects]

    def _acquire_failed(self, error: OrbitError) -> Step:
        # A source that lost the array has granted nothing: the only thing worth asking again.
        missing = isinstance(error, PathUnavailable) and error.reason == PathReason.CONNECT_FAILED
        if self.state is not _S.ACQUIRING or not missing or self._asked_twice:
            return super()._acquire_failed(error)
        self._asked_twice = True
        return _S.PREPARING, [Prepare()]

    # --- the move, and the end --------------------------------------------------------------------

    def _moved(self) -> Step:
        if self.state is _S.STOPPING:  # the caller is told that it failed, and so is the source
            return self._return()
        stop = self._stop_renewal()
        state, effects = self._complete()
        return state, [*stop, *effects]

    def _move_failed(self, reason: PathReason, error: OrbitError) -> Step:
        if self.state is not _S.STOPPING:
            self._verdict = error
        return self._return()

    def _return(self) -> Step:
        stop = self._stop_renewal()
        if self._lease_id is None or self._peer_gone:
            return _S.FAILED, [*stop, Fail(self._verdict)]
        return _S.RETURNING, [*stop, End(self._lease_id, transferred=False)]

    def _ended(self, lease_id: LeaseId, failure: OrbitError | None) -> Step:
        if self.state is _S.RETURNING:
            return _S.FAILED, [Fail(self._verdict)]
        if failure is not None:
            return _S.FAILED, [Fail(failure)]
        return self._finish(lease_id, self._nbytes)

    def _give_up(self, verdict: OrbitError | None) -> Step:
        if self.state is not _S.RETURNING:
            return super()._give_up(verdict)
        if self._peer_gone:  # and the lease with it
            return _S.FAILED, [Fail(self._verdict)]
        return _S.RETURNING, []
