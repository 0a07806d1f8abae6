"""Naps on several lanes, one after the other: what was posted together may complete on more than
one completion queue. What a nap is, and when it pays, is the lane's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from .lane import Lane


def nap_until_done(waits: Iterable[tuple[Lane, asyncio.Future[None]]], nap_us: int) -> None:
    """Until each of the futures, which end with completions of their lane, is done; on each lane
    for about `nap_us` at most.
    """
    by_lane: dict[Lane, list[asyncio.Future[None]]] = {}
    for lane, future in waits:
        by_lane.setdefault(lane, []).append(future)
    for lane, futures in by_lane.items():
        if not _all_done(futures):
            lane.nap(partial(_all_done, futures), nap_us)


def _all_done(futures: Iterable[asyncio.Future[None]]) -> bool:
    return all(future.done() for future in futures)
