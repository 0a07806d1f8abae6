"""Plans refuse what measures nothing, and travel between the ends."""

from __future__ import annotations

from typing import Any

import pytest

from orbit.bench.plan import Plan, Verb, Verify
from orbit.errors import UsageError
from orbit.model import Transport


def plan(**changes: Any) -> Plan:
    return Plan(**{"verb": Verb.GET, "sizes": (4096,), "iterations": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": ()}, "at least one"),
        ({"sizes": (0,)}, "of 1 to"),
        ({"batch": 0}, "batch=0"),
        ({"inflight": 0}, "inflight=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"batch": float("nan")}, "batch=nan"),
        ({"inflight": 4097}, "inflight=4097"),
        ({"inflight": 65, "batch": 64}, "inflight times batch is 4160"),
        ({"seed": 1 << 64}, "seed="),
        ({"sizes": (4096.0,)}, "of 1 to"),
        ({"iterations": 0}, "iterations=0"),
        ({"iterations": 1.5}, "iterations=1.5"),
        ({"iterations": None}, "either iterations or a duration"),
        ({"duration": 1.0}, "either iterations or a duration"),
        ({"iterations": None, "duration": float("nan")}, "number of seconds"),
        ({"iterations": None, "duration": float("inf")}, "number of seconds"),
        ({"verb": Verb.READ}, "no automatic transport"),
    ],
)
def test_what_measures_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(**changes)


def test_a_plan_survives_its_journey() -> None:
    sent = plan(verb=Verb.WRITE, sizes=(1, 2), transport=Transport.TCP, verify=Verify.FULL, seed=7)
    assert Plan.from_json(sent.to_json()) == sent


@pytest.mark.parametrize("change", [{"verb": "guess"}, {"more": 1}, {"sizes": None}])
def test_a_plan_of_another_version_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Plan.from_json(plan().to_json() | change)
