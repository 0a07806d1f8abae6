"""The life of a registration: every state and input, and random lives against what must hold."""

from __future__ import annotations

import random

import pytest

from orbit.errors import InternalError
from orbit.model import Deregistered
from orbit.protocol.region_life import (
    REGION_TABLE,
    KeepMemory,
    RegionInput,
    RegionLife,
    RegionState,
    Registered,
    RegistrationFailed,
    Released,
    StopUses,
    TimedOut,
    Unmap,
    UnmapFailed,
    Unmapped,
    Unregister,
    UseBegan,
    UseEnded,
    UseUnproven,
)

S = RegionState
IN_USE = (Registered(), UseBegan(1), UseBegan(2))
KEPT = (Registered(), Unregister(), UnmapFailed("busy"))
ROADS: dict[RegionState, tuple[RegionInput, ...]] = {
    S.REGISTERING: (),
    S.LIVE: IN_USE,
    S.GATED: (*IN_USE, Unregister(5.0)),
    S.DRAINING: (*IN_USE, Unregister(0.0)),
    S.UNMAPPING: (Registered(), Unregister()),
    S.RELEASED: (Registered(), Unregister(), Unmapped()),
    S.UNCONFIRMED: KEPT,
}
INPUTS: tuple[RegionInput, ...] = (
    Registered(),
    RegistrationFailed(),
    UseBegan(3),
    UseEnded(1),
    UseUnproven(1, "stuck"),
    Unregister(),
    Unregister(3.0),
    Unregister(-1.0),
    TimedOut(),
    Unmapped(),
    UnmapFailed("busy"),
)
RELEASED = Released(Deregistered.DRAINED)
ALLOWED = {  # (state, input) -> (state after, effects); whatever is not here is not allowed
    (S.REGISTERING, Registered()): (S.LIVE, []),
    (S.REGISTERING, RegistrationFailed()): (S.RELEASED, [RELEASED]),
    (S.LIVE, UseBegan(3)): (S.LIVE, []),
    (S.LIVE, UseEnded(1)): (S.LIVE, []),
    (S.LIVE, UseUnproven(1, "stuck")): (S.LIVE, []),
    (S.LIVE, Unregister()): (S.GATED, []),
    (S.LIVE, Unregister(3.0)): (S.GATED, []),
    (S.LIVE, Unregister(-1.0)): (S.DRAINING, [StopUses((1, 2))]),
    (S.GATED, UseEnded(1)): (S.GATED, []),
    (S.GATED, UseUnproven(1, "stuck")): (S.GATED, []),
    (S.GATED, Unregister()): (S.GATED, []),
    (S.GATED, Unregister(3.0)): (S.GATED, []),
    (S.GATED, Unregister(-1.0)): (S.DRAINING, [StopUses((1, 2))]),
    (S.GATED, TimedOut()): (S.DRAINING, [StopUses((1, 2))]),
    (S.DRAINING, UseEnded(1)): (S.DRAINING, []),
    (S.DRAINING, UseUnproven(1, "stuck")): (S.DRAINING, []),
    (S.DRAINING, Unregister()): (S.DRAINING, []),
    (S.DRAINING, Unregister(3.0)): (S.DRAINING, []),
    (S.DRAINING, Unregister(-1.0)): (S.DRAINING, []),
    (S.UNMAPPING, Unregister()): (S.UNMAPPING, []),
    (S.UNMAPPING, Unregister(3.0)): (S.UNMAPPING, []),
    (S.UNMAPPING, Unregister(-1.0)): (S.UNMAPPING, []),
    (S.UNMAPPING, Unmapped()): (S.RELEASED, [RELEASED]),
    (S.UNMAPPING, UnmapFailed("busy")): (S.UNCONFIRMED, [KeepMemory("busy")]),
    (S.UNCONFIRMED, Unregister()): (S.UNMAPPING, [Unmap()]),
    (S.UNCONFIRMED, Unregister(3.0)): (S.UNMAPPING, [Unmap()]),
    (S.UNCONFIRMED, Unregister(-1.0)): (S.UNMAPPING, [Unmap()]),
    (S.RELEASED, Unregister()): (S.RELEASED, [RELEASED]),
    (S.RELEASED, Unregister(3.0)): (S.RELEASED, [RELEASED]),
    (S.RELEASED, Unregister(-1.0)): (S.RELEASED, [RELEASED]),
}


