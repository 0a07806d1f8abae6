"""Message links under credits, in every order of events for small worlds, and in seeded orders for
larger ones; and mistakes planted into them, each of which must be found.

The wide bounds take minutes: they replace the fast ones when ORBIT_SOAK is set (`make soak`).
"""

from __future__ import annotations

from itertools import permutations
from random import Random
from typing import Any

import pytest

from orbit.protocol.messaging.credits import CreditBook, Windows
from orbit.protocol.messaging.packets import PacketKind, Returned, Window
from orbit.testing.credit_applications import Step
from orbit.testing.credit_explorer import explore, run
from orbit.testing.credit_link import Op
from orbit.testing.credit_world import CreditWorld, Rules
from orbit.testing.search import Violation
from tests.soak import SOAK

THERE, BACK = (0, 1), (1, 0)
LONG = 30  # payload bytes of three packets in slabs of 24


def call(ident: int, *, depth: int = 0, nbytes: int = 4, answer: int = 4) -> Step:
    return Step(Op.CALL, ident, depth, nbytes, answer)


def note(nbytes: int = 4) -> Step:
    return Step(Op.NOTE, 0, 0, nbytes)


def item() -> Step:
    return Step(Op.ITEM, 0, 0, 4)


# name -> what differs from the default rules, the program of each side, the nodes that drain
Small = tuple[dict[str, Any], tuple[Step, ...], tuple[Step, ...], frozenset[int]]
NOBODY: frozenset[int] = frozenset()
FAST: dict[str, Small] = {
    "calls": ({}, (call(1), note()), (call(2),), NOBODY),
    "at the inbound bound": ({"inbound_bytes_max": 1}, (call(1), note()), (call(2),), NOBODY),
    "charged until the answer is queued": (
        {"charge_until_queued": True, "inbound_bytes_max": 1},
        (call(1), note()),
        (call(2),),
        NOBODY,
    ),
    "segments": (
        {"slab_bytes": 24},
        (call(1, nbytes=LONG, answer=LONG),),
        (call(2, nbytes=LONG, answer=LONG),),
        NOBODY,
    ),
    "nested": ({"inbound_bytes_max": 1}, (call(1, depth=1),), (call(2, depth=1),), NOBODY),
    "nested segments": (
        {"slab_bytes": 24},
        (call(1, depth=1, nbytes=12, answer=12),),
        (call(2, depth=1, nbytes=12, answer=12),),
        NOBODY,
    ),
    "streams": ({"stream_credit": 1}, (item(), item(), note()), (item(),), NOBODY),
    "drain": ({}, (call(1),), (call(2, depth=1),), frozenset({0, 1})),
    "send slots": ({"send_slots": 1}, (call(1),), (call(2),), NOBODY),
    "wider": (
        {"windows": Windows(2, 1), "admission_frames": 2},
        (note(), note(), call(1)),
        (call(2),),
        NOBODY,
    ),
    "no margin for a refill": ({"refill_margin": False}, (call(1), note()), (call(2),), NOBODY),
    "no refill at the end": (
        {"refill_at_pass_end": False, "windows": Windows(5, 2), "admission_frames": 4},
        (note(), note(), note(), note()),
        (call(2),),
        NOBODY,
    ),
}
WIDE: dict[str, Small] = {
    "calls": ({}, (call(1), call(3)), (call(2), call(4)), NOBODY),
    "segments": (
        {"slab_bytes": 24},
        (call(1, nbytes=LONG, answer=LONG), call(3, nbytes=LONG, answer=LONG)),
        (call(2, nbytes=LONG, answer=LONG), call(4, nbytes=12, answer=LONG)),
        NOBODY,
    ),
    "nested": (
        {"slab_bytes": 24, "inbound_bytes_max": 1},
        (call(1, depth=1, nbytes=12), note(12)),
        (call(2, depth=1, nbytes=12),),
        NOBODY,
    ),
    "deep": ({}, (call(1, depth=3),), (call(2, depth=2),), NOBODY),
    "streams": (
        {"stream_credit": 2},
        (item(), item(), item()),
        (item(), call(2)),
        NOBODY,
    ),
    "drain": ({}, (call(1, depth=1),), (call(2, depth=1),), frozenset({0, 1})),
    "send slots": ({"send_slots": 1}, (call(1, depth=1),), (call(2, depth=1),), NOBODY),
    "wider": (
        {"windows": Windows(5, 2), "admission_frames": 2},
        (note(), note(), call(1)),
        (call(2), note()),
        NOBODY,
    ),
}


