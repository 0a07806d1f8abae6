"""The connecting end of the handshake."""

from __future__ import annotations

from ...errors import (
    OrbitError,
    PeerProtocolError,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    UsageError,
)
from ...model import PeerIdentity
from ..framing import FrameKind, SendFrame
from ..messages import Hello, Proof
from ..security import dialer_proof, listener_proof, proofs_equal
from .frames import check_hello, frame_of, hello_frame
from .happenings import (
    Effect,
    Established,
    HelloArrived,
    Input,
    Opened,
    ProofArrived,
    State,
    WelcomeArrived,
)
from .machine import DIALER_TABLE, Handshake


class Dialer(Handshake):
    """The connecting end. `expected` is who the address says is there; None takes anyone.

    `hello.target` must be the expected worker id (0 for anyone). Feed `Opened()` first.
    """

    TABLE = DIALER_TABLE

    def __init__(
        self,
        hello: Hello,
        secret: bytes | None,
        *,
        expected: PeerIdentity | None,
        endpoint: str,
        now: float,
        timeout_s: float,
    ) -> None:
        super().__init__(hello, secret, endpoint=endpoint, now=now, timeout_s=timeout_s)
        if hello.target != (expected.worker_id if expected is not None else 0):
            raise UsageError("the hello's target is not the expected peer")
        check_hello(hello)
        self.state = State.IDLE
        self._expected = expected

    def _decide(self, event: Input) -> tuple[State, list[Effect]]:
        match event:
            case Opened():
                frame = hello_frame(self._hello)
                self._hello_raw = frame[1:]
                return State.AWAIT_HELLO, [SendFrame(frame)]
            case HelloArrived(hello, raw):
                return self._on_hello(hello, raw)
            case ProofArrived(proof):
                return self._on_proof(proof)
            case WelcomeArrived(welcome):
                if welcome.version != self._version:
                    problem = f"welcome to version {welcome.version}, agreed {self._version}"
                    return self._end(PeerProtocolError(f"{self.endpoint}: {problem}"))
                epoch = self._epoch(self._hello_raw, self._peer_raw)
                return State.ESTABLISHED, [Established(epoch)]
            case _:
                return super()._decide(event)

    def _on_hello(self, hello: Hello, raw: bytes) -> tuple[State, list[Effect]]:
        if hello.attempt != self._hello.attempt or hello.target != self._hello.worker_id:
            problem = "the answer is for another connection attempt"
            return self._end(PeerProtocolError(f"{self.endpoint}: {problem}"))
        self._peer_hello = hello
        self._peer_raw = raw
        return self._agree(hello) or (State.AWAIT_PROOF, [])

    def _on_proof(self, proof: Proof) -> tuple[State, list[Effect]]:
        right = listener_proof(self._secret, self._hello_raw, self._peer_raw)
        if not proofs_equal(proof.mac, right):
            return self._refuse_auth()
        # Only now is it known that the hello is its sender's: before, an impostor could claim a
        # restart.
        hello = self._peer_hello
        assert hello is not None
        expected = self._expected
        if expected is not None and hello.worker_id != expected.worker_id:
            detail = f"{self.endpoint} is worker {hello.worker_id:016x}, not {expected}"
            return self._refuse(PeerRefused("wrong_peer", detail), "wrong_peer")
        if expected is not None and hello.incarnation != expected.incarnation:
            error = PeerRestarted(
                f"{self.endpoint}: worker {expected} was restarted since its address was made",
                hint="get a fresh address or ticket from it",
            )
            return self._refuse(error, "restarted")
        mac = dialer_proof(self._secret, self._hello_raw, self._peer_raw)
        return State.AWAIT_WELCOME, [SendFrame(frame_of(FrameKind.PROOF, Proof(mac)))]

    def _silence(self, waited_for: str) -> OrbitError:
        detail = f"waited {self._timeout_s:g} s for its {waited_for}"
        return PeerUnreachable(self.endpoint, "silent", detail)

    def _disconnected(self, cause: str) -> OrbitError:
        return PeerUnreachable(self.endpoint, "silent", cause)
