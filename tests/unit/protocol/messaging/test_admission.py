"""Admission: both bounds, the line behind them, and conservation under any sequence of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import BudgetExceeded, InternalError
from orbit.protocol.messaging import admission
from orbit.protocol.messaging.admission import Admission


def test_the_bound_in_frames() -> None:
    gate: Admission[str] = Admission(2, 100)
    assert gate.admit(1)
    assert gate.admit(1)
    assert not gate.admit(1)
    error = gate.refusal("peer", 1)
    assert (error.knob, error.limit, error.charged) == ("messaging.queue_frames", 2, 2)
    gate.release(1)
    assert gate.admit(1)


def test_the_bound_in_bytes_at_its_edge() -> None:
    gate: Admission[str] = Admission(10, 100)
    assert gate.admit(60)
    assert not gate.admit(41)
    assert gate.refusal("peer", 41).knob == "messaging.queue_bytes"
    assert gate.admit(40)
    assert (gate.frames, gate.nbytes) == (2, 100)


def test_a_frame_above_the_whole_bound_passes_alone() -> None:
    gate: Admission[str] = Admission(10, 100)
    assert gate.admit(101)
    assert not gate.admit(1)
    gate.release(101)
    assert gate.admit(1)
    assert not gate.admit(101)


def test_nobody_passes_those_who_wait() -> None:
    gate: Admission[str] = Admission(1, 100)
    assert gate.admit(1)
    gate.wait("first", 1)
    gate.wait("second", 1)
    assert gate.next_ready() is None
    gate.release(1)
    assert not gate.admit(1), "there is room, but it is the first one's"
    assert gate.next_ready() == "first"
    assert gate.next_ready() is None
    assert gate.withdraw("second")
    assert not gate.withdraw("second")
    gate.release(1)
    assert gate.admit(1)


def test_a_look_takes_no_room() -> None:
    gate: Admission[str] = Admission(1, 100)
    assert gate.admit(1)
    gate.look("looks")
    gate.wait("waits", 1)
    gate.release(1)
    assert gate.next_ready() == "looks"
    assert gate.frames == 0
    assert gate.next_ready() == "waits"
    assert gate.frames == 1


def test_fail_all_empties_the_line_only() -> None:
    gate: Admission[str] = Admission(1, 100)
    assert gate.admit(1)
    gate.wait("a", 1)
    gate.look("b")
    assert gate.fail_all() == ["a", "b"]
    assert (gate.waiting, gate.frames) == (0, 1)


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WAITERS_MAX", 1)
    gate: Admission[str] = Admission(1, 100)
    assert gate.admit(1)
    gate.wait("a", 1)
    with pytest.raises(BudgetExceeded):
        gate.wait("b", 1)


def test_a_double_release_is_a_bug() -> None:
    with pytest.raises(InternalError):
        Admission[str](1, 100).release(1)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("awrxp"), st.integers(0, 60)), max_size=60),
)
def test_bounds_and_order_hold(frames_max: int, steps: list[tuple[str, int]]) -> None:
    gate: Admission[int] = Admission(frames_max, 100)
    held: list[int] = []
    line: list[tuple[int, int]] = []
    for number, (step, nbytes) in enumerate(steps):
        if step == "a" and gate.admit(nbytes):
            assert not line
            held.append(nbytes)
        elif step == "w":
            gate.wait(number, nbytes)
            line.append((number, nbytes))
        elif step == "r" and held:
            gate.release(held.pop(0))
        elif step == "x" and line:
            assert gate.withdraw(line.pop(nbytes % len(line))[0])
        elif step == "p":
            while (ticket := gate.next_ready()) is not None:
                expected, size = line.pop(0)
                assert ticket == expected
                held.append(size)
        assert (gate.frames, gate.nbytes, gate.waiting) == (len(held), sum(held), len(line))
        assert gate.frames <= frames_max
        assert gate.nbytes <= 100
    for size in held:
        gate.release(size)
    rest = []
    while (ticket := gate.next_ready()) is not None:
        rest.append(ticket)
        gate.release(dict(line)[ticket])
    assert rest == [number for number, _ in line]
