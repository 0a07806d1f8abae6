"""The accepting end of the handshake."""

from __future__ import annotations

from dataclasses import replace

from ...errors import DeadlineExceeded, OrbitError, PeerRefused, PeerUnreachable
from ..framing import FrameKind, SendFrame
from ..messages import Hello, Proof, Welcome
from ..security import dialer_proof, listener_proof, proofs_equal
from .frames import frame_of, hello_frame
from .happenings import (
    Admit,
    Effect,
    Epoch,
    Established,
    HelloArrived,
    Input,
    ProofArrived,
    Proven,
    State,
)
from .machine import LISTENER_TABLE, Handshake


class Listener(Handshake):
    """The accepting end. `hello` is this node's; the dialer's target and attempt are filled in.

    Feed it the first frame of an accepted connection once that is known to be a HELLO. After
    `Proven` it waits for `Admit` or `Refuse`: a peer may have to wait for another connection.
    """

    TABLE = LISTENER_TABLE

    def _decide(self, event: Input) -> tuple[State, list[Effect]]:
        match event:
            case HelloArrived(hello, raw):
                return self._on_hello(hello, raw)
            case ProofArrived(proof):
                return self._on_proof(proof)
            case Admit():
                welcome = SendFrame(frame_of(FrameKind.WELCOME, Welcome(self._version)))
                return State.ESTABLISHED, [welcome, Established(self._proven())]
            case _:
                return super()._decide(event)

    def _on_hello(self, theirs: Hello, raw: bytes) -> tuple[State, list[Effect]]:
        if (refusal := self._agree(theirs)) is not None:
            return refusal
        me = self._hello.worker_id
        if theirs.target not in (0, me):
            detail = f"this is worker {me:016x}, not {theirs.target:016x}"
            return self._refuse(PeerRefused("wrong_peer", detail), "wrong_peer", detail)
        if theirs.worker_id == me:
            detail = f"both sides call themselves worker {me:016x}"
            return self._refuse(PeerRefused("wrong_peer", detail), "wrong_peer", detail)
        self._hello = replace(self._hello, target=theirs.worker_id, attempt=theirs.attempt)
        self._peer_hello = theirs
        self._peer_raw = raw
        frame = hello_frame(self._hello)
        self._hello_raw = frame[1:]
        mac = listener_proof(self._secret, self._peer_raw, self._hello_raw)
        return State.AWAIT_PROOF, [
            SendFrame(frame),
            SendFrame(frame_of(FrameKind.PROOF, Proof(mac))),
        ]

    def _on_proof(self, proof: Proof) -> tuple[State, list[Effect]]:
        right = dialer_proof(self._secret, self._peer_raw, self._hello_raw)
        if not proofs_equal(proof.mac, right):
            return self._refuse_auth()
        return State.PROVEN, [Proven(self._proven())]

    def _proven(self) -> Epoch:
        return self._epoch(self._peer_raw, self._hello_raw)

    def _silence(self, waited_for: str) -> OrbitError:
        return DeadlineExceeded(f"handshake of {self.endpoint} ({waited_for})", self._timeout_s)

    def _disconnected(self, cause: str) -> OrbitError:
        return PeerUnreachable(self.endpoint, "closed", cause)
