"""The agreed end of a link: in every interleaving both ends end alike, and no frame is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest

from orbit.protocol.messaging.farewell import TRANSITIONS, Farewell, FarewellState

FRAMES_MAX = 2
ASKS_MAX = 2


@dataclass(frozen=True)
class End:
    """One end in the model. `out`: its frames that the peer has not returned. `owed`: frames of the
    peer that it has not returned. `reported`: its last GOODBYE's slab is free again.
    """

    state: FarewellState = FarewellState.OPEN
    frames: int = FRAMES_MAX
    asks: int = ASKS_MAX
    out: int = 0
    owed: int = 0
    reported: bool = True
    report_due: bool = False

    @property
    def idle(self) -> bool:
        return not self.out


# A packet: what it says, the credits it returns, whether it reports the peer's GOODBYE.
Packet = tuple[str, int, bool]


@dataclass(frozen=True)
class World:
    ends: tuple[End, End] = (End(), End())
    wires: tuple[tuple[Packet, ...], tuple[Packet, ...]] = ((), ())  # towards end 0 and 1
    lost: str = ""

    def with_end(self, side: int, end: End) -> World:
        ends = (end, self.ends[1]) if side == 0 else (self.ends[0], end)
        return replace(self, ends=ends)

    def push(self, side: int, kind: str) -> World:
        """End `side` says it, with all that it can return."""
        end = self.ends[side]
        packet = (kind, end.owed, end.report_due)
        wires = list(self.wires)
        wires[1 - side] = (*wires[1 - side], packet)
        after = self.with_end(side, replace(end, owed=0, report_due=False))
        return replace(after, wires=(wires[0], wires[1]))


def machine(end: End) -> Farewell:
    farewell = Farewell()
    farewell.state = end.state
    return farewell


def spontaneous(world: World, side: int) -> list[World]:
    """What an end may do by itself."""
    end, found = world.ends[side], []
    farewell = machine(end)
    if farewell.silent:
        return []
    if end.frames:
        farewell.on_frame_sent()
        sent = replace(end, state=farewell.state, frames=end.frames - 1, out=end.out + 1)
        found.append(world.with_end(side, sent).push(side, "frame"))
    if end.asks and farewell.open and end.idle and end.reported:
        farewell.ask()
        asked = replace(end, state=farewell.state, asks=end.asks - 1, reported=False)
        # Said before the state changes, as the shell does; the order cannot be seen.
        found.append(world.with_end(side, asked).push(side, "goodbye"))
    if end.owed or end.report_due:
        found.append(world.push(side, "grant"))
    return found


def delivered(world: World, side: int) -> World:
    """The next packet reaches end `side`."""
    (kind, credits, report), *rest = world.wires[side]
    wires = (tuple(rest), world.wires[1]) if side == 0 else (world.wires[0], tuple(rest))
    world = replace(world, wires=wires)
    end = world.ends[side]
    if end.state is FarewellState.AGREED:
        return replace(world, lost="a frame reached a closed end") if kind == "frame" else world
    end = replace(end, out=end.out - credits, reported=end.reported or report)
    farewell = machine(end)
    if kind == "frame":
        farewell.on_frame_received()
        end = replace(end, owed=end.owed + 1)
    elif kind != "ack" and end.reported:
        farewell.on_refused()
    world = world.with_end(side, replace(end, state=farewell.state))
    if kind == "goodbye":
        world = world.with_end(side, replace(world.ends[side], report_due=True))
        if farewell.on_goodbye(end.idle):
            answered = replace(world.ends[side], state=farewell.state)
            return world.with_end(side, answered).push(side, "ack")
    if kind == "ack":
        owes = farewell.on_answer()
        if owes:
            world = world.push(side, "ack")
        return world.with_end(side, replace(world.ends[side], state=farewell.state))
    return world


def explore() -> tuple[str, int, int]:
    """(what is wrong, worlds seen, worlds in which both ends agreed)."""
    start = World()
    seen, todo = {start}, deque([start])
    agreed = 0
    while todo:
        world = todo.popleft()
        if world.lost:
            return world.lost, len(seen), agreed
        followers = [after for side in (0, 1) for after in spontaneous(world, side)]
        followers += [delivered(world, side) for side in (0, 1) if world.wires[side]]
        if not any(world.wires):
            states = {end.state for end in world.ends}
            if FarewellState.SILENT in states:
                return "silent for ever", len(seen), agreed
            if FarewellState.AGREED in states and len(states) > 1:
                return "one end is open", len(seen), agreed
            agreed += states == {FarewellState.AGREED}
        for after in followers:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return "", len(seen), agreed


def test_no_interleaving_loses_a_frame_or_leaves_one_end_open() -> None:
    problem, seen, agreed = explore()
    assert not problem
    assert agreed > 0
    assert seen > 1000


def _nothing(farewell: Farewell) -> None:
    pass


def _always_yes(farewell: Farewell, idle: bool) -> bool:
    if farewell.silent:
        return False
    farewell.state = FarewellState.SILENT
    return True


def _never_owed(farewell: Farewell) -> bool:
    farewell.state = TRANSITIONS["agreed"].get(farewell.state, farewell.state)
    return False


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("on_frame_sent", _nothing),  # a frame does not revoke the goodbye before it
        ("on_frame_received", _nothing),
        ("on_goodbye", _always_yes),
        ("on_answer", _never_owed),
    ],
)
def test_the_model_finds_mistakes(
    monkeypatch: pytest.MonkeyPatch, method: str, mistake: object
) -> None:
    monkeypatch.setattr(Farewell, method, mistake)
    assert explore()[0]


@pytest.mark.parametrize("state", FarewellState)
def test_what_the_table_does_not_list_changes_nothing(state: FarewellState) -> None:
    happenings = {
        "asked": Farewell.ask,
        "refused": Farewell.on_refused,
        "sent": Farewell.on_frame_sent,
        "heard": Farewell.on_frame_received,
        "answered": lambda farewell: farewell.on_goodbye(True),
        "agreed": Farewell.on_answer,
    }
    assert happenings.keys() == TRANSITIONS.keys()
    for name, happening in happenings.items():
        farewell = Farewell()
        farewell.state = state
        happening(farewell)
        assert farewell.state is TRANSITIONS[name].get(state, state)


def test_only_the_idle_answer() -> None:
    farewell = Farewell()
    assert not farewell.on_goodbye(idle=False)
    assert farewell.open
    assert farewell.on_goodbye(idle=True)
    assert farewell.silent
    assert not farewell.on_goodbye(idle=True)  # nothing may be said any more
    assert not farewell.on_answer()
    assert farewell.state is FarewellState.AGREED


def test_who_asked_owes_the_last_word() -> None:
    farewell = Farewell()
    farewell.ask()
    assert not farewell.silent
    assert farewell.on_answer()
    assert farewell.silent


def test_a_revoked_answer_means_nothing() -> None:
    farewell = Farewell()
    farewell.ask()
    farewell.on_frame_sent()
    assert not farewell.on_answer()
    assert farewell.open
