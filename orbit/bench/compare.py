"""Two runs beside each other, by verb, size and who did the work; and what else differed. Pure.

A ratio is worth as much as its circumstances are alike: every difference that can move a figure
is listed with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import UsageError
from .plan import Verb
from .report import Report, Row, Source

# Of a plan, and of each end's circumstances: what moves a figure. Host names and boots do not.
_OF_PLAN: Final = ("transport", "verify")
_OF_END: Final = (
    "kernel",
    "machine",
    "cpu",
    "cpus",
    "affinity",
    "governor",
    "python",
    "memlock",
    "netdev_mtus",
    "congestion",
    "rdma",
)
_OF_RAIL: Final = ("device", "port", "gid_index", "mtu", "link_layer", "provider", "firmware")
_OF_ROW: Final = ("batch", "inflight")

_Named = tuple[Report, Row]
_Key = tuple[Verb, int, Source]


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of both runs. Ratios are B over A; None where A has nothing to divide by."""

    verb: Verb
    size: int
    source: Source
    a: Row
    b: Row

    def to_mapping(self) -> dict[str, Any]:
        """What json can write."""
        found: dict[str, Any] = {"verb": self.verb, "size": self.size, "source": self.source}
        for name, row in (("a", self.a), ("b", self.b)):
            found[f"{name}_bytes_per_s"] = row.bytes_per_s
            found[f"{name}_p50_us"] = row.latency.p50
            found[f"{name}_p99_us"] = row.latency.p99
        for name in ("rate_ratio", "p50_ratio", "p99_ratio"):
            found[name] = getattr(self, name)
        return found

    @property
    def rate_ratio(self) -> float | None:
        """Above 1: B is faster."""
        return _ratio(self.b.bytes_per_s, self.a.bytes_per_s)

    @property
    def p50_ratio(self) -> float | None:
        """Above 1: B is slower."""
        return _ratio(self.b.latency.p50, self.a.latency.p50)

    @property
    def p99_ratio(self) -> float | None:
        return _ratio(self.b.latency.p99, self.a.latency.p99)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`differences`: why the ratios may come from something else. `unmatched`: rows of one run
    alone.
    """

    pairs: tuple[Pair, ...]
    differences: tuple[str, ...]
    unmatched: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        """What json can write."""
        return {
            "pairs": [pair.to_mapping() for pair in self.pairs],
            "differences": list(self.differences),
            "unmatched": list(self.unmatched),
        }

    def slower_than(self, bound: float) -> tuple[Pair, ...]:
        """Orbit's own rows whose rate fell below `bound` of what it was, or cannot be compared."""
        ours = (pair for pair in self.pairs if pair.source is Source.ORBIT)
        return tuple(pair for pair in ours if (pair.rate_ratio or 0.0) < bound)


def compare(a: Sequence[Report], b: Sequence[Report]) -> Comparison:
    """Raises UsageError when the two have no row in common."""
    ours, theirs = _rows(a), _rows(b)
    common = [key for key in ours if key in theirs]
    if not common:
        raise UsageError(
            "the two files have no verb and size in common",
            hint="measure both with the same --op and --size",
        )
    differences = dict.fromkeys(
        text for key in common for text in _differences(key, ours[key], theirs[key])
    )
    for name, reports in (("A", a), ("B", b)):
        for problem in (problem for report in reports for problem in report.problems):
            differences[f"{name} has a problem: {problem}"] = None
    alone = [("A", k) for k in ours if k not in theirs] + [
        ("B", k) for k in theirs if k not in ours
    ]
    return Comparison(
        tuple(Pair(*key, ours[key][1], theirs[key][1]) for key in common),
        tuple(differences),
        tuple(f"only {run} has {verb} {size} bytes by {who}" for run, (verb, size, who) in alone),
    )


def _rows(reports: Sequence[Report]) -> dict[_Key, _Named]:
    found: dict[_Key, _Named] = {}
    for report in reports:
        for row in report.rows:
            if row.is_missing:
                continue
            key = (report.plan.verb, row.size, row.source)
            if key in found:
                raise UsageError(f"a file has two rows of {key[0]} {key[1]} bytes by {key[2]}")
            found[key] = report, row
    return found


def _differences(key: _Key, a: _Named, b: _Named) -> Iterator[str]:
    verb, size, source = key
    for name in _OF_PLAN:
        yield from _differs(name, getattr(a[0].plan, name), getattr(b[0].plan, name))
    for end in ("client", "server"):
        yield from _of_end(end, getattr(a[0], end), getattr(b[0], end))
    where = f"{verb} {size} bytes by {source}: "
    for name in _OF_ROW:
        yield from _differs(where + name, getattr(a[1], name), getattr(b[1], name))
    yield from _differs(f"{where}path", *(" + ".join(row.paths) or row.path for _, row in (a, b)))


def _of_end(end: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in _OF_END:
        yield from _differs(f"{end}: {name}", a.get(name), b.get(name))
    versions = a.get("versions", {}), b.get("versions", {})
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        yield from _differs(f"{end}: {name}", versions[0].get(name), versions[1].get(name))
    yield from _differs(f"{end}: revision", a.get("revision"), b.get("revision"))
    rails = a.get("rails", ()), b.get("rails", ())
    if len(rails[0]) != len(rails[1]):
        yield f"{end}: rails: {len(rails[0])} and {len(rails[1])}"
        return
    for number, (ours, theirs) in enumerate(zip(*rails, strict=True)):
        for name in _OF_RAIL:
            yield from _differs(f"{end}: rail {number}: {name}", ours.get(name), theirs.get(name))


def _differs(name: str, a: object, b: object) -> Iterator[str]:
    if a != b:
        yield f"{name}: {_said(a)} and {_said(b)}"


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {of}" for name, of in value.items())
    return "unknown" if value is None else str(value)


def _ratio(over: float, under: float) -> float | None:
    return over / under if under > 0 else None