@pytest.mark.parametrize("name", WIDE if SOAK else FAST)
def test_links_keep_the_rules_in_every_order(name: str) -> None:
    rules, there, back, drains = (WIDE if SOAK else FAST)[name]
    world = CreditWorld(2, Rules(**rules), {THERE: there, BACK: back}, drains)
    counts = explore(world)
    assert counts["final"] > 0
    assert counts["moves"] > counts["states"]


@pytest.mark.parametrize(("callers", "depth"), [(2, 2), (3, 1)] if SOAK else [(2, 1)])
def test_three_nodes_that_call_in_a_ring_in_every_order(callers: int, depth: int) -> None:
    programs = {(n, (n + 1) % 3): (call(n, depth=depth),) for n in range(callers)}
    assert explore(CreditWorld(3, Rules(), programs))["final"] > 0


def program(draw: Random, ident: int, steps: int) -> tuple[Step, ...]:
    made = []
    for i in range(steps):
        op = draw.choice((Op.CALL, Op.CALL, Op.NOTE, Op.ITEM))
        depth = draw.choice((0, 0, 1, 2)) if op is Op.CALL else 0
        made.append(Step(op, ident + i, depth, draw.randrange(60), draw.randrange(60)))
    return tuple(made)


# window, replies, bytes of the inbound bound, send slots, frames in the queue, steps of each pair
RUNS = [(1, 1, 1, None, 1, 40), (4, 1, 100, 3, 4, 60), (64, 16, 1000, 40, 16, 60)]


@pytest.mark.parametrize("seed", range(20 if SOAK else 2))
@pytest.mark.parametrize(("messages", "replies", "bound", "slots", "queue", "steps"), RUNS)
def test_three_nodes_under_load_in_a_seeded_order(
    messages: int, replies: int, bound: int, slots: int | None, queue: int, steps: int, seed: int
) -> None:
    draw = Random(seed)
    steps *= 5 if SOAK else 1
    rules = Rules(
        windows=Windows(messages, replies),
        slab_bytes=24,
        inbound_bytes_max=bound,
        admission_frames=queue,
        send_slots=slots,
        stream_credit=8,
    )
    programs = {
        pair: program(draw, place * 10_000, steps)
        for place, pair in enumerate(permutations(range(3), 2))
    }
    drains = frozenset({2}) if seed % 4 == 3 else NOBODY
    world = CreditWorld(3, rules, programs, drains)
    assert run(world, seed) > 6 * steps
    used = {PacketKind.MESSAGE, PacketKind.RESPONSE, PacketKind.EVENT, PacketKind.GRANT}
    if messages == 4:  # one credit is reported by the message it pays for; 64 hardly run out
        used |= {PacketKind.PING, PacketKind.PONG}
    assert used <= world.seen


# --- mistakes -------------------------------------------------------------------------------------


class GrantCostsCredit(CreditBook):
    def due(self, *, starving: bool = False) -> PacketKind | None:
        return super().due(starving=starving) if self.available(Window.MESSAGES) else None


class GrantForAGrant(CreditBook):
    def due(self, *, starving: bool = False) -> PacketKind | None:
        if self.owed(Window.CONTROL):
            return PacketKind.GRANT if self.may_send(PacketKind.GRANT) else None
        return super().due(starving=starving)


