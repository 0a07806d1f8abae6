"""Why a report must not be believed, or what went wrong in it. Pure.

A figure that cannot be true is refused and not shown as a good one: more bytes a second than the
memory takes, percentiles out of order, operations that nobody counted, bytes that nobody compared,
or another path than the one that was asked for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from ..model import PathName, Transport
from .paths import rail_words, rails_of, transport_of, transports_of
from .plan import Verify
from .report import Report, Row, Source

# What a clock and a noisy machine may add to a measured limit.
_MARGIN: Final = 1.25
# A baseline's operations follow each other at once; half round trips cover half of the time.
_COVERED_MIN: Final = 0.6

_RATE = re.compile(r"([\d.]+) Gb/sec")


class Kind(StrEnum):
    """How the text of a problem begins, where a program has to tell it from others."""

    BYTES = "bytes differ"
    PATH = "path"


def kind_of(problems: tuple[str, ...]) -> Kind | None:
    """The gravest of them. None: there is none, or of no such kind."""
    return next((kind for kind in Kind if any(p.startswith(kind) for p in problems)), None)


def problems_of(report: Report, memcpy_bytes_per_s: Mapping[int, float]) -> tuple[str, ...]:
    """Beside those that it has already, one line each. `memcpy_bytes_per_s`: by size, as
    `memcpy_rates` measures at the client; a size without one is not judged by it.
    """
    found = [problem for row in report.rows for problem in _of_row(report, row, memcpy_bytes_per_s)]
    measured = {row.size for row in report.rows if row.source is Source.ORBIT}
    for size in report.plan.sizes:
        if size not in measured:
            found.append(f"{report.plan.verb} {size} bytes: not measured")
    return tuple(problem for problem in found if problem not in report.problems)


def _of_row(report: Report, row: Row, memcpy: Mapping[int, float]) -> Iterator[str]:
    name = f"{report.plan.verb} {row.size} bytes by {row.source}"
    if row.is_missing:
        return
    checks = [*_counts(row), *_clock(row), *_rate(report, row, memcpy.get(row.size))]
    if row.source is Source.ORBIT:
        checks += _verification(report, row)
        yield from (f"{Kind.PATH}: {name}: {text}" for text in _path(report, row))
    yield from (f"{name}: {text}" for text in checks)


def _counts(row: Row) -> Iterator[str]:
    if row.ops < 1:
        yield "no operation was measured"
    if row.errors > 0:
        yield f"{row.errors} of {row.errors + row.ops} operations failed ({row.reason})"
    for end in (row.client, row.server):
        values = (end.cpu_s, end.crossings, end.copied_bytes)
        if any(value is not None and value < 0 for value in values):
            yield "a cost is below zero"


def _clock(row: Row) -> Iterator[str]:
    if not row.ops:
        return
    lat = row.latency
    if not lat.max and row.source is not Source.ORBIT:
        return  # a tool that tells the rate alone
    ladder = (lat.p50, lat.p90, lat.p99, lat.p999, lat.max)
    curve = tuple(us for _, us in lat.curve)
    if not (row.seconds > 0 and math.isfinite(row.seconds)):
        yield f"{row.seconds} seconds for {row.ops} operations"
        return
    if not all(us > 0 and math.isfinite(us) for us in (*ladder, *curve)):
        yield "a latency is not a time above zero"
    elif list(ladder) != sorted(ladder) or list(curve) != sorted(curve):
        yield "a lower percentile is above a higher one"
    elif any(seconds < 0 for seconds in row.phases.values()):
        yield "a phase is below zero"
    else:
        yield from _coverage(row)


def _coverage(row: Row) -> Iterator[str]:
    """Latencies against the time in which they passed, in which at most `inflight` ran at once."""
    have = row.seconds * 1e6 * row.inflight
    # At least half of the operations took p50 or longer.
    if row.latency.p50 * row.ops / 2 > have * _MARGIN:
        yield "its operations took longer than the time in which they ran"
    if row.source is Source.PERFTEST and row.latency.p50 * row.ops < have * _COVERED_MIN:
        yield "its latencies cover half of the time or less: half round trips?"


def _rate(report: Report, row: Row, memcpy: float | None) -> Iterator[str]:
    if memcpy is None or not row.ops or row.seconds <= 0:
        return
    limit, what = _limit(report, row, memcpy)
    if row.bytes_per_s > limit * _MARGIN:
        yield (f"{row.bytes_per_s / 1e9:.3g} GB/s cannot be true: {what} {limit / 1e9:.3g} GB/s")


def _limit(report: Report, row: Row, memcpy: float) -> tuple[float, str]:
    """What the row cannot exceed. Processors copy for TCP, one for each thread that does; a device
    has the memory of the whole machine and, between two machines, its line.
    """
    if transport_of(row.path) != PathName.RDMA:
        threads = row.inflight if row.source is Source.SOCKET else 1
        return memcpy * threads, "this host's memcpy does"
    cpus = report.client.get("cpus") or os.cpu_count() or 1
    memory = memcpy * int(cpus)
    line = _line_rate(report, row)
    return (line, "its rails have") if line and line < memory else (memory, "the memory has")


def _line_rate(report: Report, row: Row) -> float:
    """Bytes a second of all rails of the row. 0: not known, or nothing that limits: one machine
    talks to itself within the card, and the rate of a software device is made up.
    """
    ends = (report.client.get("boot_id"), report.server.get("boot_id"))
    if None in ends or ends[0] == ends[1]:
        return 0.0
    rails: dict[str, Mapping[str, Any]] = {
        rail_words(rail.get("device"), rail.get("port"), rail.get("gid_index")): rail
        for rail in report.client.get("rails", ())
    }
    used = [rails.get(name) for name in rails_of(row.path)]
    rates = [_RATE.match(str(rail.get("rate", ""))) if rail else None for rail in used]
    software = any(rail.get("provider") == "software" for rail in used if rail)
    if software or not rates or None in rates:
        return 0.0
    return sum(float(rate[1]) for rate in rates if rate) * 1e9 / 8


def _verification(report: Report, row: Row) -> Iterator[str]:
    if row.verify is not report.plan.verify:
        yield f"verify {report.plan.verify} was asked for, {row.verify} was done"
    if row.verify is Verify.OFF and row.verified:
        yield f"verification is off, and {row.verified} operations are said to be verified"
    if row.verify is not Verify.OFF and row.verified < row.ops:
        yield f"the bytes of {row.ops - row.verified} of {row.ops} operations were not compared"


def _path(report: Report, row: Row) -> Iterator[str]:
    known = sum(row.paths.values())
    if row.paths and known != row.ops:
        yield f"{row.ops} operations, and the path of {known} is known"
    demanded = report.plan.transport
    if demanded is Transport.AUTO:
        return
    taken = row.paths or {row.path: row.ops}
    others = {path: count for path, count in taken.items() if transports_of(path) != {demanded}}
    for path, count in others.items():
        yield f"{demanded} was demanded, {path} was taken by {count} operations ({row.reason})"
