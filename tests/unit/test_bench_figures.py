"""The arithmetic of the benchmark: percentiles, means between two readings, and its rows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = str(Path(__file__).parents[1] / "bench")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its scripts run from their own folder."""
    monkeypatch.setattr(sys, "path", [BENCH, *sys.path])
    yield importlib.import_module("gets")
    for name in ("gets", "ends", "engine", "perftest"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("count", "percent", "found"),
    [(100, 50, 50), (100, 99, 99), (101, 99, 100), (5, 50, 3), (5, 99, 5), (1, 50, 1), (3, 0, 1)],
)
def test_percentiles_are_values_that_occurred(
    bench: Any, count: int, percent: int, found: int
) -> None:
    assert bench.percentile(range(count, 0, -1), percent) == found


def test_a_mean_is_of_what_happened_between_two_readings(bench: Any) -> None:
    before, after = {"bind_s": 1.0, "binds": 10}, {"bind_s": 4.0, "binds": 16}
    assert bench.mean(after, before, "bind_s", "binds") == 0.5
    assert bench.mean(after, {}, "bind_s", "binds") == 0.25
    assert bench.mean(before, before, "bind_s", "binds") == 0
    assert bench.mean({}, {}, "bind_s", "binds") == 0  # a node without RDMA


def test_a_row_has_a_cell_for_each_column(bench: Any) -> None:
    parts = dict.fromkeys((*bench.PARTS, "release", "bind", "receipt"), 1e-6)
    rounds = [bench.Warm([1.0], [2.0], parts, 0.1, 0.2, 3)]
    cells = bench.part_row(rounds).split(" | ")
    assert len(cells) == len(bench.PART_COLUMNS)
    assert cells[0].startswith("2 ")  # prepare and acquire together
    p50, p99, rate = bench.rate_cells(rounds, 4_000_000_000).split(" | ")
    assert p50.startswith("2000000 ")
    assert p99 == "2000000"
    assert rate.startswith("2.000 ")


def test_a_result_of_perftest_is_the_line_that_begins_with_its_size(bench: Any) -> None:
    perftest = importlib.import_module("perftest")
    text = (
        " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n"
        " 65536      20             0.00               38.11                0.000610\n"
    )
    assert perftest.result_words(text, 65536)[3] == "38.11"
    assert perftest.result_words(text, 6553) == []
    assert perftest.result_words("", 65536) == []


def test_an_engines_row_compares_within_a_round(bench: Any) -> None:
    engine = importlib.import_module("engine")
    side = {
        "cpu_s": 0.001,
        "crossings": 12.0,
        "receipts": 2.0,
        "post": 2.0,
        "post_send": 1.0,
        "post_recv": 0.0,
    }
    phases = dict.fromkeys(engine.PART_COLUMNS[3:], 1e-3)
    case = engine.Case("read", 1_000_000, 1, perftest=[1e9, 2e9], bare=[1e9, 1e9])
    for seconds in (0.002, 0.004):
        case.ours.append(engine.Sample(seconds, phases, side, side, parents=1))
    cells = engine.row(case).strip("| ").split(" | ")
    assert len(cells) == len(engine.COLUMNS)
    assert cells[6] == "0.31 (0.12 to 0.50)"  # of perftest
    assert cells[8] == "2.0 (1.0 to 3.0)"  # ms more than the bare chain
    assert len(engine.part_row(case).strip("| ").split(" | ")) == len(engine.PART_COLUMNS)
    crossings = engine.crossing_row(case, lanes=2).strip("| ").split(" | ")
    assert crossings[3:7] == ["2", "12.0", "3.0", "6.0"]  # two grants, on a queue pair each
    assert len(crossings) == len(engine.CROSSING_COLUMNS)
