"""Whether a peer can be reached, and how that was found out.

An open message link is asked by its own ping; without one the control connection is asked, and
dialed for that if need be. The state of a socket or a queue pair proves nothing and is not looked
at.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from ...errors import (
    ClosedError,
    OrbitError,
    PeerUnreachable,
    UnknownPeer,
)
from ...model import PathName, PeerIdentity, WorkerId
from .contract import Caller
from .routes import Route


class HealthKind(StrEnum):
    """What a check found."""

    OK = "ok"
    NEVER_CONNECTED = "never_connected"  # it answered, but no message link to it was ever open
    PEER_NOT_REGISTERED = "peer_not_registered"  # no address is known
    NOT_STARTED = "not_started"  # this node is not open
    CONNECTION_FAILED = "connection_failed"  # refused, lost, or not the node that was expected
    TIMEOUT = "timeout"  # no answer in time


@dataclass(frozen=True, slots=True)
class Health:
    """One check. `rtt_s` is there when the peer answered; `transport` names the link that it
    answered by, None for the control connection.
    """

    kind: HealthKind
    rtt_s: float | None = None
    transport: PathName | None = None
    detail: str = ""

    @property
    def reachable(self) -> bool:
        """The peer answered."""
        return self.kind in (HealthKind.OK, HealthKind.NEVER_CONNECTED)


class HealthChecks:
    """Of one node. `link_opened` is told of every message link, whoever opened it."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._connected: set[WorkerId] = set()

    def link_opened(self, peer: PeerIdentity) -> None:
        self._connected.add(peer.worker_id)

    async def check(self, peer: object, timeout_s: float) -> Health:
        """Never raises for what is wrong with the peer; UsageError for what is none."""
        worker_id = self._caller.worker_id_of(peer)
        if worker_id == self._caller.identity.worker_id:
            return Health(HealthKind.OK, 0.0, PathName.LOCAL)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                return await self._ask(worker_id, timeout_s)
        except UnknownPeer as error:
            return Health(HealthKind.PEER_NOT_REGISTERED, detail=str(error))
        except TimeoutError as error:  # DeadlineExceeded is one
            return Health(HealthKind.TIMEOUT, detail=str(error) or f"no answer in {timeout_s:g} s")
        except PeerUnreachable as error:
            late = error.kind in ("timeout", "silent")
            kind = HealthKind.TIMEOUT if late else HealthKind.CONNECTION_FAILED
            return Health(kind, detail=str(error))
        except OrbitError as error:
            return Health(HealthKind.CONNECTION_FAILED, detail=str(error))

    async def _ask(self, worker_id: WorkerId, timeout_s: float) -> Health:
        route = self._route(worker_id)
        if route is not None:
            self._connected.add(worker_id)
            try:
                rtt_s = await route.link.ping(timeout_s)
            except ClosedError:
                pass  # closed as idle meanwhile: that says nothing of the peer
            else:
                return Health(HealthKind.OK, rtt_s, route.transport)
        session = await self._caller.session_to(worker_id)
        rtt_s = await session.ping(timeout_s)
        known = worker_id in self._connected
        return Health(HealthKind.OK if known else HealthKind.NEVER_CONNECTED, rtt_s)

    def _route(self, worker_id: WorkerId) -> Route | None:
        """What sends use, or a link that the peer opened and this node has not sent by yet."""
        route = self._caller.route_to(worker_id)
        if route is not None:
            return route
        all_routes = self._caller.routes()
        return next((r for r in all_routes if r.peer.worker_id == worker_id and r.usable), None)
