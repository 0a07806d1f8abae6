"""The requester's side of one grant: READs or WRITEs in rounds, one receipt, and an end that proves
the local memory out of reach.

Both directions live the same life: a READ fills local memory, a WRITE empties it, and either is
called a piece here. The receipt (fenced SEND_WITH_INV) rides with the last piece and is posted at
most once, whatever happens later; nothing is ever posted again. A transfer that is given up stops
posting and hands the grant back by its receipt, so that the queue pair lives on for its siblings;
only what cannot end in time kills the queue pair. It knows no device: `verbs/requester.py` carries
out the effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from ...errors import InternalError
from ..transitions import Table, TableMachine
from .happenings import (
    Drained,
    DrainUnproven,
    GrantTimeouts,
    KillQueuePair,
    QueuePairFailed,
    Retain,
    SessionClosed,
    TimedOut,
)
from .rounds import Piece, RoundPlanner


class RequesterState(StrEnum):
    READY = "ready"  # the grant is here, nothing is posted
    MOVING = "moving"  # pieces in flight, more to post
    CLOSING = "closing"  # the last pieces and the receipt are posted
    SETTLING = "settling"  # every piece has succeeded; the receipt's completion is missing
    STOPPING = "stopping"  # given up: pieces in flight, no receipt yet
    RETURNING = "returning"  # given up: no piece in flight, receipt posted
    KILLING = "killing"  # waiting for the queue pair to be drained
    UNQUIESCED = "unquiesced"  # no proof; the local memory is retained
    FINISHED = "finished"  # the end: payload delivered
    FAILED = "failed"  # the end: payload not delivered, and the local memory out of reach


# --- inputs (beside those of happenings) ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The local memory is ready: begin to move."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up. Before Start it hands an unused grant back (no room for a bounce, for example)."""

    cause: str


@dataclass(frozen=True, slots=True)
class PiecesCompleted:
    """The oldest `count` pieces in flight have succeeded."""

    count: int


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """A piece completed in error; the queue pair is dead."""

    cause: str


@dataclass(frozen=True, slots=True)
class PostFailed:
    """A post was refused, in part or in whole, or it cannot be told."""

    cause: str


@dataclass(frozen=True, slots=True)
class ReceiptCompleted:
    """The receipt's send completion was a success."""


@dataclass(frozen=True, slots=True)
class ReceiptFailed:
    """The receipt's send completed in error."""

    cause: str


RequesterInput = (
    Start
    | Cancel
    | PiecesCompleted
    | PieceFailed
    | PostFailed
    | ReceiptCompleted
    | ReceiptFailed
    | QueuePairFailed
    | Drained
    | DrainUnproven
    | SessionClosed
    | TimedOut
)


