"""Two ends of one logical connection in every order of events, and proof that planted mistakes are
found. The wide bounds take minutes: they are added when ORBIT_SOAK is set.
"""

from __future__ import annotations

import pytest

from orbit.protocol.connection import (
    SUPERSEDED,
    AbandonDial,
    Admit,
    Connection,
    ConnectionEffect,
    ConnectionInput,
    ConnectionState,
    DialFailed,
    DialSucceeded,
    EndSession,
    Offer,
    Proven,
    Refuse,
    TimedOut,
    Wake,
)
from orbit.testing.connection_explorer import explore, moves_of
from orbit.testing.connection_world import ConnectionWorld
from orbit.testing.search import Violation
from tests.soak import SOAK

FAST = [((1, 1), 0, 0), ((3, 3), 0, 0), ((1, 1), 1, 1), ((2, 1), 1, 0), ((1, 1), 2, 0)]
WIDE = [((1, 1), 2, 1), ((2, 1), 2, 0), ((2, 2), 1, 1)]

Step = tuple[ConnectionState, list[ConnectionEffect]]


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize(("wants", "faults", "restarts"), [*FAST, *(WIDE if SOAK else ())])
def test_every_order_ends_in_one_session_or_none(
    wants: tuple[int, int], faults: int, restarts: int, authenticated: bool
) -> None:
    world = ConnectionWorld(wants, faults, restarts, authenticated)
    assert explore(world)["final"] > 0


def test_without_faults_nobody_fails_and_no_session_is_lost() -> None:
    world = ConnectionWorld(wants=(2, 2))
    while moves := moves_of(world):
        world = world.after(moves[-1][1])
    assert [(side.served, side.failed) for side in world.sides] == [(2, 0), (2, 0)]
    currents = [side.machine.current for side in world.sides]
    assert currents[0] is not None
    assert currents[1] is not None
    assert {current.dialed for current in currents if current} == {True, False}


class ParksOnBothSides(Connection):
    """No tie-break: each side lets the other wait."""

    def _cross(self, offer: Offer) -> Step:
        self.parked = offer
        return ConnectionState.PARKING, []


class AdmitsOnBothSides(Connection):
    """No tie-break either: each side drops its own attempt for the other's."""

    def _cross(self, offer: Offer) -> Step:
        return ConnectionState.OPEN, [*self._abandon(), *self._admit(offer)]


class ReplacesWhatCrossed(Connection):
    """Takes an attempt that was begun before the session for a newer one."""

    def _meet(self, offer: Offer) -> Step:
        return ConnectionState.OPEN, self._admit(offer)


class ForgetsTheParked(Connection):
    """Its own attempt succeeds, and the one that waits is never answered."""

    def _react(self, event: ConnectionInput, now: float) -> Step:
        state, effects = super()._react(event, now)
        if isinstance(event, DialSucceeded):
            effects = [effect for effect in effects if not isinstance(effect, Refuse)]
        return state, effects


class KeepsBoth(Connection):
    """Admits the parked one and lets its own attempt go on."""

    def _react(self, event: ConnectionInput, now: float) -> Step:
        state, effects = super()._react(event, now)
        if isinstance(event, TimedOut):
            effects = [effect for effect in effects if not isinstance(effect, AbandonDial)]
        return state, effects


class KeepsTheOldSession(Connection):
    def _react(self, event: ConnectionInput, now: float) -> Step:
        state, effects = super()._react(event, now)
        return state, [effect for effect in effects if not isinstance(effect, EndSession)]


class ForgetsToWake(Connection):
    """Who waits for a dial is not told that the peer's attempt was admitted."""

    def _react(self, event: ConnectionInput, now: float) -> Step:
        state, effects = super()._react(event, now)
        if isinstance(event, Proven) and any(isinstance(e, Admit) for e in effects):
            effects = [effect for effect in effects if not isinstance(effect, Wake)]
        return state, effects


class FailsWhenSuperseded(Connection):
    """Takes the refusal for a failure, although the session is there."""

    def _react(self, event: ConnectionInput, now: float) -> Step:
        crossed = self.state is ConnectionState.CROSSED
        state, effects = super()._react(event, now)
        if isinstance(event, DialFailed) and crossed and SUPERSEDED in str(event.error):
            session, self.current = self.current, None
            assert session is not None
            return ConnectionState.OPEN, effects
        return state, effects


MISTAKES = [
    (ParksOnBothSides, "only a timeout helps"),
    (AdmitsOnBothSides, "given up although nothing failed"),
    (ReplacesWhatCrossed, "ended although nothing failed"),
    (ForgetsTheParked, "without an answer"),
    (KeepsBoth, "nobody waits for"),
    (KeepsTheOldSession, "two current sessions"),
    (ForgetsToWake, "a waiter hangs"),
    (FailsWhenSuperseded, "does not hold"),
]


@pytest.mark.parametrize(("mistake", "rule"), MISTAKES)
def test_a_mistake_is_found(mistake: type[Connection], rule: str) -> None:
    with pytest.raises(Violation, match=rule):
        explore(ConnectionWorld(wants=(1, 1), faults=1, machine=mistake))
