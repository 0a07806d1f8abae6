"""A search through everything that may happen in a closed world, or one seeded run of it.

The search is exhaustive: it finds broken rules, states in which nothing can happen although the
world has not settled, and moves that go round in circles. A world is anything with moves that are
applied to copies; nothing here knows what moves mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from random import Random
from typing import Protocol, Self, TypeVar


class Violation(AssertionError):
    """A rule of the world was broken."""


def require(fact: bool, rule: str) -> None:
    if not fact:
        raise Violation(rule)


class ClosedWorld(Protocol):
    """State that can be copied, compared by its key, and asked whether it may rest."""

    def key(self) -> Hashable: ...

    def after(self, act: Callable[[Self], None]) -> Self:
        """A copy in which `act` has happened and every rule was checked."""

    def settled(self) -> bool:
        """Nothing is left to wait for."""


World = TypeVar("World", bound=ClosedWorld)
Act = Callable[[World], None]
Moves = Callable[[World], list[tuple[str, Act[World]]]]


def explore(world: World, moves_of: Moves[World], states_max: int = 10_000_000) -> dict[str, int]:
    """Visit every reachable state, depth first. Raises Violation with the moves that led there.

    Returns how many states, moves and final states there are.
    """
    counts = {"states": 0, "moves": 0, "final": 0}
    open_keys: set[Hashable] = set()
    done_keys: set[Hashable] = set()
    path: list[str] = []
    stack: list[tuple[World, Hashable, Iterator[tuple[str, Act[World]]]]] = []

    def enter(state: World, key: Hashable) -> None:
        counts["states"] += 1
        require(counts["states"] <= states_max, "too many states")
        moves = moves_of(state)
        if not moves:
            require(state.settled(), "nothing can happen, and the world has not settled")
            counts["final"] += 1
        open_keys.add(key)
        stack.append((state, key, iter(moves)))

    try:
        enter(world, world.key())
        while stack:
            state, key, moves = stack[-1]
            step = next(moves, None)
            if step is None:
                stack.pop()
                open_keys.discard(key)
                done_keys.add(key)
                if path:
                    path.pop()
                continue
            name, act = step
            path.append(name)
            counts["moves"] += 1
            follower = state.after(act)
            follower_key = follower.key()
            require(follower_key not in open_keys, "the same state again: moves without an end")
            if follower_key in done_keys:
                path.pop()
            else:
                enter(follower, follower_key)
    except Exception as error:
        raise Violation(f"{error}; after: " + " | ".join(path)) from error
    return counts


class RunningWorld(Protocol):
    """A world that is not copied: moves change it."""

    def check(self) -> None:
        """Every rule, in this state."""

    def settled(self) -> bool: ...


Running = TypeVar("Running", bound=RunningWorld)


def run(
    world: Running,
    moves_of: Callable[[Running], list[tuple[str, Callable[[Running], None]]]],
    seed: int,
    moves_max: int = 10_000_000,
) -> int:
    """One run in which each next move is drawn by `seed`, until nothing can happen. Raises
    Violation naming the seed and the last moves; returns how many moves there were.
    """
    draw = Random(seed)
    path: list[str] = []
    try:
        while moves := moves_of(world):
            name, act = draw.choice(moves)
            path.append(name)
            require(len(path) <= moves_max, "moves without an end")
            act(world)
            world.check()
        require(world.settled(), "nothing can happen, and the world has not settled")
    except Exception as error:
        last = " | ".join(path[-20:])
        raise Violation(f"seed {seed}, move {len(path)}: {error}; last: {last}") from error
    return len(path)
