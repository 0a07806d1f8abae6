"""Counts of what the RDMA path did; their frozen snapshot is transport/path_statistics.py.

Owns numbers only. They do not depend on the machine's speed, so tests and benchmarks compare them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..transport.path_statistics import PathStatistics

__all__ = ["PathCounters", "PathStatistics"]


@dataclass(slots=True)
class PathCounters:
    """Written by the shells, read through `RdmaPath.statistics`."""

    grants: int = 0  # authority asked for by consumers
    binds: int = 0
    binds_completed: int = 0
    bind_s: float = 0.0  # from post to completion, all of them together
    receipts: int = 0
    aborts: int = 0  # queue pairs killed, on either side
    connects: int = 0  # queue pairs connected, on either side
    connect_failures: int = 0
    key_rollovers: int = 0  # fresh protection domains, since the keys of one ran out
    key_rollovers_failed: int = 0
    pulls: int = 0
    pulls_failed: int = 0
    pushes: int = 0
    pushes_failed: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    receipts_sent: int = 0
    receipt_s: float = 0.0  # from a transfer's last byte to its receipt's completion, all of them
    targets_direct: int = 0  # pieces of targets and sources that were pinned
    targets_registered: int = 0  # that were registered for the operation
    targets_copied: int = 0  # that went through the pool, with one copy
