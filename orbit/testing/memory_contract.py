"""The contract of PinnedMemory as a suite that every implementation passes, run by
`check_pinned_memory`.

An implementation gives a factory that opens memory with given limits. The cases are in
memory_pool_cases, memory_registration_cases and memory_end_cases; what they work with is in
memory_rig. What is asserted is what the budget, the statistics and the handed out buffers show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .leftovers import nothing_left
from .memory_end_cases import END_CASES
from .memory_pool_cases import POOL_CASES
from .memory_registration_cases import REGISTRATION_CASES
from .memory_rig import MemoryCase, MemoryRig, OpenMemory, PoolSettings

__all__ = ["MEMORY_CASES", "MemoryRig", "OpenMemory", "PoolSettings", "check_pinned_memory"]

MEMORY_CASES: Final[Mapping[str, MemoryCase]] = {
    case.__name__: case for case in (*POOL_CASES, *REGISTRATION_CASES, *END_CASES)
}


async def check_pinned_memory(case: str, open_memory: OpenMemory) -> None:
    """Run one of MEMORY_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left():
        await MEMORY_CASES[case](open_memory)
