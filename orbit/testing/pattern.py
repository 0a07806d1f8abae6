"""Payloads for tests and demos: bytes whose pattern has no power-of-two period, so that a slice
that lands at the wrong offset never looks right by accident.
"""

from __future__ import annotations

from typing import Final

PERIOD: Final = 251 * 257


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """`nbytes` bytes, byte i being (j % 251) ^ ((j // 251) % 257 & 0xff) with j = i + seed."""
    start = seed % PERIOD
    block = _BLOCK[start:] + _BLOCK[:start]
    whole, rest = divmod(nbytes, PERIOD)
    return block * whole + block[:rest]


_BLOCK = bytes((j % 251) ^ ((j // 251) % 257 & 0xFF) for j in range(PERIOD))
