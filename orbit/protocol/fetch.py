"""A consumer's get: the payload moves into a target, and the caller gets the lease.

Whatever a peer says about sizes is checked before anything is allocated or pulled.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BudgetExceeded, OrbitError, PeerProtocolError, UsageError
from ..model import Direction, LeaseId
from .messages import AcquireReply, RdmaAnswer, ReadyAnswer
from .transfer import (
    GIVEN_UP,
    AcquireAnswered,
    AcquireFailed,
    Begin,
    Cancelled,
    DeadlinePassed,
    Deliver,
    Ended,
    EndFailed,
    Fail,
    Moved,
    MoveFailed,
    PathsReady,
    PeerGone,
    Release,
    Step,
    Stopped,
    Transfer,
    TransferPlan,
    TransferState,
    TransferTable,
    to,
)

FetchInput = (
    Begin
    | PathsReady
    | AcquireAnswered
    | AcquireFailed
    | Moved
    | MoveFailed
    | Cancelled
    | Stopped
    | DeadlinePassed
    | PeerGone
)

_S = TransferState

FETCH_TABLE: TransferTable = {
    _S.IDLE: {Begin: to(_S.PREPARING, _S.ACQUIRING, _S.FAILED)},
    _S.PREPARING: {
        PathsReady: to(_S.ACQUIRING, _S.FAILED),
        **{kind: to(_S.FAILED) for kind in GIVEN_UP},
    },
    _S.ACQUIRING: {
        AcquireAnswered: to(_S.MOVING, _S.ACQUIRING, _S.FINISHED, _S.FAILED),
        AcquireFailed: to(_S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
        PeerGone: to(_S.FAILED),
    },
    _S.MOVING: {
        Moved: to(_S.FINISHED),
        MoveFailed: to(_S.ACQUIRING, _S.FAILED),
        **{kind: to(_S.STOPPING) for kind in GIVEN_UP},
    },
    _S.STOPPING: {
        Moved: to(_S.FAILED),
        MoveFailed: to(_S.FAILED),
        **{kind: to(_S.STOPPING) for kind in GIVEN_UP},
    },
    _S.ABANDONING: {
        AcquireAnswered: to(_S.FAILED),
        AcquireFailed: to(_S.FAILED),
        PeerGone: to(_S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
    },
    _S.FINISHED: {
        Cancelled: to(_S.FAILED),
        Stopped: to(_S.FINISHED),
        DeadlinePassed: to(_S.FINISHED),
        PeerGone: to(_S.FINISHED),
    },
    _S.FAILED: {
        PathsReady: to(_S.FAILED),
        AcquireAnswered: to(_S.FAILED),  # after PeerGone: a lease that went with its epoch
        AcquireFailed: to(_S.FAILED),
        **{kind: to(_S.FAILED) for kind in GIVEN_UP},
    },
}


@dataclass(frozen=True, slots=True)
class FetchPlan(TransferPlan):
    """What the caller asked for, and what it can take."""

    capacity_bytes: int | None = None  # of the caller's target; None: memory is made to measure
    payload_bytes_max: int | None = None  # a larger one is refused before anything is allocated
    # As above, of what a peer staged for this fetch alone: refusing it also drops its reference.
    staged_payload_max: int | None = None


class Fetch(Transfer):
    """One get."""

    def __init__(
        self, plan: FetchPlan, deadline: float | None = None, timeout_s: float = 0.0
    ) -> None:
        super().__init__("get", FETCH_TABLE, plan, deadline, timeout_s)
        self._plan = plan
        self._total_bytes: int | None = None  # as the first answer said

    def _answered(self, reply: AcquireReply) -> Step:
        answer = reply.rdma if reply.rdma is not None else reply.ready
        assert answer is not None  # AcquireReply holds exactly one
        refused = check_staged(self._plan, answer.total_len)
        if refused is None or self.state is not _S.ACQUIRING:
            return super()._answered(reply)
        return _S.FAILED, [Release(LeaseId(answer.lease_id)), Fail(refused)]

    def _check(self, answer: RdmaAnswer | ReadyAnswer) -> None:
        if answer.direction != Direction.READ:
            raise PeerProtocolError("the owner granted another direction than was asked for")
        total = answer.total_len
        if self._total_bytes is not None and total != self._total_bytes:
            raise PeerProtocolError(
                f"the payload's size changed from {self._total_bytes} to {total} bytes"
            )
        check_size(self._plan, total)
        self._total_bytes = total

    def _take_ready(self, answer: ReadyAnswer) -> Step:
        total = answer.total_len
        if total == 0:
            return self._held()
        if answer.inline is None:
            return self._move(answer)
        if len(answer.inline) != total:
            return self._fail(
                PeerProtocolError(f"{len(answer.inline)} inline bytes of a payload of {total}")
            )
        state, effects = self._held()
        return state, [Deliver(answer.inline), *effects]

    def _moved(self) -> Step:
        stop = self._stop_renewal()
        if self.state is _S.STOPPING:
            return _S.FAILED, [*stop, *self._detach(transferred=True), Fail(self._verdict)]
        state, effects = self._held()
        return state, [*stop, *effects]

    def _held(self) -> Step:
        assert self._lease_id is not None
        assert self._total_bytes is not None
        return self._finish(self._lease_id, self._total_bytes)

    def _give_up(self, verdict: OrbitError | None) -> Step:
        if self.state is _S.FINISHED and verdict is None:  # the result could not be delivered
            return _S.FAILED, self._detach(transferred=True)
        return super()._give_up(verdict)

    def _settle(self, event: Ended | EndFailed) -> Step:
        raise AssertionError("the table of a get does not list it")


def check_size(plan: FetchPlan, total_bytes: int) -> None:
    """Raises UsageError (more than the target holds), BudgetExceeded (more than is fetched)."""
    if plan.capacity_bytes is not None and total_bytes > plan.capacity_bytes:
        raise UsageError(
            f"the payload has {total_bytes} bytes, the destination holds {plan.capacity_bytes}",
            hint="metadata(handle) tells the size",
        )
    limit = plan.payload_bytes_max
    if limit is not None and total_bytes > limit:
        raise BudgetExceeded(
            "payload of one get", total_bytes, limit, 0, "rendezvous.payload_max_bytes"
        )


def check_staged(plan: FetchPlan, total_bytes: int) -> OrbitError | None:
    """Why a payload that was staged for this fetch alone is too large. Nobody else will read it, so
    whoever refuses it releases it, and its owner frees it at once.
    """
    limit = plan.staged_payload_max
    if limit is None or total_bytes <= limit:
        return None
    return BudgetExceeded(
        "payload staged by a peer", total_bytes, limit, 0, "rendezvous.staged_payload_max"
    )
