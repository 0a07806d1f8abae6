"""Inputs and effects of the handshake machines: frozen values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ...errors import OrbitError, PeerProtocolError
from ...model import PeerIdentity
from ..framing import SendFrame
from ..messages import Hello, Proof, Refusal, Welcome


class State(StrEnum):
    IDLE = "idle"  # dialer only: not spoken yet
    AWAIT_HELLO = "await_hello"
    AWAIT_PROOF = "await_proof"
    AWAIT_WELCOME = "await_welcome"  # dialer only
    PROVEN = "proven"  # listener only: the welcome is this side's decision
    ESTABLISHED = "established"
    REFUSED = "refused"


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The connection is up: the dialer may speak."""


@dataclass(frozen=True, slots=True)
class HelloArrived:
    hello: Hello
    raw: bytes  # the body as received: proofs cover these bytes, known fields or not


@dataclass(frozen=True, slots=True)
class ProofArrived:
    proof: Proof


@dataclass(frozen=True, slots=True)
class WelcomeArrived:
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class RefusalArrived:
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes arrived that have no place in a handshake (the parser's error, for one)."""

    error: PeerProtocolError


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection ended under the handshake."""

    cause: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Listener: this side will have the proven dialer."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """This side will not have the connection: reason busy, closing or superseded."""

    reason: str
    detail: str = ""


Input = (
    Opened
    | HelloArrived
    | ProofArrived
    | WelcomeArrived
    | RefusalArrived
    | Broken
    | Disconnected
    | Admit
    | Refuse
)


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epoch:
    """What both ends know of an open epoch."""

    peer: PeerIdentity
    attempt: bytes
    key: bytes = field(repr=False)
    version: int
    local_hello: Hello
    peer_hello: Hello


@dataclass(frozen=True, slots=True)
class Proven:
    """Listener: the dialer is who it says. Admit it or refuse it before the deadline."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Established:
    """The epoch is open; frames after this one belong to it."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no epoch. Send what is queued, then close the connection."""

    error: OrbitError


Effect = SendFrame | Proven | Established | Refused
