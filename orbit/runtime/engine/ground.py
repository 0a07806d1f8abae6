"""What an engine stands on: the parts of one node, and what all of its transfers share.

It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ...config import EngineConfig
from ...model import PeerIdentity, WorkerId
from ...transport.interface import Session
from ..paths import Paths
from ..regions import Regions
from ..registering import Registering
from ..session import ControlSession
from ..sessions import Sessions
from ..transferring import TransferContext, TransferRun
from .budgets import SharedBudget
from .planning import RailPlanner
from .tally import Tally

_GRANTS = "engine.max_grants"
_DIRECT = "engine.max_direct_bytes"
_STAGING = "engine.max_staging_bytes"


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Of a node. `watched` tells a run of the end of its session."""

    identity: PeerIdentity
    paths: Paths
    regions: Regions
    registering: Registering
    context: TransferContext
    sessions: Sessions
    session_to: Callable[[WorkerId], Coroutine[Any, Any, ControlSession]]
    watched: Callable[[Session, TransferRun], AbstractContextManager[None]]
    kill_switch: bool


class Budgets:
    """Each role is counted apart: if a source's loans came out of what requests wait for, two
    engines that read from each other could wait for each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        direct, staging = config.max_direct_bytes, config.max_staging_bytes
        self.grants = SharedBudget("max_grants", config.max_grants, _GRANTS)
        self.direct = SharedBudget("max_direct_bytes", direct, _DIRECT)
        self.staging = SharedBudget("max_staging_bytes", staging, _STAGING)
        self.source_grants = SharedBudget("max_grants (source)", config.max_grants, _GRANTS)
        self.source_direct = SharedBudget("max_direct_bytes (source)", direct, _DIRECT)
        self.source_staging = SharedBudget("max_staging_bytes (source)", staging, _STAGING)

    @property
    def all(self) -> tuple[SharedBudget, ...]:
        requester = (self.grants, self.direct, self.staging)
        return (*requester, self.source_grants, self.source_direct, self.source_staging)


@dataclass(frozen=True, slots=True)
class Ground:
    """`planner` None: this node has no rails. `parents`: those that hold something."""

    config: EngineConfig
    node: NodeParts
    budgets: Budgets
    parents: Tally
    planner: RailPlanner | None
    loop: asyncio.AbstractEventLoop

    @property
    def staged(self) -> bool:
        """Devices reach private copies only."""
        return self.config.host_memory == "staged"
