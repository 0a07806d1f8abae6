"""Percentiles that occurred, rates and costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.bench import figures
from orbit.bench.memcpy import memcpy_rates
from orbit.bench.report import EndUsage, Source
from tests.unit.bench.reports import SIZE, baseline, report, row


@pytest.mark.parametrize(
    ("count", "percent", "found"),
    [
        (100, 50, 50),
        (100, 99, 99),
        (101, 99, 100),
        (1000, 99.9, 999),
        (10_000, 99.99, 9999),
        (5, 50, 3),
        (1, 50, 1),
        (3, 0, 1),
        (7, 100, 7),
    ],
)
def test_percentiles_are_by_nearest_rank(count: int, percent: float, found: int) -> None:
    assert figures.percentile(range(1, count + 1), percent) == found


@pytest.mark.parametrize(
    ("percent", "count", "slowest"),
    [(99.9, 10, True), (99.9, 1000, False), (99, 99, True), (99, 101, False), (50, 1, True)],
)
def test_a_percentile_of_too_few_is_the_slowest(percent: float, count: int, slowest: bool) -> None:
    assert figures.is_slowest(percent, count) is slowest


@given(st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=50))
def test_latencies_are_in_order_and_occurred(seconds: list[float]) -> None:
    found = figures.latency_of(seconds)
    ladder = [found.p50, found.p90, found.p99, found.p999, found.max]
    curve = [us for _, us in found.curve]
    occurred = {second * 1e6 for second in seconds}
    assert ladder == sorted(ladder)
    assert curve == sorted(curve)
    assert {*ladder, *curve} <= occurred
    assert curve[0] == min(occurred)
    assert curve[-1] == found.max == max(occurred)


def test_no_operation_has_no_latency() -> None:
    assert figures.latency_of([]).max == 0
    assert figures.latency_of([]).curve == ()


def test_costs_are_per_gib_operation_and_byte() -> None:
    one = row(client=EndUsage(cpu_s=0.5, crossings=700, copied_bytes=SIZE * 200))
    assert figures.cpu_s_per_gib(one, one.client) == pytest.approx(0.5 * 1024 / 100)
    assert figures.crossings_per_op(one) == 7
    assert figures.copies_per_byte(one) == 2
    assert figures.gbit_per_s(one) == pytest.approx(figures.gb_per_s(one) * 8)


def test_what_was_not_counted_is_not_zero() -> None:
    one = row(client=EndUsage(), server=EndUsage())
    assert figures.cpu_s_per_gib(one, one.client) is None
    assert figures.crossings_per_op(one) is figures.copies_per_byte(one) is None


def test_ratios_are_to_a_baseline_of_the_same_size() -> None:
    plain = baseline()
    found = report(row(), plain, baseline(source=Source.READ_CHAIN, size=4096))
    assert figures.ratio_to(found, plain) == pytest.approx(0.5)
    assert figures.ratio_to(found, found.rows[0]) is None
    assert figures.ratio_to(found, found.rows[2]) is None


def test_memory_is_copied_at_some_rate() -> None:
    rates = memcpy_rates((1, 65536, 1 << 20))
    assert rates[1] == rates[65536]  # too small to be measured alone
    assert min(rates.values()) > 1e6
