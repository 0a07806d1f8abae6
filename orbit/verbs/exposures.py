"""The source's half of the RDMA path: what each lease has opened, until it is over.

Owns the table from lease to grants and the numbers of the grants. Which queue pair serves whom is
its arrays' choice, what a grant may do next is decided by its machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Iterable, Sequence

from ..errors import InternalError, OrbitError, PathUnavailable
from ..model import Direction, LeaseId
from ..transport.interface import Exposure, Session
from .exposing import LeaseGrants, reserve
from .source_arrays import SourceArrays
from .source_runs import ArrayPart

_LeaseKey = tuple[bytes, LeaseId]


class Exposures:
    """All methods belong to one event loop."""

    def __init__(self, arrays: SourceArrays, nap_us: int) -> None:
        self._arrays = arrays
        self._nap_us = nap_us
        self._leases: dict[_LeaseKey, LeaseGrants] = {}
        self._generations = itertools.count(1)

    async def expose(
        self,
        session: Session,
        parts: Sequence[ArrayPart],
        lease_id: LeaseId,
        direction: Direction,
        *,
        whole: bool,
    ) -> Exposure:
        """A grant over each part. `whole`: its end says whether every receipt came, also of READs.
        Raises PathUnavailable; then no key was published.
        """
        key = session.attempt, lease_id
        if key in self._leases:
            raise InternalError(f"lease {lease_id} is exposed already")

        def open_grants() -> LeaseGrants:
            arrays, generations = self._arrays, self._generations
            grants = reserve(arrays, session, parts, lease_id, direction, generations)
            return LeaseGrants(grants, whole=whole or direction is Direction.WRITE)

        lease = open_grants()
        try:
            return await self._publish(key, lease)
        except PathUnavailable:
            if not lease.found_dead:
                raise
        for array in dict.fromkeys(array for array, _ in parts):
            self._arrays.poll(session, array, direction)  # others may be dead as well
        return await self._publish(key, open_grants())

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        """See DataPath."""
        key = session.attempt, lease_id
        lease = self._leases.get(key)
        if lease is None:
            return
        await lease.end(transferred=transferred)
        self._forget(key, lease)
        lease.check_whole(transferred=transferred)

    async def wait_settled(self) -> None:
        """Until nobody uses what is exposed now."""
        for lease in list(self._leases.values()):
            await lease.wait_settled()

    def end_by_force(self, cause: OrbitError) -> Iterable[Awaitable[None]]:
        """Of every lease: await each. They raise Unquiesced."""
        return [lease.end_by_force(cause) for lease in self._leases.values()]

    def forget_ended(self, session: Session) -> None:
        """The epoch is over. What is not proven stays."""
        for key in [key for key in self._leases if key[0] == session.attempt]:
            if self._leases[key].ended:
                del self._leases[key]

    def clear(self) -> None:
        """Everything is closed."""
        self._leases.clear()

    async def _publish(self, key: _LeaseKey, lease: LeaseGrants) -> Exposure:
        self._leases[key] = lease
        try:
            return await lease.publish(self._nap_us, lambda: self._forget(key, lease))
        except PathUnavailable:
            self._forget(key, lease)
            raise

    def _forget(self, key: _LeaseKey, lease: LeaseGrants) -> None:
        if self._leases.get(key) is lease:
            del self._leases[key]
