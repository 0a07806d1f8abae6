"""The source's side of one grant: bind, arm, publish, then receipt and DONE in either order, or an
abort.

It decides when a window may be rebound, when it may only be freed, and when the granted memory is
free for reuse. It knows no device: `verbs/source.py` carries out the effects. After the receipt the
window is unbound and fresh for the next bind; without it the window is only ever freed, after the
queue pair is in the error state and drained, so no key is invalidated twice and no key that a peer
may still send is invalidated here. Both directions live the same life. Of a WRITE the receipt also
proves that the bytes are in place, since it follows them on their queue pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from ...model import PathReason
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


class SourceState(StrEnum):
    NEW = "new"
    BINDING = "binding"  # bind posted, completion awaited
    BOUND = "bound"  # receive for the receipt not posted yet, key not published
    PUBLISHED = "published"  # the requester may use it
    RECEIPTED = "receipted"  # window unbound by the receipt; DONE is missing
    AWAITING_RECEIPT = "awaiting_receipt"  # DONE seen; the receipt is missing
    ABORTING = "aborting"  # waiting for the queue pair to be drained
    FREEING = "freeing"  # waiting for the window to be freed
    UNQUIESCED = "unquiesced"  # no proof; memory retained
    REUSABLE = "reusable"  # the end: no authority is left


# --- inputs (beside those of happenings) ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bind:
    """Begin."""


@dataclass(frozen=True, slots=True)
class BindCompleted:
    """The bind's completion was a success."""


@dataclass(frozen=True, slots=True)
class BindRefused:
    """The bind was certainly not taken by the device (post refused): the window is as before."""

    cause: str


@dataclass(frozen=True, slots=True)
class BindFailed:
    """The bind completed in error or was flushed, or it cannot be told whether it was taken."""

    cause: str


@dataclass(frozen=True, slots=True)
class ReceivePosted:
    """The receive for the receipt is posted."""


@dataclass(frozen=True, slots=True)
class ReceiveRefused:
    """The receive could not be posted."""

    cause: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receive completed that invalidated this grant's key. `matches`: its 141 bytes are the
    expected binding.
    """

    matches: bool


@dataclass(frozen=True, slots=True)
class Done:
    """The lease ended. `transferred`: the requester says that its receipt is on the way or was
    seen; false when it says that the transfer failed, and when the lease was reaped, evicted or
    shut down. Drain the lane's completions before feeding this, so that a receipt that has
    arrived counts.
    """

    transferred: bool


@dataclass(frozen=True, slots=True)
class WindowFreed:
    """The window was deallocated."""


@dataclass(frozen=True, slots=True)
class WindowFreeFailed:
    """The device refused to deallocate the window."""

    cause: str


SourceInput = (
    Bind
    | BindCompleted
    | BindRefused
    | BindFailed
    | ReceivePosted
    | ReceiveRefused
    | Receipt
    | Done
    | WindowFreed
    | WindowFreeFailed
    | QueuePairFailed
    | Drained
    | DrainUnproven
    | SessionClosed
    | TimedOut
)


# --- effects (beside those of happenings) ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostBind:
    """Post the bind, signaled."""


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Post the receive for the receipt; feed ReceivePosted or ReceiveRefused."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Hand descriptor and grant record to the requester."""


@dataclass(frozen=True, slots=True)
class FailExposure:
    """Nothing was published: `expose` raises PathUnavailable(reason, cause)."""

    reason: PathReason
    cause: str


@dataclass(frozen=True, slots=True)
class RecycleWindow:
    """The window is unbound: back to its queue pair's pool, for a bind with a fresh key."""


