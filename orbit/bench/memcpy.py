"""How fast one processor of this host copies memory: what no copying transport can exceed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

_BYTES_MIN: Final = 64 << 10  # below it the interpreter would be measured
_BYTES_MAX: Final = 64 << 20
_COPIES_MIN: Final = 5
_FOR_S: Final = 0.03


def memcpy_rates(sizes: Iterable[int]) -> dict[int, float]:
    """Bytes a second for each size: what fits a cache is copied faster than what does not."""
    measured: dict[int, float] = {}
    found = {}
    for size in sizes:
        nbytes = min(max(size, _BYTES_MIN), _BYTES_MAX)
        if nbytes not in measured:
            measured[nbytes] = memcpy_rate(nbytes)
        found[size] = measured[nbytes]
    return found


def memcpy_rate(nbytes: int = _BYTES_MAX) -> float:
    """Bytes a second of the fastest of several copies of so many bytes."""
    source, target = memoryview(bytearray(b"x") * nbytes), memoryview(bytearray(nbytes))
    target[:] = source  # brings the pages in
    best, copies, until = float("inf"), 0, time.perf_counter() + _FOR_S
    while copies < _COPIES_MIN or time.perf_counter() < until:
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
        copies += 1
    return nbytes / best
