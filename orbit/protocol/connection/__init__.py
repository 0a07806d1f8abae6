"""One logical connection to one peer, whoever dialed it (D7): one dial at a time, back-off, the
tie-break of simultaneous dials, and what becomes of a live session when another attempt arrives.

It decides; `runtime/peers.py` dials, greets and carries out. It knows no socket, address or clock:
attempts are names, `now`, fresh names and the spread of the back-off are handed in.

How a newer attempt is told from one that crossed ours: a hello carries the dialer's count of dials
and the name of the last session that it held with this peer. A dialer has one dial at a time and
none while it holds a session, so an attempt that names our live session says that its other end is
gone, and one that does not name a session which we dialed was begun before the peer learned of it.
"""

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
from .machine import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    CONNECTION_TABLE,
    SUPERSEDED,
    Connection,
    restarted_error,
)

__all__ = [
    "BACKOFF_FIRST_S",
    "BACKOFF_MAX_S",
    "CONNECTION_TABLE",
    "SUPERSEDED",
    "AbandonDial",
    "Admit",
    "Begin",
    "Close",
    "Connection",
    "ConnectionEffect",
    "ConnectionInput",
    "ConnectionSettings",
    "ConnectionState",
    "DialFailed",
    "DialSucceeded",
    "EndReason",
    "EndSession",
    "Fail",
    "Held",
    "LifeAdded",
    "Offer",
    "OfferGone",
    "Ping",
    "PingAnswered",
    "Proven",
    "Refuse",
    "SessionLost",
    "StartDial",
    "TimedOut",
    "Wake",
    "Wanted",
    "restarted_error",
]
