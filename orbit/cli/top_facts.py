"""What `orbit top` shows, computed from two scrapes of one node: states of now, and rates between.

Every rate is a count a second, and None where there is nothing to compare with: before the second
scrape, and after a restart, which sets counters back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..scraping import Snapshot, quantile

# Resources of all rails that stand among the engine's budgets, or as a budget of their own, too.
_SHOWN_ALREADY = ("endpoints", "registered_bytes")
_READS = "orbit_rendezvous_rdma_get_duration_seconds"


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """`waiting`: requests that wait for it."""

    name: str
    used: float
    limit: float
    waiting: int = 0

    @property
    def part(self) -> float:
        return min(1.0, self.used / self.limit) if self.limit else 0.0

    @property
    def in_bytes(self) -> bool:
        return "bytes" in self.name


@dataclass(frozen=True, slots=True)
class RailRow:
    """`keys_left`: the part of its device's window keys that is left, 0 to 1; None: not told.
    `reason`: why it is paused.
    """

    device: str
    port: str
    active: bool
    in_flight_bytes: float
    bytes_per_s: float | None
    keys_left: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransportRow:
    """One of rdma and tcp, or local: within this node. `fetched`: payload bytes; `frames`: of
    messages.
    """

    name: str
    fetched_bytes: float
    fetched_bytes_per_s: float | None
    leases: int
    links: int
    frames_out_per_s: float | None
    frames_in_per_s: float | None


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """How often a path was taken and why. `side`: owner, consumer, or fallback for a transfer that
    gave up RDMA on its way.
    """

    side: str
    path: str
    reason: str
    count: int
    per_s: float | None


@dataclass(frozen=True, slots=True)
class Retention:
    """Memory of this process whose end of access could not be proven."""

    pieces: int
    nbytes: float
    age_s: float
    device_bytes: float  # of these or others, what no device has let go of

    @property
    def anything(self) -> bool:
        return bool(self.pieces or self.nbytes or self.device_bytes)


@dataclass(frozen=True, slots=True)
class TopFacts:
    """One screen. `gauges` and `rates` by the words that stand on the screen."""

    node: str
    version: str
    rdma_reason: str
    uptime_s: float | None
    interval_s: float | None
    budgets: tuple[BudgetRow, ...]
    rails: tuple[RailRow, ...]
    transports: tuple[TransportRow, ...]
    decisions: tuple[DecisionRow, ...]
    retained: Retention
    gauges: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float | None] = field(default_factory=dict)
    read_p50_s: float | None = None
    read_p99_s: float | None = None


GAUGES = {
    "sessions": "orbit_sessions",
    "slots": "orbit_rendezvous_active_slots",
    "staged_bytes": "orbit_rendezvous_staged_bytes",
    "leased_bytes": "orbit_rendezvous_leased_bytes",
    "leases_held": "orbit_rendezvous_leases_held",
    "leases_armed": "orbit_rendezvous_leases_armed",
    "leases_held_here": "orbit_rendezvous_leases_held_here",
    "leases_unquiesced": "orbit_rendezvous_leases_unquiesced",
    "grants_active": "orbit_rdma_grants_active",
    "grant_age_s": "orbit_rdma_grant_age_seconds",
    "queue_pairs": "orbit_rdma_queue_pairs",
    "requests_running": "orbit_engine_requests_running",
    "in_flight_bytes": "orbit_engine_in_flight_bytes",
    "pending_calls": "orbit_messenger_pending_responses",
    "queued_frames": "orbit_messenger_queued_frames",
    "waiting_sends": "orbit_messenger_waiting_sends",
    "resident_bytes": "process_resident_memory_bytes",
    "open_fds": "process_open_fds",
}
RATES = {
    "leases_ended": "orbit_rendezvous_leases_ended_total",
    "leases_reaped": "orbit_rendezvous_rdma_leases_reaped_total",
    "grants": "orbit_rdma_grants_total",
    "moved_bytes": "orbit_engine_moved_bytes_total",
    "requests": "orbit_engine_requests_total",
    "calls_served": "orbit_messenger_handler_requests_total",
    "call_failures": "orbit_messenger_handler_failures_total",
    "sends_failed": "orbit_messenger_sends_failed_total",
    "aborts": "orbit_rdma_aborts_total",
    "cpu_s": "process_cpu_seconds_total",
}


def facts_of(now: Snapshot, before: Snapshot | None = None) -> TopFacts:
    """`before`: an earlier scrape of the same endpoint, for rates."""
    rates = _Rates(now, before)
    info = next((labels for labels, _ in now.rows("orbit_node_info")), {})
    started = now.value("process_start_time_seconds")
    read_buckets = rates.buckets(_READS)
    return TopFacts(
        node=info.get("node", ""),
        version=info.get("version", ""),
        rdma_reason=info.get("rdma", ""),
        uptime_s=max(0.0, time.time() - started) if started else None,
        interval_s=rates.interval_s,
        budgets=_budgets(now),
        rails=_rails(now, rates),
        transports=_transports(now, rates),
        decisions=_decisions(now, rates),
        retained=Retention(
            int(now.value("orbit_memory_retained")),
            now.value("orbit_memory_retained_bytes"),
            now.value("orbit_memory_retained_age_seconds"),
            now.value("orbit_rdma_retained_bytes"),
        ),
        gauges={name: now.value(series) for name, series in GAUGES.items()},
        rates={name: rates.per_s(series) for name, series in RATES.items()},
        read_p50_s=quantile(read_buckets, 0.5),
        read_p99_s=quantile(read_buckets, 0.99),
    )


class _Rates:
    """Between two scrapes, where they are of one life of the process."""

    def __init__(self, now: Snapshot, before: Snapshot | None) -> None:
        start = "process_start_time_seconds"
        if before is not None and before.value(start) != now.value(start):
            before = None
        self._now = now
        self._before = before
        self.interval_s = None if before is None else max(1e-3, now.at - before.at)

    def per_s(self, series: str, **labels: str) -> float | None:
        if self._before is None or self.interval_s is None:
            return None
        grown = self._now.value(series, **labels) - self._before.value(series, **labels)
        return grown / self.interval_s if grown >= 0 else None

    def buckets(self, series: str) -> list[tuple[float, float]]:
        """Of what happened in between; of all, when nothing did."""
        name = f"{series}_bucket"
        found = [(float(labels["le"]), count) for labels, count in self._now.rows(name)]
        if self._before is not None:
            old = {float(labels["le"]): count for labels, count in self._before.rows(name)}
            between = [(bound, count - old.get(bound, 0.0)) for bound, count in found]
            if any(count > 0 for _, count in between):
                return between
        return found


def _budgets(now: Snapshot) -> tuple[BudgetRow, ...]:
    registered, limit = "orbit_rdma_registered_bytes", "orbit_rdma_registered_bytes_budget"
    rows = []
    if now.value(limit):
        rows.append(BudgetRow("registered_bytes", now.value(registered), now.value(limit)))
    limits = now.by("budget", "orbit_engine_budget_limit")
    used = now.by("budget", "orbit_engine_budget_in_use")
    waiting = now.by("budget", "orbit_engine_budget_waiting")
    rows += [
        BudgetRow(name, used.get(name, 0.0), most, int(waiting.get(name, 0)))
        for name, most in limits.items()
    ]
    shared = now.by("resource", "orbit_engine_rails_in_use")
    rows += [
        BudgetRow(name, shared.get(name, 0.0), most)
        for name, most in now.by("resource", "orbit_engine_rails_limit").items()
        if name not in _SHOWN_ALREADY
    ]
    return tuple(rows)


def _rails(now: Snapshot, rates: _Rates) -> tuple[RailRow, ...]:
    left = now.by("device", "orbit_rdma_device_window_keys_remaining")
    limit = now.by("device", "orbit_rdma_device_window_keys_limit")
    rows = []
    for labels, active in now.rows("orbit_engine_rail_active"):
        device = labels.get("device", "")
        keys = left[device] / limit[device] if limit.get(device) and device in left else None
        in_flight = now.value("orbit_engine_rail_in_flight_bytes", **labels)
        rate = rates.per_s("orbit_engine_rail_planned_bytes_total", **labels)
        paused = now.rows("orbit_engine_rail_paused", **labels)
        reason = next((why.get("reason", "") for why, is_so in paused if is_so), "")
        port = labels.get("port", "")
        rows.append(RailRow(device, port, active > 0, in_flight, rate, keys, reason))
    return tuple(rows)


def _transports(now: Snapshot, rates: _Rates) -> tuple[TransportRow, ...]:
    fetched, frames = "orbit_rendezvous_fetched_bytes_total", "orbit_transport_frames_total"
    leases = now.by("path", "orbit_rendezvous_leases")
    names = ["rdma", "tcp"]
    if leases.get("local") or now.value(fetched, path="local"):
        names.append("local")
    return tuple(
        TransportRow(
            name,
            now.value(fetched, path=name),
            rates.per_s(fetched, path=name),
            int(leases.get(name, 0)),
            int(now.value("orbit_transport_active_connections", transport=name)),
            rates.per_s(frames, transport=name, direction="out"),
            rates.per_s(frames, transport=name, direction="in"),
        )
        for name in names
    )


def _decisions(now: Snapshot, rates: _Rates) -> tuple[DecisionRow, ...]:
    series, fallbacks = "orbit_rendezvous_rdma_path_total", "orbit_rendezvous_fallbacks_total"
    rows = [
        DecisionRow(
            labels.get("side", ""),
            labels.get("path", ""),
            labels.get("reason", ""),
            int(count),
            rates.per_s(series, **labels),
        )
        for labels, count in now.rows(series)
    ]
    rows += [
        DecisionRow(
            "fallback",
            "tcp",
            labels.get("reason", ""),
            int(count),
            rates.per_s(fallbacks, **labels),
        )
        for labels, count in now.rows(fallbacks)
    ]
    return tuple(sorted(rows, key=lambda row: (-(row.per_s or 0.0), -row.count)))
