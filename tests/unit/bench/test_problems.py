"""A figure that cannot be true is refused, with what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orbit.bench.figures import latency_of
from orbit.bench.plan import Verify
from orbit.bench.problems import Kind, kind_of, problems_of
from orbit.bench.report import EndUsage, Latency, Report, Source
from orbit.model import Transport
from tests.unit.bench.reports import MEMCPY, SIZE, baseline, report, row

BAD_LADDER = Latency(p50=2.0, p90=1.0, p99=3.0, p999=3.0, max=3.0)
MLX = "rdma/mlx5_0:1 gid 3"
RAIL = {
    "device": "mlx5_0",
    "port": 1,
    "gid_index": 3,
    "rate": "100 Gb/sec (4X EDR)",
    "provider": "mlx5_core",
}


def test_a_good_report_has_none() -> None:
    assert problems_of(report(), MEMCPY) == ()
    assert kind_of(()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ops": 0, "paths": {}, "verified": 0}, "no operation was measured"),
        ({"errors": 2, "reason": "reset"}, "2 of 102 operations failed (reset)"),
        ({"seconds": 0.0}, "0.0 seconds for 100 operations"),
        ({"seconds": -1.0}, "-1.0 seconds"),
        ({"seconds": 0.001}, "took longer than the time in which they ran"),
        ({"latency": BAD_LADDER}, "a lower percentile is above a higher one"),
        ({"latency": latency_of([-0.001] * 100)}, "not a time above zero"),
        ({"phases": {"move": -0.1}}, "a phase is below zero"),
        ({"client": EndUsage(cpu_s=-0.1)}, "a cost is below zero"),
        ({"verified": 99}, "the bytes of 1 of 100 operations were not compared"),
        ({"verify": Verify.OFF}, "verify sample was asked for, off was done"),
        ({"verify": Verify.OFF}, "verification is off, and 100 operations"),
        ({"paths": {"tcp": 99}}, "100 operations, and the path of 99 is known"),
    ],
)
def test_what_cannot_be_true_is_refused(changes: dict[str, Any], said: str) -> None:
    found = problems_of(report(row(**changes)), MEMCPY)
    assert any(said in problem for problem in found), found


def test_faster_than_memcpy_is_refused() -> None:
    fast = row(ops=100, seconds=0.001, latency=latency_of([1e-5] * 100))
    (problem,) = problems_of(report(fast), MEMCPY)
    assert problem.endswith("105 GB/s cannot be true: this host's memcpy does 10 GB/s")
    # A plain socket loop has a thread for each of its connections.
    many = replace(fast, source=Source.SOCKET, inflight=16)
    assert problems_of(report(row(), many), MEMCPY) == ()


def rdma_report(boot: str, **changes: Any) -> Report:
    """13.1 GB/s over a rail of 12.5 GB/s."""
    seconds = SIZE * 100 / 16e9
    each = latency_of([seconds / 100] * 100)
    fast = row(path=MLX, paths={MLX: 100}, seconds=seconds, latency=each)
    found = report(fast, client={"cpus": 64, "boot_id": "one", "rails": [RAIL | changes]})
    plan = replace(found.plan, transport=Transport.RDMA)
    return replace(found, plan=plan, server={"boot_id": boot})


def test_a_device_is_bound_by_its_line_between_machines() -> None:
    (problem,) = problems_of(rdma_report("two"), MEMCPY)
    assert "its rails have 12.5 GB/s" in problem
    assert problems_of(rdma_report("one"), MEMCPY) == ()  # within one card
    assert problems_of(rdma_report("two", provider="software"), MEMCPY) == ()


@pytest.mark.parametrize("paths", [{"tcp": 2, MLX: 98}, {"tcp": 100}, {f"{MLX} and tcp": 100}])
def test_another_path_than_the_demanded_one(paths: dict[str, int]) -> None:
    found = rdma_report("one")
    other = replace(found.rows[0], paths=paths, reason="get_failed", seconds=1.0)
    (problem,) = problems_of(replace(found, rows=(other,)), MEMCPY)
    assert "rdma was demanded, " in problem
    assert "tcp was taken by" in problem
    assert "get_failed" in problem
    assert kind_of((problem,)) is Kind.PATH
    auto = replace(found.plan, transport=Transport.AUTO)
    assert problems_of(replace(found, rows=(other,), plan=auto), MEMCPY) == ()


def test_wrong_bytes_are_the_gravest() -> None:
    assert kind_of(("path: x", "bytes differ: y", "z")) is Kind.BYTES
    assert kind_of(("z",)) is None


def test_half_round_trips_are_noticed() -> None:
    halved = baseline(source=Source.PERFTEST, latency=latency_of([0.00025] * 100))
    (problem,) = problems_of(report(row(), halved), MEMCPY)
    assert "half round trips?" in problem


def test_a_size_without_a_row_is_a_problem() -> None:
    assert problems_of(report(row(size=4096)), MEMCPY) == (f"get_into {SIZE} bytes: not measured",)


def test_a_baseline_that_failed_is_no_problem_of_the_run() -> None:
    none = Latency(p50=0.0, p90=0.0, p99=0.0, p999=0.0, max=0.0)
    failed = baseline(ops=0, errors=1, seconds=0.0, latency=none, reason="refused")
    assert problems_of(report(row(), failed), MEMCPY) == ()
    told_rate_alone = baseline(source=Source.PERFTEST, latency=none, seconds=0.06)
    assert problems_of(report(row(), told_rate_alone), MEMCPY) == ()


def test_a_problem_that_is_told_already_is_not_repeated() -> None:
    found = report(row(errors=1))
    told = replace(found, problems=problems_of(found, MEMCPY))
    assert told.problems
    assert problems_of(told, MEMCPY) == ()
