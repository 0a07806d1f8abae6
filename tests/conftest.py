"""Fixtures that every kind of test shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

LOOP_KINDS = ("asyncio", "uvloop")

# On a busy machine a time limit on one example is a coin toss; test runs have their own limits.
settings.register_profile(
    "orbit", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("orbit")


@pytest.fixture
def loop_kind() -> str:
    """Which event loop `run_async` uses; contract suites parametrize it over LOOP_KINDS."""
    return "asyncio"


@pytest.fixture
def run_async(loop_kind: str) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run one coroutine to its end on the loop of this test."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        if loop_kind == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        else:
            factory = asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coroutine)

    return run
