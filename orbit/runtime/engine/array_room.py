"""How many grants the arrays of queue pairs to a peer have room for: each one needs a receive at
the source until it is over.

The peer's hello says how many that are. Who waits for room is served in order, on each array by
itself. It knows no request and connects nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from ...protocol.messages import SliceRun
from ...transport.interface import Session
from .budgets import SharedBudget

_KNOB = "the peer's rdma.max_send_wr"
_Key = tuple[Session, int]  # and the array's number


def grants_at_once(session: Session) -> int:
    """Grants that one array to that peer can have; 0: it does not say."""
    theirs, ours = session.peer_hello.limits, session.local_hello.limits
    if not theirs.grants_max or not theirs.bulk_width:
        return 0
    width = min(theirs.bulk_width, ours.bulk_width or theirs.bulk_width)
    return max(1, theirs.grants_max * width // theirs.bulk_width)


class ArrayRoom:
    """For all parents of one engine."""

    def __init__(self) -> None:
        self._budgets: dict[_Key, SharedBudget] = {}

    @property
    def in_use(self) -> int:
        """Grants, on all arrays together."""
        return sum(budget.use.in_use for budget in self._budgets.values())

    async def take(
        self,
        session: Session,
        ranges: Sequence[int],
        runs: Sequence[SliceRun],
        deadline: float | None,
    ) -> contextlib.ExitStack:
        """Room for the grants of those runs over ranges of those sizes; closing what is returned
        gives it back. Waits until `deadline` (loop time). Raises BudgetExceeded (more than an array
        ever has), DeadlineExceeded.
        """
        limit = grants_at_once(session)
        with contextlib.ExitStack() as holds:
            # In one order, so that no two parents wait for each other.
            for array, count in sorted(_grants_by_array(ranges, runs).items() if limit else ()):
                key = session, array
                budget = self._budgets.get(key)
                if budget is None:
                    budget = SharedBudget(f"receives of array {array}", limit, _KNOB)
                    self._budgets[key] = budget
                holds.callback(self._forget_unused, key)
                taken = await budget.take(count, deadline)
                holds.callback(taken.give_back)
            return holds.pop_all()

    def _forget_unused(self, key: _Key) -> None:
        budget = self._budgets.get(key)
        if budget is not None and not (budget.use.in_use or budget.use.waiting):
            del self._budgets[key]


def _grants_by_array(ranges: Sequence[int], runs: Sequence[SliceRun]) -> Counter[int]:
    """A grant for each run, and one more for each border of ranges within it."""
    borders = [end for end, size in zip(accumulate(ranges), ranges, strict=True) if size]
    found: Counter[int] = Counter()
    place = at = 0
    for run in runs:
        at += run.nbytes
        found[run.array] += 1
        while place < len(borders) and borders[place] < at:
            found[run.array] += 1
            place += 1
        if place < len(borders) and borders[place] == at:
            place += 1
    return found
