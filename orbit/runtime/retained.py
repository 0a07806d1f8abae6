"""Memory whose end of access could not be proven: kept for the life of the process, and listed.

Freeing it could let a device write into memory that has another owner by then, so nothing but a
late proof takes it off this list. It outlives the node that put it there, which is why it is the
process's.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from ..errors import Unquiesced

_log = logging.getLogger("orbit")
# Reentrant: a garbage collection within may drop a region's guard, which may have to keep memory.
_lock = threading.RLock()


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

    def __reduce__(self) -> tuple[object, ...]:
        # A report may travel; what it reports of stays.
        return Retained, (self.what, self.nbytes, self.cause, self.since, None)


_kept: list[Retained] = []


def retain(error: Unquiesced, holder: object) -> Retained:
    """Keep `holder` (whatever keeps the memory alive) until `proven`, or for ever."""
    entry = Retained(error.what, error.retained_bytes, error.cause, time.monotonic(), holder)
    with _lock:
        _kept.append(entry)
    _log.error("%s", error, extra={"event": "memory_retained"})
    return entry


def proven(entry: Retained) -> None:
    """Another attempt has proven the end of access: the memory is not held here any more."""
    with _lock:
        _kept.remove(entry)


def retained() -> tuple[Retained, ...]:
    """Everything kept so far, oldest first."""
    with _lock:
        return tuple(_kept)
