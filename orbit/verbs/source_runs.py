"""How the bytes of one lease are divided among arrays: runs of the requester's choice, cut where a
piece of the span ends.

Pure arithmetic over views. It opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PathUnavailable
from ..model import PathName, PathReason
from ..protocol.messages import SliceRun
from ..transport.interface import Span
from ..transport.pieces import cut_span

ArrayPart = tuple[int, Span]  # the array, and one piece that has bytes


def parts_of_array(span: Span, array: int) -> list[ArrayPart]:
    """All of it through one array."""
    return [(array, piece) for piece in span.pieces if piece.view.nbytes]


def parts_of_runs(span: Span, runs: Sequence[SliceRun]) -> list[ArrayPart]:
    """In payload order. Raises PathUnavailable (no_offer) unless the runs cover the span."""
    covered = sum(run.nbytes for run in runs)
    if covered != span.nbytes or not all(run.nbytes > 0 for run in runs):
        detail = f"{len(runs)} runs cover {covered} of {span.nbytes} bytes"
        raise PathUnavailable(PathName.RDMA, PathReason.NO_OFFER, detail)
    pieces = [piece for piece in span.pieces if piece.view.nbytes]
    parts: list[ArrayPart] = []
    place = offset = 0  # within the pieces
    for run in runs:
        left = run.nbytes
        while left:
            piece = pieces[place]
            taken = min(left, piece.view.nbytes - offset)
            alone = Span(piece.view, piece.pinned)
            parts.append((run.array, cut_span(alone, offset, taken)))
            left -= taken
            offset += taken
            if offset == piece.view.nbytes:
                place, offset = place + 1, 0
    return parts
