"""What the kernel lets this process pin: memlock against the budgets, and the count of mappings.

Whether the limit holds at all is read from the effective capabilities. The bounding set, which
tools like `capsh` show first, says only what the process could be given.
"""

from __future__ import annotations

import resource

from ..config import MIB
from .finding import Area, Finding
from .host import Limits
from .seen import Seen

_AREA = Area("memory")
_CAP_IPC_LOCK = 1 << 14
_MAPPINGS_MIN = 65_530  # the kernel's default of vm.max_map_count
_FIX = (
    "'USER - memlock unlimited' in /etc/security/limits.conf, and a new login;"
    " for a service: LimitMEMLOCK=infinity;"
    " for a container: docker run --ulimit memlock=-1 ..."
)


def limit_findings(seen: Seen) -> list[Finding]:
    found = [_memlock(seen)]
    limit = seen.host.number(seen.host.proc / "sys/vm/max_map_count")
    if limit is not None and limit < _MAPPINGS_MIN:
        text = f"vm.max_map_count is {limit}: registrations may fail with ENOMEM"
        fix = f"sysctl -w vm.max_map_count={_MAPPINGS_MIN}"
        found.append(_AREA.warn("mappings_few", text, fix, limit=limit))
    return found


def _memlock(seen: Seen) -> Finding:
    if _has_ipc_lock(seen, "CapEff"):
        text = "memlock does not bind this process: its effective capabilities have IPC_LOCK"
        return _AREA.ok("memlock_exempt", text)
    limits = seen.host.memlock()
    if limits is None:
        return _AREA.skip("memlock_unknown", "the limit of locked memory cannot be read")
    return _judge(seen, limits)


def _judge(seen: Seen, limits: Limits) -> Finding:
    soft, hard = limits
    pool = seen.config.rdma.pool
    budget, arena = pool.registered_bytes_budget, pool.initial_arena_bytes
    data = {"soft": soft, "hard": hard, "budget": budget, "arena": arena}
    if soft == resource.RLIM_INFINITY or soft >= budget:
        return _AREA.ok("memlock_ok", f"memlock {_shown(soft)}, budget {_shown(budget)}", **data)
    fix = _FIX
    if hard == resource.RLIM_INFINITY or hard >= budget:
        fix = f"ulimit -l {'unlimited' if hard == resource.RLIM_INFINITY else budget // 1024}"
    if _has_ipc_lock(seen, "CapBnd"):
        fix += "; or run it with IPC_LOCK, which the bounding set allows and the process lacks"
    if soft < min(arena, budget):
        text = f"memlock {_shown(soft)} is below the first arena of {_shown(min(arena, budget))}:"
        text += " registered memory cannot be had at all, and data moves by TCP"
        return _AREA.at(seen.missing, "memlock_below_arena", text, fix, **data)
    text = f"memlock {_shown(soft)} is below the budget of {_shown(budget)}: registrations beyond"
    text += " it fail with ENOMEM"
    return _AREA.warn("memlock_below_budget", text, fix, **data)


def _has_ipc_lock(seen: Seen, which: str) -> bool:
    text = seen.host.status(which)
    try:
        return bool(int(text, 16) & _CAP_IPC_LOCK)
    except ValueError:
        return False


def _shown(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else f"{nbytes / MIB:.4g} MiB"