class ReturnsWithheld(CreditBook):
    def __init__(self, granted: Windows, allowed: Windows, inbound_bytes_max: int) -> None:
        super().__init__(granted, allowed, 1 << 30)


class PingBeforePong(CreditBook):
    """A ping goes whenever the grant's slab is out."""

    def may_send(self, kind: int) -> bool:
        return kind == PacketKind.PING or super().may_send(kind)


class NoPing(CreditBook):
    """When the grant's slab is out, the next return waits for some other packet."""

    def due(self, *, starving: bool = False) -> PacketKind | None:
        kind = super().due(starving=starving)
        return None if kind is PacketKind.PING else kind


class ReplyWaitsForMessageCredit(CreditBook):
    def may_send(self, kind: int) -> bool:
        if kind in (PacketKind.RESPONSE, PacketKind.EVENT):
            return self.available(Window.MESSAGES) > 0 and super().may_send(kind)
        return super().may_send(kind)


class ForgetsReports(CreditBook):
    def stamp(self) -> Returned:
        return super().stamp()._replace(reports=0)


FLOOD = (note(), note(), note(), note(), note())
NESTING = (call(1, depth=1), call(3, depth=1))
NESTING_BACK = (call(2, depth=1), call(4, depth=1))
DEADLOCK = "nothing can happen"

# name -> rules, programs, what the explorer says
MISTAKES: dict[str, tuple[dict[str, Any], tuple[Step, ...], tuple[Step, ...], str]] = {
    "a grant costs a message credit": ({"book": GrantCostsCredit}, FLOOD, FLOOD, DEADLOCK),
    "a grant for a grant": ({"book": GrantForAGrant}, (note(),), (), "the same state again"),
    "withheld credit is returned": (
        {"book": ReturnsWithheld, "inbound_bytes_max": 1, "payload_bytes_max": 16},
        FLOOD,
        (),
        "60 bytes of one peer's messages; limit 57",
    ),
    "a ping before the pong": (
        {"book": PingBeforePong, "windows": Windows(3, 1), "admission_frames": 3},
        FLOOD,
        (),
        "control: 6 slabs of 5",
    ),
    "no ping when the grant is out": (
        {"book": NoPing, "inbound_bytes_max": 1},
        (note(), note()),
        (call(2),),
        DEADLOCK,
    ),
    "a reply waits for message credit": (
        {"book": ReplyWaitsForMessageCredit, "inbound_bytes_max": 1},
        (call(1), call(3)),
        (call(2), call(4)),
        DEADLOCK,
    ),
    "reports are forgotten": ({"book": ForgetsReports}, FLOOD, (), "control: 4 slabs of 5"),
    "a waiting handler keeps its charge": (
        {"keeps_charge": True, "inbound_bytes_max": 1},
        NESTING,
        NESTING_BACK,
        DEADLOCK,
    ),
    "segments are charged before their message is whole": (
        {"charges_segments": True, "slab_bytes": 24, "inbound_bytes_max": 1},
        (note(LONG),),
        (),
        DEADLOCK,
    ),
    "a batch that the depth does not cover, and none at the end of a pass": (
        {"refill_batch": 16, "refill_at_pass_end": False},
        FLOOD * 2,
        (),
        "receiver not ready",
    ),
}


def test_ordered_handlers_that_wait_for_each_other_are_left_to_their_deadlines() -> None:
    """What is queued in a lane keeps its charge, so two lanes whose heads call into each other's
    node can withhold the credit of those very calls. The model knows no deadlines, hence it stops.
    """
    rules = Rules(ordered=True, inbound_bytes_max=1)
    with pytest.raises(Violation, match=DEADLOCK):
        explore(CreditWorld(2, rules, {THERE: NESTING, BACK: NESTING_BACK}), 100_000)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str) -> None:
    rules, there, back, message = MISTAKES[name]
    with pytest.raises(Violation, match=message):
        explore(CreditWorld(2, Rules(**rules), {THERE: there, BACK: back}), 100_000)
