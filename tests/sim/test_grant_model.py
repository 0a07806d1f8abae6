"""Grants that share one queue pair, in every order of events within a bound of faults.

The wide bounds take minutes: they replace the fast ones when ORBIT_SOAK is set (`make soak`).
"""

from __future__ import annotations

import os

import pytest

from orbit.model import Direction
from orbit.testing.grant_explorer import explore
from orbit.testing.grant_world import GrantWorld

FAST = [(2, 0, 2), (2, 1, 2), (1, 3, 1)]
WIDE = [(2, 2, 1), (2, 2, 2), (1, 5, 2), (3, 1, 1)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("grants", "faults", "pieces"), WIDE if os.environ.get("ORBIT_SOAK") == "1" else FAST
)
def test_siblings_keep_the_rules_in_every_order(
    grants: int, faults: int, pieces: int, direction: Direction
) -> None:
    counts = explore(GrantWorld(grants, faults, pieces, direction))
    assert counts["final"] > 0
    assert counts["moves"] > counts["states"]
