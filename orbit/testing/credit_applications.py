"""What applications do in the closed world of credits: their programs, and the handlers, calls and
streams that are under way at one end. Values only; the world moves them.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from .credit_link import Label, Op


class Step(NamedTuple):
    """One thing to do towards a peer. A call of depth d makes its handler call the next node with
    depth d - 1. `ident` is unique in the world among calls.
    """

    op: Op
    ident: int = 0
    depth: int = 0
    nbytes: int = 0
    answer: int = 0


class Stage(Enum):
    READY = "ready"
    WANTING = "wanting"  # admission of its own call
    WAITING = "waiting"  # for the answer of its own call
    ANSWERED = "answered"


class Handler(NamedTuple):
    """A message that was dispatched and whose handler has not ended."""

    label: Label
    charge: int
    stage: Stage

    @property
    def nests(self) -> bool:
        return self.label.op is Op.CALL and self.label.depth > 0

    @property
    def nests_or_notes(self) -> bool:
        return self.nests or self.label.op is Op.NOTE


class Contact:
    """One node's applications towards one peer."""

    __slots__ = ("calls", "handlers", "program", "read", "stream_credit", "unread")

    def __init__(self, program: tuple[Step, ...], stream_credit: int) -> None:
        self.program = program
        self.calls: frozenset[tuple[int, int]] = frozenset()  # (ident, depth) without an answer
        self.handlers: tuple[Handler, ...] = ()
        self.stream_credit = stream_credit
        self.unread = 0  # items that arrived
        self.read = 0  # items whose credit was not given back yet

    def key(self) -> Hashable:
        return (
            len(self.program),
            self.calls,
            self.handlers,
            self.stream_credit,
            self.unread,
            self.read,
        )

    def clone(self) -> Contact:
        twin = Contact(self.program, self.stream_credit)
        twin.calls, twin.handlers = self.calls, self.handlers
        twin.unread, twin.read = self.unread, self.read
        return twin

    @property
    def resting(self) -> bool:
        return not (self.program or self.calls or self.handlers or self.unread)

    def replace(self, place: int, handler: Handler | None) -> None:
        rest = () if handler is None else (handler,)
        self.handlers = (*self.handlers[:place], *rest, *self.handlers[place + 1 :])

    def answer(self, ident: int, depth: int) -> None:
        """The handler that waits inside that call goes on, if it is one of these."""
        for place, handler in enumerate(self.handlers):
            label = handler.label
            waits = handler.stage is Stage.WAITING
            if waits and (label.ident, label.depth) == (ident, depth):
                self.replace(place, handler._replace(stage=Stage.ANSWERED))
                return
