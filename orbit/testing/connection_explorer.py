"""Every order of events in a `ConnectionWorld`: what may happen next, and the search through it.

Words of different connections overtake each other in every way. Timeouts come when nothing else
can happen, and as faults at any time. This module knows nothing of the machines' insides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec

from . import search
from .connection_world import ConnectionWorld, End
from .search import require

P = ParamSpec("P")
Act = Callable[[ConnectionWorld], None]
Move = tuple[str, Act]


def moves_of(world: ConnectionWorld) -> list[Move]:
    """What may happen next, each with a name."""
    moves = [*_words(world), *_wants(world)]
    if not moves:
        moves = list(_timeouts(world))
    if world.faults:
        moves += [(name, _as_fault(act)) for name, act in _faults(world)]
    return moves


def explore(world: ConnectionWorld, states_max: int = 2_000_000) -> dict[str, int]:
    """Visit every reachable state. Raises Violation with the moves that led there.

    Returns how many states, moves and final states there are.
    """
    return search.explore(world, moves_of, states_max)


def _call(
    method: Callable[Concatenate[ConnectionWorld, P], None], *args: P.args, **kwargs: P.kwargs
) -> Act:
    return lambda world: method(world, *args, **kwargs)


def _words(world: ConnectionWorld) -> Iterator[Move]:
    for name, wire in world.wires.items():
        for side in range(2):
            words = wire.words[wire.index(side)]
            if words:
                move = _call(ConnectionWorld.deliver, name, side)
                yield f"{name.decode()}: {words[0]} to {side}", move


def _wants(world: ConnectionWorld) -> Iterator[Move]:
    for number, side in enumerate(world.sides):
        if side.wants:
            yield f"{number} wants", _call(ConnectionWorld.want, number)
        if side.known_life != world.sides[1 - number].life:
            yield f"{number} is told", _call(ConnectionWorld.tell, number)


def _timeouts(world: ConnectionWorld) -> Iterator[Move]:
    for number, side in enumerate(world.sides):
        if side.machine.deadline is not None:
            require(world.faulted, "nothing failed, and yet only a timeout helps")
            yield f"{number} times out", _call(ConnectionWorld.time_out, number)
        if side.machine.dialing is not None and side.machine.deadline is None:
            require(world.faulted, "nothing failed, and yet a dial has to give up")
            yield f"{number} gives up", _call(ConnectionWorld.give_up, number)


def _faults(world: ConnectionWorld) -> Iterator[Move]:
    for number, side in enumerate(world.sides):
        if side.machine.deadline is not None:
            yield f"{number} times out early", _call(ConnectionWorld.time_out, number)
        if side.machine.dialing is not None:
            yield f"{number} gives up early", _call(ConnectionWorld.give_up, number)
        if world.restarts:
            yield f"{number} restarts", _restart(number)
    for name, wire in world.wires.items():
        if set(wire.ends) != {End.CLOSED} and "eof" not in (*wire.words[0], *wire.words[1]):
            yield f"{name.decode()} breaks", _call(ConnectionWorld.cut, name)


def _restart(number: int) -> Act:
    def act(world: ConnectionWorld) -> None:
        world.restarts -= 1
        world.restart(number)

    return act


def _as_fault(act: Act) -> Act:
    def once(world: ConnectionWorld) -> None:
        world.faults -= 1
        world.faulted = True
        act(world)

    return once
