"""A consumer's get: offer or not, acquire, pull, fall back at most once, and hand the lease to the
caller or back.

Every exit but a finished fetch returns the lease; a pull that was told to stop is waited for, since
it may still write the target. It knows path names only, no device and no bytes: the runtime carries
out the effects, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..errors import (
    BudgetExceeded,
    DeadlineExceeded,
    OrbitError,
    PathUnavailable,
    PeerProtocolError,
    TransferFailed,
    Unquiesced,
    UsageError,
)
from ..model import LeaseId, PathName, PathReason, Transport
from .messages import AcquireReply, RdmaAnswer, ReadyAnswer
from .paths import check_answer, decide_offer, fallback_reason, peer_reason
from .transitions import Table, TableMachine


class FetchState(StrEnum):
    IDLE = "idle"
    PREPARING = "preparing"  # the RDMA path dials, if it must
    ACQUIRING = "acquiring"
    PULLING = "pulling"
    STOPPING = "stopping"  # given up; the pull has not ended yet
    ABANDONING = "abandoning"  # given up, the caller knows; the owner may still grant a lease
    FINISHED = "finished"  # the caller holds the lease
    FAILED = "failed"  # no lease is held


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start."""


@dataclass(frozen=True, slots=True)
class PathsReady:
    """`prepare` of the RDMA path answered: OK, or why there is none to this owner."""

    reason: PathReason


@dataclass(frozen=True, slots=True)
class AcquireAnswered:
    reply: AcquireReply


@dataclass(frozen=True, slots=True)
class AcquireFailed:
    """The acquire was refused or its answer is lost with the epoch; no lease is held through it."""

    error: OrbitError


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Every byte is in the target and nothing writes it any more."""


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The pull ended without the bytes, and nothing writes the target, unless `error` is
    Unquiesced.
    """

    reason: PathReason
    error: OrbitError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller gave up. After the end: the finished result could not be delivered."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The caller's deadline passed. Feed it through `on_deadline`."""


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The epoch is over; the owner ends the lease by itself."""

    error: OrbitError


FetchInput = (
    Begin
    | PathsReady
    | AcquireAnswered
    | AcquireFailed
    | PullFinished
    | PullFailed
    | Cancelled
    | DeadlinePassed
    | PeerGone
)


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Call the RDMA path's `prepare`; feed PathsReady."""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Call the owner; feed AcquireAnswered or AcquireFailed. The call must outlive the caller's
    patience.
    """

    offer: bool
    skip_threshold: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Have a target of `total_bytes` ready, pull into it, feed PullFinished or PullFailed. A
    target that cannot be had is PullFailed(pool_exhausted). `answer` is what the owner said.
    """

    path: PathName
    lease_id: LeaseId
    total_bytes: int
    answer: RdmaAnswer | ReadyAnswer


@dataclass(frozen=True, slots=True)
class Deliver:
    """The payload came with the answer: copy `data` into the target."""

    data: bytes


@dataclass(frozen=True, slots=True)
class StartRenewal:
    """Renew the lease every half of `timeout_s` until StopRenewal."""

    lease_id: LeaseId
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StopRenewal:
    """Stop renewing."""


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Ask the pull to end early; it still reports its end."""


@dataclass(frozen=True, slots=True)
class FellBack:
    """RDMA was offered or under way and TCP is taken instead. At most once in a fetch, for the
    records.
    """

    reason: PathReason


@dataclass(frozen=True, slots=True)
class Detach:
    """Give the lease back. `transferred` as in DetachRequest."""

    lease_id: LeaseId
    transferred: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The caller gets the payload and holds the lease."""

    lease_id: LeaseId
    path: PathName
    reason: PathReason
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The caller gets `error`; None when it cancelled the fetch itself."""

    error: OrbitError | None


FetchEffect = (
    Prepare
    | Acquire
    | Pull
    | Deliver
    | StartRenewal
    | StopRenewal
    | CancelPull
    | FellBack
    | Detach
    | Finish
    | Fail
)


def _to(*states: FetchState) -> frozenset[FetchState]:
    return frozenset(states)


_F = FetchState
_GIVEN_UP = (Cancelled, DeadlinePassed, PeerGone)

FETCH_TABLE: Table[FetchState] = {
    _F.IDLE: {Begin: _to(_F.PREPARING, _F.ACQUIRING, _F.FAILED)},
    _F.PREPARING: {
        PathsReady: _to(_F.ACQUIRING, _F.FAILED),
        **{kind: _to(_F.FAILED) for kind in _GIVEN_UP},
    },
    _F.ACQUIRING: {
        AcquireAnswered: _to(_F.PULLING, _F.ACQUIRING, _F.FINISHED, _F.FAILED),
        AcquireFailed: _to(_F.FAILED),
        Cancelled: _to(_F.ABANDONING),
        DeadlinePassed: _to(_F.ABANDONING),
        PeerGone: _to(_F.FAILED),
    },
    _F.PULLING: {
        PullFinished: _to(_F.FINISHED),
        PullFailed: _to(_F.ACQUIRING, _F.FAILED),
        **{kind: _to(_F.STOPPING) for kind in _GIVEN_UP},
    },
    _F.STOPPING: {
        PullFinished: _to(_F.FAILED),
        PullFailed: _to(_F.FAILED),
        **{kind: _to(_F.STOPPING) for kind in _GIVEN_UP},
    },
    _F.ABANDONING: {
        AcquireAnswered: _to(_F.FAILED),
        AcquireFailed: _to(_F.FAILED),
        PeerGone: _to(_F.FAILED),
        Cancelled: _to(_F.ABANDONING),
        DeadlinePassed: _to(_F.ABANDONING),
    },
    _F.FINISHED: {
        Cancelled: _to(_F.FAILED),
        DeadlinePassed: _to(_F.FINISHED),
        PeerGone: _to(_F.FINISHED),
    },
    _F.FAILED: {
        PathsReady: _to(_F.FAILED),
        AcquireAnswered: _to(_F.FAILED),  # after PeerGone: a lease that went with its epoch
        AcquireFailed: _to(_F.FAILED),
        **{kind: _to(_F.FAILED) for kind in _GIVEN_UP},
    },
}

_Step = tuple[FetchState, list[FetchEffect]]


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What the caller asked for. `rdma` is the RDMA path's availability from facts at hand: OK,
    or why not.
    """

    transport: Transport
    rdma: PathReason
    kill_switch: bool = False
    capacity_bytes: int | None = None  # of the caller's target; None: memory is made to measure
    payload_bytes_max: int | None = None  # a larger one is refused before anything is allocated


