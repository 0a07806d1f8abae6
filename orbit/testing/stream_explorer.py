"""Every order of events in a `StreamWorld`: what may happen next, and a search through all of it.

The search is exhaustive within the bounds of the world's script: it finds broken rules, and states
in which nothing can happen although an end is open.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from ..protocol.streams import sender as s
from .stream_world import StreamWorld, Violation, require

P = ParamSpec("P")
Move = tuple[str, Callable[[StreamWorld], None]]


def _call(
    method: Callable[Concatenate[StreamWorld, P], None], *args: P.args, **kwargs: P.kwargs
) -> Callable[[StreamWorld], None]:
    return lambda world: method(world, *args, **kwargs)


def moves_of(world: StreamWorld) -> list[Move]:
    """What may happen next. Deadlines pass for free only when nothing else can happen."""
    moves = list(_progress(world))
    for fault in world.faults:
        act = FAULTS[fault]
        moves += [(name, _once(fault, move)) for name, move in act(world)]
    return moves or list(_time(world))


def _progress(world: StreamWorld) -> Iterator[Move]:
    attached = world.sender.state is s.SenderState.ATTACHED
    if attached and world.seen.issued < len(world.lengths):
        yield f"submit {world.seen.issued}", StreamWorld.submit
    elif attached:
        for how in world.ends:
            yield how, _call(StreamWorld.finish, how)
    for road in ("ordered", "beats", "back"):
        if getattr(world.roads, road):
            yield f"{road} arrives", _call(StreamWorld.arrives, road)
    for sequence in world.fetches:
        yield f"fetched {sequence}", _call(StreamWorld.fetch, sequence)
    if world.receiver.ready:
        yield "take", StreamWorld.take
    if world.roads.link == "down":
        if not world.roads.sender_knows:
            yield "sender hears", StreamWorld.sender_hears
        if not world.roads.receiver_knows:
            yield "receiver hears", StreamWorld.receiver_hears


def _time(world: StreamWorld) -> Iterator[Move]:
    if world.sender.deadline is not None:
        yield "sender waits", lambda w: w.time_passes("sender")
    if world.receiver.deadline is not None:
        yield "receiver waits", lambda w: w.time_passes("receiver")


def _cancels(world: StreamWorld) -> Iterator[Move]:
    yield "cancel", StreamWorld.cancel


def _dies(world: StreamWorld) -> Iterator[Move]:
    if world.roads.link == "up":
        yield "link dies", StreamWorld.die


def _breaks(world: StreamWorld) -> Iterator[Move]:
    for sequence in world.fetches:
        yield f"fetch {sequence} fails", _call(StreamWorld.fetch, sequence, broken=True)


def _withdraws(world: StreamWorld) -> Iterator[Move]:
    if world.sender.waiting and world.seen.issued:
        yield "withdraw", StreamWorld.withdraw


def _drops(world: StreamWorld) -> Iterator[Move]:
    if world.sender.state in (s.SenderState.ATTACHED, s.SenderState.FINISHING):
        yield "dropped early", lambda w: w.finish("drop")


FAULTS: dict[str, Callable[[StreamWorld], Iterator[Move]]] = {
    "cancel": _cancels,
    "die": _dies,
    "break": _breaks,
    "withdraw": _withdraws,
    "drop": _drops,
    "time": _time,
}


def _once(fault: str, act: Callable[[StreamWorld], None]) -> Callable[[StreamWorld], None]:
    def move(world: StreamWorld) -> None:
        world.faults.remove(fault)
        act(world)

    return move


@dataclass(slots=True)
class Found:
    """What a search went through."""

    states: int = 0
    final: int = 0
    ends: set[tuple[str, str]] = field(default_factory=set)  # (sender's, receiver's)


def explore(world: StreamWorld, states_max: int = 300_000) -> Found:
    """Every reachable state. Raises Violation for a broken rule, or where nothing can happen and an
    end is still open.
    """
    found = Found()
    seen = {world.key()}
    stack: list[tuple[StreamWorld, tuple[str, ...]]] = [(world, ())]
    while stack:
        state, road = stack.pop()
        found.states += 1
        require(found.states <= states_max, "too many states")
        moves = moves_of(state)
        if not moves:
            if not state.settled():
                raise Violation(f"nothing can happen; after: {' | '.join(road)}")
            found.final += 1
            assert state.sender.end is not None
            assert state.receiver.end is not None
            found.ends.add((state.sender.end.kind.value, state.receiver.end.kind.value))
        for name, act in moves:
            follower = copy.deepcopy(state)
            try:
                act(follower)
                follower.check()
            except Exception as error:
                raise Violation(f"{error}; after: {' | '.join((*road, name))}") from error
            key = follower.key()
            if key not in seen:
                seen.add(key)
                stack.append((follower, (*road, name)))
    return found
