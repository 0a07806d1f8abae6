"""What a test must not leave behind: tasks of the event loop and open file descriptors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_FD_FOLDER = Path("/proc/self/fd")


def open_descriptors() -> frozenset[str]:
    """What each open descriptor refers to, with its number. Empty off Linux."""
    found = []
    for entry in _FD_FOLDER.iterdir() if _FD_FOLDER.is_dir() else ():
        try:
            found.append(f"{entry.name} -> {os.readlink(entry)}")
        except OSError:  # the descriptor of this very listing
            continue
    # libuv keeps a spare one for the day when there are no more.
    return frozenset(name for name in found if not name.endswith("-> /dev/null"))


@asynccontextmanager
async def nothing_left(settle_rounds: int = 20) -> AsyncIterator[None]:
    """Assert that the body ended what it started. Gives the loop `settle_rounds` turns to do so."""
    before, tasks = open_descriptors(), asyncio.all_tasks()
    yield
    for _ in range(settle_rounds):
        await asyncio.sleep(0)
    new_tasks = asyncio.all_tasks() - tasks
    assert not new_tasks, f"tasks left: {new_tasks}"
    new = open_descriptors() - before
    assert not new, f"descriptors left: {sorted(new)}"
