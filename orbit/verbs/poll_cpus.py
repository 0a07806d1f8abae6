"""Which processors a thread that polls a device may run on: those of the device's NUMA node.

Reads sysfs below a root that is given. What it finds is cut to what this process is allowed;
binding a thread is the poller's business.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from .topology import SYSFS


def poll_cpus(
    numa_node: int, *, allowed: Collection[int] | None = None, sysfs: Path = SYSFS
) -> tuple[int, ...]:
    """In order. Empty, which means no binding, when the node is unknown (-1) or this process may
    use none of its processors. `allowed` None: what the kernel says of this process.
    """
    if numa_node < 0:
        return ()
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    try:
        text = (sysfs / f"devices/system/node/node{numa_node}/cpulist").read_text("ascii")
        return tuple(cpu for cpu in _listed(text) if cpu in allowed)
    except (OSError, ValueError):
        return ()


def _listed(text: str) -> list[int]:
    """ "0-2,8" is 0, 1, 2 and 8. Raises ValueError."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found
