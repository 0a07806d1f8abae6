"""Further rails for large gets: which queue-pair arrays a consumer offers an owner at once.

The first large get goes over one array; the others are connected behind it, in nobody's way, and
offered from then on. A rail that fails is offered again when it was connected again. How much goes
through which is the owner's choice.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from ..errors import OrbitError
from ..model import Direction, Lease, PathName
from ..protocol.paths import FALLBACK_REASONS, SPREAD_BYTES_MIN
from ..transport.interface import Session
from ..transport.rails import RailedPath
from .paths import Paths
from .runner import TaskRunner

_log = logging.getLogger("orbit")

CONNECT_S: Final = 3.0  # for one array: nobody waits for it but the close of the node


class Spreading:
    """Of one node, towards all owners."""

    def __init__(self, paths: Paths, runner: TaskRunner) -> None:
        self._path = paths.rdma if isinstance(paths.rdma, RailedPath) else None
        self._runner = runner
        self._arrays: dict[Session, tuple[int, ...]] = {}
        self._connecting: set[Session] = set()

    def arrays(self, session: Session) -> tuple[int, ...]:
        """What to offer: none while one array is all there is."""
        return self._arrays.get(session, ())

    def fetched(self, session: Session, lease: Lease) -> None:
        """A get has ended so. After one that says more than one rail is worth it, or that one of
        them failed, they are connected in the background.
        """
        if self._path is None or session.closed:
            return
        failed = lease.reason in FALLBACK_REASONS and self._arrays.pop(session, None) is not None
        large = lease.path is PathName.RDMA and lease.nbytes >= SPREAD_BYTES_MIN
        if not (failed or large) or session in self._connecting:
            return
        if len(self._path.routes(session)) > 1:
            self._connecting.add(session)
            self._runner.spawn(self._connect(self._path, session), "connect further rails")

    def forget(self, session: Session) -> None:
        """The epoch is over."""
        self._arrays.pop(session, None)

    async def _connect(self, path: RailedPath, session: Session) -> None:
        """Each of them, those that are connected included: that costs nothing."""
        loop = asyncio.get_running_loop()
        found: list[int] = []
        try:
            for route in path.routes(session):
                deadline = loop.time() + CONNECT_S
                try:
                    array = await path.connect_route(
                        session, Direction.READ, route, deadline=deadline
                    )
                except OrbitError as error:
                    _log.debug("%s to %s: %s", route.rail.device, session.peer, error)
                else:
                    found.append(array)
        finally:
            self._connecting.discard(session)
        if len(found) > 1 and not session.closed:
            self._arrays[session] = tuple(dict.fromkeys(found))
        else:
            self._arrays.pop(session, None)
