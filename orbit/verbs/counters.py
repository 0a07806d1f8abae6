"""Counts of what the RDMA path did, and their frozen snapshot.

Owns numbers only. They do not depend on the machine's speed, so tests and benchmarks compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class PathCounters:
    """Written by the shells, read through `RdmaPath.statistics`."""

    grants: int = 0  # authority asked for by consumers
    binds: int = 0
    receipts: int = 0
    aborts: int = 0  # queue pairs killed, on either side
    connects: int = 0  # queue pairs connected, on either side
    connect_failures: int = 0
    pulls: int = 0
    pulls_failed: int = 0
    reads: int = 0
    read_bytes: int = 0
    receipts_sent: int = 0
    targets_direct: int = 0  # pulls into pinned memory
    targets_registered: int = 0  # pulls that registered their target
    targets_copied: int = 0  # pulls through the pool, with one copy


@dataclass(frozen=True, slots=True)
class PathStatistics:
    """What `RdmaPath.statistics` answers."""

    counts: Mapping[str, int]
    grants_active: int
    queue_pairs: int
    windows_parked: int
    window_keys_used: int
    window_keys_remaining: int
    registered_bytes: int
    unknown_completions: int
    crossings: int  # calls into the helper
    retained_bytes: int
    retained: tuple[object, ...] = field(default=())
