"""Log lines that the same cause would repeat without end: one per key and interval.

A line says how many like it were left out since the one before. Keys come from peers, so their
number is bounded: beyond it the key that was said longest ago is forgotten.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

INTERVAL_S: Final = 60.0
KEYS_MAX: Final = 1024


@dataclass(slots=True)
class _Said:
    at: float
    left_out: int = 0


class LimitedLog:
    """For one event loop, or one thread."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        keys_max: int = KEYS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._keys_max = keys_max
        self._clock = clock
        self._said: OrderedDict[Hashable, _Said] = OrderedDict()  # said longest ago first

    def __len__(self) -> int:
        return len(self._said)

    def warning(self, key: Hashable, message: str, *arguments: object, **fields: object) -> None:
        """Warn, unless `key` was warned of within the interval. `fields` go into structured logs
        (`extra` of logging).
        """
        now = self._clock()
        before = self._said.get(key)
        if before is not None and now - before.at < self._interval_s:
            before.left_out += 1
            return
        if before is not None and before.left_out:
            message += " (%d more since %.0f s ago)"
            arguments = (*arguments, before.left_out, now - before.at)
            fields["left_out"] = before.left_out
        self._said[key] = _Said(now)
        self._said.move_to_end(key)
        if len(self._said) > self._keys_max:
            self._said.popitem(last=False)
        self._logger.warning(message, *arguments, extra=fields)
