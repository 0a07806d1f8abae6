"""Cutting spans, targets and registered ranges: bytes in several pieces as if they were one.

Slices hold what they were cut from alive, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ..errors import OutOfRange, UsageError
from ..model import Address
from .interface import PinnedBuffer, Span, Target

_PieceT = TypeVar("_PieceT", Span, Target)


def join_spans(pieces: Sequence[Span]) -> Span:
    """One span of all their pieces, in order, without empty ones. Raises UsageError for none."""
    flat = [piece for span in pieces for piece in span.pieces]
    return _joined(Span, flat)


def join_targets(pieces: Sequence[Target]) -> Target:
    """As `join_spans`, of targets."""
    flat = [piece for target in pieces for piece in target.pieces]
    return _joined(Target, flat)


def cut_span(span: Span, offset: int, nbytes: int) -> Span:
    """Those bytes of it, as a span of its own. Raises OutOfRange."""
    check_range(offset, nbytes, span.nbytes)
    return _joined(Span, list(_cut(span.pieces, offset, nbytes)))


def cut_target(target: Target, offset: int, nbytes: int) -> Target:
    """As `cut_span`, of a target."""
    check_range(offset, nbytes, target.nbytes)
    return _joined(Target, list(_cut(target.pieces, offset, nbytes)))


def check_range(offset: int, nbytes: int, total_bytes: int) -> None:
    """Raises OutOfRange unless [offset, offset + nbytes) lies within `total_bytes`. An empty range
    may stand at the end, and not behind it.
    """
    if offset < 0 or nbytes < 0 or offset + nbytes > total_bytes:
        raise OutOfRange(
            f"bytes [{offset}, {offset} + {nbytes}) are not within {total_bytes} bytes"
        )


def _joined(kind: type[_PieceT], flat: Sequence[_PieceT]) -> _PieceT:
    if not flat:
        raise UsageError("no memory was given")
    full = [piece for piece in flat if piece.view.nbytes] or list(flat[:1])
    first = full[0]
    rest = tuple(kind(piece.view, piece.pinned) for piece in full[1:])
    return kind(first.view, first.pinned, rest)


def _cut(pieces: Iterable[_PieceT], offset: int, nbytes: int) -> Iterator[_PieceT]:
    empty: _PieceT | None = None
    start, found = 0, False
    for piece in pieces:
        size = piece.view.nbytes
        low, high = max(offset - start, 0), min(offset + nbytes - start, size)
        if low < high:
            found = True
            yield _part(piece, low, high)
        empty = empty or piece
        start += size
    if not found and empty is not None:
        yield _part(empty, 0, 0)


def _part(piece: _PieceT, low: int, high: int) -> _PieceT:
    if low == 0 and high == piece.view.nbytes:
        return type(piece)(piece.view, piece.pinned)
    pinned = piece.pinned
    if pinned is not None:
        address = Address(pinned.address + low)
        pinned = PinnedBuffer(pinned.view[low:high], address, pinned.arena, pinned.token)
    return type(piece)(piece.view[low:high], pinned)
