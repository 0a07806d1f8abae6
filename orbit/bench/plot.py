"""Reports as one picture: throughput and latency over size, and the distribution of latencies.

The one door to matplotlib, which is loaded when a plot is asked for. The figure is drawn without a
display, and the same reports make the same SVG, byte for byte.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import UsageError
from .figures import gb_per_s, path_text
from .report import Report, Row, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES: Final = (".png", ".svg")
_HINT: Final = "pip install orbit[plot]"
# Okabe and Ito: told apart with every kind of colour blindness, in this order on white.
_COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES: Final[Mapping[Source, tuple[Any, str]]] = {
    Source.ORBIT: ("-", "o"),
    Source.READ_CHAIN: ((0, (6, 2)), "s"),
    Source.SOCKET: ((0, (2, 2)), "^"),
    Source.PERFTEST: ((0, (6, 2, 1, 2)), "D"),
}
_NAMES: Final[Mapping[Source, str]] = {
    Source.READ_CHAIN: "bare chain",
    Source.SOCKET: "socket loop",
    Source.PERFTEST: "perftest",
}
_STYLE: Final[Mapping[str, Any]] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "orbit",
}
_PERCENTS: Final = (0, 50, 90, 99, 99.9, 99.99, 99.999)


class Line(NamedTuple):
    """One row for each size of one source of one report, smallest first."""

    label: str
    color: str
    source: Source
    rows: tuple[Row, ...]


def check_plot(out: Path) -> None:
    """Whether `plot` could draw into `out`, as far as can be told before. Raises UsageError: an
    unknown suffix, or no matplotlib.
    """
    suffix = out.suffix.lower()
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"plot {str(out)!r}: the format {suffix or 'without a suffix'} is not drawn",
            hint=f"name a file that ends in {' or '.join(_SUFFIXES)}",
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"plots need matplotlib: {error}", hint=_HINT) from error


def plot(reports: Sequence[Report], out: Path) -> None:
    """Draw them into `out`; its suffix chooses the format. Raises UsageError as `check_plot`, and
    where there are no rows; OSError: the file cannot be written.
    """
    check_plot(out)
    lines = lines_of(reports)
    if not lines:
        raise UsageError("there is nothing to plot: no row has an operation")
    import matplotlib
    from matplotlib.figure import Figure

    suffix = out.suffix.lower()
    style: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_STYLE}  # nothing of the user's own
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a host's name may have glyphs that the font lacks
        figure = Figure(figsize=(14, 5.6), layout="constrained")
        _draw(figure, reports, lines)
        undated = {"Date": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(out, format=suffix[1:], dpi=150, metadata=undated)


def lines_of(reports: Sequence[Report]) -> list[Line]:
    """A colour is a report, a dash a source. Rows without an operation are left out."""
    found = []
    for index, report in enumerate(reports):
        color = _COLORS[index % len(_COLORS)]
        for source in Source:
            rows = (row for row in report.rows if row.source is source and row.ops)
            ordered = tuple(sorted(rows, key=lambda row: row.size))
            if ordered:
                found.append(Line(_label(report, source, ordered), color, source, ordered))
    return found


def title_of(reports: Sequence[Report]) -> tuple[str, str]:
    """What was measured, and on what: of the first report's client."""
    first = reports[0]
    plan, end = first.plan, first.client
    verbs = ", ".join(dict.fromkeys(str(report.plan.verb) for report in reports))
    text = f"orbit bench: {verbs}; batch {plan.batch}, {plan.inflight} in flight"
    versions = end.get("versions")
    orbit = versions.get("orbit") if isinstance(versions, Mapping) else None
    rails = [
        f"{rail.get('device')} ({', '.join(_rail_words(rail))})"
        for rail in end.get("rails") or ()
        if isinstance(rail, Mapping)
    ]
    facts = [
        f"orbit {orbit}" if orbit else "",
        f"kernel {end['kernel']}" if end.get("kernel") else "",
        str(end.get("cpu") or ""),
        ", ".join(rails),
        first.started,
    ]
    return text, " · ".join(fact for fact in facts if fact)


def percentile_points(row: Row) -> list[tuple[float, float]]:
    """(1 / (1 - p), microseconds) of its curve, as far as its operations can tell them apart: the
    slowest of n stands at n.
    """
    points = [(100 / (100 - p), us) for p, us in row.latency.curve if p < 100]
    known = [(x, us) for x, us in points if x < row.ops]
    return [*known, (float(max(1, row.ops)), row.latency.max)]


