"""Two connection machines, the connections between them, and every rule that must hold at any time.

A connection is two queues of words, each in order; connections overtake each other freely. What may
happen is `connection_explorer.py`'s; here is what it does, and what is forbidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..errors import OrbitError, PeerRefused, PeerRestarted, PeerUnreachable
from ..model import Incarnation, WorkerId
from ..protocol.connection import (
    AbandonDial,
    Admit,
    Begin,
    Connection,
    ConnectionEffect,
    ConnectionInput,
    ConnectionSettings,
    ConnectionState,
    DialFailed,
    DialSucceeded,
    EndSession,
    Fail,
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
from .search import require

Machine = Callable[[ConnectionSettings], Connection]


class End(StrEnum):
    """One end of one connection."""

    FRESH = "fresh"  # listener: the hello has not come yet
    DIALING = "dialing"
    OFFERED = "offered"
    SESSION = "session"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Wire:
    """One connection: who dialed it, what its hello says, both ends, and what is on the way to
    each. Index 0 is the dialing side's of `ends` and `words`.
    """

    dialer: int
    expected: Incarnation
    offer: Offer
    ends: tuple[End, End] = (End.DIALING, End.FRESH)
    words: tuple[tuple[str, ...], tuple[str, ...]] = ((), ("hello",))

    def index(self, side: int) -> int:
        return 0 if side == self.dialer else 1

    def end(self, side: int) -> End:
        return self.ends[self.index(side)]

    def with_end(self, side: int, end: End) -> Wire:
        near, far = self.ends
        return replace(self, ends=(end, far) if self.index(side) == 0 else (near, end))

    def with_word(self, to: int, *words: str) -> Wire:
        near, far = self.words
        more = (near + words, far) if self.index(to) == 0 else (near, far + words)
        return replace(self, words=more)

    def without_first(self, to: int) -> tuple[str, Wire]:
        near, far = self.words
        if self.index(to) == 0:
            return near[0], replace(self, words=(near[1:], far))
        return far[0], replace(self, words=(near, far[1:]))


@dataclass(slots=True)
class Side:
    """One node: its machine, who waits, and how often it may want a session."""

    machine: Connection
    life: Incarnation
    known_life: Incarnation  # of the other side: what it would dial
    wants: int
    waiting: int = 0
    served: int = 0
    failed: int = 0


@dataclass(slots=True)
class ConnectionWorld:
    """`faults` may happen. `machine` makes the machines, so that tests can plant mistakes."""

    wants: tuple[int, int] = (1, 1)
    faults: int = 0
    restarts: int = 0
    authenticated: bool = False
    machine: Machine = Connection
    sides: list[Side] = field(default_factory=list)
    wires: dict[bytes, Wire] = field(default_factory=dict)
    now: float = 0.0
    names: int = 0
    faulted: bool = False

    def __post_init__(self) -> None:
        for side in range(2):
            machine = self._make(side)
            machine.step(LifeAdded(_life(1 - side, 0)), 0.0)
            self.sides.append(Side(machine, _life(side, 0), _life(1 - side, 0), self.wants[side]))

    def _make(self, side: int) -> Connection:
        ids = WorkerId(side + 1), WorkerId(2 - side)
        return self.machine(ConnectionSettings(*ids, authenticated=self.authenticated))

    # --- search -----------------------------------------------------------------------------------

    def after(self, act: Callable[[ConnectionWorld], None]) -> ConnectionWorld:
        """A copy in which `act` has happened."""
        world = copy.copy(self)
        world.sides = [replace(s, machine=copy.copy(s.machine)) for s in self.sides]
        world.wires = dict(self.wires)
        world.now += 10.0  # past every back-off; deadlines are moves of their own
        act(world)
        world.check()
        return world

    def key(self) -> Hashable:
        """Everything but times and errors."""
        sides = tuple(
            (
                tuple(
                    (name, value)
                    for name, value in vars(s.machine).items()
                    if name not in _NOT_STATE
                ),
                s.machine.deadline is not None,
                *(s.life, s.known_life, s.wants, s.waiting, s.served, s.failed),
            )
            for s in self.sides
        )
        wires = tuple(sorted(self.wires.items(), key=lambda item: item[0]))
        return sides, wires, self.faults, self.restarts, self.faulted

    def check(self) -> None:
        """At any moment each side holds exactly what its machine says."""
        for number, side in enumerate(self.sides):
            machine = side.machine
            held = {
                end: {name for name, wire in self.wires.items() if wire.end(number) is end}
                for end in End
            }
            current = set() if machine.current is None else {machine.current.attempt}
            parked = set() if machine.parked is None else {machine.parked.attempt}
            dialing = set() if machine.dialing is None else {machine.dialing.attempt}
            require(len(held[End.SESSION]) <= 1, "two current sessions")
            require(held[End.SESSION] == current, "a session that the machine does not hold")
            require(held[End.OFFERED] == parked, "an attempt of the peer without an answer")
            require(held[End.DIALING] == dialing, "an attempt of ours that nobody waits for")

    def settled(self) -> bool:
        """Both agree on one session, or on none, and nobody waits."""
        states = {side.machine.state for side in self.sides}
        agreed = {side.machine.current and side.machine.current.attempt for side in self.sides}
        waiting = sum(side.waiting for side in self.sides)
        require(waiting == 0, "a waiter hangs")
        require(len(agreed) == 1, "the sides do not agree")
        require(states <= {ConnectionState.IDLE, ConnectionState.OPEN}, "an attempt hangs")
        if not self.faulted and any(side.served + side.failed for side in self.sides):
            require(agreed != {None}, "nothing failed, and yet there is no session")
        return True

    # --- moves ------------------------------------------------------------------------------------

    def want(self, number: int) -> None:
        """Somebody needs a session."""
        side = self.sides[number]
        side.wants -= 1
        if side.machine.current is not None:
            side.served += 1
            return
        side.waiting += 1
        if side.machine.state is ConnectionState.IDLE:
            self._step(number, Wanted(self._fresh()))

    def deliver(self, name: bytes, to: int) -> None:
        """The oldest word on its way to that end arrives."""
        word, self.wires[name] = self.wires[name].without_first(to)
        wire = self.wires[name]
        end = wire.end(to)
        match word, end:
            case _, End.CLOSED:
                pass
            case "hello", End.FRESH if wire.expected != self.sides[to].life:
                self._close(name, to, "refused restarted")
            case "hello", End.FRESH:
                self.wires[name] = wire.with_end(to, End.OFFERED)
                self._step(to, Proven(wire.offer))
            case "welcome", End.DIALING:
                self._step(to, DialSucceeded(wire.expected))
            case "ping", End.SESSION:
                self.wires[name] = wire.with_word(1 - to, "pong")
            case "pong", End.SESSION:
                if self.sides[to].machine.state is ConnectionState.CHECKING:
                    self._step(to, PingAnswered())
            case "eof", _:
                self._ended(name, to, PeerUnreachable("peer", "silent"))
            case "refused restarted", _:
                self._ended(name, to, PeerRestarted("peer"))
            case _ if word.startswith("refused "):
                self._ended(name, to, PeerRefused(word.removeprefix("refused ")))
            case _:
                require(False, f"{word} at an end that is {end}")

    def time_out(self, number: int) -> None:
        """The machine's deadline comes."""
        self._step(number, TimedOut())

    def tell(self, number: int) -> None:
        """The user gives the other side's present address."""
        side = self.sides[number]
        side.known_life = self.sides[1 - number].life
        self._step(number, LifeAdded(side.known_life))

    def cut(self, name: bytes) -> None:
        """A connection breaks; what was on its way is lost, and each end hears of it some time."""
        self.wires[name] = replace(self.wires[name], words=(("eof",), ("eof",)))

    def give_up(self, number: int) -> None:
        """The handshake's own deadline ends a dial."""
        dialing = self.sides[number].machine.dialing
        assert dialing is not None
        self._close(dialing.attempt, number, "eof")
        self._dial_failed(number, PeerUnreachable("peer", "silent"))

    def restart(self, number: int) -> None:
        """The process dies and comes back with nothing but the other's address."""
        for name, wire in list(self.wires.items()):
            if wire.end(number) is not End.CLOSED:
                self._close(name, number, "eof")
        old = self.sides[number]
        machine = self._make(number)
        machine.step(LifeAdded(old.known_life), self.now)
        life = Incarnation(old.life + 1)
        self.sides[number] = Side(machine, life, old.known_life, old.wants)

    # --- effects ----------------------------------------------------------------------------------

    def _step(self, number: int, event: ConnectionInput) -> None:
        for effect in self.sides[number].machine.step(event, self.now):
            self._carry_out(number, effect)

    def _carry_out(self, number: int, effect: ConnectionEffect) -> None:
        side = self.sides[number]
        match effect:
            case StartDial(attempt, count, previous):
                offer = Offer(attempt, side.life, count, previous)
                self.wires[attempt] = Wire(number, side.known_life, offer)
            case AbandonDial(attempt):
                require(self.faulted, "an attempt is given up although nothing failed")
                self._close(attempt, number, "eof")
            case Begin(attempt):
                self.wires[attempt] = self.wires[attempt].with_end(number, End.SESSION)
            case Admit(attempt):
                wire = self.wires[attempt].with_end(number, End.SESSION)
                self.wires[attempt] = wire.with_word(1 - number, "welcome")
                side.known_life = wire.offer.incarnation
            case Refuse(attempt, reason):
                self._close(attempt, number, f"refused {reason}")
            case EndSession(attempt):
                require(self.faulted, "a session is ended although nothing failed")
                self._close(attempt, number, "eof")
            case Ping(attempt):
                self.wires[attempt] = self.wires[attempt].with_word(1 - number, "ping")
            case Wake():
                require(side.machine.current is not None, "woken without a session")
                side.served, side.waiting = side.served + side.waiting, 0
            case Fail():
                require(self.faulted or side.waiting == 0, "a waiter fails; nothing else did")
                side.failed, side.waiting = side.failed + side.waiting, 0

    def _close(self, name: bytes, number: int, last: str) -> None:
        self.wires[name] = self.wires[name].with_end(number, End.CLOSED).with_word(1 - number, last)

    def _ended(self, name: bytes, number: int, error: OrbitError) -> None:
        wire = self.wires[name]
        end = wire.end(number)
        self.wires[name] = wire.with_end(number, End.CLOSED).with_word(1 - number, "eof")
        if end is End.DIALING:
            self._dial_failed(number, error)
        elif end is End.OFFERED:
            self._step(number, OfferGone())
        elif end is End.SESSION:
            self._step(number, SessionLost())

    def _dial_failed(self, number: int, error: OrbitError) -> None:
        self._step(number, DialFailed(error, self._fresh()))

    def _fresh(self) -> bytes:
        self.names += 1
        return b"%03d" % self.names


# Times, what never changes, and errors, which do not compare.
_NOT_STATE = frozenset({"deadline", "_retry_at", "_error", "_failures", "_table", "_settings"})


def _life(side: int, restarts: int) -> Incarnation:
    return Incarnation(100 * (side + 1) + restarts)
