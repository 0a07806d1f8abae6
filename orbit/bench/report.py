"""What was measured: rows, the circumstances, and the file that holds them. Pure values.

A row is one size of one verb, or of a baseline that did the same work without orbit. Units are in
the names: seconds, microseconds, bytes. Rates are decimal: 1 GB/s is 1e9 bytes a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from ..errors import UsageError
from .plan import Plan, Verify

SCHEMA: Final = "orbit-bench/1"
GIB: Final = 1 << 30


class Source(StrEnum):
    """Who did the work of a row."""

    ORBIT = "orbit"
    SOCKET = "socket"  # a blocking send/recv loop between the same two processes
    READ_CHAIN = "read_chain"  # plain RC READs or WRITEs without windows, on the same devices
    PERFTEST = "perftest"  # ib_read_bw, ib_write_bw, ib_send_lat ..., as installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of operations, in microseconds. `curve` has (percent, us) from 0 to 100 for a plot."""

    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    curve: tuple[tuple[float, float], ...] = ()


NO_LATENCY: Final = Latency(p50=0.0, p90=0.0, p99=0.0, p999=0.0, max=0.0)  # nobody told one


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUsage:
    """What one end spent on the row. None: this end cannot count it."""

    cpu_s: float | None = None  # user and system time of the process
    crossings: int | None = None  # calls into the C helper
    copied_bytes: int | None = None  # payload bytes that orbit copied on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`path` is what really ran ("tcp", "rdma/mlx5_0:1 gid 3"), and `paths` counts it by operation:
    more than one key means that a fallback happened.
    """

    source: Source
    size: int  # bytes of one item
    batch: int
    inflight: int
    ops: int  # operations that succeeded, without the warm-up
    errors: int
    seconds: float  # in which at least one operation was under way
    latency: Latency
    path: str
    reason: str = "ok"
    paths: Mapping[str, int] = field(default_factory=dict)
    client: EndUsage = field(default_factory=EndUsage)
    server: EndUsage = field(default_factory=EndUsage)
    phases: Mapping[str, float] = field(default_factory=dict)  # median seconds of an operation
    verify: Verify = Verify.OFF
    verified: int = 0  # operations whose bytes were compared

    @property
    def is_missing(self) -> bool:
        """A baseline that could not be had: `reason` says why, and there are no figures."""
        return self.source is not Source.ORBIT and self.errors > 0 and self.ops == 0

    @property
    def nbytes(self) -> int:
        return self.ops * self.batch * self.size

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. `client` and `server` are the circumstances of each end (orbit/bench/header.py);
    `problems` are why the figures must not be believed, or what went wrong: empty for a good run.
    """

    plan: Plan
    rows: tuple[Row, ...]
    client: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    started: str = ""  # ISO 8601, UTC

    def to_mapping(self) -> dict[str, Any]:
        """What json can write."""
        return asdict(self) | {"schema": SCHEMA, "plan": self.plan.to_json()}

    def to_json(self) -> str:
        return json.dumps(self.to_mapping(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`. Raises UsageError."""
        try:
            found = json.loads(text)
            if found.pop("schema") != SCHEMA:
                raise UsageError("the file is of another version of orbit bench")
            found["plan"] = Plan.from_json(found["plan"])
            found["rows"] = tuple(_row(row) for row in found["rows"])
            found["problems"] = tuple(found["problems"])
            return cls(**found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a report of orbit bench: {error}") from error


def reports_from_json(text: str) -> tuple[Report, ...]:
    """All reports of a file: one object after the other, on a line each or not. Raises
    UsageError.
    """
    decoder, at, found = json.JSONDecoder(), 0, []
    text = text.strip()
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except ValueError as error:
            raise UsageError(f"not a report of orbit bench: {error}") from error
        found.append(Report.from_json(text[at:end]))
        at = end + len(text[end:]) - len(text[end:].lstrip())
    if not found:
        raise UsageError("the file has no report of orbit bench")
    return tuple(found)


_COUNTS: Final = ("size", "batch", "inflight", "ops", "errors", "verified")


def _row(found: dict[str, Any]) -> Row:
    """Raises TypeError and others: it is none."""
    latency = found["latency"]
    figures = [latency[name] for name in ("p50", "p90", "p99", "p999", "max")]
    if not all(type(found[name]) is int for name in _COUNTS) or not all(
        isinstance(figure, int | float) for figure in (found["seconds"], *figures)
    ):
        raise TypeError("a figure is no number")
    curve = tuple((percent, us) for percent, us in found["latency"].pop("curve"))
    return Row(
        **{
            **found,
            "source": Source(found["source"]),
            "latency": Latency(**found["latency"], curve=curve),
            "client": EndUsage(**found["client"]),
            "server": EndUsage(**found["server"]),
            "verify": Verify(found["verify"]),
        }
    )
