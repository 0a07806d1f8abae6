"""Waiting in tests for what no event announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Look at `condition` every millisecond until it holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (the watched object knows nothing of tests)
            await asyncio.sleep(0.001)
