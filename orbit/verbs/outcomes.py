"""Futures and tasks whose end may come before anybody waits for it, or after nobody does any more.

Shared by the shells of both grant machines and by the queue pair. It knows none of them.
"""

from __future__ import annotations

import asyncio

from ..errors import OrbitError


def settle(future: asyncio.Future[None], error: OrbitError | None = None) -> None:
    """End it once, well or with `error`; a second end changes nothing."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # seen: nobody may be waiting


def take_exception(future: asyncio.Future[None]) -> None:
    """A done callback: an error that nobody awaits is not reported as forgotten."""
    if not future.cancelled():
        future.exception()
