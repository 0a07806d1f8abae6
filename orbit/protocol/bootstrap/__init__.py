"""The handshake of a control connection, as one machine for each end.

    dialer                                listener
    HELLO (target, attempt, nonce)  -->   version and target checked
    identity noted                  <--   HELLO (echo, own nonce), PROOF
    proof and identity checked;
    PROOF                           -->   proof checked; admitted, parked or refused
    epoch open                      <--   WELCOME

Nothing that a hello says is acted on before its sender's proof was verified. A fresh nonce on each
side makes every replay a wrong proof. Either side ends it with REFUSAL(reason). The machines know
no socket, clock or randomness: frames, nonces and `now` are handed in.
"""

from .dialer import Dialer
from .frames import ATTEMPT_BYTES, DETAIL_CHARS_MAX, NONCE_BYTES, printable, refusal_frame
from .happenings import (
    Admit,
    Broken,
    Disconnected,
    Effect,
    Epoch,
    Established,
    HelloArrived,
    Input,
    Opened,
    ProofArrived,
    Proven,
    RefusalArrived,
    Refuse,
    Refused,
    State,
    WelcomeArrived,
)
from .listener import Listener
from .machine import (
    DIALER_TABLE,
    LISTENER_TABLE,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    negotiate_version,
)

__all__ = [
    "ATTEMPT_BYTES",
    "DETAIL_CHARS_MAX",
    "DIALER_TABLE",
    "LISTENER_TABLE",
    "NONCE_BYTES",
    "PROTOCOL_VERSION",
    "PROTOCOL_VERSION_MIN",
    "Admit",
    "Broken",
    "Dialer",
    "Disconnected",
    "Effect",
    "Epoch",
    "Established",
    "HelloArrived",
    "Input",
    "Listener",
    "Opened",
    "ProofArrived",
    "Proven",
    "RefusalArrived",
    "Refuse",
    "Refused",
    "State",
    "WelcomeArrived",
    "negotiate_version",
    "printable",
    "refusal_frame",
]
