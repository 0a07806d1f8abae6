"""What becomes of dials, offers and sessions: the table and the rules of one connection."""

from __future__ import annotations

from enum import Enum
from typing import Final

from ...errors import ClosedError, InternalError, OrbitError, PeerRefused, PeerRestarted
from ...model import Incarnation, PeerIdentity, WorkerId
from ..transitions import Table, TableMachine
from .happenings import (
    AbandonDial,
    Admit,
    Begin,
    Close,
    ConnectionEffect,
    ConnectionInput,
    ConnectionSettings,
    ConnectionState,
    DialFailed,
    DialSucceeded,
    EndReason,
    EndSession,
    Fail,
    Held,
    LifeAdded,
    Offer,
    OfferGone,
    Ping,
    PingAnswered,
    Proven,
    Refuse,
    SessionLost,
    StartDial,
    TimedOut,
    Wake,
    Wanted,
)

# A refused dial costs a round trip and a silent one its whole deadline; both may repeat, not
# hammer.
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0

# What no repetition mends soon: back off as far as it goes at once.
_LASTING_REFUSALS: Final = frozenset({"version", "auth", "wrong_peer"})
SUPERSEDED: Final = "superseded"


def _states(*states: ConnectionState) -> frozenset[ConnectionState]:
    return frozenset(states)


_S = ConnectionState
_CLOSES: Final[dict[type, frozenset[ConnectionState]]] = {Close: _states(_S.CLOSED)}
CONNECTION_TABLE: Final[Table[ConnectionState]] = {
    _S.IDLE: {
        Wanted: _states(_S.IDLE, _S.DIALING),
        Proven: _states(_S.IDLE, _S.OPEN),
        LifeAdded: _states(_S.IDLE),
        **_CLOSES,
    },
    _S.DIALING: {
        DialSucceeded: _states(_S.OPEN),
        DialFailed: _states(_S.IDLE, _S.DIALING),
        Proven: _states(_S.DIALING, _S.PARKING, _S.CROSSED, _S.OPEN),
        LifeAdded: _states(_S.DIALING, _S.IDLE),
        **_CLOSES,
    },
    _S.PARKING: {
        DialSucceeded: _states(_S.OPEN, _S.CHECKING),
        DialFailed: _states(_S.OPEN),
        Proven: _states(_S.PARKING, _S.OPEN),
        OfferGone: _states(_S.DIALING),
        LifeAdded: _states(_S.PARKING, _S.IDLE, _S.OPEN),
        TimedOut: _states(_S.OPEN),
        **_CLOSES,
    },
    _S.OPEN: {
        Proven: _states(_S.OPEN, _S.CHECKING),
        SessionLost: _states(_S.IDLE),
        LifeAdded: _states(_S.OPEN, _S.IDLE),
        **_CLOSES,
    },
    _S.CROSSED: {
        DialSucceeded: _states(_S.OPEN),
        DialFailed: _states(_S.OPEN),
        Proven: _states(_S.CROSSED, _S.OPEN),
        SessionLost: _states(_S.DIALING),
        LifeAdded: _states(_S.CROSSED, _S.IDLE),
        **_CLOSES,
    },
    _S.CHECKING: {
        Proven: _states(_S.CHECKING, _S.OPEN),
        OfferGone: _states(_S.OPEN),
        SessionLost: _states(_S.OPEN),
        PingAnswered: _states(_S.OPEN),
        LifeAdded: _states(_S.CHECKING, _S.IDLE, _S.OPEN),
        TimedOut: _states(_S.OPEN),
        **_CLOSES,
    },
    _S.CLOSED: {
        Proven: _states(_S.CLOSED),
        SessionLost: _states(_S.CLOSED),
        LifeAdded: _states(_S.CLOSED),
        Close: _states(_S.CLOSED),
    },
}

_Step = tuple[ConnectionState, list[ConnectionEffect]]