@dataclass(frozen=True, slots=True)
class FreeWindow:
    """Deallocate the window (never invalidate it); feed WindowFreed or WindowFreeFailed."""


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Nothing can reach the granted range through this grant any more."""


SourceEffect = (
    PostBind
    | PostReceive
    | Publish
    | FailExposure
    | RecycleWindow
    | KillQueuePair
    | FreeWindow
    | ReleaseMemory
    | Retain
)


def _to(*states: SourceState) -> frozenset[SourceState]:
    return frozenset(states)


_S = SourceState
_ABORT = _to(_S.ABORTING)
_STAY_ABORTING: dict[type, frozenset[SourceState]] = {
    kind: _to(_S.ABORTING)
    for kind in (
        BindCompleted,
        BindFailed,
        Receipt,
        Done,
        QueuePairFailed,
        SessionClosed,
    )
}

SOURCE_TABLE: Table[SourceState] = {
    _S.NEW: {Bind: _to(_S.BINDING)},
    _S.BINDING: {
        BindCompleted: _to(_S.BOUND),
        BindRefused: _to(_S.REUSABLE),
        BindFailed: _ABORT,
        Receipt: _ABORT,  # a guessed key: nothing was published yet
        Done: _ABORT,
        QueuePairFailed: _ABORT,
        SessionClosed: _ABORT,
        TimedOut: _ABORT,
    },
    _S.BOUND: {
        ReceivePosted: _to(_S.PUBLISHED),
        ReceiveRefused: _ABORT,
        Receipt: _ABORT,
        Done: _ABORT,
        QueuePairFailed: _ABORT,
        SessionClosed: _ABORT,
        TimedOut: _ABORT,
    },
    _S.PUBLISHED: {
        Receipt: _to(_S.RECEIPTED, _S.ABORTING),
        Done: _to(_S.AWAITING_RECEIPT, _S.ABORTING),
        QueuePairFailed: _ABORT,
        SessionClosed: _ABORT,
    },
    _S.RECEIPTED: {
        Done: _to(_S.REUSABLE),
        SessionClosed: _to(_S.REUSABLE),
        QueuePairFailed: _to(_S.RECEIPTED),
        Drained: _to(_S.RECEIPTED),
        DrainUnproven: _to(_S.RECEIPTED),
    },
    _S.AWAITING_RECEIPT: {
        Receipt: _to(_S.REUSABLE, _S.ABORTING),
        Done: _to(_S.AWAITING_RECEIPT),
        QueuePairFailed: _ABORT,
        SessionClosed: _ABORT,
        TimedOut: _ABORT,
    },
    _S.ABORTING: {
        **_STAY_ABORTING,
        Drained: _to(_S.FREEING),
        DrainUnproven: _to(_S.UNQUIESCED),
        TimedOut: _to(_S.UNQUIESCED),
    },
    _S.FREEING: {
        WindowFreed: _to(_S.REUSABLE),
        WindowFreeFailed: _to(_S.UNQUIESCED),
        TimedOut: _to(_S.UNQUIESCED),
        Done: _to(_S.FREEING),
        SessionClosed: _to(_S.FREEING),
        QueuePairFailed: _to(_S.FREEING),
        Drained: _to(_S.FREEING),
    },
    _S.UNQUIESCED: {
        **{kind: _to(_S.UNQUIESCED) for kind in _STAY_ABORTING},
        DrainUnproven: _to(_S.UNQUIESCED),
        WindowFreeFailed: _to(_S.UNQUIESCED),
        Drained: _to(_S.FREEING),  # the proof came late
        WindowFreed: _to(_S.REUSABLE),
    },
    _S.REUSABLE: {
        Done: _to(_S.REUSABLE),
        SessionClosed: _to(_S.REUSABLE),
        QueuePairFailed: _to(_S.REUSABLE),
        Drained: _to(_S.REUSABLE),
        DrainUnproven: _to(_S.REUSABLE),
    },
}

_Step = tuple[SourceState, list[SourceEffect]]


class GrantSource(TableMachine[SourceState, SourceInput, SourceEffect]):
    """One grant at its source. Feed inputs with `step`, re-arm one timer for `deadline`."""

    def __init__(self, timeouts: GrantTimeouts | None = None) -> None:
        super().__init__(SOURCE_TABLE, SourceState.NEW)
        self._timeouts = timeouts or GrantTimeouts()
        self.receipted = False  # the matching receipt was seen, and it stays so

    @property
    def ended(self) -> bool:
        """Nothing of this grant is left to wait for."""
        return self.state is SourceState.REUSABLE

    @property
    def holds_window(self) -> bool:
        """The window belongs to this grant: it is neither back in the pool nor freed."""
        return self.state not in (SourceState.NEW, SourceState.RECEIPTED, SourceState.REUSABLE)

    def on_deadline(self, now: float) -> list[SourceEffect]:
        """Call at or after `deadline`. Nothing happens when it has not passed."""
        if self.deadline is None or now < self.deadline:
            return []
        return self.step(TimedOut(), now)

    def _react(self, event: SourceInput, now: float) -> _Step:  # noqa: PLR0912 - one match
        state = self.state
        match event:
            case Bind():
                return _S.BINDING, [PostBind()]
            case BindRefused(cause):
                failed = FailExposure(PathReason.WINDOWS_BUSY, cause)
                return _S.REUSABLE, [RecycleWindow(), failed, ReleaseMemory()]
            case BindCompleted() if state is _S.BINDING:
                return _S.BOUND, [PostReceive()]
            case ReceivePosted():
                return _S.PUBLISHED, [Publish()]
            case Receipt(matches=True) if state in (_S.PUBLISHED, _S.AWAITING_RECEIPT):
                return self._receipt()
            case Done(transferred=True) if state is _S.PUBLISHED:
                return _S.AWAITING_RECEIPT, []
            case Done() | SessionClosed() if state is _S.RECEIPTED:
                return _S.REUSABLE, [ReleaseMemory()]  # the receipt was the end of all authority
            case Done() if state is _S.AWAITING_RECEIPT:
                return state, []  # a lease ends once
            case Drained() if state in (_S.ABORTING, _S.UNQUIESCED):
                return _S.FREEING, [FreeWindow()]
            case WindowFreed():
                return _S.REUSABLE, [ReleaseMemory()]
            case DrainUnproven(cause) | WindowFreeFailed(cause) if state in (
                _S.ABORTING,
                _S.FREEING,
            ):
                return _S.UNQUIESCED, [Retain(cause)]
            case TimedOut() if state in (_S.ABORTING, _S.FREEING):
                return _S.UNQUIESCED, [Retain(f"no end of {state} within its deadline")]
            case _ if state in _LIVE:
                return self._abort(event)
            case _:
                return state, []  # late news in an ending or ended grant

    def _receipt(self) -> _Step:
        """The end of all authority; of the memory's use as well, when DONE came first."""
        self.receipted = True
        if self.state is _S.PUBLISHED:
            return _S.RECEIPTED, [RecycleWindow()]
        return _S.REUSABLE, [RecycleWindow(), ReleaseMemory()]

    def _abort(self, event: SourceInput) -> _Step:
        cause = _cause(self.state, event)
        effects: list[SourceEffect] = []
        if not isinstance(event, QueuePairFailed):
            effects.append(KillQueuePair(cause))
        if self.state in (_S.BINDING, _S.BOUND):
            reason = PathReason.DEVICE_FAILED
            if isinstance(event, QueuePairFailed | SessionClosed):
                reason = PathReason.CONNECT_FAILED
            effects.append(FailExposure(reason, cause))
        return _S.ABORTING, effects

    def _entered(self, now: float) -> None:
        wait = _WAITS.get(self.state)
        self.deadline = None if wait is None else now + wait(self._timeouts)


_WAITS: dict[SourceState, Callable[[GrantTimeouts], float]] = {
    _S.BINDING: attrgetter("bind_s"),
    _S.BOUND: attrgetter("bind_s"),
    _S.AWAITING_RECEIPT: attrgetter("receipt_s"),
    _S.ABORTING: attrgetter("drain_s"),
    _S.FREEING: attrgetter("drain_s"),
}
_LIVE = frozenset({_S.BINDING, _S.BOUND, _S.PUBLISHED, _S.AWAITING_RECEIPT})


def _cause(state: SourceState, event: SourceInput) -> str:
    match event:
        case BindFailed(cause) | ReceiveRefused(cause) | QueuePairFailed(cause):
            return cause
        case Receipt(matches=True):
            return "receipt for a key that was not published"
        case Receipt():
            return "receipt with a foreign binding"
        case Done():
            return "lease ended without a receipt"
        case SessionClosed():
            return "the epoch is over"
        case _:
            return f"{state} timed out"