def _draw(figure: Figure, reports: Sequence[Report], lines: Sequence[Line]) -> None:
    text, facts = title_of(reports)
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(facts, x=0.01, ha="left", fontsize=8, color="#555555")
    columns = min(len(lines), 3 if len(reports) == 1 else len(reports))
    rows = math.ceil(len(lines) / columns)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 0.055 * rows))
    rates, latencies, spread = (figure.add_subplot(grid[0, column]) for column in range(3))
    for axes in (rates, latencies):
        _size_axis(axes, sorted({row.size for line in lines for row in line.rows}))
    _throughput(rates, lines)
    _latency(latencies, lines)
    _distribution(spread, lines)
    words = figure.add_subplot(grid[1, :])
    words.set_axis_off()
    handles, labels = rates.get_legend_handles_labels()
    words.legend(handles, labels, loc="center left", ncols=columns, fontsize=9, borderpad=0)


def _throughput(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_title("Throughput (1 GB/s = 1e9 bytes a second)")
    axes.set_ylabel("GB/s")
    for line in lines:
        sizes = [row.size for row in line.rows]
        rates = [gb_per_s(row) for row in line.rows]
        axes.plot(sizes, rates, label=line.label, **_looks(line))
    axes.set_ylim(bottom=0)


def _latency(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_title("Latency of an operation: p50, band to p99")
    _time_axis(axes)
    shade = 0.15 / max(1, sum(line.source is Source.ORBIT for line in lines))
    for line in lines:
        rows = [row for row in line.rows if row.latency.p50 > 0]
        sizes = [row.size for row in rows]
        middle, high = ([getattr(row.latency, name) for row in rows] for name in ("p50", "p99"))
        axes.plot(sizes, middle, **_looks(line))
        if line.source is Source.ORBIT:
            axes.fill_between(sizes, middle, high, color=line.color, alpha=shade, linewidth=0)


def _distribution(axes: Axes, lines: Sequence[Line]) -> None:
    """Of each line's largest size."""
    shown = [(line, line.rows[-1]) for line in lines if line.rows[-1].latency.curve]
    sizes = sorted({row.size for _, row in shown})
    axes.set_title(f"Latency by percentile, {', '.join(map(_size_text, sizes)) or 'not told'}")
    axes.set_xlabel("percent of operations that are as fast or faster")
    axes.set_xscale("log")
    for line, row in shown:
        points = percentile_points(row)
        looks = _looks(line)
        if len(points) > 1:
            looks["marker"] = ""
        axes.plot([x for x, _ in points], [us for _, us in points], **looks)
    most = max((row.ops for _, row in shown), default=1)
    ticks = [p for p in _PERCENTS if 100 / (100 - p) <= max(most, 10)]
    axes.set_xticks([100 / (100 - p) for p in ticks], [f"{p:g}" for p in ticks])
    axes.minorticks_off()
    _time_axis(axes)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xlabel("bytes of one item")
    axes.set_xscale("log", base=2)
    step = math.ceil(len(sizes) / 8)
    shown = sizes[::-step][::-1]
    axes.set_xticks(shown, [_size_text(size) for size in shown], rotation=30)
    axes.minorticks_off()


def _time_axis(axes: Axes) -> None:
    """Logarithmic, with marks that say their unit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us)))


def _looks(line: Line) -> dict[str, Any]:
    style, marker = _LINES[line.source]
    orbit = line.source is Source.ORBIT
    return {
        "color": line.color,
        "linestyle": style,
        "linewidth": 2.0 if orbit else 1.3,
        "marker": marker,
        "markersize": 5 if orbit else 3.5,
        "markerfacecolor": line.color if orbit else "white",
    }


def _label(report: Report, source: Source, rows: Sequence[Row]) -> str:
    paths = ", ".join(dict.fromkeys(path_text(row) for row in rows))
    verb = report.plan.verb
    name = f"orbit {verb}" if source is Source.ORBIT else f"{_NAMES[source]} for {verb}"
    return f"{name}, {paths}"


def _rail_words(rail: Mapping[str, Any]) -> Iterator[str]:
    words = {"provider": "{}", "rate": "{}", "mtu": "MTU {}"}
    yield from (form.format(rail[name]) for name, form in words.items() if rail.get(name))


def time_text(us: float) -> str:
    """20 us, 1.5 ms, 3 s."""
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:.3g} {name}"
    return f"{us:.3g} us"


def _size_text(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"
