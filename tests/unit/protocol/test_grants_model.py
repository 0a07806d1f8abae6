"""One grant in every order of events, and proof that the search finds planted mistakes."""

from __future__ import annotations

import pytest

from orbit.model import Direction
from orbit.protocol.grants import (
    Complete,
    Done,
    Fail,
    FreeWindow,
    GrantRequester,
    GrantSource,
    KillQueuePair,
    PiecesCompleted,
    Receipt,
    RecycleWindow,
    ReleaseMemory,
    RequesterEffect,
    RequesterInput,
    RequesterState,
    SourceEffect,
    SourceInput,
    SourceState,
    Start,
)
from orbit.testing import grant_world
from orbit.testing.grant_explorer import explore, moves_of
from orbit.testing.grant_world import GrantWorld
from orbit.testing.search import Violation


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("faults", [0, 1, 2])
def test_every_order_of_one_grant_keeps_the_rules(faults: int, direction: Direction) -> None:
    counts = explore(GrantWorld(grants=1, faults=faults, pieces=2, direction=direction))
    assert counts["final"] > 0


@pytest.mark.parametrize("direction", Direction)
def test_without_faults_everything_is_released_and_both_queue_pairs_live(
    direction: Direction,
) -> None:
    world = GrantWorld(grants=1, faults=0, pieces=2, direction=direction)
    while moves := moves_of(world):
        world = world.after(moves[-1][1])
    (grant,) = world.grants
    assert grant.outcome == "complete"
    assert grant.source.receipted
    assert grant.pieces_served == 2
    assert not grant.memory_held
    assert grant.window == "pooled"
    assert world.source_qp.serving
    assert world.requester_qp.serving


SourceStep = tuple[SourceState, list[SourceEffect]]
RequesterStep = tuple[RequesterState, list[RequesterEffect]]


class ReleasesOnDone(GrantSource):
    """DONE alone proves nothing."""

    def _react(self, event: SourceInput, now: float) -> SourceStep:
        state, effects = super()._react(event, now)
        if event == Done(transferred=True) and self.state is SourceState.PUBLISHED:
            effects = [ReleaseMemory()]
        return state, effects


class FreesBeforeTheDrain(GrantSource):
    def _react(self, event: SourceInput, now: float) -> SourceStep:
        state, effects = super()._react(event, now)
        if any(isinstance(effect, KillQueuePair) for effect in effects):
            effects = [FreeWindow()]
        return state, effects


class RecyclesOnDone(GrantSource):
    def _react(self, event: SourceInput, now: float) -> SourceStep:
        state, effects = super()._react(event, now)
        if isinstance(event, Done) and self.state is SourceState.PUBLISHED:
            effects = [RecycleWindow(), *effects]
        return state, effects


class ForgetsTheReceipt(GrantSource):
    """Nothing ever frees the memory of a grant whose receipt came first."""

    def _react(self, event: SourceInput, now: float) -> SourceStep:
        if isinstance(event, Receipt) and self.state is SourceState.AWAITING_RECEIPT:
            return SourceState.REUSABLE, [RecycleWindow()]
        return super()._react(event, now)


class NeverTimesOut(GrantSource):
    def _entered(self, now: float) -> None:
        self.deadline = None


class CompletesEarly(GrantRequester):
    def _react(self, event: RequesterInput, now: float) -> RequesterStep:
        state, effects = super()._react(event, now)
        return state, [*effects, Complete()] if isinstance(event, Start) else effects


class RaisesBeforeTheDrain(GrantRequester):
    def _react(self, event: RequesterInput, now: float) -> RequesterStep:
        state, effects = super()._react(event, now)
        if state is RequesterState.KILLING and self.state is not state:
            effects = [*effects, Fail(self.cause, returned=False)]
        elif self.state is RequesterState.KILLING and state is not self.state:
            effects = []
        return state, effects


class PostsTheReceiptTwice(GrantRequester):
    def _react(self, event: RequesterInput, now: float) -> RequesterStep:
        state, effects = super()._react(event, now)
        if isinstance(event, PiecesCompleted) and state is RequesterState.SETTLING:
            effects = [grant_world.Post((), receipt=True), *effects]
        return state, effects


class CallsAReturnedGrantWhole(GrantRequester):
    """Hands an unfinished grant back and reports success."""

    def _react(self, event: RequesterInput, now: float) -> RequesterStep:
        state, effects = super()._react(event, now)
        if state is RequesterState.FAILED and self.state is RequesterState.RETURNING:
            effects = [Complete() if isinstance(e, Fail) else e for e in effects]
        return state, effects


SOURCE_MISTAKES = [
    (ReleasesOnDone, "released"),
    (FreesBeforeTheDrain, "drained"),
    (RecyclesOnDone, "bound window"),
    (ForgetsTheReceipt, "holds memory"),
    (NeverTimesOut, "nothing can happen"),
]
REQUESTER_MISTAKES = [
    (CompletesEarly, "bytes missing"),
    (RaisesBeforeTheDrain, "target"),
    (PostsTheReceiptTwice, "not bound"),
    (CallsAReturnedGrantWhole, "bytes missing"),
]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("mistake", "rule"), SOURCE_MISTAKES)
def test_a_mistake_at_the_source_is_found(
    mistake: type[GrantSource], rule: str, direction: Direction
) -> None:
    world = GrantWorld(grants=1, faults=2, pieces=2, direction=direction)
    world.grants[0].source = mistake()
    with pytest.raises(Violation, match=rule):
        explore(world)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("mistake", "rule"), REQUESTER_MISTAKES)
def test_a_mistake_at_the_requester_is_found(
    mistake: type[GrantRequester],
    rule: str,
    direction: Direction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grant_world, "GrantRequester", mistake)
    with pytest.raises(Violation, match=rule):
        explore(GrantWorld(grants=1, faults=2, pieces=2, direction=direction))


def test_a_consumer_that_calls_a_returned_push_transferred_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grant_world, "says_transferred", lambda _, *, returned: returned)
    with pytest.raises(Violation, match="a push counts as whole"):
        explore(GrantWorld(grants=1, faults=2, pieces=2, direction=Direction.WRITE))
