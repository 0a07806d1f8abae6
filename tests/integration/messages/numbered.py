"""Numbered messages, and the oracle that their receiver keeps: in order, whole, once.

A sender's *stream of numbers* is named by the header `by`; gaps are noted, since a sender may have
been told of them, while a number that comes late, twice or damaged is a mistake of orbit's.
"""

from __future__ import annotations

from functools import lru_cache

import orbit
from orbit.testing.pattern import pattern

NUMBER_BYTES = 8
_SEEDS = 13


@lru_cache(maxsize=256)
def _filling(nbytes: int, seed: int) -> bytes:
    return pattern(nbytes, seed)


def payload_of(number: int, nbytes: int) -> bytes:
    """A payload of `nbytes` in which `number` can be read."""
    return number.to_bytes(NUMBER_BYTES, "big") + _filling(nbytes - NUMBER_BYTES, number % _SEEDS)


class Oracle:
    """What arrived, by sender's name. Its `take` is a plain handler."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {}
        self.wrong: list[str] = []

    def take(self, message: orbit.Message) -> None:
        by = message.headers.get("by", "")
        number = int.from_bytes(message.payload[:NUMBER_BYTES], "big")
        numbers = self.numbers.setdefault(by, [])
        if numbers and number <= numbers[-1]:
            self.wrong.append(f"{by}: {number} after {numbers[-1]}")
        if message.payload != payload_of(number, len(message.payload)):
            self.wrong.append(f"{by}: {number} is damaged")
        numbers.append(number)

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers.values()))

    def check(self, sent: dict[str, list[int]]) -> None:
        """Exactly these arrived, in this order."""
        assert not self.wrong, self.wrong[:5]
        assert self.numbers == sent
