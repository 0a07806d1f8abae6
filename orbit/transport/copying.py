"""Copies between memories of this process that do not hold up the event loop.

It stands here because the shells above, runtime and verbs, both copy and never see each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from .interface import Span, Target

# A gigabyte takes a quarter of a second; the lease renewals of others must not wait that long.
_STEP_BYTES = 8 << 20


async def copy_bytes(source: memoryview, target: memoryview) -> None:
    """All of `source` into `target`, of the same size. Up to 8 MiB nothing else runs meanwhile;
    cancelling a longer copy leaves a part of it done.
    """
    for offset in range(0, source.nbytes, _STEP_BYTES):
        if offset:
            await asyncio.sleep(0)
        target[offset : offset + _STEP_BYTES] = source[offset : offset + _STEP_BYTES]


async def copy_pieces(source: Span, target: Span | Target) -> None:
    """As `copy_bytes`, of any pieces; `target` may be longer."""
    done = 0
    for part, place in _overlaps(source, target):
        for offset in range(0, part.nbytes, _STEP_BYTES):
            if done >= _STEP_BYTES:
                done = 0
                await asyncio.sleep(0)
            piece = part[offset : offset + _STEP_BYTES]
            place[offset : offset + _STEP_BYTES] = piece
            done += piece.nbytes


def copy_now(source: Span, target: Span | Target) -> None:
    """As `copy_pieces`, without a pause: for what is small."""
    for part, place in _overlaps(source, target):
        place[:] = part


def _overlaps(source: Span, target: Span | Target) -> Iterator[tuple[memoryview, memoryview]]:
    """The source cut at the borders of both, and where each part goes."""
    places: Iterator[Span | Target] = iter(target.pieces)
    place = next(places).view
    for piece in source.pieces:
        rest = piece.view
        while rest.nbytes:
            while not place.nbytes:
                place = next(places).view
            count = min(rest.nbytes, place.nbytes)
            yield rest[:count], place[:count]
            rest, place = rest[count:], place[count:]
