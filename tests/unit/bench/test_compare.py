"""Two runs beside each other, with every difference that can move a figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orbit.bench.compare import compare
from orbit.bench.plan import Verify
from orbit.bench.report import NO_LATENCY, Source
from orbit.errors import UsageError
from tests.unit.bench.reports import baseline, report, row


def test_rows_are_matched_by_verb_size_and_source() -> None:
    a = report(row(), baseline(), row(size=4096))
    b = report(row(seconds=0.125), baseline(), baseline(source=Source.PERFTEST))
    found = compare([a], [b])
    assert [pair.source for pair in found.pairs] == [Source.ORBIT, Source.SOCKET]
    assert found.pairs[0].rate_ratio == pytest.approx(0.8)
    assert found.pairs[0].p50_ratio == found.pairs[0].p99_ratio == 1
    assert found.differences == ()
    assert found.unmatched == (
        "only A has get_into 4096 bytes by orbit",
        "only B has get_into 1048576 bytes by perftest",
    )
    assert found.slower_than(0.9) == found.pairs[:1]
    assert found.slower_than(0.7) == ()


def test_a_baseline_that_was_not_had_is_no_row() -> None:
    missing = baseline(ops=0, errors=1, seconds=0.0, latency=NO_LATENCY, reason="refused")
    found = compare([report()], [report(row(), missing)])
    assert [pair.source for pair in found.pairs] == [Source.ORBIT]
    assert found.unmatched == ("only A has get_into 1048576 bytes by socket",)


def test_a_slower_baseline_is_no_slower_orbit() -> None:
    found = compare([report()], [report(row(), baseline(seconds=0.5))])
    assert found.slower_than(0.95) == ()


def test_what_else_differs_is_listed_once() -> None:
    a = report(row(), baseline())
    b = report(row(inflight=4, paths={"rdma/x:1 gid 1": 100}), baseline(), problems=("bad",))
    b = replace(b, plan=replace(b.plan, verify=Verify.FULL))
    b = replace(b, client={**b.client, "kernel": "6.2.0", "rails": [{"device": "x", "mtu": 1024}]})
    b = replace(b, server={**b.server, "versions": {"orbit": "0.2.0"}})
    assert set(compare([a], [b]).differences) == {
        "verify: sample and full",
        "client: kernel: 6.1.0 and 6.2.0",
        "client: rails: 0 and 1",
        "server: orbit: 0.1.0 and 0.2.0",
        "get_into 1048576 bytes by orbit: inflight: 1 and 4",
        "get_into 1048576 bytes by orbit: path: tcp and rdma/x:1 gid 1",
        "B has a problem: bad",
    }


def test_rails_are_compared_one_by_one() -> None:
    a, b = (
        replace(report(), client={"rails": [{"device": "x", "mtu": mtu}]}) for mtu in (1024, 4096)
    )
    assert compare([a], [b]).differences == ("client: rail 0: mtu: 1024 and 4096",)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(UsageError, match="in common"):
        compare([report(row())], [report(row(size=4096))])


def test_two_rows_of_one_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="two rows"):
        compare([report(), report()], [report()])
