"""ArenaPool on scripted devices against the contract of PinnedMemory: one device and two, of which
one refuses, on both event loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orbit.testing.memory_contract import MEMORY_CASES, check_pinned_memory
from tests.contract.pinned_memory_rigs import pools_of


@pytest.mark.parametrize("case", MEMORY_CASES)
@pytest.mark.parametrize(("loop_kind", "devices"), [("asyncio", 2), ("uvloop", 1)])
def test_scripted(case: str, devices: int, run_async: Callable[..., Any]) -> None:
    run_async(check_pinned_memory(case, pools_of(devices)))
