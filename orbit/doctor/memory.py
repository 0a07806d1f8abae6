"""The memory that registrations come from: RAM, the cgroup's limit, overcommit, huge pages."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ..config import MIB
from .finding import Area, Finding
from .host import Host
from .seen import Seen

_AREA = Area("memory")
_STRICT = 2  # vm.overcommit_memory: never more than CommitLimit
_NO_LIMIT = 1 << 60  # cgroup v1 writes "none" as a number near 2^63


def memory_findings(seen: Seen) -> list[Finding]:
    host = seen.host
    budget = seen.config.rdma.pool.registered_bytes_budget
    facts = _meminfo(host)
    found = [_ram(facts, budget), _cgroup(host, budget), _huge_pages(host, facts)]
    room = facts.get("CommitLimit", 0) - facts.get("Committed_AS", 0)
    strict = host.number(host.proc / "sys/vm/overcommit_memory") == _STRICT
    if strict and room < budget:
        text = f"vm.overcommit_memory is 2, and {room // MIB} MiB can still be promised; the"
        text += f" budget of registered memory is {budget // MIB} MiB"
        fix = "sysctl -w vm.overcommit_memory=0, or a larger vm.overcommit_ratio"
        found.append(_AREA.warn("overcommit_strict", text, fix, room=room))
    return found


def _ram(facts: dict[str, int], budget: int) -> Finding:
    total, free = facts.get("MemTotal"), facts.get("MemAvailable")
    if total is None or free is None:
        return _AREA.skip("ram_unknown", "/proc/meminfo cannot be read")
    data = {"total": total, "available": free, "budget": budget}
    text = f"{free // MIB} MiB of {total // MIB} MiB are available, the budget is {budget // MIB}"
    fix = f"lower rdma.pool.registered_bytes_budget below {free // MIB} MiB"
    if budget > free:
        return _AREA.warn("budget_above_ram", f"pinned memory is never paged out: {text}", fix)
    return _AREA.ok("ram_ok", text, **data)


def _cgroup(host: Host, budget: int) -> Finding:
    files = [file for file in _limit_files(host) if file.exists()]
    limit = min((n for n in map(host.number, files) if n is not None), default=_NO_LIMIT)
    if limit < budget:
        text = (
            f"the cgroup allows {limit // MIB} MiB, the budget is {budget // MIB} MiB: the kernel"
        )
        text += " ends the process before the budget is spent"
        fix = "raise the container's memory limit, or lower rdma.pool.registered_bytes_budget"
        return _AREA.warn("cgroup_below_budget", text, fix, limit=limit, budget=budget)
    if limit < _NO_LIMIT:
        text = f"the cgroup allows {limit // MIB} MiB, the budget is {budget // MIB} MiB"
        return _AREA.ok("cgroup_ok", text, limit=limit, budget=budget)
    # The first cgroup of version 2 has no limit, and no file for one.
    if not files and not (host.sysfs / "fs/cgroup/cgroup.controllers").exists():
        return _AREA.skip("cgroup_unknown", "the memory limit of this process' cgroup is not shown")
    return _AREA.ok("cgroup_ok", "no cgroup limits this process' memory")


def _limit_files(host: Host) -> list[Path]:
    """Of the process' cgroup and all above it, version 2 and 1."""
    found: list[Path] = []
    for line in host.read(host.proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = host.sysfs / "fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, file = host.sysfs / "fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        place = PurePosixPath(path.lstrip("/"))
        found += [root / above / file for above in (place, *place.parents)]
    return found


def _huge_pages(host: Host, facts: dict[str, int]) -> Finding:
    mode = host.read(host.sysfs / "kernel/mm/transparent_hugepage/enabled")
    chosen = mode.partition("[")[2].partition("]")[0]
    free = facts.get("HugePages_Free", 0)
    reserved = f"{free} reserved huge pages are free"
    if free:
        return _AREA.ok("huge_pages", f"{reserved}; transparent ones: {chosen or 'unknown'}")
    if not chosen:
        return _AREA.skip("huge_pages_unknown", "whether huge pages can be had cannot be read")
    if chosen == "never":
        text = "transparent huge pages are off and none are reserved: registering takes longer"
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return _AREA.warn("huge_pages_off", text, fix)
    return _AREA.ok("huge_pages", f"transparent huge pages: {chosen}; {reserved}")


def _meminfo(host: Host) -> dict[str, int]:
    """In bytes; the counts of huge pages as they are."""
    found: dict[str, int] = {}
    for line in host.read(host.proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return found
