"""Every class of faults at each phase of a grant in both roles, for READs and for WRITEs."""

from __future__ import annotations

import gc

import pytest

from orbit.model import Direction
from orbit.testing.clock import run_virtual
from tests.unit.verbs.faults.drive import run_cell
from tests.unit.verbs.faults.matrix import Cell, Fault, Phase, Role, cells, render

CELLS = list(cells())
_seen: dict[tuple[Cell, Direction], str] = {}


def test_no_cell_is_left_out() -> None:
    assert len(CELLS) == len(Role) * len(Phase) * len(Fault) == 160
    assert len({str(cell) for cell in CELLS}) == 160


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.name.lower())
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_fault(cell: Cell, direction: Direction) -> None:
    _seen[cell, direction] = run_virtual(run_cell(cell, direction))


def test_the_matrix_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs what the selection of this run has left out, and prints all of it."""
    gc.collect()
    for direction in Direction:
        for cell in CELLS:
            if (cell, direction) not in _seen:
                _seen[cell, direction] = run_virtual(run_cell(cell, direction))
        print(f"\n{direction.name}")
        print(render({cell: _seen[cell, direction] for cell in CELLS}))
