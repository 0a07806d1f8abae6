"""A node's counts and gauges for Prometheus, its engine's beside them: `start_http_server` serves
them, an `Exporter` hands them to a registry that exists. Needs `orbit[metrics]`.
"""

from __future__ import annotations

try:
    import prometheus_client as _needed  # noqa: F401
except ImportError as error:
    raise ImportError("orbit.metrics needs prometheus_client: install orbit[metrics]") from error

from .exporter import COLLECT_TIMEOUT_S, EngineReporting, Exporter, Reporting
from .series import HELP, UNDESCRIBED
from .server import MetricsServer, start_http_server

__all__ = [
    "COLLECT_TIMEOUT_S",
    "HELP",
    "UNDESCRIBED",
    "EngineReporting",
    "Exporter",
    "MetricsServer",
    "Reporting",
    "start_http_server",
]
