"""What one operation of each verb is, at the client: one class for each way to move bytes, all of
one shape.

The server has offered what it works with (offers.py); the clock is measuring.py's.
"""

from __future__ import annotations

from ..plan import Plan, Verb
from .handles import Gets, Puts
from .messages import Messages
from .ranges import Ranges
from .shape import Asking, Bench, Workload

__all__ = ["Asking", "Bench", "Workload", "workload_of"]


def workload_of(plan: Plan, bench: Bench) -> Workload:
    """For one size. `open` it before the first operation, `close` it in any case."""
    if plan.verb.of_messages:
        return Messages(plan, bench)
    if plan.verb.of_engine:
        return Ranges(plan, bench)
    return Puts(plan, bench) if plan.verb is Verb.PUT else Gets(plan, bench)