def reach(*road: RegionInput) -> RegionLife:
    life = RegionLife()
    for event in road:
        life.step(event, 0.0)
    return life


@pytest.mark.parametrize("state", list(ROADS))
@pytest.mark.parametrize("event", INPUTS, ids=str)
def test_every_state_and_input(state: RegionState, event: RegionInput) -> None:
    life = reach(*ROADS[state])
    assert life.state is state
    expected = ALLOWED.get((state, event))
    if expected is None:
        with pytest.raises(InternalError):
            life.step(event, 0.0)
        assert life.state is state
        return
    assert (life.step(event, 0.0), life.state) == (expected[1], expected[0])


def test_the_table_lists_every_state() -> None:
    assert set(REGION_TABLE) == set(RegionState) == set(ROADS)


def test_without_a_use_the_end_begins_at_once() -> None:
    life = reach(Registered())
    assert life.step(Unregister(9.0), 0.0) == [Unmap()]
    assert life.deadline is None


def test_the_last_use_begins_the_end_and_force_is_remembered() -> None:
    for deadline, how in ((None, Deregistered.DRAINED), (0.0, Deregistered.DRAIN_TIMED_OUT)):
        life = reach(*IN_USE, Unregister(deadline))
        assert life.step(UseEnded(2), 0.0) == []
        assert life.step(UseEnded(1), 0.0) == [Unmap()]
        assert life.step(Unmapped(), 0.0) == [Released(how)]


def test_the_soonest_deadline_counts() -> None:
    life = reach(*IN_USE, Unregister())
    assert life.deadline is None
    for asked, due in ((5.0, 5.0), (7.0, 5.0), (None, 5.0), (3.0, 3.0)):
        life.step(Unregister(asked), 0.0)
        assert life.deadline == due
    life.step(TimedOut(), 3.0)
    assert life.deadline is None


def test_a_use_without_a_proof_keeps_the_region_until_the_proof_comes() -> None:
    life = reach(*IN_USE, UseUnproven(1, "stuck"))
    life.step(Unregister(), 0.0)
    assert life.step(UseEnded(2), 0.0) == [KeepMemory("stuck")]
    assert life.step(Unregister(), 0.0) == [KeepMemory("stuck")]
    assert life.state is S.UNCONFIRMED
    life.step(UseEnded(1), 0.0)
    assert life.step(Unregister(), 0.0) == [Unmap()]
    assert life.step(Unmapped(), 0.0) == [RELEASED]


@pytest.mark.parametrize("event", [UseEnded(9), UseUnproven(9, "what")])
def test_a_use_that_never_began_cannot_end(event: RegionInput) -> None:
    with pytest.raises(InternalError):
        reach(*IN_USE).step(event, 0.0)


def test_random_lives_never_let_go_of_memory_in_use() -> None:
    for seed in range(2000):
        chance = random.Random(seed)
        life = reach(Registered())
        used: set[int] = set()
        unproven: set[int] = set()
        begun, unmaps, released = 0, 0, 0
        for _ in range(40):
            choices: list[RegionInput] = [Unregister(chance.choice([None, 0.0, 9.0]))]
            if life.state is S.LIVE:
                choices += [UseBegan(begun + 1)] * 3
            if life.state is S.GATED:
                choices.append(TimedOut())
            if life.state is S.UNMAPPING:
                choices += [Unmapped(), UnmapFailed("busy")]
            choices += [UseEnded(use) for use in used]
            choices += [UseUnproven(use, "stuck") for use in list(used)[:1]]
            event = chance.choice(choices)
            match event:
                case UseBegan(use):
                    begun += 1
                    used.add(use)
                case UseEnded(use):
                    used.discard(use)
                case UseUnproven(use):
                    used.discard(use)
                    unproven.add(use)
            for effect in life.step(event, 1.0):
                match effect:
                    case Unmap():
                        unmaps += 1
                        assert not used | unproven, f"seed {seed}"
                    case Released():
                        released += 1
                        assert isinstance(event, Unmapped | Unregister)
                        assert not used | unproven, f"seed {seed}"
            if released:
                assert life.state is S.RELEASED
                assert unmaps >= 1
            assert set(life.uses) == used
            assert set(life.unproven) == unproven
