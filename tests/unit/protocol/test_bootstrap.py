"""The handshake machines: who gets through, who is refused and why, and that nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit.errors import (
    DeadlineExceeded,
    InternalError,
    OrbitError,
    PeerProtocolError,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    UsageError,
)
from orbit.model import Incarnation, PeerIdentity, WorkerId
from orbit.protocol import bootstrap
from orbit.protocol.bootstrap import (
    DIALER_TABLE,
    LISTENER_TABLE,
    Admit,
    Broken,
    Dialer,
    Disconnected,
    Effect,
    Epoch,
    Established,
    HelloArrived,
    Input,
    Listener,
    Opened,
    ProofArrived,
    Proven,
    RefusalArrived,
    Refuse,
    Refused,
    State,
    WelcomeArrived,
    negotiate_version,
    refusal_frame,
)
from orbit.protocol.codec import encode
from orbit.protocol.framing import FrameKind, SendFrame, encode_frame
from orbit.protocol.messages import Hello, Limits, Proof, RailHint, Refusal, Welcome
from orbit.protocol.security import listener_proof
from orbit.protocol.transitions import mermaid

LISTENER_ID = PeerIdentity(WorkerId(0xB), Incarnation(2))
_T0 = 100.0


def dialer_hello(**changes: object) -> Hello:
    base = Hello(
        version_min=1,
        version_max=1,
        worker_id=0xA,
        incarnation=1,
        target=0xB,
        attempt=b"t" * 16,
        nonce=b"d" * 16,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def listener_hello(**changes: object) -> Hello:
    base = Hello(
        version_min=1,
        version_max=1,
        worker_id=0xB,
        incarnation=2,
        target=0,
        attempt=bytes(16),
        nonce=b"l" * 16,
        rails=(RailHint("rxe0", 1, "::ffff:10.0.0.1", 1, 1024),),
        limits=Limits(bulk_width=2),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def make_dialer(
    hello: Hello | None = None,
    secret: bytes | None = None,
    expected: PeerIdentity | None = LISTENER_ID,
) -> Dialer:
    return Dialer(
        hello or dialer_hello(),
        secret,
        expected=expected,
        endpoint="10.0.0.2:7000",
        now=_T0,
        timeout_s=5.0,
    )


def make_listener(hello: Hello | None = None, secret: bytes | None = None) -> Listener:
    return Listener(
        hello or listener_hello(), secret, endpoint="10.0.0.1:4000", now=_T0, timeout_s=5.0
    )


@dataclass
class Run:
    """Both machines joined by a perfect connection."""

    dialer: Dialer
    listener: Listener
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    ends: dict[str, Epoch | OrbitError] = field(default_factory=dict)

    def go(self) -> Run:
        self._carry_out("dialer", self.dialer.step(Opened(), _T0))
        return self

    def _carry_out(self, who: str, effects: list[Effect]) -> None:
        other = "listener" if who == "dialer" else "dialer"
        for effect in effects:
            match effect:
                case SendFrame(frame):
                    self.sent.append((who, frame))
                    machine = self.listener if other == "listener" else self.dialer
                    self._carry_out(other, machine.on_frame(frame, _T0 + 1))
                case Proven():
                    self._carry_out(who, self.listener.step(Admit(), _T0 + 1))
                case Established(epoch):
                    self.ends[who] = epoch
                case Refused(error):
                    self.ends[who] = error


def run(dialer: Dialer | None = None, listener: Listener | None = None) -> Run:
    return Run(dialer or make_dialer(), listener or make_listener()).go()


def refused(effects: list[Effect]) -> OrbitError:
    assert isinstance(effects[-1], Refused)
    return effects[-1].error


@pytest.mark.parametrize("secret", [None, b"", b"secret", bytes(4096)])
def test_both_ends_agree_on_the_epoch(secret: bytes | None) -> None:
    result = run(make_dialer(secret=secret), make_listener(secret=secret))
    ours, theirs = result.ends["dialer"], result.ends["listener"]
    assert isinstance(ours, Epoch)
    assert isinstance(theirs, Epoch)
    assert ours.key == theirs.key
    assert len(ours.key) == 32
    assert ours.attempt == theirs.attempt == b"t" * 16
    assert ours.version == theirs.version == 1
    assert ours.peer == LISTENER_ID
    assert theirs.peer == PeerIdentity(WorkerId(0xA), Incarnation(1))
    assert ours.peer_hello == theirs.local_hello
    assert theirs.peer_hello == ours.local_hello
    assert ours.peer_hello.rails[0].device == "rxe0"
    assert repr(ours.key) not in repr(ours)
    assert [(who, frame[0]) for who, frame in result.sent] == [
        ("dialer", FrameKind.HELLO),
        ("listener", FrameKind.HELLO),
        ("listener", FrameKind.PROOF),
        ("dialer", FrameKind.PROOF),
        ("listener", FrameKind.WELCOME),
    ]
    assert result.dialer.deadline is None
    assert result.listener.deadline is None


def test_whoever_listens_there_will_do_without_an_expectation() -> None:
    result = run(make_dialer(dialer_hello(target=0), expected=None))
    assert isinstance(result.ends["dialer"], Epoch)


@pytest.mark.parametrize(
    ("dialer_secret", "listener_secret"), [(b"x", b"y"), (None, b"y"), (b"x", None)]
)
def test_a_wrong_or_missing_secret_is_auth_on_both_sides_and_nothing_is_proven_to_a_stranger(
    dialer_secret: bytes | None, listener_secret: bytes | None
) -> None:
    result = run(make_dialer(secret=dialer_secret), make_listener(secret=listener_secret))
    for error in result.ends.values():
        assert isinstance(error, PeerRefused)
        assert error.reason == "auth"
        assert "--secret-file" in error.hint
    assert ("dialer", FrameKind.PROOF) not in [(who, frame[0]) for who, frame in result.sent]


def test_a_dialer_that_lies_about_its_proof_is_refused() -> None:
    listener = make_listener(secret=b"s")
    listener.on_frame(encode_frame(FrameKind.HELLO, encode(dialer_hello().to_wire())), _T0)
    effects = listener.on_frame(encode_frame(FrameKind.PROOF, encode({"mac": bytes(32)})), _T0)
    assert isinstance(effects[0], SendFrame)
    assert effects[0].frame[0] == FrameKind.REFUSAL
    error = refused(effects)
    assert isinstance(error, PeerRefused)
    assert error.reason == "auth"
    assert listener.state is State.REFUSED


def test_a_proof_of_the_other_role_is_no_proof() -> None:
    listener = make_listener()
    effects = listener.on_frame(
        encode_frame(FrameKind.HELLO, encode(dialer_hello().to_wire())), _T0
    )
    reflected = effects[1]
    assert isinstance(reflected, SendFrame)
    error = refused(listener.on_frame(reflected.frame, _T0))
    assert isinstance(error, PeerRefused)
    assert error.reason == "auth"


@pytest.mark.parametrize("secret", [None, b"s"])
def test_a_recorded_dialer_is_refused_when_replayed(secret: bytes | None) -> None:
    first = run(make_dialer(secret=secret), make_listener(secret=secret))
    recorded = [frame for who, frame in first.sent if who == "dialer"]
    again = make_listener(listener_hello(nonce=b"m" * 16), secret)
    again.on_frame(recorded[0], _T0)
    error = refused(again.on_frame(recorded[1], _T0))
    assert isinstance(error, PeerRefused)
    assert error.reason == "auth"


def test_a_recorded_listener_is_refused_when_replayed() -> None:
    recorded = [f for who, f in run().sent if who == "listener"]
    for hello in (dialer_hello(attempt=b"u" * 16), dialer_hello(nonce=b"e" * 16)):
        dialer = make_dialer(hello)
        dialer.step(Opened(), _T0)
        effects = dialer.on_frame(recorded[0], _T0) or dialer.on_frame(recorded[1], _T0)
        assert isinstance(refused(effects), PeerProtocolError | PeerRefused)


@pytest.mark.parametrize(
    ("mine", "theirs", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 1), (2, 3), None)],
)
def test_the_highest_common_version_is_spoken(
    mine: tuple[int, int], theirs: tuple[int, int], agreed: int | None
) -> None:
    ours = dialer_hello(version_min=mine[0], version_max=mine[1])
    other = listener_hello(version_min=theirs[0], version_max=theirs[1])
    assert negotiate_version(ours, other) == negotiate_version(other, ours) == agreed
    ends = run(make_dialer(ours), make_listener(other)).ends
    for end in ends.values():
        if agreed is not None:
            assert isinstance(end, Epoch)
            assert end.version == agreed
        else:
            assert isinstance(end, PeerRefused)
            assert end.reason == "version"
            assert "1..1" in str(end)
            assert "2..3" in str(end)


def test_a_dialer_checks_the_version_itself() -> None:
    dialer = make_dialer()
    dialer.step(Opened(), _T0)
    answer = listener_hello(version_min=2, version_max=2, target=0xA, attempt=b"t" * 16)
    error = refused(dialer.on_frame(encode_frame(FrameKind.HELLO, encode(answer.to_wire())), _T0))
    assert isinstance(error, PeerRefused)
    assert error.reason == "version"


def test_a_wrong_target_is_refused_by_the_listener() -> None:
    expected = PeerIdentity(WorkerId(0xC), Incarnation(2))
    ends = run(make_dialer(dialer_hello(target=0xC), expected=expected)).ends
    for end in ends.values():
        assert isinstance(end, PeerRefused)
        assert end.reason == "wrong_peer"
        assert "000000000000000b" in str(end)


def test_a_listener_that_ignores_the_target_is_found_out_by_the_dialer() -> None:
    dialer = make_dialer()
    opened = dialer.step(Opened(), _T0)[0]
    assert isinstance(opened, SendFrame)
    # It holds the (empty) secret and follows the protocol, but it is worker 0xd.
    raw = encode(listener_hello(worker_id=0xD, target=0xA, attempt=b"t" * 16).to_wire())
    mac = listener_proof(b"", opened.frame[1:], raw)
    assert dialer.on_frame(encode_frame(FrameKind.HELLO, raw), _T0) == []
    effects = dialer.on_frame(encode_frame(FrameKind.PROOF, encode({"mac": mac})), _T0)
    error = refused(effects)
    assert isinstance(error, PeerRefused)
    assert error.reason == "wrong_peer"
    assert "000000000000000d" in str(error)


@pytest.mark.parametrize("changes", [{"attempt": b"u" * 16}, {"target": 0xC}, {"target": 0}])
def test_an_answer_to_another_connection_is_not_taken(changes: dict[str, object]) -> None:
    dialer = make_dialer()
    dialer.step(Opened(), _T0)
    answer = listener_hello(**{"target": 0xA, "attempt": b"t" * 16} | changes)
    error = refused(dialer.on_frame(encode_frame(FrameKind.HELLO, encode(answer.to_wire())), _T0))
    assert isinstance(error, PeerProtocolError)
    assert "another connection attempt" in str(error)


def test_a_restarted_process_is_told_from_the_old_one_after_its_proof() -> None:
    ends = run(listener=make_listener(listener_hello(incarnation=3))).ends
    assert isinstance(ends["dialer"], PeerRestarted)
    assert isinstance(ends["listener"], PeerRefused)
    assert ends["listener"].reason == "restarted"
    # Without the secret nobody can claim a restart.
    ends = run(
        make_dialer(secret=b"s"), make_listener(listener_hello(incarnation=3), b"wrong")
    ).ends
    assert isinstance(ends["dialer"], PeerRefused)
    assert ends["dialer"].reason == "auth"


def test_two_nodes_of_one_worker_id_do_not_talk() -> None:
    ends = run(make_dialer(dialer_hello(worker_id=0xB))).ends
    assert isinstance(ends["listener"], PeerRefused)
    assert ends["listener"].reason == "wrong_peer"


@pytest.mark.parametrize("reason", ["busy", "closing"])
def test_a_listener_may_decline_at_any_moment(reason: str) -> None:
    for frames in range(2):
        dialer, listener = make_dialer(), make_listener()
        opened = dialer.step(Opened(), _T0)[0]
        assert isinstance(opened, SendFrame)
        if frames:
            listener.on_frame(opened.frame, _T0)
        effects = listener.step(Refuse(reason, "later"), _T0)
        assert isinstance(effects[0], SendFrame)
        error = refused(dialer.on_frame(effects[0].frame, _T0))
        assert isinstance(error, PeerRefused)
        assert (error.reason, error.detail) == (reason, "later")


def _proven() -> Listener:
    dialer, listener = make_dialer(), make_listener()
    frames = [e.frame for e in dialer.step(Opened(), _T0) if isinstance(e, SendFrame)]
    while frames:
        for effect in listener.on_frame(frames.pop(0), _T0):
            if isinstance(effect, SendFrame) and not dialer.finished:
                answers = dialer.on_frame(effect.frame, _T0)
                frames += [e.frame for e in answers if isinstance(e, SendFrame)]
    assert listener.state is State.PROVEN
    return listener


def test_a_proven_dialer_waits_for_the_decision() -> None:
    listener = _proven()
    refusal, end = listener.step(Refuse("superseded", "there is one"), _T0)
    assert isinstance(refusal, SendFrame)
    assert isinstance(end, Refused)
    late = _proven()
    assert isinstance(refused(late.step(Admit(), _T0 + 5)), DeadlineExceeded)
    gone = _proven()
    assert isinstance(refused(gone.step(Disconnected("reset"), _T0)), PeerUnreachable)
    early = _proven()
    error = refused(early.on_frame(encode_frame(FrameKind.PING, encode([1])), _T0))
    assert isinstance(error, PeerProtocolError)  # it speaks before its welcome


def test_silence_ends_at_the_deadline_and_not_before() -> None:
    dialer, listener = make_dialer(), make_listener()
    dialer.step(Opened(), _T0)
    for machine in (dialer, listener):
        assert machine.deadline == _T0 + 5
        assert machine.on_deadline(_T0 + 4.999) == []
    error = refused(dialer.on_deadline(_T0 + 5))
    assert isinstance(error, PeerUnreachable)
    assert error.kind == "silent"
    assert "hello" in error.detail
    assert isinstance(refused(listener.on_deadline(_T0 + 5)), DeadlineExceeded)
    assert dialer.on_deadline(_T0 + 6) == []


def test_frames_do_not_extend_the_deadline_and_none_counts_after_it() -> None:
    listener = make_listener()
    hello = encode_frame(FrameKind.HELLO, encode(dialer_hello().to_wire()))
    listener.on_frame(hello, _T0 + 4.9)
    assert listener.deadline == _T0 + 5
    late = encode_frame(FrameKind.PROOF, encode({"mac": bytes(32)}))
    assert isinstance(refused(listener.on_frame(late, _T0 + 5)), DeadlineExceeded)
    assert listener.on_frame(late, _T0 + 5.1) == []


def test_a_connection_that_ends_is_named() -> None:
    dialer, listener = make_dialer(), make_listener()
    dialer.step(Opened(), _T0)
    error = refused(dialer.step(Disconnected("reset"), _T0))
    assert isinstance(error, PeerUnreachable)
    assert "reset" in str(error)
    assert isinstance(refused(listener.step(Disconnected("reset"), _T0)), PeerUnreachable)


_GOOD_HELLO = dialer_hello().to_wire()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"\xff" * 20,
        encode_frame(FrameKind.HELLO),
        encode_frame(FrameKind.HELLO, b"\xc1"),
        encode_frame(FrameKind.HELLO, encode([])),
        encode_frame(FrameKind.HELLO, encode({})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"nonce": b"short"})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"attempt": bytes(17)})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"worker_id": 0})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"worker_id": -1})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"version_min": 0})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"version_min": 2})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"later": bytes(4096)})),
        encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO) + b"\x00"),
        encode_frame(FrameKind.PROOF, encode({"mac": bytes(32)})),
        encode_frame(FrameKind.WELCOME, encode({"version": 1})),
        encode_frame(FrameKind.CALL, encode([65536, "_rv_metadata", {}])),
        encode_frame(FrameKind.BULK_HELLO, encode({})),
    ],
)
def test_whatever_else_comes_first_ends_it_without_an_answer(frame: bytes) -> None:
    listener = make_listener()
    effects = listener.on_frame(frame, _T0)
    assert len(effects) == 1
    assert isinstance(refused(effects), PeerProtocolError)
    assert "10.0.0.1:4000" in str(refused(effects))
    assert listener.state is State.REFUSED


def test_hellos_of_later_versions_may_have_more_fields() -> None:
    listener = make_listener()
    frame = encode_frame(FrameKind.HELLO, encode(_GOOD_HELLO | {"later": {"x": [1]}}))
    effects = listener.on_frame(frame, _T0)
    assert len(effects) == 2
    assert listener.state is State.AWAIT_PROOF


def test_a_strangers_text_cannot_forge_a_log_line() -> None:
    dialer = make_dialer()
    dialer.step(Opened(), _T0)
    error = refused(dialer.on_frame(refusal_frame("x" * 99, "a\nERROR \x1b[31m" + "b" * 999), _T0))
    assert isinstance(error, PeerRefused)
    assert len(error.reason) == 32
    assert len(error.detail) == bootstrap.DETAIL_CHARS_MAX
    assert error.detail.startswith("a?ERROR ?[31m")


def test_what_a_caller_gets_wrong_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="target"):
        make_dialer(dialer_hello(target=0xC))
    with pytest.raises(UsageError, match="16 bytes"):
        make_dialer(dialer_hello(nonce=b""))
    rails = tuple(RailHint(f"mlx5_{i}", 1, "::", 0, 4096) for i in range(60))
    crowded = make_dialer(dialer_hello(rails=rails))
    with pytest.raises(UsageError, match="fewer rails"):
        crowded.step(Opened(), _T0)


def test_frames_of_the_epoch_are_not_the_handshakes() -> None:
    result = run()
    with pytest.raises(InternalError):
        result.dialer.on_frame(encode_frame(FrameKind.PING), _T0)


# --- the tables -----------------------------------------------------------------------------------

_SAMPLES: dict[type[Input], Callable[[], Input]] = {
    Opened: Opened,
    HelloArrived: lambda: HelloArrived(dialer_hello(), b"raw"),
    ProofArrived: lambda: ProofArrived(Proof(bytes(32))),
    WelcomeArrived: lambda: WelcomeArrived(Welcome(1)),
    RefusalArrived: lambda: RefusalArrived(Refusal("busy")),
    Broken: lambda: Broken(PeerProtocolError("x")),
    Disconnected: lambda: Disconnected("x"),
    Admit: Admit,
    Refuse: lambda: Refuse("closing"),
}


def _in_state(role: str, state: State) -> Dialer | Listener:
    machine: Dialer | Listener = make_dialer() if role == "dialer" else make_listener()
    if role == "dialer" and state is not State.IDLE:
        machine.step(Opened(), _T0)
    if state not in (State.IDLE, State.AWAIT_HELLO):
        answer = dialer_hello()
        if role == "dialer":
            answer = listener_hello(target=0xA, attempt=b"t" * 16)
        machine.step(HelloArrived(answer, encode(answer.to_wire())), _T0)
    machine.state = state
    return machine


@pytest.mark.parametrize("kind", list(_SAMPLES), ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    ("role", "state"),
    [("dialer", s) for s in DIALER_TABLE] + [("listener", s) for s in LISTENER_TABLE],
    ids=lambda v: getattr(v, "value", v),
)
def test_every_state_with_every_input(role: str, state: State, kind: type[Input]) -> None:
    table = DIALER_TABLE if role == "dialer" else LISTENER_TABLE
    machine = _in_state(role, state)
    allowed = table[state].get(kind)
    if allowed is None:
        with pytest.raises(PeerProtocolError, match=kind.__name__):
            machine.step(_SAMPLES[kind](), _T0)
        assert machine.state is state
    else:
        machine.step(_SAMPLES[kind](), _T0)
        assert machine.state in allowed


def test_the_diagrams_in_the_documents_are_drawn_from_the_tables() -> None:
    page = Path(__file__).parents[3] / "docs/design/wire.md"
    text = page.read_text(encoding="utf-8")
    assert mermaid(DIALER_TABLE, State.IDLE) in text
    assert mermaid(LISTENER_TABLE, State.AWAIT_HELLO) in text


@given(st.data())
@settings(max_examples=150)
def test_no_interleaving_reaches_an_epoch_without_the_right_proof(data: st.DataObject) -> None:
    """A stranger without the secret says anything it has seen or made up, in any order."""
    real = run(make_dialer(secret=b"s"), make_listener(secret=b"s"))
    assert len(real.ends) == 2
    seen = [frame for _, frame in real.sent]
    victim: Dialer | Listener
    if data.draw(st.booleans()):
        victim = make_listener(listener_hello(nonce=b"n" * 16), b"s")
    else:
        victim = make_dialer(dialer_hello(nonce=b"n" * 16), b"s")
        opened = victim.step(Opened(), _T0)[0]
        assert isinstance(opened, SendFrame)
        seen.append(opened.frame)
    for _ in range(data.draw(st.integers(1, 8))):
        frame = data.draw(
            st.sampled_from(seen)
            | st.builds(encode_frame, st.sampled_from(FrameKind), st.binary(max_size=40))
            | st.builds(
                lambda mac: encode_frame(FrameKind.PROOF, encode({"mac": mac})), st.binary()
            )
            | st.binary(max_size=30)
        )
        effects = victim.on_frame(frame, _T0 + data.draw(st.floats(0, 6)))
        assert not any(isinstance(e, Established | Proven) for e in effects)
        seen += [e.frame for e in effects if isinstance(e, SendFrame)]
    assert victim.state not in (State.ESTABLISHED, State.PROVEN)
