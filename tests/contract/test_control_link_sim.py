"""SimLink against the contract of ControlLink, on the virtual clock, with several seeds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from orbit.testing.clock import run_virtual
from orbit.testing.contracts import LINK_CASES, check_control_link
from orbit.testing.network import SimLink, SimNetwork


@pytest.mark.parametrize("case", LINK_CASES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_simulated(case: str, seed: int) -> None:
    @contextlib.asynccontextmanager
    async def open_pair() -> AsyncIterator[tuple[SimLink, SimLink]]:
        left, right = SimNetwork(seed).link_pair()
        yield left, right
        left.abort()
        right.abort()

    run_virtual(check_control_link(case, open_pair))
