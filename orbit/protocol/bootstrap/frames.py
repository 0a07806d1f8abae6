"""Handshake frames to machine inputs and back, with everything checked that needs no state."""

from __future__ import annotations

from typing import Final

from ...errors import PeerProtocolError, PeerRefused, UsageError
from ..codec import Readable, decode, encode
from ..framing import HANDSHAKE_FRAME_BYTES_MAX, FrameKind, encode_frame, split_frame
from ..messages import Hello, Message, Proof, Refusal, Welcome
from ..security import SECRET_HINT
from .happenings import HelloArrived, Input, ProofArrived, RefusalArrived, WelcomeArrived

ATTEMPT_BYTES: Final = 16
NONCE_BYTES: Final = 16
RAILS_MAX: Final = 64
DETAIL_CHARS_MAX: Final = 200  # of what a stranger may put into our log


def parse(frame: Readable) -> Input:
    kind, body = split_frame(frame)
    if len(frame) > HANDSHAKE_FRAME_BYTES_MAX:
        raise PeerProtocolError(f"a handshake frame of {len(frame)} bytes")
    match kind:
        case FrameKind.HELLO:
            raw = bytes(body)
            hello = Hello.from_wire(decode(raw))
            try:
                check_hello(hello)
            except UsageError as error:
                raise PeerProtocolError(str(error)) from error
            return HelloArrived(hello, raw)
        case FrameKind.PROOF:
            return ProofArrived(Proof.from_wire(decode(body)))
        case FrameKind.WELCOME:
            return WelcomeArrived(Welcome.from_wire(decode(body)))
        case FrameKind.REFUSAL:
            return RefusalArrived(Refusal.from_wire(decode(body)))
        case _:
            raise PeerProtocolError(f"{kind.name} before the epoch is open")


def check_hello(hello: Hello) -> None:
    if len(hello.attempt) != ATTEMPT_BYTES or len(hello.nonce) != NONCE_BYTES:
        raise UsageError("hello: attempt and nonce have 16 bytes each")
    if len(hello.previous) not in (0, ATTEMPT_BYTES):
        raise UsageError("hello: previous is no attempt")
    if hello.worker_id == 0:
        raise UsageError("hello: worker id 0")
    if not 0 < hello.version_min <= hello.version_max:
        raise UsageError(f"hello: versions {hello.version_min}..{hello.version_max}")
    if len(hello.rails) > RAILS_MAX:
        raise UsageError(f"hello: {len(hello.rails)} rails, limit {RAILS_MAX}")


def refused_by_peer(refusal: Refusal) -> PeerRefused:
    reason = printable(refusal.reason, 32) or "unknown"
    hint = SECRET_HINT if reason == "auth" else ""
    return PeerRefused(reason, printable(refusal.detail, DETAIL_CHARS_MAX), hint=hint)


def printable(text: str, chars_max: int) -> str:
    """A stranger's text, fit for one line of a terminal or a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:chars_max])


def hello_frame(hello: Hello) -> bytes:
    frame = frame_of(FrameKind.HELLO, hello)
    if len(frame) > HANDSHAKE_FRAME_BYTES_MAX:
        raise UsageError(f"a hello of {len(frame)} bytes; announce fewer rails or features")
    return frame


def frame_of(kind: FrameKind, message: Message) -> bytes:
    return encode_frame(kind, encode(message.to_wire()))


def refusal_frame(reason: str, detail: str = "") -> bytes:
    """A REFUSAL by itself, for connections that no machine was made for."""
    return frame_of(FrameKind.REFUSAL, Refusal(reason, detail))
