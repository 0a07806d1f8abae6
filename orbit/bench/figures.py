"""The arithmetic of a measurement: percentiles that occurred, curves, rates and costs. Pure.

Percentiles are by the nearest rank: each is the latency of an operation that really ran, never a
value between two. One that falls on the slowest operation says no more than the maximum does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from .report import GIB, NO_LATENCY, EndUsage, Latency, Report, Row, Source

# Where a curve has points: every percent, and closer to 100 where tails are.
CURVE: Final = (*(float(percent) for percent in range(100)), 99.5, 99.9, 99.95, 99.99, 100.0)
NAMED: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}


def rank(percent: float, count: int) -> int:
    """Index of that percentile among `count` ordered values: the first that at least so many
    percent of them do not exceed.
    """
    # 99.9 has no exact binary form; a millionth of a value must not lift the rank.
    return min(count - 1, max(0, math.ceil(percent * count / 100 - 1e-6) - 1))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of at least one value, in ascending order."""
    return ordered[rank(percent, len(ordered))]


def is_slowest(percent: float, count: int) -> bool:
    """So few operations that this percentile is the maximum."""
    return percent < 100 and rank(percent, count) == count - 1


def latency_of(seconds: Iterable[float]) -> Latency:
    """Of one row's operations, given in seconds; all zero where there was none."""
    ordered = sorted(second * 1e6 for second in seconds)
    if not ordered:
        return NO_LATENCY
    return Latency(
        **{name: percentile(ordered, percent) for name, percent in NAMED.items()},
        max=ordered[-1],
        curve=tuple((percent, percentile(ordered, percent)) for percent in CURVE),
    )


def gb_per_s(row: Row) -> float:
    """Decimal gigabytes."""
    return row.bytes_per_s / 1e9


def gbit_per_s(row: Row) -> float:
    """Decimal gigabits."""
    return row.bytes_per_s * 8 / 1e9


def cpu_s_per_gib(row: Row, end: EndUsage) -> float | None:
    """Seconds of processor time for each 2**30 payload bytes. None: not counted."""
    if end.cpu_s is None or row.nbytes == 0:
        return None
    return end.cpu_s / (row.nbytes / GIB)


def crossings_per_op(row: Row) -> float | None:
    """Calls into the helper of both ends together. None: not counted."""
    counted = [end.crossings for end in (row.client, row.server) if end.crossings is not None]
    return sum(counted) / row.ops if counted and row.ops else None


def copies_per_byte(row: Row) -> float | None:
    """How often each payload byte was copied by orbit, at both ends together. None: not counted."""
    ends = (row.client, row.server)
    counted = [end.copied_bytes for end in ends if end.copied_bytes is not None]
    return sum(counted) / row.nbytes if counted and row.nbytes else None


def ratio_to(report: Report, baseline: Row) -> float | None:
    """Rate of orbit over that of this baseline, of the same size. None: one of them has none."""
    ours = next(
        (r for r in report.rows if r.source is Source.ORBIT and r.size == baseline.size), None
    )
    if baseline.source is Source.ORBIT or ours is None or not baseline.bytes_per_s or not ours.ops:
        return None
    return ours.bytes_per_s / baseline.bytes_per_s


def path_text(row: Row) -> str:
    """What really ran, and by how many operations where it was not one path."""
    if len(row.paths) < 2:
        return next(iter(row.paths), row.path)
    return " + ".join(f"{path} x{count}" for path, count in row.paths.items())