class Fetch(TableMachine[FetchState, FetchInput, FetchEffect]):
    """One get. Feed inputs with `step`, re-arm one timer for `deadline` (absolute, the
    caller's).
    """

    def __init__(
        self, plan: FetchPlan, deadline: float | None = None, timeout_s: float = 0.0
    ) -> None:
        super().__init__(FETCH_TABLE, FetchState.IDLE)
        self.deadline = deadline
        self._plan = plan
        self._timeout_s = timeout_s
        self._offered = False
        self._reason = PathReason.OK  # why RDMA is not taken; OK while it may be
        self._path = PathName.RDMA
        self._lease_id: LeaseId | None = None  # held, and not yet given back
        self._total_bytes: int | None = None  # as the first answer said
        self._attempts: list[OrbitError] = []
        self._verdict: OrbitError | None = None  # what ends a STOPPING fetch; None: cancelled
        self._peer_gone = False

    @property
    def ended(self) -> bool:
        return self.state in (FetchState.FINISHED, FetchState.FAILED)

    def on_deadline(self, now: float) -> list[FetchEffect]:
        """Call at or after `deadline`. Nothing happens when it has not passed."""
        if self.deadline is None or now < self.deadline:
            return []
        self.deadline = None  # once
        return self.step(DeadlinePassed(), now)

    def _react(self, event: FetchInput, now: float) -> _Step:
        match event:
            case _ if self.state is _F.FAILED:
                return _F.FAILED, []
            case Begin():
                return self._begin()
            case PathsReady(reason):
                return self._prepared(reason)
            case AcquireAnswered(reply):
                return self._answered(reply)
            case AcquireFailed(error):
                return self._acquire_failed(error)
            case PullFinished():
                return self._pulled()
            case PullFailed(reason, error):
                return self._pull_failed(reason, error)
            case Cancelled():
                return self._give_up(None)
            case DeadlinePassed():
                return self._give_up(DeadlineExceeded("get", self._timeout_s))
            case PeerGone(error):
                self._peer_gone = True
                return self._give_up(error)

    def _entered(self, now: float) -> None:
        if self.ended or self.state is _F.ABANDONING:
            self.deadline = None  # the caller has its answer

    def _begin(self) -> _Step:
        plan = self._plan
        self._reason = decide_offer(plan.transport, kill_switch=plan.kill_switch, rdma=plan.rdma)
        if self._reason is PathReason.OK:
            return _F.PREPARING, [Prepare()]
        return self._without_offer()

    def _prepared(self, reason: PathReason) -> _Step:
        self._reason = reason
        if reason is not PathReason.OK:
            return self._without_offer()
        self._offered = True
        demanded = self._plan.transport is Transport.RDMA
        return _F.ACQUIRING, [Acquire(offer=True, skip_threshold=demanded)]

    def _without_offer(self) -> _Step:
        if self._plan.transport is Transport.RDMA:
            return self._fail(PathUnavailable(PathName.RDMA, self._reason))
        return _F.ACQUIRING, [Acquire(offer=False, skip_threshold=False)]

    def _answered(self, reply: AcquireReply) -> _Step:
        answer = reply.rdma if reply.rdma is not None else reply.ready
        assert answer is not None  # AcquireReply holds exactly one
        self._lease_id = LeaseId(answer.lease_id)
        if self.state is _F.ABANDONING:
            return _F.FAILED, self._detach(transferred=False)
        total = answer.total_len
        try:
            check_answer(reply, offered=self._offered)
            self._check_size(total)
        except OrbitError as error:
            return self._fail(error)
        self._total_bytes = total
        if isinstance(answer, RdmaAnswer):
            return self._pull_by_rdma(answer, total)
        return self._take_ready(answer, total)

    def _check_size(self, total: int) -> None:
        """Before anything of that size is allocated or pulled."""
        plan = self._plan
        if self._total_bytes is not None and total != self._total_bytes:
            raise PeerProtocolError(
                f"the payload's size changed from {self._total_bytes} to {total} bytes"
            )
        if plan.capacity_bytes is not None and total > plan.capacity_bytes:
            raise UsageError(
                f"the payload has {total} bytes, the destination holds {plan.capacity_bytes}",
                hint="metadata(handle) tells the size",
            )
        if plan.payload_bytes_max is not None and total > plan.payload_bytes_max:
            raise BudgetExceeded(
                "payload of one get", total, plan.payload_bytes_max, 0, "payload_bytes_max"
            )

    def _pull_by_rdma(self, answer: RdmaAnswer, total: int) -> _Step:
        lease_id = LeaseId(answer.lease_id)
        self._path = PathName.RDMA
        if total == 0:
            error = PeerProtocolError("a descriptor for a payload without a byte")
            return self._pull_failed(PathReason.DECODE_ERROR, error)
        effects: list[FetchEffect] = []
        if answer.lease_timeout_ms:  # 0: the lease has no deadline
            effects.append(StartRenewal(lease_id, answer.lease_timeout_ms / 1000))
        return _F.PULLING, [*effects, Pull(PathName.RDMA, lease_id, total, answer)]

    def _take_ready(self, answer: ReadyAnswer, total: int) -> _Step:
        self._path = PathName.TCP
        if self._plan.transport is Transport.RDMA:
            if total == 0:  # nothing has to move, so the demand is met
                self._path, self._reason = PathName.RDMA, PathReason.OK
                return self._finish([])
            return self._fail(PathUnavailable(PathName.RDMA, peer_reason(answer.reason)))
        if self._offered:
            self._reason = peer_reason(answer.reason)
        if total == 0:
            return self._finish([])
        if answer.inline is not None:
            if len(answer.inline) != total:
                return self._fail(
                    PeerProtocolError(f"{len(answer.inline)} inline bytes of a payload of {total}")
                )
            return self._finish([Deliver(answer.inline)])
        return _F.PULLING, [Pull(PathName.TCP, LeaseId(answer.lease_id), total, answer)]

    def _acquire_failed(self, error: OrbitError) -> _Step:
        if self.state is _F.ABANDONING:
            return _F.FAILED, []
        return self._fail(error)

    def _pulled(self) -> _Step:
        stop: list[FetchEffect] = [StopRenewal()] if self._path is PathName.RDMA else []
        if self.state is _F.STOPPING:
            return _F.FAILED, [*stop, *self._detach(transferred=True), Fail(self._verdict)]
        return self._finish(stop)

    def _pull_failed(self, reason: PathReason, error: OrbitError) -> _Step:
        by_rdma = self._path is PathName.RDMA
        effects: list[FetchEffect] = [StopRenewal()] if by_rdma else []
        effects += self._detach(transferred=False)
        if self.state is _F.STOPPING:
            return _F.FAILED, [*effects, Fail(self._verdict)]
        # A target that hardware may still write must not be filled a second time.
        if by_rdma and self._plan.transport is Transport.AUTO and not isinstance(error, Unquiesced):
            self._reason = fallback_reason(reason)
            self._attempts.append(error)
            self._offered = False
            again = Acquire(offer=False, skip_threshold=False)
            return _F.ACQUIRING, [*effects, FellBack(self._reason), again]
        state, failed = self._fail(error)
        return state, [*effects, *failed]

    def _give_up(self, verdict: OrbitError | None) -> _Step:
        match self.state:
            case _F.PREPARING:
                return _F.FAILED, [Fail(verdict)]
            case _F.ACQUIRING:
                state = _F.FAILED if self._peer_gone else _F.ABANDONING
                return state, [Fail(verdict)]
            case _F.PULLING:
                self._verdict = verdict
                return _F.STOPPING, [CancelPull()]
            case _F.ABANDONING:
                return (_F.FAILED if self._peer_gone else _F.ABANDONING), []
            case _F.FINISHED if verdict is None:
                return _F.FAILED, self._detach(transferred=True)
            case state:
                return state, []  # the first verdict stays

    def _finish(self, before: list[FetchEffect]) -> _Step:
        assert self._lease_id is not None
        assert self._total_bytes is not None
        finish = Finish(self._lease_id, self._path, self._reason, self._total_bytes)
        return _F.FINISHED, [*before, finish]

    def _fail(self, error: OrbitError) -> _Step:
        effects = self._detach(transferred=False)
        if self._attempts and not isinstance(error, UsageError | PeerProtocolError | Unquiesced):
            error = TransferFailed("get", [*self._attempts, error])
        return _F.FAILED, [*effects, Fail(error)]

    def _detach(self, *, transferred: bool) -> list[FetchEffect]:
        """Give the held lease back, once; it went with the epoch when the peer is gone."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is None or self._peer_gone:
            return []
        return [Detach(lease_id, transferred)]
