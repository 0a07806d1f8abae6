"""Memory whose end of access could not be proven: kept for the life of the process, and listed.

Freeing it could let a device write into memory that has another owner by then, so nothing is ever
taken off this list. It outlives the node that put it there, which is why it is the process's.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from ..errors import Unquiesced

_log = logging.getLogger("orbit")
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """One kept piece: what it was, its size, why, and since when (`time.monotonic`)."""

    what: str
    nbytes: int
    cause: str
    since: float
    holder: object = field(repr=False)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since


_kept: list[Retained] = []


def retain(error: Unquiesced, holder: object) -> Retained:
    """Keep `holder` (whatever keeps the memory alive) for ever."""
    entry = Retained(error.what, error.retained_bytes, error.cause, time.monotonic(), holder)
    with _lock:
        _kept.append(entry)
    _log.error("%s", error)
    return entry


def retained() -> tuple[Retained, ...]:
    """Everything kept so far, oldest first."""
    with _lock:
        return tuple(_kept)
