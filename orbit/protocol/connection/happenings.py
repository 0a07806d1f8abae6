"""States, inputs and effects of the connection machine: frozen values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from ...errors import OrbitError
from ...model import Incarnation, WorkerId


class ConnectionState(StrEnum):
    IDLE = "idle"  # no session, no attempt of ours
    DIALING = "dialing"  # our attempt runs
    PARKING = "parking"  # our attempt runs and has precedence; the peer's waits for its end
    OPEN = "open"  # a session
    CROSSED = "crossed"  # the peer's attempt was admitted; ours has no verdict yet
    CHECKING = "checking"  # a session that has to answer a ping; an attempt waits for the outcome
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """`park_s`: how long an attempt of the peer waits for the end of ours. `check_s`: how long a
    session has to answer a ping when somebody wants its place. `authenticated`: whoever comes this
    far has proven a secret.
    """

    own: WorkerId
    peer: WorkerId
    authenticated: bool = False
    park_s: float = 1.0
    check_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Offer:
    """An attempt of the peer whose proof was right and that was not answered yet. `number`: its
    count of dials (0: an older peer, which uses only what it dialed). `previous`: the session that
    it held last.
    """

    attempt: bytes
    incarnation: Incarnation
    number: int = 0
    previous: bytes = b""


@dataclass(frozen=True, slots=True)
class Held:
    """The session that both directions use."""

    attempt: bytes
    incarnation: Incarnation
    dialed: bool


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody needs a session. `attempt` is a fresh name, in case that one is dialed."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class DialSucceeded:
    """The peer said welcome to our attempt."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class DialFailed:
    """Our attempt ended without a session. `attempt` is a fresh name for another one; `spread`,
    from 0.5 to 1, keeps nodes that lost one peer together from coming back together.
    """

    error: OrbitError
    attempt: bytes
    spread: float = 1.0


@dataclass(frozen=True, slots=True)
class Proven:
    """The peer asks for a session."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class OfferGone:
    """The attempt that waits was given up by the peer, or its handshake ran out of time."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The current session is over."""


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """The current session lives."""


@dataclass(frozen=True, slots=True)
class LifeAdded:
    """The user says which life of the peer is the present one."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline has come."""


@dataclass(frozen=True, slots=True)
class Close:
    """The node closes. Its sessions are ended by others."""


ConnectionInput = (
    Wanted
    | DialSucceeded
    | DialFailed
    | Proven
    | OfferGone
    | SessionLost
    | PingAnswered
    | LifeAdded
    | TimedOut
    | Close
)


# --- effects --------------------------------------------------------------------------------------


class EndReason(Enum):
    """Why a session had to go."""

    SUPERSEDED = "superseded"  # the same process opened another one
    RESTARTED = "restarted"  # the peer is a new process


@dataclass(frozen=True, slots=True)
class StartDial:
    """Dial, and say these three in the hello."""

    attempt: bytes
    number: int
    previous: bytes


@dataclass(frozen=True, slots=True)
class AbandonDial:
    """End our attempt; what still comes of it is dropped."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class Begin:
    """The attempt that we dialed is the session."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class Admit:
    """Say welcome to the peer's attempt: it is the session from now on."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """Say no to the peer's attempt."""

    attempt: bytes
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EndSession:
    """It is not the session any more."""

    attempt: bytes
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Ping:
    """Find out whether the session lives."""

    attempt: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """Whoever waited has a session."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Whoever waited gets this."""

    error: OrbitError


ConnectionEffect = (
    StartDial | AbandonDial | Begin | Admit | Refuse | EndSession | Ping | Wake | Fail
)
