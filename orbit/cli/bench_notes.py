"""What a reader has to know of the figures of one report, in a line each."""

from __future__ import annotations

from collections.abc import Iterator

from ..bench import figures
from ..bench.plan import SAMPLE_BYTES, Plan, Verb, Verify
from ..bench.report import Report, Row, Source
from .output import short_bytes

_UNITS = "1 GB/s is 1e9 bytes/s, 1 Gb/s 1e9 bits/s; sizes are binary"
_COSTS = "CPU is in seconds for each GiB of payload; phases are medians of an item, in ms"
_RATIO = "ratio is orbit's GB/s over that of the baseline in its line"
_SLOWEST = "* of so few operations it is the slowest one"
_COMPARED = {
    Verify.OFF: "no bytes were compared",
    Verify.SAMPLE: f"compared outside of latencies: {SAMPLE_BYTES} bytes at both ends of items",
    Verify.FULL: "compared outside of latencies: every byte",
}


def notes_of(report: Report) -> Iterator[str]:
    plan = report.plan
    yield _UNITS
    yield _COSTS
    yield _latencies(plan)
    yield _COMPARED[plan.verify]
    if plan.verify is not Verify.OFF and plan.verb in (Verb.MSG, Verb.PUT, Verb.WRITE):
        yield "CPU contains a call for each operation by which the server compares; see --verify"
    if plan.verify is Verify.FULL and plan.inflight > 1:
        yield "comparing every byte held up the other operations; see --verify"
    if any(figures.ratio_to(report, row) is not None for row in report.rows):
        yield _RATIO
    if any(_is_few(row) for row in report.rows):
        yield _SLOWEST
    for row in report.rows:
        size = short_bytes(row.size)
        if row.is_missing:
            yield f"no {row.source} to compare {size} with: {row.reason}"
        elif (row.batch, row.inflight) != (plan.batch, plan.inflight):
            yield f"{size} by {row.source}: batch {row.batch}, inflight {row.inflight}"


def _latencies(plan: Plan) -> str:
    items = "" if plan.batch == 1 else f" of {plan.batch} items"
    trip = ", full round trips and never halves" if plan.verb is Verb.UNARY else ""
    back = " with the lease given back" if plan.verb in (Verb.GET, Verb.GET_INTO) else ""
    return f"latencies are of whole operations{items}{trip}{back}; in us"


def _is_few(row: Row) -> bool:
    """Whether a percentile of it falls on the slowest operation."""
    told = row.source is Source.ORBIT or row.latency.max > 0
    few = (figures.is_slowest(percent, row.ops) for percent in figures.NAMED.values())
    return bool(told and row.ops and any(few))
