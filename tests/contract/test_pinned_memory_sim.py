"""SimPinnedMemory against the contract of PinnedMemory: a fake that behaves as the real pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orbit.testing.memory_contract import MEMORY_CASES, check_pinned_memory
from tests.conftest import LOOP_KINDS
from tests.contract.pinned_memory_rigs import open_sim


@pytest.mark.parametrize("loop_kind", LOOP_KINDS)
@pytest.mark.parametrize("case", MEMORY_CASES)
def test_sim(case: str, run_async: Callable[..., Any]) -> None:
    run_async(check_pinned_memory(case, open_sim))
