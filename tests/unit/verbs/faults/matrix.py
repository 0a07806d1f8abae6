"""The fault matrix: ten phases of a grant, two roles, eight classes of faults, and what must be
seen of each.

The expectations are written down from the rules of the contract, one letter for each cell; nothing
here runs anything. The rules: a fault before publication costs the exposure, a later one the
transfer, or its end where the bytes had moved already; memory goes back by the receipt, or when its
queue pair is proven to be drained, and is kept otherwise; what does not complete in time fences its
queue pair; an end that is refused keeps the queue pair and frees the memory all the same; what
nobody waits for changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from orbit.errors import OrbitError, PathFailed, PathUnavailable, Unquiesced


class Phase(enum.IntEnum):
    PLAN = 1  # capacity is reserved
    PATH = 2  # queue pairs are connected: the cells of it find none
    BIND = 3
    RECEIVE = 4  # posted for the receipt
    PUBLISH = 5
    HOLD = 6  # no payload before every grant is there
    PAYLOAD = 7
    RECEIPT = 8  # on its way
    MATCH = 9  # arrived, and not seen yet
    END = 10  # matched: DONE, and its answer


class Role(enum.StrEnum):
    SOURCE = "source"
    REQUESTER = "requester"


class Fault(enum.StrEnum):
    PARTIAL = "partial post"  # the device says where it stopped
    UNCOUNTED = "partial, uncounted"  # it cannot say
    LOST = "lost"
    LATE = "late"  # after every deadline
    DUPLICATE = "duplicate"
    FOREIGN = "foreign"
    ERROR = "error"
    DESTROY = "failed destroy"


@dataclass(frozen=True, slots=True)
class Expected:
    """`stage`, `error`: of the parent; without a stage it succeeds. `other`: of a transfer that the
    fault hits on the same queue pair. `pairs`: queue pairs charged afterwards at source and
    requester, of three each. `kept`: what is retained at the role that was hit.
    """

    stage: str = ""
    error: type[OrbitError] | None = None
    other: type[OrbitError] | None = None
    pairs: tuple[int, int] = (3, 3)
    kept: tuple[str, ...] = ()


# What is kept: of the two grants on the rail that is hit, or of that other transfer.
_PAIR = ("queue pair",)
_GRANT, _GRANTS = ("grant", *_PAIR), ("grant", "grant", *_PAIR)
_TARGET, _TARGETS = ("local memory", *_PAIR), ("local memory", "local memory", *_PAIR)

LEGEND: dict[str, tuple[str, Expected]] = {
    "=": ("nothing changes", Expected()),
    # The source. Its failed exposure costs the queue pairs of all that was bound for it, on either
    # rail, because a bound window is given up in no other way.
    "R": ("refused, by proof", Expected("expose", PathUnavailable, pairs=(1, 1))),
    "U": ("refused, unproven", Expected("expose", PathUnavailable, None, (2, 1), _GRANTS)),
    "r": ("refused, pair kept", Expected("expose", PathUnavailable, None, (2, 1), _PAIR)),
    "p": ("no pair to plan on", Expected("expose", PathUnavailable, None, (3, 2), _PAIR)),
    # Who does not choose a rail goes to the other one: one more pair on both sides.
    "c": ("no pair, one kept", Expected("connect", PathUnavailable, None, (4, 3), _PAIR)),
    # The move fails. What the other rail was granted goes back by its receipt if it was taken on.
    "M": ("move fails", Expected("move", PathFailed, pairs=(2, 2))),
    "m": ("move never begins", Expected("move", PathFailed, pairs=(1, 1))),
    "o": ("as m, by another bind", Expected("move", PathFailed, PathUnavailable, (1, 1))),
    "O": ("as M, by another bind", Expected("move", PathFailed, PathUnavailable, (2, 2))),
    "d": ("move fails, pair kept", Expected("move", PathFailed, None, (3, 2), _PAIR)),
    "e": ("as m, pair kept", Expected("move", PathFailed, None, (2, 1), _PAIR)),
    # All bytes have moved, and the receipts did not all come.
    "D": ("DONE refused", Expected("done", PathFailed, pairs=(2, 2))),
    "V": ("DONE unproven", Expected("done", Unquiesced, None, (3, 2), _GRANTS)),
    "v": ("one grant unproven", Expected("done", Unquiesced, None, (3, 2), _GRANT)),
    "k": ("DONE refused, pair kept", Expected("done", PathFailed, None, (3, 2), _PAIR)),
    # All receipts were matched: only somebody else is hit.
    "n": ("another bind refused", Expected(other=PathUnavailable, pairs=(2, 2))),
    "u": ("another bind unproven", Expected("", None, PathUnavailable, (3, 2), _GRANT)),
    "q": ("pair kept", Expected(pairs=(3, 2), kept=_PAIR)),
    # The requester.
    "K": ("move unproven", Expected("move", Unquiesced, None, (2, 3), _TARGETS)),
    "L": ("one part unproven", Expected("move", Unquiesced, None, (3, 3), _TARGET)),
    "A": ("receipt taken, pair lost", Expected(pairs=(3, 2))),
    "l": ("move fails, grants returned", Expected("move", PathFailed, pairs=(3, 2))),
    "P": ("another move, returned", Expected(other=PathFailed, pairs=(3, 2))),
    "N": ("another move fails", Expected(other=PathFailed, pairs=(2, 2))),
    "W": ("another move unproven", Expected("", None, Unquiesced, (3, 3), _TARGET)),
    "C": ("no pair, one kept", Expected("connect", PathUnavailable, None, (3, 4), _PAIR)),
    "E": ("as m, pair kept", Expected("move", PathFailed, None, (1, 2), _PAIR)),
    "F": ("move fails, pair kept", Expected("move", PathFailed, None, (2, 3), _PAIR)),
    "Q": ("pair kept", Expected(pairs=(3, 3), kept=_PAIR)),
}

# One column for each phase, in order.
GRID: dict[Role, dict[Fault, str]] = {
    Role.SOURCE: {
        Fault.PARTIAL: "R R R R o o O O n n",
        Fault.UNCOUNTED: "R R R R o o O O n n",
        Fault.LOST: "R R R D D D D D D n",
        Fault.LATE: "U U U V V V V V v u",
        Fault.DUPLICATE: "= = = = = = = = = =",
        Fault.FOREIGN: "= = = = = = = = = =",
        Fault.ERROR: "R R R M M m M M D n",
        Fault.DESTROY: "p c r r d e d d k q",
    },
    Role.REQUESTER: {
        Fault.PARTIAL: "M M M M M M M M N N",
        Fault.UNCOUNTED: "M M M M M M M M N N",
        Fault.LOST: "l l l l l l l A A P",
        Fault.LATE: "K K K K K K K L Q W",
        Fault.DUPLICATE: "= = = = = = = = = =",
        Fault.FOREIGN: "= = = = = = = = = =",
        Fault.ERROR: "M M M M M M M M A N",
        Fault.DESTROY: "E C E E E E F F Q Q",
    },
}


@dataclass(frozen=True, slots=True)
class Cell:
    role: Role
    phase: Phase
    fault: Fault
    letter: str

    @property
    def expected(self) -> Expected:
        return LEGEND[self.letter][1]

    def __str__(self) -> str:
        return f"{self.role}-{self.phase.name.lower()}-{self.fault.name.lower()}"


def cells() -> Iterator[Cell]:
    for role, rows in GRID.items():
        for fault, row in rows.items():
            letters = row.split()
            for phase in Phase:
                yield Cell(role, phase, fault, letters[phase - 1])


def render(seen: dict[Cell, str]) -> str:
    """The grid of what was seen, by letter, with its legend; `seen` has every cell."""
    lines = []
    for role in Role:
        heads = " ".join(f"{phase.name.lower():8}" for phase in Phase)
        lines.append(f"{role:20} {heads}")
        for fault in Fault:
            row = [seen[cell] for cell in cells() if (cell.role, cell.fault) == (role, fault)]
            lines.append(f"{fault:20} " + " ".join(f"{letter:8}" for letter in row))
    lines += [
        f"{letter}  {text}: {_facts(expected)}" for letter, (text, expected) in LEGEND.items()
    ]
    return "\n".join(lines)


def _facts(expected: Expected) -> str:
    ends = f"{expected.stage} {expected.error.__name__}" if expected.error else "success"
    other = f"; another {expected.other.__name__}" if expected.other else ""
    kept = f"; kept {', '.join(expected.kept)}" if expected.kept else ""
    return f"{ends}{other}; {expected.pairs[0]}+{expected.pairs[1]} queue pairs{kept}"
