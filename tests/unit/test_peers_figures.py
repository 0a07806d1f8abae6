"""The arithmetic of the comparison with peers: ratios within a repetition, what a pull costs as a
whole, what the device proves, and that wrong bytes are seen.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
MODULES = ("tables", "report", "contenders", "child", "end", "neighbours", "ends")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules, which import one another from their own folder."""
    monkeypatch.setattr(sys, "path", [str(BENCH / "peers"), *sys.path])
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def found_of(peers: Any) -> Any:
    """Two repetitions of a limit and of one of ours, which was 2 and 4 times as slow."""
    sample = peers.tables.Sample
    trips = [sample(who, n, 0, [1e-5]) for who in ("limit", "orbit get_into") for n in (0, 1)]
    pulls = [
        sample("limit", 0, 1 << 20, [1.0, 2.0, 3.0]),
        sample("limit", 1, 1 << 20, [10.0]),
        sample("orbit get_into", 0, 1 << 20, [4.0], [4.0], 0.5, 0.25, packets=256, path="rdma"),
        sample("orbit get_into", 1, 1 << 20, [40.0], [0.0], 0.5, 0.25, packets=256, path="rdma"),
    ]
    return peers.tables.Found(samples=[*trips, *pulls])


def test_ratios_are_within_a_repetition(peers: Any) -> None:
    found = found_of(peers)
    mine, limit = (found.of(who, 1 << 20) for who in ("orbit get_into", "limit"))
    assert peers.tables.ratios(mine, limit, lambda one: one.median) == [0.5, 0.25]
    assert peers.tables.ratios(mine, limit, lambda one: one.whole) == [0.25, 0.25]
    assert peers.tables.ratios(mine, {1: limit[1]}, lambda one: one.median) == [0.25]


def test_processor_time_is_for_a_gib_and_of_all_pulls(peers: Any) -> None:
    sample = peers.tables.Sample("one", 0, 1 << 29, [1.0, 1.0], (), 3.0, 1.0)
    assert sample.cpu_s_gib == (3.0, 1.0)


@pytest.mark.parametrize(
    ("packets", "said"), [(256, "x; RDMA proven"), (255, "x; 255 of 256 packets"), (0, "x")]
)
def test_rdma_is_proven_by_the_packets_that_the_bytes_need(
    peers: Any, packets: int, said: str
) -> None:
    sample = peers.tables.Sample("one", 0, 1 << 20, [1.0], packets=packets, path="x")
    small = peers.tables.Sample("one", 0, 0, [1.0], packets=1, path="x")
    assert peers.tables.proven([small, sample]) == said


def test_every_row_has_a_cell_for_each_column(peers: Any) -> None:
    found = found_of(peers)
    found.ends = [peers.tables.Ends("orbit get_into", 0, (0.0, 0.0), 1 << 20, 1 << 20, "1")]
    found.failed = {"other": "why"}
    about = dict.fromkeys(("repeats", "seed", "processors", "processor", "kernel"), 2)
    about |= {"network": "tcp", "placement": "two", "versions": {}, "load": 0, "revision": "x"}
    names = {"limit": "echo", "orbit get_into": "call", "never ran": "READ"}
    lines = "\n".join(peers.report.Report(found, names, "limit", [1 << 20], about).lines())
    tables = [block.splitlines() for block in lines.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4  # rates, ahead without and with the lease, costs
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, table
    assert "| orbit get_into | call | 10 (10 to 10) |" in lines
    assert "- other: why" in lines
    assert "never ran" not in lines


def test_wrong_bytes_anywhere_are_seen(peers: Any) -> None:
    nbytes = 3 * len(peers.end.BLOCK) + 5
    whole = peers.end.payload(nbytes)
    assert peers.end.is_payload(whole)
    assert not peers.end.is_payload(peers.end.memory(nbytes))
    for place in (0, len(peers.end.BLOCK), nbytes - 1):
        whole[place] ^= 1
        assert not peers.end.is_payload(whole)
        whole[place] ^= 1


def test_a_child_that_dies_or_hangs_is_a_reason(peers: Any) -> None:
    child = peers.child
    dead = child.Child([sys.executable, "-c", "raise SystemExit('no device\\n  ^^^')"], 30.0)
    with pytest.raises(child.PeerFailed, match="no device"):
        dead.answer()
    dead.close()
    hangs = child.Child([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    with pytest.raises(child.PeerFailed, match="no answer"):
        hangs.answer()
    hangs.close()
