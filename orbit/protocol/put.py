"""A consumer's put: the caller's bytes move into a destination of the owner's.

That they are in place is only known from the owner's answer to the detach, so a put ends with a
call of its own. So does an attempt that falls back: two writers at once could mix their bytes, and
the owner answers when it has taken the first one's authority back. The destination's bytes are
undefined until the put has succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OrbitError, PathFailed, PathUnavailable, PeerProtocolError
from ..model import Direction, LeaseId, PathName, PathReason
from .confirmed import LAST_ROWS, ConfirmedTransfer
from .messages import RdmaAnswer, ReadyAnswer
from .transfer import (
    GIVEN_UP,
    Acquire,
    AcquireAnswered,
    AcquireFailed,
    Begin,
    Cancelled,
    DeadlinePassed,
    End,
    Ended,
    EndFailed,
    Fail,
    FellBack,
    Moved,
    MoveFailed,
    PathsReady,
    PeerGone,
    Step,
    Stopped,
    TransferPlan,
    TransferState,
    TransferTable,
    to,
)

_S = TransferState

PUT_TABLE: TransferTable = {
    _S.IDLE: {Begin: to(_S.PREPARING, _S.ACQUIRING, _S.FAILED)},
    _S.PREPARING: {
        PathsReady: to(_S.ACQUIRING, _S.FAILED),
        **{kind: to(_S.FAILED) for kind in GIVEN_UP},
    },
    _S.ACQUIRING: {
        AcquireAnswered: to(_S.MOVING, _S.RETURNING, _S.COMPLETING, _S.FAILED),
        AcquireFailed: to(_S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
        PeerGone: to(_S.FAILED),
    },
    _S.MOVING: {
        Moved: to(_S.COMPLETING),
        MoveFailed: to(_S.RETURNING, _S.FAILED),
        **{kind: to(_S.STOPPING) for kind in GIVEN_UP},
    },
    _S.STOPPING: {
        Moved: to(_S.FAILED),
        MoveFailed: to(_S.FAILED),
        **{kind: to(_S.STOPPING) for kind in GIVEN_UP},
    },
    _S.RETURNING: {
        Ended: to(_S.ACQUIRING),
        EndFailed: to(_S.ACQUIRING, _S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
        PeerGone: to(_S.FAILED),
    },
    _S.COMPLETING: {
        Ended: to(_S.FINISHED),
        EndFailed: to(_S.ACQUIRING, _S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
        PeerGone: to(_S.FAILED),
    },
    **LAST_ROWS,
}


@dataclass(frozen=True, slots=True)
class PutPlan(TransferPlan):
    """What the caller asked for. `nbytes`: of its source."""

    nbytes: int = 0


class PutMachine(ConfirmedTransfer):
    """One put."""

    def __init__(
        self, plan: PutPlan, deadline: float | None = None, timeout_s: float = 0.0
    ) -> None:
        super().__init__("put", PUT_TABLE, plan, deadline, timeout_s)
        self._nbytes = plan.nbytes

    def _begin(self) -> Step:
        state, effects = super()._begin()
        if state is not _S.PREPARING or self._nbytes:
            return state, effects
        # Nothing has to move: the owner only checks handle and range.
        self._reason = PathReason.BELOW_MIN
        return _S.ACQUIRING, [Acquire(offer=False, skip_threshold=False)]

    def _check(self, answer: RdmaAnswer | ReadyAnswer) -> None:
        if answer.direction != Direction.WRITE:
            # It granted a READ of something else: an owner from before there were puts.
            raise PathUnavailable(
                PathName.TCP, PathReason.PEER_WITHOUT, "the owner is too old to be written to"
            )
        if answer.total_len != self._nbytes:
            raise PeerProtocolError(
                f"the owner takes {answer.total_len} bytes in place of {self._nbytes}"
            )

    def _take_ready(self, answer: ReadyAnswer) -> Step:
        if answer.total_len == 0:
            return self._complete()
        return self._move(answer)

    def _moved(self) -> Step:
        stop = self._stop_renewal()
        if self.state is _S.STOPPING:
            # The caller is told that it failed, so the owner must not hear of a success.
            return _S.FAILED, [*stop, *self._detach(transferred=False), Fail(self._verdict)]
        state, effects = self._complete()
        return state, [*stop, *effects]

    def _acquire_again(self, note: FellBack) -> Step:
        if self._lease_id is None:  # the owner has said already that it is over
            return super()._acquire_again(note)
        return _S.RETURNING, [note, End(self._lease_id, transferred=False)]

    def _ended(self, lease_id: LeaseId, failure: OrbitError | None) -> Step:
        if self.state is _S.RETURNING:
            if failure is None or isinstance(failure, PathFailed):
                return _S.ACQUIRING, [Acquire(offer=False, skip_threshold=False)]
            return self._fail(failure)
        if failure is None:
            return self._finish(lease_id, self._nbytes)
        if isinstance(failure, PathFailed):
            return self._fall_back_or_fail(PathReason.GET_FAILED, failure)
        return self._fail(failure)
