"""Copies between memories of this process that do not hold up the event loop."""

from __future__ import annotations

import asyncio

# A gigabyte takes a quarter of a second; the lease renewals of others must not wait that long.
_STEP_BYTES = 8 << 20


async def copy_bytes(source: memoryview, target: memoryview) -> None:
    """All of `source` into `target`, of the same size. Up to 8 MiB nothing else runs meanwhile;
    cancelling a longer copy leaves a part of it done.
    """
    for offset in range(0, source.nbytes, _STEP_BYTES):
        if offset:
            await asyncio.sleep(0)
        target[offset : offset + _STEP_BYTES] = source[offset : offset + _STEP_BYTES]
