"""A report of `orbit bench` as text: circumstances, figures, costs, phases and problems.

The same columns on a terminal and in a pipe. A line of figures is as long as these are, never cut;
lines of words are folded.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench import figures
from ..bench.compare import Comparison
from ..bench.plan import Plan
from ..bench.report import Report, Row, Source
from ..model import PathReason
from .bench_header import end_lines
from .bench_notes import notes_of
from .output import short_bytes

_WIDTH: Final = 1000  # no line of figures is folded
_WORDS_WIDTH: Final = 100
_NOT_KNOWN: Final = "-"
_TOTAL: Final = "total"
_TOLD: Final = set(PathReason) - {PathReason.OK, PathReason.ASKED}
_PERCENTS: Final = (("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("p999", "p99.9"))


def show_report(report: Report) -> None:
    """To stdout."""
    console = _console()
    console.print(f"orbit bench {report.plan.verb}", style="bold")
    console.print(_folded(f"asked   {_asked(report.plan)}", indent=8))
    for line in end_lines(report.client, report.server):
        console.print(_folded(line, indent=8))
    console.print()
    rows = [row for row in report.rows if not row.is_missing]
    _show_figures(console, report, rows)
    _show_costs(console, rows)
    _show_phases(console, rows)
    for line in notes_of(report):
        console.print(_folded(line, indent=2), style="dim")
    for problem in report.problems:
        console.print(f"problem: {problem}", style="bold red")
    console.print()


def show_comparison(found: Comparison) -> None:
    """To stdout. Ratios are B over A."""
    console = _console()
    units = ("GB/s", "p50 us", "p99 us")
    heads = [head for unit in units for head in (f"A {unit}", f"B {unit}", "B/A")]
    table = _table("verb", "size", "by", *heads, left=(0, 2))
    for pair in found.pairs:
        cells = [pair.verb, short_bytes(pair.size), pair.source]
        cells += [rate(figures.gb_per_s(pair.a)), rate(figures.gb_per_s(pair.b))]
        cells += [ratio(pair.rate_ratio), us(pair.a.latency.p50), us(pair.b.latency.p50)]
        cells += [ratio(pair.p50_ratio), us(pair.a.latency.p99), us(pair.b.latency.p99)]
        table.add_row(*cells, ratio(pair.p99_ratio))
    console.print(table)
    console.print("B/A above 1 is faster of GB/s, and slower of a latency", style="dim")
    if found.differences:
        console.print("What else differs, A and B:", style="bold yellow")
    for text in (*found.differences, *found.unmatched):
        console.print(f"  {text}")


def us(value: float) -> str:
    """Microseconds, to a digit that means something; 0 is no latency."""
    if not value:
        return _NOT_KNOWN
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def rate(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def ratio(value: float | None) -> str:
    return _NOT_KNOWN if value is None else f"{value:.2f}"


def _asked(plan: Plan) -> str:
    until = f"{plan.iterations} operations" if plan.iterations else f"{plan.duration:g} s"
    return (
        f"transport {plan.transport}, batch {plan.batch}, inflight {plan.inflight}, "
        f"{until} a size after {plan.warmup} to warm up, verify {plan.verify}, seed {plan.seed}"
    )


def _show_figures(console: Console, report: Report, rows: Sequence[Row]) -> None:
    """Rates and latencies; orbit's rate over each baseline's stands in the baseline's line."""
    heads = [head for _, head in _PERCENTS]
    beside = any(row.source is not Source.ORBIT for row in rows)
    first = ("size", "by", "ops", "GB/s", "Gb/s", *(["ratio"] if beside else []))
    table = _table(*first, *heads, "max us", left=(1,))
    for row in rows:
        cells = [short_bytes(row.size), str(row.source), str(row.ops)]
        cells += [rate(figures.gb_per_s(row)), rate(figures.gbit_per_s(row))]
        if beside:
            ours = row.source is Source.ORBIT
            cells.append("" if ours else ratio(figures.ratio_to(report, row)))
        cells += [_percentile(row, name) for name, _ in _PERCENTS]
        table.add_row(*cells, us(row.latency.max), style=_style(row))
    console.print(table)
    console.print()


def _percentile(row: Row, name: str) -> str:
    if not row.latency.max:
        return _NOT_KNOWN
    slowest = figures.is_slowest(figures.NAMED[name], row.ops)
    return us(getattr(row.latency, name)) + ("*" if slowest else "")


def _show_costs(console: Console, rows: Sequence[Row]) -> None:
    """Errors, what both ends spent, and the path that ran."""
    heads = ("errors", "CPU client", "server", "crossings/op", "copies/B", "path")
    table = _table("size", "by", *heads, left=(1, 7))
    for row in rows:
        cells = [short_bytes(row.size), str(row.source), str(row.errors)]
        cells += [_number(figures.cpu_s_per_gib(row, end)) for end in (row.client, row.server)]
        cells.append(_number(figures.crossings_per_op(row), digits=1))
        cells.append(_number(figures.copies_per_byte(row)))
        table.add_row(*cells, _path(row), style=_style(row))
    console.print(table)
    console.print()


def _path(row: Row) -> str:
    """With the reason, where there is one to give."""
    text = figures.path_text(row)
    return f"{text} ({row.reason})" if row.reason in _TOLD else text


def _show_phases(console: Console, rows: Sequence[Row]) -> None:
    fullest = sorted(rows, key=lambda row: len(row.phases), reverse=True)
    names = list(dict.fromkeys(name for row in fullest for name in row.phases))
    if not names:
        return
    names.sort(key=lambda name: name == _TOTAL)  # last; the others stay in their order
    table = _table("phases, ms", "by", *names, left=(1,))
    for row in rows:
        if row.phases:
            cells = (_number(row.phases.get(name), digits=3, times=1e3) for name in names)
            table.add_row(short_bytes(row.size), str(row.source), *cells, style=_style(row))
    console.print(table)
    console.print()


def _number(value: float | None, *, digits: int = 2, times: float = 1.0) -> str:
    return _NOT_KNOWN if value is None else f"{value * times:.{digits}f}"


def _style(row: Row) -> str:
    return "" if row.source is Source.ORBIT else "dim"


def _table(*heads: str, left: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if number in left else "right", no_wrap=True)
    return table


def _folded(line: str, indent: int) -> str:
    width = min(_WORDS_WIDTH, shutil.get_terminal_size((_WORDS_WIDTH, 0)).columns)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _console() -> Console:
    return Console(width=_WIDTH, highlight=False, markup=False, emoji=False)
