"""A transfer engine's statistics as samples."""

from __future__ import annotations

from ..model import PathReason
from ..runtime.engine.core import EngineStatistics
from ..runtime.retained import Retained
from .node_series import fill_retained
from .sheet import Sheet

_PAUSES = (PathReason.PORT_DOWN, PathReason.DEVICE_FAILED)  # for now, and for good


def fill_engine(sheet: Sheet, statistics: EngineStatistics, retained: tuple[Retained, ...]) -> None:
    sheet.add("orbit_engine_regions", statistics.regions)
    sheet.add("orbit_engine_requests_running", statistics.running)
    for state, count in statistics.outcomes.items():
        sheet.add("orbit_engine_requests_total", count, state=state)
    sheet.add("orbit_engine_moved_bytes_total", statistics.bytes_moved)
    sheet.add("orbit_engine_in_flight_bytes", statistics.in_flight_bytes)
    for name, (used, limit) in statistics.budgets.items():
        sheet.add("orbit_engine_budget_in_use", used, budget=name)
        sheet.add("orbit_engine_budget_limit", limit, budget=name)
    for name, count in statistics.waiting.items():
        sheet.add("orbit_engine_budget_waiting", count, budget=name)
    fill_retained(sheet, "orbit_engine", retained)
    _fill_rails(sheet, statistics)


def _fill_rails(sheet: Sheet, statistics: EngineStatistics) -> None:
    rails = statistics.rails
    if rails is None:
        return
    for rail in rails.rails:
        labels = {"device": rail.device, "port": str(rail.port), "nic": str(rail.nic)}
        in_flight, planned = statistics.rail_bytes.get(rail.nic, (0, 0))
        sheet.add("orbit_engine_rail_active", int(rail.active), **labels)
        for reason in _PAUSES:
            paused = int(not rail.active and rail.reason is reason)
            sheet.add("orbit_engine_rail_paused", paused, **labels, reason=reason.value)
        sheet.add("orbit_engine_rail_in_flight_bytes", in_flight, **labels)
        sheet.add("orbit_engine_rail_planned_bytes_total", planned, **labels)
    for resource, (used, limit) in rails.budgets.items():
        sheet.add("orbit_engine_rails_in_use", used, resource=resource)
        sheet.add("orbit_engine_rails_limit", limit, resource=resource)
    sheet.add("orbit_engine_monitor_ticks_total", rails.monitor_ticks)
    sheet.add("orbit_engine_route_queries_total", rails.route_queries)
    sheet.add("orbit_engine_route_recoveries_total", rails.route_recoveries)
    sheet.add("orbit_engine_progress_recoveries_total", rails.progress_recoveries)
