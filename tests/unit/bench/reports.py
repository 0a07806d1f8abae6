"""Made-up reports: one good row of each source, to be changed by a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orbit.bench.figures import latency_of
from orbit.bench.plan import Plan, Verb, Verify
from orbit.bench.report import EndUsage, Report, Row, Source
from orbit.model import Transport

SIZE = 1 << 20
MEMCPY = {SIZE: 10e9, 64 << 10: 10e9}


def row(**changes: Any) -> Row:
    """100 operations of 1 ms each, one at a time, over TCP: 1.05 GB/s."""
    good = Row(
        source=Source.ORBIT,
        size=SIZE,
        batch=1,
        inflight=1,
        ops=100,
        errors=0,
        seconds=0.1,
        latency=latency_of([0.001] * 100),
        path="tcp",
        paths={"tcp": 100},
        client=EndUsage(cpu_s=0.05, copied_bytes=SIZE * 100),
        server=EndUsage(cpu_s=0.025, copied_bytes=0),
        phases={"acquire": 0.0002, "total": 0.001},
        verify=Verify.SAMPLE,
        verified=100,
    )
    return replace(good, **changes)


def baseline(**changes: Any) -> Row:
    """Twice as fast as `row`, without orbit."""
    plain: dict[str, Any] = {
        "source": Source.SOCKET,
        "seconds": 0.05,
        "latency": latency_of([0.0005] * 100),
        "phases": {},
        "verify": Verify.OFF,
        "verified": 0,
        "client": EndUsage(cpu_s=0.02),
        "server": EndUsage(cpu_s=0.02),
    }
    return row(**(plain | changes))


def report(*rows: Row, **changes: Any) -> Report:
    """Of `get_into` over what the caller's plan says; TCP was demanded."""
    plan = Plan(verb=Verb.GET_INTO, sizes=(SIZE,), transport=Transport.TCP, iterations=100)
    ends = {"kernel": "6.1.0", "cpus": 2, "boot_id": "one", "versions": {"orbit": "0.1.0"}}
    good = Report(
        plan=plan,
        rows=rows or (row(), baseline()),
        client={"host": "left", **ends},
        server={"host": "right", **ends},
        started="2026-01-02T03:04:05+00:00",
    )
    return replace(good, **changes)
