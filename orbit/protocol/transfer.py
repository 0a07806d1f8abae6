"""What a get and a put have in common: offer or not, acquire, move the bytes, fall back at most
once, and give the lease back on every exit but success.

A move that was told to stop is waited for, since it may still touch the caller's memory. The base
machine knows path names only, no device and no bytes: the runtime carries out the effects, one
after the other. `fetch` and `put` are the two machines, each with a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..errors import (
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

PIECES_MAX = 64  # descriptors that one answer may have, as the offer says


class TransferState(StrEnum):
    IDLE = "idle"
    PREPARING = "preparing"  # the RDMA path dials, if it must
    ACQUIRING = "acquiring"
    RETURNING = "returning"  # of a put: the first lease goes back, before a second is asked for
    MOVING = "moving"
    COMPLETING = "completing"  # of a put: the owner is asked whether every byte is in place
    STOPPING = "stopping"  # given up; the move has not ended yet
    ABANDONING = "abandoning"  # given up, the caller knows; an answer of the owner is still due
    FINISHED = "finished"
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
class Moved:
    """A pull: every byte is in the target. A push: every byte has left. Nothing touches the
    caller's memory any more.
    """


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The move ended without all bytes, and nothing touches the caller's memory, unless `error` is
    Unquiesced.
    """

    reason: PathReason
    error: OrbitError


@dataclass(frozen=True, slots=True)
class Ended:
    """The owner's answer to End: nothing moves under that lease any more, and as far as it was
    `transferred`, every byte is in place.
    """


@dataclass(frozen=True, slots=True)
class EndFailed:
    """The owner said otherwise, or its answer is lost. The lease is over in any case. PathFailed:
    nothing moves any more, but not every byte is in place.
    """

    error: OrbitError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller gave up. After the end: the finished result could not be delivered."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The caller's memory is wanted back, and the caller gets `error`."""

    error: OrbitError


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The caller's deadline passed. Feed it through `on_deadline`."""


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The epoch is over; the owner ends the lease by itself."""

    error: OrbitError


TransferInput = (
    Begin
    | PathsReady
    | AcquireAnswered
    | AcquireFailed
    | Moved
    | MoveFailed
    | Ended
    | EndFailed
    | Cancelled
    | Stopped
    | DeadlinePassed
    | PeerGone
)

GIVEN_UP = (Cancelled, Stopped, DeadlinePassed, PeerGone)


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
class Move:
    """Pull into (push from) the caller's memory, feed Moved or MoveFailed. Memory of `total_bytes`
    that cannot be had is MoveFailed(pool_exhausted). `answer` is what the owner said.
    """

    path: PathName
    lease_id: LeaseId
    total_bytes: int
    answer: RdmaAnswer | ReadyAnswer


@dataclass(frozen=True, slots=True)
class StopMoving:
    """Ask the move to end early; it still reports its end."""


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
class FellBack:
    """RDMA was offered or under way and TCP is taken instead. At most once in a transfer, for the
    records.
    """

    reason: PathReason


@dataclass(frozen=True, slots=True)
class Detach:
    """Give the lease back, without waiting. `transferred` as in DetachRequest."""

    lease_id: LeaseId
    transferred: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease back, untransferred, and one reference with it, without waiting."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class End:
    """Give the lease back by a call; feed Ended or EndFailed. The call must outlive the caller's
    patience.
    """

    lease_id: LeaseId
    transferred: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The transfer succeeded. Of a get: the caller holds the lease."""

    lease_id: LeaseId
    path: PathName
    reason: PathReason
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The caller gets `error`; None when it cancelled the transfer itself."""

    error: OrbitError | None


TransferEffect = (
    Prepare
    | Acquire
    | Move
    | StopMoving
    | Deliver
    | StartRenewal
    | StopRenewal
    | FellBack
    | Detach
    | Release
    | End
    | Finish
    | Fail
)

TransferTable = Table[TransferState]
Step = tuple[TransferState, list[TransferEffect]]

_S = TransferState


def to(*states: TransferState) -> frozenset[TransferState]:
    """One cell of a table."""
    return frozenset(states)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the caller asked for. `rdma` is the RDMA path's availability from facts at hand: OK,
    or why not.
    """

    transport: Transport
    rdma: PathReason
    kill_switch: bool = False


