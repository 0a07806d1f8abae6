"""Which bytes a payload has, by seed and number, so that a stale or misplaced one is noticed.

Two payloads whose numbers follow each other differ in every byte, and no shift of one by a power of
two gives it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..testing.pattern import PERIOD, pattern
from .plan import SAMPLE_BYTES, Verify

_STEP: Final = 16 * PERIOD  # what is compared or written at once: about a megabyte
_BYTES: Final = pattern(17 * PERIOD)  # any start within the first period, and one step behind it
_SEED_STEP: Final = 48_271


class Pattern:
    """Of one seed."""

    def __init__(self, seed: int) -> None:
        self._start = seed * _SEED_STEP

    def fill(self, view: memoryview, number: int, verify: Verify = Verify.FULL) -> None:
        """Write those bytes of payload `number` that `verify` compares."""
        for begin, end, start in self._pieces(len(view), number, verify):
            view[begin:end] = _BYTES[start : start + end - begin]

    def differs(self, view: memoryview, number: int, verify: Verify) -> int | None:
        """The place of a byte of `view` that is not payload `number`'s; None: what `verify`
        compares is right.
        """
        for begin, end, start in self._pieces(len(view), number, verify):
            found, right = bytes(view[begin:end]), _BYTES[start : start + end - begin]
            if found != right:
                return begin + next(i for i, byte in enumerate(found) if byte != right[i])
        return None

    def wrong(self, payload: memoryview, size: int, number: int, verify: Verify) -> int | None:
        """As `differs`, of a payload that must have `size` bytes."""
        if len(payload) != size:
            return min(len(payload), size)
        return self.differs(payload, number, verify)

    def _pieces(self, size: int, number: int, verify: Verify) -> Iterator[tuple[int, int, int]]:
        """Begin, end, and where in _BYTES they are."""
        for low, high in compared(size, verify):
            for begin in range(low, high, _STEP):
                yield begin, min(begin + _STEP, high), (self._start + number + begin) % PERIOD


def compared(size: int, verify: Verify) -> tuple[tuple[int, int], ...]:
    """The ranges of an item of `size` bytes that are looked at."""
    if verify is Verify.OFF:
        return ()
    if verify is Verify.FULL or size <= 2 * SAMPLE_BYTES:
        return ((0, size),)
    return (0, SAMPLE_BYTES), (size - SAMPLE_BYTES, size)
