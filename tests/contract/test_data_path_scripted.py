"""RdmaPath on the scripted device against the contracts of DataPath and RailedPath: by the
specification and in rxe mode, into pinned memory and into the caller's own, on both event loops.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from orbit.testing.contracts import PATH_CASES, RAIL_CASES, check_data_path, check_railed_path
from tests.contract.rdma_pairs import ScriptedPair, rdma_pair

# Every value of each parameter, and every pair of them once.
VARIANTS = [
    pytest.param("asyncio", False, True, id="asyncio-specification-pinned"),
    pytest.param("asyncio", True, False, id="asyncio-rxe-unpinned"),
    pytest.param("uvloop", False, False, id="uvloop-specification-unpinned"),
    pytest.param("uvloop", True, True, id="uvloop-rxe-pinned"),
]


@pytest.mark.parametrize("case", PATH_CASES)
@pytest.mark.parametrize(("loop_kind", "rxe", "pinned"), VARIANTS)
def test_scripted(case: str, pinned: bool, rxe: bool, run_async: Callable[..., Any]) -> None:
    @contextlib.asynccontextmanager
    async def open_pair() -> AsyncIterator[ScriptedPair]:
        async with rdma_pair(rxe=rxe, pinned_targets=pinned) as pair:
            yield pair

    run_async(check_data_path(case, open_pair))


@pytest.mark.parametrize("case", RAIL_CASES)
@pytest.mark.parametrize(("loop_kind", "rxe", "pinned"), VARIANTS)
def test_scripted_rails(case: str, pinned: bool, rxe: bool, run_async: Callable[..., Any]) -> None:
    @contextlib.asynccontextmanager
    async def open_pair() -> AsyncIterator[ScriptedPair]:
        async with rdma_pair(rxe=rxe, pinned_targets=pinned, rails=2) as pair:
            yield pair

    run_async(check_railed_path(case, open_pair))