class Transfer(TableMachine[TransferState, TransferInput, TransferEffect]):
    """One transfer. Feed inputs with `step`, re-arm one timer for `deadline` (absolute, the
    caller's). `what` is what the caller called: get or put.
    """

    def __init__(
        self,
        what: str,
        table: TransferTable,
        plan: TransferPlan,
        deadline: float | None,
        timeout_s: float,
    ) -> None:
        super().__init__(table, _S.IDLE)
        self.deadline = deadline
        self._what = what
        self._asked = plan
        self._timeout_s = timeout_s
        self._offered = False
        self._reason = PathReason.OK  # why RDMA is not taken; OK while it may be
        self._path = PathName.RDMA
        self._lease_id: LeaseId | None = None  # held, and not yet given back
        self._renewing = False
        self._attempts: list[OrbitError] = []
        self._verdict: OrbitError | None = None  # what ends a STOPPING transfer; None: cancelled
        self._peer_gone = False

    @property
    def ended(self) -> bool:
        return self.state in (_S.FINISHED, _S.FAILED)

    def on_deadline(self, now: float) -> list[TransferEffect]:
        """Call at or after `deadline`. Nothing happens when it has not passed."""
        if self.deadline is None or now < self.deadline:
            return []
        self.deadline = None  # once
        return self.step(DeadlinePassed(), now)

    def _react(self, event: TransferInput, now: float) -> Step:
        match event:
            case _ if self.state is _S.FAILED:
                return _S.FAILED, []
            case Begin():
                return self._begin()
            case PathsReady(reason):
                return self._prepared(reason)
            case AcquireAnswered(reply):
                return self._answered(reply)
            case AcquireFailed(error):
                return self._acquire_failed(error)
            case Moved():
                return self._moved()
            case MoveFailed(reason, error):
                return self._move_failed(reason, error)
            case Ended() | EndFailed():
                return self._settle(event)
            case Cancelled():
                return self._give_up(None)
            case Stopped(error):
                return self._give_up(error)
            case DeadlinePassed():
                return self._give_up(DeadlineExceeded(self._what, self._timeout_s))
            case PeerGone(error):
                self._peer_gone = True
                return self._give_up(error)

    def _entered(self, now: float) -> None:
        if self.ended or self.state is _S.ABANDONING:
            self.deadline = None  # the caller has its answer

    # --- what each kind of transfer says for itself -----------------------------------------------

    def _check(self, answer: RdmaAnswer | ReadyAnswer) -> None:
        """Raises what ends the transfer before anything of that answer is used."""
        raise NotImplementedError

    def _take_ready(self, answer: ReadyAnswer) -> Step:
        """TCP was chosen, and may be."""
        raise NotImplementedError

    def _moved(self) -> Step:
        raise NotImplementedError

    def _settle(self, event: Ended | EndFailed) -> Step:
        """Only the tables of confirmed transfers list these."""
        raise NotImplementedError

    def _acquire_again(self, note: FellBack) -> Step:
        """The second acquire, which makes no offer. A lease may still be held."""
        again = Acquire(offer=False, skip_threshold=False)
        return _S.ACQUIRING, [*self._detach(transferred=False), note, again]

    # --- the offer --------------------------------------------------------------------------------

    def _begin(self) -> Step:
        asked = self._asked
        self._reason = decide_offer(asked.transport, kill_switch=asked.kill_switch, rdma=asked.rdma)
        if self._reason is PathReason.OK:
            return _S.PREPARING, [Prepare()]
        return self._without_offer()

    def _prepared(self, reason: PathReason) -> Step:
        self._reason = reason
        if reason is not PathReason.OK:
            return self._without_offer()
        self._offered = True
        demanded = self._asked.transport is Transport.RDMA
        return _S.ACQUIRING, [Acquire(offer=True, skip_threshold=demanded)]

    def _without_offer(self) -> Step:
        if self._asked.transport is Transport.RDMA:
            return self._fail(PathUnavailable(PathName.RDMA, self._reason))
        return _S.ACQUIRING, [Acquire(offer=False, skip_threshold=False)]

    # --- the answer -------------------------------------------------------------------------------

    def _answered(self, reply: AcquireReply) -> Step:
        answer = reply.rdma if reply.rdma is not None else reply.ready
        assert answer is not None  # AcquireReply holds exactly one
        self._lease_id = LeaseId(answer.lease_id)
        if self.state is _S.ABANDONING:
            return _S.FAILED, self._detach(transferred=False)
        try:
            check_answer(reply, offered=self._offered)
            self._check(answer)
        except OrbitError as error:
            return self._fail(error)
        if isinstance(answer, RdmaAnswer):
            return self._take_descriptor(answer)
        self._path = PathName.TCP
        if self._asked.transport is Transport.RDMA:
            if answer.total_len:
                return self._fail(PathUnavailable(PathName.RDMA, peer_reason(answer.reason)))
            self._path, self._reason = PathName.RDMA, PathReason.OK  # nothing has to move
        elif self._offered:
            self._reason = peer_reason(answer.reason)
        return self._take_ready(answer)

    def _take_descriptor(self, answer: RdmaAnswer) -> Step:
        self._path = PathName.RDMA
        if answer.total_len == 0 or len(answer.rest) >= PIECES_MAX:
            count = 1 + len(answer.rest)
            error = PeerProtocolError(f"{count} descriptors for {answer.total_len} bytes")
            return self._move_failed(PathReason.DECODE_ERROR, error)
        return self._move(answer)

    def _move(self, answer: RdmaAnswer | ReadyAnswer) -> Step:
        lease_id = LeaseId(answer.lease_id)
        effects: list[TransferEffect] = []
        if answer.lease_timeout_ms:  # 0: the lease has no deadline
            self._renewing = True
            effects.append(StartRenewal(lease_id, answer.lease_timeout_ms / 1000))
        move = Move(self._path, lease_id, answer.total_len, answer)
        return _S.MOVING, [*effects, move]

    def _acquire_failed(self, error: OrbitError) -> Step:
        if self.state is _S.ABANDONING:
            return _S.FAILED, []
        return self._fail(error)

    # --- the move ---------------------------------------------------------------------------------

    def _move_failed(self, reason: PathReason, error: OrbitError) -> Step:
        stop = self._stop_renewal()
        if self.state is _S.STOPPING:
            return _S.FAILED, [*stop, *self._detach(transferred=False), Fail(self._verdict)]
        state, effects = self._fall_back_or_fail(reason, error)
        return state, [*stop, *effects]

    def _fall_back_or_fail(self, reason: PathReason, error: OrbitError) -> Step:
        by_rdma, auto = self._path is PathName.RDMA, self._asked.transport is Transport.AUTO
        # Memory that hardware may still touch must not be used a second time.
        if not by_rdma or not auto or isinstance(error, Unquiesced):
            return self._fail(error)
        self._reason = fallback_reason(reason)
        self._attempts.append(error)
        self._offered = False
        return self._acquire_again(FellBack(self._reason))

    # --- the end ----------------------------------------------------------------------------------

    def _give_up(self, verdict: OrbitError | None) -> Step:
        match self.state:
            case _S.PREPARING:
                return _S.FAILED, [Fail(verdict)]
            case _S.ACQUIRING | _S.RETURNING | _S.COMPLETING:
                return (_S.FAILED if self._peer_gone else _S.ABANDONING), [Fail(verdict)]
            case _S.MOVING:
                self._verdict = verdict
                return _S.STOPPING, [StopMoving()]
            case _S.ABANDONING if self._peer_gone:
                return _S.FAILED, []
            case state:
                return state, []  # the first verdict stays

    def _finish(self, lease_id: LeaseId, total_bytes: int) -> Step:
        return _S.FINISHED, [Finish(lease_id, self._path, self._reason, total_bytes)]

    def _fail(self, error: OrbitError) -> Step:
        effects = self._detach(transferred=False)
        if self._attempts and not isinstance(error, UsageError | PeerProtocolError | Unquiesced):
            error = TransferFailed(self._what, [*self._attempts, error])
        return _S.FAILED, [*effects, Fail(error)]

    def _stop_renewal(self) -> list[TransferEffect]:
        renewing, self._renewing = self._renewing, False
        return [StopRenewal()] if renewing else []

    def _detach(self, *, transferred: bool) -> list[TransferEffect]:
        """Give the held lease back, once; it went with the epoch when the peer is gone."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is None or self._peer_gone:
            return []
        return [Detach(lease_id, transferred)]
