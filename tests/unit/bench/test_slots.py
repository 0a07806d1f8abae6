"""The memory of one size: where pieces lie, how much it may be, and how it is filled."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from orbit.bench import aside as aside_module
from orbit.bench.aside import Aside
from orbit.bench.pattern import Pattern
from orbit.bench.plan import Plan, Verb, Verify
from orbit.bench.slots import Slots, check_memory
from orbit.errors import UsageError


def test_a_plan_for_more_memory_than_is_left_is_refused(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64 kB\nMemAvailable: 16 kB\n")
    plan = Plan(verb=Verb.GET, sizes=(8192,), iterations=1)
    check_memory(plan, meminfo=meminfo)
    with pytest.raises(UsageError, match="32768 bytes of memory here, and 16384 are left"):
        check_memory(plan, ends=2, meminfo=meminfo)
    check_memory(plan, ends=1 << 40, meminfo=tmp_path / "absent")


@pytest.mark.parametrize("small", [True, False])
def test_much_is_a_threads_work(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    monkeypatch.setattr(aside_module, "_AT_ONCE_MAX", 10)
    aside = Aside()
    ran_in = asyncio.run(aside.run(10 if small else 11, threading.get_ident))
    assert (ran_in == threading.get_ident()) is small
    assert aside.cpu_s > 0


def test_all_pieces_are_filled_as_of_the_first_turn() -> None:
    slots = Slots(workers=2, batch=2, size=5000, pattern=Pattern(3))
    asyncio.run(slots.fill_all())
    for worker in range(2):
        for item, piece in enumerate(slots.pieces(worker)):
            assert Pattern(3).differs(piece, slots.number(worker, 0, item), Verify.FULL) is None
