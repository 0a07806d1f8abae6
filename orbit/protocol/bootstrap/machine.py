"""What both ends of the handshake share: the tables, one deadline, and how it ends."""

from __future__ import annotations

from typing import ClassVar, Final

from ...errors import InternalError, OrbitError, PeerProtocolError, PeerRefused
from ...model import Incarnation, PeerIdentity, WorkerId
from ..codec import Readable
from ..framing import SendFrame
from ..messages import Hello
from ..security import SECRET_HINT, session_key
from ..transitions import Table
from .frames import parse, refusal_frame, refused_by_peer
from .happenings import (
    Admit,
    Broken,
    Disconnected,
    Effect,
    Epoch,
    HelloArrived,
    Input,
    Opened,
    ProofArrived,
    RefusalArrived,
    Refuse,
    Refused,
    State,
    WelcomeArrived,
)

PROTOCOL_VERSION: Final = 1
PROTOCOL_VERSION_MIN: Final = 1

_END = frozenset({State.REFUSED})
_ANY_TIME: Final = {RefusalArrived: _END, Broken: _END, Disconnected: _END, Refuse: _END}

DIALER_TABLE: Final[Table[State]] = {
    State.IDLE: {Opened: frozenset({State.AWAIT_HELLO}), **_ANY_TIME},
    State.AWAIT_HELLO: {HelloArrived: _END | {State.AWAIT_PROOF}, **_ANY_TIME},
    State.AWAIT_PROOF: {ProofArrived: _END | {State.AWAIT_WELCOME}, **_ANY_TIME},
    State.AWAIT_WELCOME: {WelcomeArrived: _END | {State.ESTABLISHED}, **_ANY_TIME},
    State.ESTABLISHED: {},
    State.REFUSED: {},
}
LISTENER_TABLE: Final[Table[State]] = {
    State.AWAIT_HELLO: {HelloArrived: _END | {State.AWAIT_PROOF}, **_ANY_TIME},
    State.AWAIT_PROOF: {ProofArrived: _END | {State.PROVEN}, **_ANY_TIME},
    State.PROVEN: {Admit: frozenset({State.ESTABLISHED}), **_ANY_TIME},
    State.ESTABLISHED: {},
    State.REFUSED: {},
}


def negotiate_version(mine: Hello, theirs: Hello) -> int | None:
    """The highest version that both speak, or None."""
    highest = min(mine.version_max, theirs.version_max)
    return highest if highest >= max(mine.version_min, theirs.version_min) else None


class Handshake:
    """What both ends share: table, deadline, frames to inputs, and how it ends."""

    TABLE: ClassVar[Table[State]]

    def __init__(
        self, hello: Hello, secret: bytes | None, *, endpoint: str, now: float, timeout_s: float
    ) -> None:
        self.state = State.AWAIT_HELLO
        self.endpoint = endpoint
        self._hello = hello
        self._secret = secret or b""
        self._timeout_s = timeout_s
        self._deadline = now + timeout_s
        self._hello_raw = b""
        self._peer_hello: Hello | None = None
        self._peer_raw = b""
        self._version = 0

    @property
    def finished(self) -> bool:
        return self.state in (State.ESTABLISHED, State.REFUSED)

    @property
    def deadline(self) -> float | None:
        """Absolute; None once it is over. Nothing that arrives extends it."""
        return None if self.finished else self._deadline

    def on_frame(self, frame: Readable, now: float) -> list[Effect]:
        """One frame (kind + body). Whatever is wrong with it becomes Refused, not an exception."""
        if self.state is State.ESTABLISHED:
            raise InternalError("a frame of the epoch was given to its handshake")
        if self.state is State.REFUSED:
            return []  # what a refused stranger goes on sending is not read
        try:
            return self.step(parse(frame), now)
        except PeerProtocolError as error:
            return self.step(Broken(error), now)

    def step(self, event: Input, now: float) -> list[Effect]:
        """Raises PeerProtocolError, with nothing changed, for an input that the table lacks."""
        allowed = self.TABLE[self.state].get(type(event))
        if allowed is None:
            raise PeerProtocolError(f"{type(event).__name__} in state {self.state.value}")
        if now >= self._deadline:
            return self.on_deadline(now)
        state, effects = self._decide(event)
        assert state in allowed
        self.state = state
        return effects

    def on_deadline(self, now: float) -> list[Effect]:
        """Call it when `deadline` has come. Earlier, or once finished, it does nothing."""
        if self.finished or now < self._deadline:
            return []
        waited_for = self.state.value.removeprefix("await_")
        self.state = State.REFUSED
        return [Refused(self._silence(waited_for))]

    def _decide(self, event: Input) -> tuple[State, list[Effect]]:
        match event:
            case RefusalArrived(refusal):
                return self._end(refused_by_peer(refusal))
            case Broken(error):
                return self._end(PeerProtocolError(f"{self.endpoint}: {error}"))
            case Disconnected(cause):
                return self._end(self._disconnected(cause))
            case Refuse(reason, detail):
                return self._refuse(PeerRefused(reason, detail or "by this side"), reason, detail)
            case _:
                raise InternalError(f"no rule for {type(event).__name__}")

    def _end(self, error: OrbitError) -> tuple[State, list[Effect]]:
        return State.REFUSED, [Refused(error)]

    def _refuse(
        self, error: OrbitError, reason: str, detail: str = ""
    ) -> tuple[State, list[Effect]]:
        return State.REFUSED, [SendFrame(refusal_frame(reason, detail)), Refused(error)]

    def _refuse_auth(self) -> tuple[State, list[Effect]]:
        error = PeerRefused("auth", "the proofs do not match", hint=SECRET_HINT)
        return self._refuse(error, "auth", "the proofs do not match")

    def _agree(self, theirs: Hello) -> tuple[State, list[Effect]] | None:
        """Settle the version, or refuse."""
        version = negotiate_version(self._hello, theirs)
        if version is not None:
            self._version = version
            return None
        mine = f"{self._hello.version_min}..{self._hello.version_max}"
        other = f"{theirs.version_min}..{theirs.version_max}"
        error = PeerRefused("version", f"peer speaks {other}, this side {mine}")
        return self._refuse(error, "version", f"yours {other}, mine {mine}")

    def _epoch(self, dialer_raw: bytes, listener_raw: bytes) -> Epoch:
        peer = self._peer_hello
        assert peer is not None
        return Epoch(
            peer=PeerIdentity(WorkerId(peer.worker_id), Incarnation(peer.incarnation)),
            attempt=peer.attempt,
            key=session_key(self._secret, dialer_raw, listener_raw),
            version=self._version,
            local_hello=self._hello,
            peer_hello=peer,
        )

    def _silence(self, waited_for: str) -> OrbitError:
        raise NotImplementedError

    def _disconnected(self, cause: str) -> OrbitError:
        raise NotImplementedError
