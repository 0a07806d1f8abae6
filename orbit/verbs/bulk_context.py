"""What every bulk queue pair of one path shares, in either role. It holds the parts and does
nothing with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.grants import GrantTimeouts
from .counters import PathCounters
from .endpoints import EndpointBudget
from .retention import Retained
from .settings import RdmaPathConfig


@dataclass(frozen=True, slots=True, eq=False)
class BulkContext:
    config: RdmaPathConfig
    timeouts: GrantTimeouts
    retained: Retained
    counters: PathCounters
    endpoints: EndpointBudget
