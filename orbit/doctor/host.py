"""How checks see the host: the roots of its trees and what a process asks of itself.

The defaults are the real host; tests give a folder and answers of their own. Nothing here judges.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..verbs.gid_ranking import Netdev
from ..verbs.netdevs import read_netdevs

Limits = tuple[int, int]  # soft and hard, in bytes; resource.RLIM_INFINITY for none


def _memlock() -> Limits:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host, real or made up."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")
    etc: Path = Path("/etc")
    nodes: Path = Path("/dev/infiniband")
    memlock: Callable[[], Limits] = _memlock
    netdevs: Callable[[], Mapping[str, Netdev]] = read_netdevs
    environment: Mapping[str, str] = field(default_factory=dict)  # ORBIT_* and the provider's own

    def read(self, path: Path) -> str:
        """The stripped text of a small file; empty if it cannot be read."""
        try:
            return path.read_text("utf-8", "replace").strip()
        except OSError:
            return ""
