"""What may happen next in a `CreditWorld`: for the search through every order, and for seeded runs.

Knows the moves of the world and their preconditions, nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec

from . import search
from .credit_link import Op
from .credit_world import CreditWorld, Pair

P = ParamSpec("P")
Move = tuple[str, Callable[[CreditWorld], None]]


def moves_of(world: CreditWorld) -> list[Move]:
    return [
        *(move for pair in world.links for move in _link_moves(world, pair)),
        *(move for pair in world.contacts for move in _application_moves(world, pair)),
        *((f"drain {n}", _call(CreditWorld.drain, n)) for n in sorted(world.drains)),
    ]


def explore(world: CreditWorld, states_max: int = 10_000_000) -> dict[str, int]:
    """Every order of events. Raises Violation with the moves that led there."""
    return search.explore(world, moves_of, states_max)


def run(world: CreditWorld, seed: int) -> int:
    """One order of events, drawn by `seed`. Raises Violation naming it."""
    return search.run(world, moves_of, seed)


def _call(
    method: Callable[Concatenate[CreditWorld, P], None], *args: P.args, **kwargs: P.kwargs
) -> Callable[[CreditWorld], None]:
    return lambda world: method(world, *args, **kwargs)


def _link_moves(world: CreditWorld, pair: Pair) -> Iterator[Move]:
    n, peer = pair
    link = world.links[pair]
    if link.landed < len(link.wire):
        yield f"land {n}>{peer}", _call(CreditWorld.land, pair)
    # A pass takes what is at hand; anything between one packet and all of them may be that.
    for count in sorted({min(link.landed, 1), link.landed} - {0}):
        yield f"poll {count} of {n}>{peer}", _call(CreditWorld.poll, (peer, n), count)


def _application_moves(world: CreditWorld, pair: Pair) -> Iterator[Move]:
    n, peer = pair
    contact = world.contacts[pair]
    if contact.program and world.admits(pair):
        step = contact.program[0]
        if step.op is not Op.ITEM or contact.stream_credit:
            yield f"issue {n}>{peer}", _call(CreditWorld.issue, pair)
    for place in range(len(contact.handlers)):
        if world.may_run(pair, place):
            yield f"handler {place} at {n} of {peer}", _call(CreditWorld.run_handler, pair, place)
    if contact.unread:
        yield f"read at {n} of {peer}", _call(CreditWorld.read_item, pair)
