"""Why memory could not be registered, for people: the limits that one errno may stand for.

It reads what the kernel says about this process when something has failed already, and decides
nothing.
"""

from __future__ import annotations

import errno as errnos
import resource
from collections.abc import Callable
from pathlib import Path

_SPENT = 0.95  # of the mappings: the rest goes to threads and libraries before we can look

_REFUSED = {
    errnos.EFAULT: "read-only, foreign or device memory: the kernel must be able to pin it for "
    "writing; copy it into memory of your own",
    errnos.EINVAL: "the device takes no registration of this length; or fork protection is on "
    "(IBV_FORK_SAFE), and this is a part of a huge page: register whole huge pages",
}


def registration_hint(errno: int) -> str:
    """One line, or nothing for an errno that speaks for itself."""
    if errno == errnos.ENOMEM:
        return _out_of_memory(_read)
    return _REFUSED.get(errno, "")


def _out_of_memory(read: Callable[[str], str]) -> str:
    """ENOMEM is what the kernel says of unmapped addresses and of two limits, too."""
    mappings = read("/proc/self/maps").count("\n")
    limit = _number(read("/proc/sys/vm/max_map_count"))
    counted = f"{mappings} of {limit or 'unknown'} mappings (sysctl vm.max_map_count)"
    pinned = _status_kib(read("/proc/self/status"), "VmPin") << 10
    locked = f"{pinned} bytes are pinned of {_locked_limit()} (RLIMIT_MEMLOCK, ulimit -l)"
    if limit and mappings >= _SPENT * limit:
        return f"the process has too many mappings: {counted}; {locked}"
    return f"the limit of locked memory may be too small: {locked}; {counted}"


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if soft == resource.RLIM_INFINITY else str(soft)


def _status_kib(status: str, name: str) -> int:
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return _number(line.split()[1])
    return 0


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
