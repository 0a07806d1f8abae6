"""What transfers and handles cost in memory, in processes of their own: pulling into the caller's
memory costs that memory, and handles that come and go leave nothing behind, over either path.

That the TCP path allocates nothing per chunk is tests/unit/transport's. ORBIT_SOAK (`make soak`)
pulls 1 GiB, and makes it 100,000 handles.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.messages.settled import SOAK

ROOT = Path(__file__).parents[3]
NBYTES = (1024 if SOAK else 256) << 20
# 2 % of 1 GiB: what a node takes by itself, the modules that it imports included, is half of that.
BESIDE_BYTES = (1 << 30) // 50
HANDLES = {"tcp": 100_000, "rdma": 100_000} if SOAK else {"tcp": 2000, "rdma": 600}
LEFT_BYTES_MAX = 1 << 20 if SOAK else 256 << 10  # allocators and caches breathe by as much
HANG_S = 3600.0 if SOAK else 300.0


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.cases.memory_worker", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def said(by: subprocess.Popen[str]) -> dict[str, Any]:
    assert by.stdout is not None
    return dict(json.loads(by.stdout.readline()))


def test_a_pull_costs_its_payload_and_no_more(record_property: Any) -> None:
    """The peak, from the import on, of whoever fetches and of whoever serves."""
    with process("own", NBYTES) as owner:
        told = said(owner)
        with process("fetch", told["address"], told["handle"], NBYTES) as consumer:
            fetched = said(consumer)
        assert owner.stdin is not None
        owner.stdin.write("\n")
        owner.stdin.flush()
        served = said(owner)
    assert fetched["checksum"] == served["checksum"]
    for name, found in (("consumer", fetched), ("owner", served)):
        record_property(name, found["grown"] / NBYTES)
        assert NBYTES <= found["grown"] <= NBYTES + BESIDE_BYTES, name


@pytest.mark.parametrize("path", HANDLES)
def test_handles_that_come_and_go_leave_nothing(path: str, record_property: Any) -> None:
    """Both nodes are in that process. Its first turns fill caches; after that it does not grow."""
    with process("handles", path, HANDLES[path]) as both:
        output, _ = both.communicate(timeout=HANG_S)
    found = json.loads(output)
    record_property("grown", found)
    assert found["second"] <= LEFT_BYTES_MAX, found