# --- effects (beside those of happenings) ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Post:
    """Post these pieces in order and, with `receipt`, the fenced SEND_WITH_INV behind them, as
    one chain.
    """

    pieces: tuple[Piece, ...]
    receipt: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """Every piece has succeeded: `pull` or `push` may return. The receipt's completion is still to
    be accounted.
    """


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing can reach the local memory any more: `pull` or `push` may raise. `returned`: the
    receipt was delivered, so the queue pair need not die. Of a READ the lease's end may then say
    transferred; of a WRITE it may not, since bytes are missing.
    """

    cause: str
    returned: bool


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    """The proof that was missing at `Retain` has come: the local memory may be freed."""


RequesterEffect = Post | Complete | Fail | KillQueuePair | Retain | ReleaseTarget


def _to(*states: RequesterState) -> frozenset[RequesterState]:
    return frozenset(states)


_R = RequesterState
_KILL = _to(_R.KILLING)


def _absorbing(state: RequesterState, *kinds: type) -> dict[type, frozenset[RequesterState]]:
    return {kind: frozenset({state}) for kind in kinds}


_LATE = (ReceiptCompleted, ReceiptFailed, QueuePairFailed, Drained, DrainUnproven, Cancel)
_ANY_COMPLETION = (PiecesCompleted, PieceFailed, PostFailed, ReceiptCompleted, ReceiptFailed)

REQUESTER_TABLE: Table[RequesterState] = {
    _R.READY: {
        Start: _to(_R.MOVING, _R.CLOSING),
        Cancel: _to(_R.RETURNING),
        QueuePairFailed: _to(_R.FAILED),
        SessionClosed: _to(_R.FAILED),
    },
    _R.MOVING: {
        PiecesCompleted: _to(_R.MOVING, _R.CLOSING),
        Cancel: _to(_R.STOPPING),
        PieceFailed: _KILL,
        PostFailed: _KILL,
        QueuePairFailed: _KILL,
        SessionClosed: _KILL,
        TimedOut: _KILL,
    },
    _R.CLOSING: {
        PiecesCompleted: _to(_R.CLOSING, _R.SETTLING),
        Cancel: _to(_R.CLOSING),
        PieceFailed: _KILL,
        PostFailed: _KILL,
        ReceiptFailed: _KILL,
        QueuePairFailed: _KILL,
        SessionClosed: _KILL,
        TimedOut: _KILL,
    },
    _R.SETTLING: {
        ReceiptCompleted: _to(_R.FINISHED),
        ReceiptFailed: _to(_R.FINISHED),
        QueuePairFailed: _to(_R.FINISHED),
        SessionClosed: _to(_R.FINISHED),
        TimedOut: _to(_R.FINISHED),
        Cancel: _to(_R.SETTLING),
    },
    _R.STOPPING: {
        PiecesCompleted: _to(_R.STOPPING, _R.RETURNING),
        Cancel: _to(_R.STOPPING),
        PieceFailed: _KILL,
        PostFailed: _KILL,
        QueuePairFailed: _KILL,
        SessionClosed: _KILL,
        TimedOut: _KILL,
    },
    _R.RETURNING: {
        ReceiptCompleted: _to(_R.FAILED),
        ReceiptFailed: _to(_R.FAILED),
        PostFailed: _to(_R.FAILED),
        QueuePairFailed: _to(_R.FAILED),
        SessionClosed: _to(_R.FAILED),
        TimedOut: _to(_R.FAILED),
        Cancel: _to(_R.RETURNING),
    },
    _R.KILLING: {
        **_absorbing(_R.KILLING, *_ANY_COMPLETION, QueuePairFailed, SessionClosed, Cancel),
        Drained: _to(_R.FAILED),
        DrainUnproven: _to(_R.UNQUIESCED),
        TimedOut: _to(_R.UNQUIESCED),
    },
    _R.UNQUIESCED: {
        **_absorbing(_R.UNQUIESCED, *_ANY_COMPLETION, QueuePairFailed, SessionClosed, Cancel),
        DrainUnproven: _to(_R.UNQUIESCED),
        Drained: _to(_R.FAILED),  # the proof came late
    },
    _R.FINISHED: _absorbing(_R.FINISHED, *_LATE, SessionClosed),
    _R.FAILED: _absorbing(_R.FAILED, *_LATE, SessionClosed),
}

_Step = tuple[RequesterState, list[RequesterEffect]]
_ENDED = frozenset({_R.FINISHED, _R.FAILED})


class GrantRequester(TableMachine[RequesterState, RequesterInput, RequesterEffect]):
    """One grant at its requester. Feed inputs with `step`, re-arm one timer for `deadline`.

    The planner's send slots are an allotment of the queue pair's send queue, reserved until the
    machine has ended.
    """

    def __init__(self, planner: RoundPlanner, timeouts: GrantTimeouts | None = None) -> None:
        super().__init__(REQUESTER_TABLE, RequesterState.READY)
        self.planner = planner
        self.receipt_posted = False
        self._timeouts = timeouts or GrantTimeouts()
        self.cause = ""  # why it was given up or killed; the first cause stays

    @property
    def ended(self) -> bool:
        """Nothing of this grant is left to wait for."""
        return self.state in _ENDED

    def on_deadline(self, now: float) -> list[RequesterEffect]:
        """Call at or after `deadline`. Nothing happens when it has not passed."""
        if self.deadline is None or now < self.deadline:
            return []
        return self.step(TimedOut(), now)

    def _react(self, event: RequesterInput, now: float) -> _Step:  # noqa: PLR0912 - one match
        state = self.state
        match event:
            case Start():
                return self._advance()
            case PiecesCompleted(count) if state in (_R.MOVING, _R.CLOSING, _R.STOPPING):
                return self._completed(count, now)
            case Cancel(cause) if state in (_R.READY, _R.MOVING):
                self.cause = cause
                if state is _R.MOVING:
                    return _R.STOPPING, []
                return _R.RETURNING, [self._post((), receipt=True)]
            case _ if state is _R.SETTLING:
                return self._settled(event)
            case _ if state is _R.RETURNING:
                return self._returned(event)
            case QueuePairFailed() | SessionClosed() if state is _R.READY:
                return _R.FAILED, [Fail(_cause(state, event), returned=False)]
            case Cancel():
                return state, []
            case Drained() if state is _R.KILLING:
                return _R.FAILED, [Fail(self.cause, returned=False)]
            case Drained() if state is _R.UNQUIESCED:
                return _R.FAILED, [ReleaseTarget()]
            case DrainUnproven(cause) if state is _R.KILLING:
                return _R.UNQUIESCED, [Retain(cause)]
            case TimedOut() if state is _R.KILLING:
                return _R.UNQUIESCED, [Retain("queue pair not drained within its deadline")]
            case _ if state in (_R.MOVING, _R.CLOSING, _R.STOPPING):
                return self._kill(event)
            case _:
                return state, []  # late news in an ending or ended grant

    def _advance(self) -> _Step:
        """Post what fits; the receipt rides with the last piece."""
        pieces = self.planner.next_round()
        if self.planner.all_posted:
            return _R.CLOSING, [self._post(pieces, receipt=True)]
        return _R.MOVING, [self._post(pieces, receipt=False)] if pieces else []

    def _completed(self, count: int, now: float) -> _Step:
        self.planner.complete(count)
        match self.state:
            case _R.MOVING:
                self.deadline = now + self._timeouts.progress_s
                return self._advance()
            case _R.CLOSING:
                self.deadline = now + self._timeouts.progress_s
                return (_R.SETTLING, [Complete()]) if self.planner.finished else (_R.CLOSING, [])
            case _:
                if self.planner.pieces_in_flight:
                    return _R.STOPPING, []
                return _R.RETURNING, [self._post((), receipt=True)]

    def _settled(self, event: RequesterInput) -> _Step:
        """The payload is safe; what is left is the receipt's completion."""
        match event:
            case Cancel():
                return _R.SETTLING, []
            case ReceiptCompleted() | QueuePairFailed():
                return _R.FINISHED, []
            case _:
                return _R.FINISHED, [KillQueuePair(_cause(self.state, event))]

    def _returned(self, event: RequesterInput) -> _Step:
        """No piece is in flight, so the memory is safe whatever becomes of the receipt."""
        match event:
            case Cancel():
                return _R.RETURNING, []
            case ReceiptCompleted():
                return _R.FAILED, [Fail(self.cause, returned=True)]
            case QueuePairFailed():
                return _R.FAILED, [Fail(self.cause, returned=False)]
            case _:
                kill = KillQueuePair(_cause(self.state, event))
                return _R.FAILED, [kill, Fail(self.cause, returned=False)]

    def _kill(self, event: RequesterInput) -> _Step:
        cause = _cause(self.state, event)
        self.cause = self.cause or cause
        if isinstance(event, QueuePairFailed):
            return _R.KILLING, []
        return _R.KILLING, [KillQueuePair(cause)]

    def _post(self, pieces: tuple[Piece, ...], *, receipt: bool) -> Post:
        if receipt:
            if self.receipt_posted:
                raise InternalError("the receipt of a grant was about to be posted twice")
            self.receipt_posted = True
        return Post(pieces, receipt)

    def _entered(self, now: float) -> None:
        wait = _WAITS.get(self.state)
        self.deadline = None if wait is None else now + wait(self._timeouts)


_WAITS: dict[RequesterState, Callable[[GrantTimeouts], float]] = {
    _R.MOVING: attrgetter("progress_s"),
    _R.CLOSING: attrgetter("progress_s"),
    _R.SETTLING: attrgetter("receipt_s"),
    _R.STOPPING: attrgetter("cancel_s"),
    _R.RETURNING: attrgetter("cancel_s"),
    _R.KILLING: attrgetter("drain_s"),
}


def _cause(state: RequesterState, event: RequesterInput) -> str:
    match event:
        case PieceFailed(cause) | PostFailed(cause) | ReceiptFailed(cause) | QueuePairFailed(cause):
            return cause
        case SessionClosed():
            return "the epoch is over"
        case _ if state in (RequesterState.MOVING, RequesterState.CLOSING):
            return "no progress within the deadline"
        case _:
            return f"{state} timed out"
