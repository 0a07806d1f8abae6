"""Runs against the pieces of a span: every byte in exactly one part, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import PathUnavailable
from orbit.model import PathReason
from orbit.protocol.messages import SliceRun
from orbit.testing.pattern import pattern
from orbit.transport.interface import Span
from orbit.verbs.source_runs import parts_of_array, parts_of_runs


def span_of(sizes: list[int]) -> Span:
    data = memoryview(pattern(sum(sizes)))
    pieces, at = [], 0
    for size in sizes:
        pieces.append(Span(data[at : at + size]))
        at += size
    return Span(pieces[0].view, None, tuple(pieces[1:]))


def borders(sizes: list[int]) -> set[int]:
    return {sum(sizes[:place]) for place in range(1, len(sizes))}


@given(st.data())
def test_parts_are_cut_where_either_side_has_a_border(data: st.DataObject) -> None:
    runs = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    total = sum(runs)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=8)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    parts = parts_of_runs(span_of(sizes), [SliceRun(n, size) for n, size in enumerate(runs)])
    assert b"".join(bytes(piece.view) for _, piece in parts) == bytes(pattern(total))
    assert all(piece.view.nbytes and not piece.rest for _, piece in parts)
    for number, size in enumerate(runs):
        assert sum(piece.view.nbytes for array, piece in parts if array == number) == size
    lengths = [piece.view.nbytes for _, piece in parts]
    inner = (borders(sizes) | borders(runs)) - {0, total}
    assert borders(lengths) == inner


@pytest.mark.parametrize("runs", [[], [5], [5, 6], [10, 0], [11]])
def test_what_does_not_cover_is_refused(runs: list[int]) -> None:
    with pytest.raises(PathUnavailable) as caught:
        parts_of_runs(span_of([4, 6]), [SliceRun(0, size) for size in runs])
    assert caught.value.reason == PathReason.NO_OFFER


def test_one_array_takes_every_piece_that_has_bytes() -> None:
    parts = parts_of_array(span_of([0, 3, 0, 4]), 7)
    assert [(array, piece.view.nbytes) for array, piece in parts] == [(7, 3), (7, 4)]
