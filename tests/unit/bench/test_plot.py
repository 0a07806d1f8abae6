"""Plots of made-up reports: what is drawn, that it is the same each time, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orbit.bench.figures import latency_of
from orbit.bench.plan import Plan, Verb
from orbit.bench.plot import lines_of, percentile_points, plot, time_text, title_of
from orbit.bench.report import Latency, Report, Row, Source
from orbit.errors import UsageError
from orbit.model import Transport

SIZES = (1 << 20, 4096, 64 << 10)  # in no order
RDMA = "rdma/mlx5_0:1 gid 3"
CLIENT = {
    "kernel": "6.1.0",
    "versions": {"orbit": "0.1.0"},
    "rails": [{"device": "mlx5_0", "provider": "mlx5_core", "mtu": 4096}],
}


def row(source: Source, size: int, path: str, ops: int = 200) -> Row:
    seconds = [20e-6 + size / 1e9 * (1 + one / 1000) for one in range(ops)]
    latency = latency_of(seconds)
    return Row(
        source=source,
        size=size,
        batch=1,
        inflight=1,
        ops=ops,
        errors=0,
        seconds=sum(seconds),
        latency=latency,
        path=path,
    )


def report(verb: Verb, *, ops: int = 200) -> Report:
    sources = ((Source.ORBIT, RDMA), (Source.READ_CHAIN, RDMA), (Source.SOCKET, "tcp"))
    rows = [row(source, size, path, ops) for size in SIZES for source, path in sources]
    bandwidth = Latency(p50=0.0, p90=0.0, p99=0.0, p999=0.0, max=0.0)
    rows += [replace(row(Source.PERFTEST, size, RDMA), latency=bandwidth) for size in SIZES]
    plan = Plan(verb=verb, sizes=SIZES, iterations=ops, transport=Transport.RDMA)
    return Report(plan=plan, rows=tuple(rows), client=CLIENT, started="2020-01-01T00:00:00Z")


def test_an_svg_says_what_was_measured_and_how(tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    plot([report(Verb.READ), report(Verb.GET_INTO)], out)
    assert ElementTree.parse(out).getroot().tag.endswith("svg")
    text = out.read_text()
    for words in (
        f"orbit read, {RDMA}",
        f"orbit get_into, {RDMA}",
        f"bare chain for read, {RDMA}",
        "socket loop for get_into, tcp",
        "perftest for read",
        "orbit bench: read, get_into; batch 1, 1 in flight",
        "orbit 0.1.0 · kernel 6.1.0 · mlx5_0 (mlx5_core, MTU 4096) · 2020-01-01T00:00:00Z",
        "GB/s",
        "64 KiB",
        "Latency by percentile, 1 MiB",
        "99",
    ):
        assert f"<!-- {words}" in text, words


def test_the_same_report_makes_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for out in files:
        plot([report(Verb.READ)], out)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_png_of_one_operation_of_one_size(tmp_path: Path) -> None:
    one = report(Verb.UNARY, ops=1)
    one = replace(one, rows=tuple(row for row in one.rows if row.size == 4096), client={})
    out = tmp_path / "out.PNG"
    plot([one], out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_lines_are_by_source_and_ordered_by_size() -> None:
    found = report(Verb.READ)
    failed = replace(found.rows[2], ops=0, errors=1)
    lines = lines_of([replace(found, rows=(*found.rows[:2], failed, *found.rows[3:]))])
    assert {line.source for line in lines} == set(Source)
    for line in lines:
        sizes = [row.size for row in line.rows]
        assert sizes == sorted(SIZES[1:] if line.source is Source.SOCKET else SIZES)


def test_percentiles_end_where_the_operations_do() -> None:
    points = percentile_points(row(Source.ORBIT, 4096, RDMA, ops=10))
    assert points[0][0] == 1
    assert points[-1] == (10, row(Source.ORBIT, 4096, RDMA, ops=10).latency.max)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_a_title_without_circumstances() -> None:
    title, facts = title_of([replace(report(Verb.MSG), client={}, started="")])
    assert title.startswith("orbit bench: msg")
    assert facts == ""


def test_times_say_their_unit() -> None:
    assert [time_text(us) for us in (5, 1500, 2e6)] == ["5 us", "1.5 ms", "2 s"]


@pytest.mark.parametrize("name", ["out.pdf", "out"])
def test_an_unknown_format_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="format") as raised:
        plot([report(Verb.READ)], tmp_path / name)
    assert ".svg" in raised.value.hint


def test_nothing_to_plot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing"):
        plot([replace(report(Verb.READ), rows=())], tmp_path / "out.svg")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plot([report(Verb.READ)], tmp_path / "none" / "out.svg")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as raised:
        plot([report(Verb.READ)], tmp_path / "out.svg")
    assert raised.value.hint == "pip install orbit[plot]"
