"""Every order of events in a `GrantWorld`: what may happen next, and the search through all of it.

The search is exhaustive within the bounds of the world it is given. This module knows nothing of
the machines' insides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec

from ..protocol.grants import (
    Bind,
    Cancel,
    Drained,
    DrainUnproven,
    RequesterState,
    SourceState,
    Start,
)
from . import search
from .grant_world import CANCELLED, GrantWorld

P = ParamSpec("P")
Act = Callable[[GrantWorld], None]
Move = tuple[str, Act]


def moves_of(world: GrantWorld) -> list[Move]:
    """What may happen next. Time passes as a fault of the world, or for free when nothing else
    can happen.
    """
    moves = list(_progress(world))
    if world.faults:
        moves += [(name, _as_fault(act)) for name, act in (*_faults(world), *_time(world))]
    return moves or list(_time(world))


def _call(
    method: Callable[Concatenate[GrantWorld, P], None], *args: P.args, **kwargs: P.kwargs
) -> Act:
    return lambda world: method(world, *args, **kwargs)


def _progress(world: GrantWorld) -> Iterator[Move]:
    for i, grant in enumerate(world.grants):
        first = i == 0 or world.grants[i - 1].source.state is not SourceState.NEW
        fresh = grant.source.state is SourceState.NEW
        if fresh and first and world.source_qp.serving and world.epoch == "open":
            yield f"begin {i}", _call(GrantWorld.feed_source, i, Bind())
        if grant.window == "binding" and world.source_qp.serving:
            yield f"bind {i}", _call(GrantWorld.bind, i)
        if grant.requester is not None and grant.requester.state is RequesterState.READY:
            yield f"start {i}", _call(GrantWorld.feed_requester, i, Start())
    if world.source_qp.completions:
        yield f"source polls {world.source_qp.completions[0]}", GrantWorld.source_polls
    if world.requester_qp.completions:
        yield f"requester polls {world.requester_qp.completions[0]}", GrantWorld.requester_polls
    if world.wire:
        yield f"wire {world.wire[0]}", GrantWorld.serve
    for message in sorted(set(world.control)):
        yield f"arrives {message}", _call(GrantWorld.arrive, message)
    for name, pair in (("source", world.source_qp), ("requester", world.requester_qp)):
        if pair.state == "err" and not pair.completions:
            yield f"{name} drained", _call(GrantWorld.drain, name, Drained())
    if world.epoch == "closing":
        yield "requester sees the epoch end", GrantWorld.close_requester


def _faults(world: GrantWorld) -> Iterator[Move]:
    for message in sorted(set(world.control)):
        yield f"lost {message}", _call(GrantWorld.lose, message)
    for i, grant in enumerate(world.grants):
        if grant.requester is not None and not grant.requester.ended:
            yield f"cancel {i}", _call(GrantWorld.feed_requester, i, Cancel(CANCELLED))
        if grant.window == "binding" and world.source_qp.serving:
            yield f"bind fails {i}", _call(GrantWorld.bind_fails, i)
    for name, pair in (("source", world.source_qp), ("requester", world.requester_qp)):
        if pair.killable:
            yield f"{name} queue pair fails", _call(GrantWorld.kill, name, f"{name} event")
        if pair.state == "err" and not pair.completions:
            lost = DrainUnproven("drain lost")
            yield f"{name} drain unproven", _call(GrantWorld.drain, name, lost)
    if world.source_qp.completions and world.source_qp.completions[0][0] == "receipt":
        yield "foreign binding", _call(GrantWorld.source_polls, matches=False)
    if world.wire and not world.requester_qp.serving:
        yield "wire lost", GrantWorld.lose_wire
    if world.epoch == "open":
        yield "epoch ends", GrantWorld.close_source


def _time(world: GrantWorld) -> Iterator[Move]:
    for i, grant in enumerate(world.grants):
        if grant.lease_open and grant.source.state is not SourceState.NEW:
            yield f"lease expires {i}", _call(GrantWorld.end_lease, i, transferred=False)
        if grant.source.deadline is not None:
            yield f"source deadline {i}", _call(GrantWorld.source_timeout, i)
        if grant.requester is not None and grant.requester.deadline is not None:
            yield f"requester deadline {i}", _call(GrantWorld.requester_timeout, i)


def _as_fault(act: Act) -> Act:
    def once(world: GrantWorld) -> None:
        world.faults -= 1
        act(world)

    return once


def explore(world: GrantWorld, states_max: int = 10_000_000) -> dict[str, int]:
    """Visit every reachable state. Raises Violation with the moves that led there.

    Returns how many states, moves and final states there are.
    """
    return search.explore(world, moves_of, states_max)
