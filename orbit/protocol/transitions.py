"""How a machine uses its transition table: an input that the table does not list changes nothing.

A table says, for each state and each type of input, which states may follow. `TableMachine` checks
it before and after every step. It knows no protocol, clock or I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from ..errors import InternalError

StateT = TypeVar("StateT", bound=StrEnum)
InputT = TypeVar("InputT")
EffectT = TypeVar("EffectT")

Table = Mapping[StateT, Mapping[type, frozenset[StateT]]]


class TableMachine(Generic[StateT, InputT, EffectT]):
    """State, one deadline, and `step` guarded by the class's table. Subclasses write `_react` as
    one match.
    """

    def __init__(self, table: Table[StateT], state: StateT) -> None:
        self._table = table
        self.state = state
        self.deadline: float | None = None

    def step(self, event: InputT, now: float) -> list[EffectT]:
        """Take one input. Raises InternalError, with the machine unchanged, when the table does
        not list it.
        """
        followers = self._table[self.state].get(type(event))
        if followers is None:
            raise InternalError(
                f"{type(self).__name__}: {type(event).__name__} is not allowed in {self.state}"
            )
        state, effects = self._react(event, now)
        if state not in followers:
            raise InternalError(
                f"{type(self).__name__}: {type(event).__name__} led from {self.state} to {state}"
            )
        if state is not self.state:
            self.state = state
            self._entered(now)
        return effects

    def _react(self, event: InputT, now: float) -> tuple[StateT, list[EffectT]]:
        raise NotImplementedError

    def _entered(self, now: float) -> None:
        """Set the deadline of the state that was just entered."""
        raise NotImplementedError


def mermaid(table: Table[StateT], start: StateT) -> str:
    """The table as a Mermaid state diagram. Inputs that change nothing are left out."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, inputs in table.items():
        for kind, followers in inputs.items():
            for follower in sorted(followers):
                if follower is not state:
                    arrows.setdefault((state, follower), []).append(kind.__name__)
    lines = ["stateDiagram-v2", f"    [*] --> {start}"]
    lines += [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in arrows.items()]
    final = [s for s in table if not any(a == s for a, _ in arrows)]
    lines += [f"    {state} --> [*]" for state in final]
    return "\n".join(lines) + "\n"