class _Verdict(Enum):
    """What becomes of an attempt that meets a live session."""

    REPLACE = "replace"
    REFUSE = "refuse"
    CHECK = "check"


class Connection(TableMachine[ConnectionState, ConnectionInput, ConnectionEffect]):
    """The machine of one peer. `current`, `dialing` and `parked` name what the shell holds for it:
    it must not feed the ends of anything else.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__(CONNECTION_TABLE, ConnectionState.IDLE)
        self.current: Held | None = None
        self.dialing: StartDial | None = None
        self.parked: Offer | None = None
        self._settings = settings
        self._life: Incarnation | None = None  # that we would dial
        self._dials = 0
        self._previous = b""  # the session that was held last
        self._newest: tuple[Incarnation, int] | None = None  # of the peer's attempts: life, number
        self._failures = 0
        self._retry_at = 0.0
        self._error: OrbitError | None = None

    def _entered(self, now: float) -> None:
        match self.state:
            case ConnectionState.PARKING:
                self.deadline = now + self._settings.park_s
            case ConnectionState.CHECKING:
                self.deadline = now + self._settings.check_s
            case _:
                self.deadline = None

    def _react(self, event: ConnectionInput, now: float) -> _Step:
        match event:
            case Wanted(attempt):
                return self._on_wanted(attempt, now)
            case DialSucceeded(incarnation):
                return self._on_dial_succeeded(incarnation)
            case DialFailed():
                return self._on_dial_failed(event, now)
            case Proven(offer):
                return self._on_proven(offer)
            case OfferGone():
                self.parked = None
                checking = self.state is ConnectionState.CHECKING
                return ConnectionState.OPEN if checking else ConnectionState.DIALING, []
            case SessionLost():
                return self._on_session_lost()
            case PingAnswered():
                return ConnectionState.OPEN, [self._refuse_parked(SUPERSEDED)]
            case TimedOut():
                return ConnectionState.OPEN, [*self._abandon(), *self._admit(self._unpark())]
            case LifeAdded(incarnation):
                return self._on_life_added(incarnation)
            case Close():
                return self._on_close()

    # --- our attempt ------------------------------------------------------------------------------

    def _on_wanted(self, attempt: bytes, now: float) -> _Step:
        if self._error is not None and now < self._retry_at:
            return ConnectionState.IDLE, [Fail(self._error)]
        return ConnectionState.DIALING, [self._dial(attempt)]

    def _dial(self, attempt: bytes) -> StartDial:
        self._dials += 1
        self.dialing = StartDial(attempt, self._dials, self._previous)
        return self.dialing

    def _on_dial_succeeded(self, incarnation: Incarnation) -> _Step:
        dialing = self._dialing()
        # The peer's word counts: it says welcome to ours only when it has given up its own, so a
        # session that was admitted meanwhile is over at its other end.
        held = Held(dialing.attempt, incarnation, dialed=True)
        effects: list[ConnectionEffect] = [Begin(dialing.attempt), *self._replace(held), Wake()]
        self.dialing = None
        if self.parked is None:
            return ConnectionState.OPEN, effects
        state, more = self._meet(self._unpark())
        return state, effects + more

    def _on_dial_failed(self, event: DialFailed, now: float) -> _Step:
        dialing = self._dialing()
        self.dialing = None
        if self.state is ConnectionState.CROSSED:
            return ConnectionState.OPEN, []
        if self.parked is not None:
            return ConnectionState.OPEN, self._admit(self._unpark())
        error = event.error
        reason = error.reason if isinstance(error, PeerRefused) else ""
        if reason == SUPERSEDED and dialing.previous != self._previous:
            # By a session that came and went while this attempt was on its way: the next one says
            # so. It is one more for each such session, never a loop.
            return ConnectionState.DIALING, [self._dial(event.attempt)]
        self._back_off(error, now, event.spread, lasting=reason in _LASTING_REFUSALS)
        return ConnectionState.IDLE, [Fail(error)]

    def _back_off(self, error: OrbitError, now: float, spread: float, *, lasting: bool) -> None:
        if isinstance(error, InternalError):
            return  # a bug, not a fact about the peer
        delay = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * (1 << min(self._failures, 16)))
        self._failures += 1
        self._error = error
        self._retry_at = now + (BACKOFF_MAX_S if lasting else delay) * spread

    def _abandon(self) -> list[ConnectionEffect]:
        dialing, self.dialing = self.dialing, None
        return [] if dialing is None else [AbandonDial(dialing.attempt)]

    def _dialing(self) -> StartDial:
        assert self.dialing is not None
        return self.dialing

    # --- the peer's attempts ----------------------------------------------------------------------

    def _on_proven(self, offer: Offer) -> _Step:
        if self.state is ConnectionState.CLOSED:
            return self.state, [Refuse(offer.attempt, "closing")]
        if self._is_stale(offer):
            return self.state, [Refuse(offer.attempt, SUPERSEDED, "a later attempt came first")]
        if offer.number and offer.incarnation == self._life:
            self._newest = offer.incarnation, offer.number
        match self.state:
            case ConnectionState.IDLE:
                return ConnectionState.OPEN, self._admit(offer)
            case ConnectionState.DIALING | ConnectionState.PARKING:
                return self._cross(offer)
            case _:
                return self._meet(offer)

    def _is_stale(self, offer: Offer) -> bool:
        """Whether its dialer has given it up: it dialed again since."""
        if self._newest is None or self._newest[0] != offer.incarnation:
            return False
        return 0 < offer.number <= self._newest[1]

    def _cross(self, offer: Offer) -> _Step:
        """Both sides dial, and neither has finished."""
        if self._ours_is_over(offer):
            refused = [] if self.parked is None else [self._refuse_parked(SUPERSEDED)]
            return ConnectionState.OPEN, [*self._abandon(), *refused, *self._admit(offer)]
        if self.parked is not None:
            return self.state, [self._park_instead(offer)]
        # Of another life, without a secret, ours finds out whether the known one lives.
        other_life = offer.incarnation != self._life
        if other_life or self._settings.own < self._settings.peer:
            self.parked = offer
            return ConnectionState.PARKING, []
        return ConnectionState.CROSSED, self._admit(offer)

    def _ours_is_over(self, offer: Offer) -> bool:
        """Whether no welcome to our attempt is worth waiting for: the peer says that it had
        admitted ours and lost it, or proves that it is a new process.
        """
        if self.dialing is None:
            return False
        renewed = self._settings.authenticated and offer.incarnation != self._life
        return renewed or offer.previous == self.dialing.attempt

    def _meet(self, offer: Offer) -> _Step:
        """An attempt while there is a session."""
        match self._judge(offer):
            case _Verdict.REPLACE:
                refused = [] if self.parked is None else [self._refuse_parked(SUPERSEDED)]
                abandoned = self._abandon() if self._ours_is_over(offer) else []
                crossed = self.dialing is not None
                state = ConnectionState.CROSSED if crossed else ConnectionState.OPEN
                return state, [*abandoned, *refused, *self._admit(offer)]
            case _Verdict.CHECK if self.parked is not None:
                return ConnectionState.CHECKING, [self._park_instead(offer)]
            case _Verdict.CHECK if self.dialing is None:
                self.parked = offer
                return ConnectionState.CHECKING, [Ping(self._session().attempt)]
            case _Verdict.CHECK:
                return self.state, [Refuse(offer.attempt, "busy", "an attempt is on its way")]
        detail = "there is a session already"
        meeting = self.state in (ConnectionState.CROSSED, ConnectionState.CHECKING)
        state = self.state if meeting else ConnectionState.OPEN
        return state, [Refuse(offer.attempt, SUPERSEDED, detail)]

    def _judge(self, offer: Offer) -> _Verdict:
        session = self._session()
        if offer.incarnation != session.incarnation:
            # Whoever proved the secret speaks for that worker id, so its older life is over.
            # Without one anybody could say so, and a live peer is left alone.
            return _Verdict.REPLACE if self._settings.authenticated else _Verdict.CHECK
        held = (
            {session.attempt} if self.dialing is None else {session.attempt, self.dialing.attempt}
        )
        if offer.previous in held or offer.number == 0:
            return _Verdict.REPLACE
        if session.dialed:
            return _Verdict.REFUSE
        # It dialed the session, then dialed again: it lost this one, perhaps before its welcome.
        return _Verdict.REPLACE if self._settings.authenticated else _Verdict.CHECK

    def _admit(self, offer: Offer) -> list[ConnectionEffect]:
        held = Held(offer.attempt, offer.incarnation, dialed=False)
        self._newest = offer.incarnation, offer.number
        return [Admit(offer.attempt), *self._replace(held), Wake()]

    def _park_instead(self, offer: Offer) -> ConnectionEffect:
        """The same process gave up the attempt that waits; another one has to come again."""
        parked = self.parked
        assert parked is not None
        if parked.incarnation != offer.incarnation:
            return Refuse(offer.attempt, "busy", "an attempt is on its way")
        self.parked = offer
        return Refuse(parked.attempt, SUPERSEDED, "a later attempt came")

    def _refuse_parked(self, reason: str) -> ConnectionEffect:
        return Refuse(self._unpark().attempt, reason)

    def _unpark(self) -> Offer:
        parked, self.parked = self.parked, None
        assert parked is not None
        return parked

    # --- the session ------------------------------------------------------------------------------

    def _replace(self, held: Held) -> list[ConnectionEffect]:
        old, self.current = self.current, held
        self._life = held.incarnation
        self._previous = held.attempt
        self._failures, self._error = 0, None
        if old is None:
            return []
        restarted = old.incarnation != held.incarnation
        reason = EndReason.RESTARTED if restarted else EndReason.SUPERSEDED
        return [EndSession(old.attempt, reason)]

    def _on_session_lost(self) -> _Step:
        self.current = None
        match self.state:
            case ConnectionState.CROSSED:
                return ConnectionState.DIALING, []
            case ConnectionState.CHECKING:
                return ConnectionState.OPEN, self._admit(self._unpark())
            case ConnectionState.CLOSED:
                return ConnectionState.CLOSED, []
            case _:
                return ConnectionState.IDLE, []

    def _session(self) -> Held:
        assert self.current is not None
        return self.current

    def _on_life_added(self, incarnation: Incarnation) -> _Step:
        known, self._life = self._life, incarnation
        if known == incarnation or self.state is ConnectionState.CLOSED:
            return self.state, []
        self._failures, self._error = 0, None
        old, self.current = self.current, None
        effects: list[ConnectionEffect] = self._abandon()
        if old is not None:
            effects.append(EndSession(old.attempt, EndReason.RESTARTED))
        if self.parked is not None and self.parked.incarnation == incarnation:
            return ConnectionState.OPEN, [*effects, *self._admit(self._unpark())]
        if self.parked is not None:
            effects.append(self._refuse_parked("restarted"))
        if self.state is not ConnectionState.IDLE:
            effects.append(Fail(restarted_error(self._settings.peer, incarnation)))
        return ConnectionState.IDLE, effects

    def _on_close(self) -> _Step:
        effects = self._abandon()
        if self.parked is not None:
            effects.append(self._refuse_parked("closing"))
        return ConnectionState.CLOSED, [*effects, Fail(ClosedError("the node"))]


def restarted_error(peer: WorkerId, incarnation: Incarnation) -> PeerRestarted:
    """What work of an older life ends with."""
    return PeerRestarted(f"{PeerIdentity(peer, incarnation)}: a newer process took its place")
