"""All bulk arrays of this node as a requester: the one of each epoch and direction that serves who
does not choose a rail, one for each further route, and private ones.

Owns their numbers. When one of them dials is its own business.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Iterator, Sequence

from ..errors import OrbitError, PathUnavailable
from ..model import Direction, PathName, PathReason
from ..protocol.messages import BulkLostNotice
from ..transport.interface import Session
from ..transport.rails import RailRoute
from .bulk_context import BulkContext
from .bulk_dial import ArrayName
from .device import DeviceContext
from .endpoints import IdleArray
from .rail_routes import RailPair, nearest_pair, pair_of, routes_of
from .requester_arrays import FindPair, RequesterArray
from .source_arrays import DEFAULT_ARRAYS

_Route = tuple[bytes, Direction, int, str]  # epoch, direction, local rail, GID of the remote one


class RequesterTable:
    """All methods belong to one event loop."""

    def __init__(self, devices: Sequence[DeviceContext], context: BulkContext) -> None:
        self._devices = tuple(devices)
        self._context = context
        self._arrays: dict[tuple[bytes, int], RequesterArray] = {}  # by epoch and number
        self._routes: dict[_Route, RequesterArray] = {}  # shared ones beside the default
        self._numbers = itertools.count(max(DEFAULT_ARRAYS.values()) + 1)
        context.endpoints.add_idle(self._idle)

    def __iter__(self) -> Iterator[RequesterArray]:
        return iter(self._arrays.values())

    def default(self, session: Session, direction: Direction) -> RequesterArray:
        """The array for who does not choose, made when it is asked for first."""
        number = DEFAULT_ARRAYS[direction]
        array = self._arrays.get((session.attempt, number))
        if array is None:
            array = self._make(
                ArrayName(session, direction, number),
                lambda avoid: nearest_pair(self._devices, session.peer_hello.rails, avoid),
            )
        return array

    def find(self, session: Session, number: int) -> RequesterArray | None:
        return self._arrays.get((session.attempt, number))

    def routes(self, session: Session) -> tuple[RailRoute, ...]:
        return () if session.closed else routes_of(self._devices, session.peer_hello.rails)

    async def connect_route(
        self,
        session: Session,
        direction: Direction,
        route: RailRoute,
        deadline: float | None,
        *,
        private: bool,
    ) -> int:
        """See RailedPath."""

        def find_pair(avoid: RailPair | None = None) -> RailPair:
            return pair_of(self._devices, session.peer_hello.rails, route)

        if session.closed:
            raise PathUnavailable(PathName.RDMA, PathReason.DRAINING, "the epoch is over")
        pair = find_pair()
        if private:
            name = ArrayName(session, direction, next(self._numbers), private=True)
            array = self._make(name, find_pair)
        else:
            array = self._shared(session, direction, route, find_pair)
        try:
            await array.connect(deadline)
            if array.pair.device is not pair.device:
                detail = f"{pair.device.name} was left meanwhile"
                raise PathUnavailable(PathName.RDMA, PathReason.PORT_DOWN, detail)
        except BaseException:
            if private:
                self._abandon(array, "its requester gave up")
            raise
        return array.name.number

    async def close_array(self, session: Session, direction: Direction, number: int) -> None:
        """See RailedPath. One whose end is not proven stays known, and says so again."""
        array = self.find(session, number)
        if array is None or not array.name.private or array.name.direction is not direction:
            return
        await asyncio.shield(array.begin_end(OrbitError("its requester is done with it")))
        self._arrays.pop((session.attempt, number), None)

    def lost_at_source(self, session: Session, notice: BulkLostNotice) -> None:
        """The owner lost queue pairs of an array."""
        array = self.find(session, notice.array)
        if array is not None:
            array.lost_at_source(notice)

    def close_session(self, session: Session) -> list[Awaitable[None]]:
        """Kill the session's queue pairs: await each. They raise Unquiesced."""
        for route in [route for route in self._routes if route[0] == session.attempt]:
            del self._routes[route]
        keys = [key for key in self._arrays if key[0] == session.attempt]
        cause = OrbitError("the epoch is over")
        return [self._arrays.pop(key).close(cause) for key in keys]

    def close(self, cause: OrbitError) -> list[Awaitable[None]]:
        """As `close_session`, of every session."""
        arrays, self._arrays = list(self._arrays.values()), {}
        self._routes.clear()
        return [array.close(cause) for array in arrays]

    def leave_old_domains(self) -> None:
        """See `rollover.Leaving`. Arrays that nothing is on, and that no grant is on its way to."""
        now = asyncio.get_running_loop().time()
        for array in [a for a in self._arrays.values() if a.idle and a.old_since < math.inf]:
            if now < array.evictable_at:
                continue
            if array.name.number in DEFAULT_ARRAYS.values():
                array.evict()  # dialed anew under its number
            else:
                self._abandon(array, "its protection domain has no window keys left")

    def _shared(
        self, session: Session, direction: Direction, route: RailRoute, find_pair: FindPair
    ) -> RequesterArray:
        """The default array where it is between the same rails, so that both uses share it. None
        that is in a protection domain that was left: a new number costs nobody anything.
        """
        pair, default = find_pair(None), self.default(session, direction)
        try:
            if default.pair == pair and default.old_since == math.inf:
                return default
        except PathUnavailable:
            pass  # it has no rails at all
        key = session.attempt, direction, route.rail.nic, route.remote_gid
        array = self._routes.get(key)
        if array is None or array.old_since < math.inf:
            name = ArrayName(session, direction, next(self._numbers))
            array = self._routes[key] = self._make(name, find_pair)
        return array

    def _make(self, name: ArrayName, find_pair: FindPair) -> RequesterArray:
        array = RequesterArray(name, find_pair, self._context)
        if not name.session.closed:  # else nobody would close it
            self._arrays[name.session.attempt, name.number] = array
        return array

    def _abandon(self, array: RequesterArray, why: str) -> None:
        """One that nobody will ask for again: it ends in the background, and stays known where its
        end is not proven.
        """
        for route in [route for route, known in self._routes.items() if known is array]:
            del self._routes[route]
        key = array.name.session.attempt, array.name.number

        def gone(ending: asyncio.Task[None]) -> None:
            if not ending.cancelled() and ending.exception() is None:
                self._arrays.pop(key, None)

        array.begin_end(OrbitError(why)).add_done_callback(gone)

    def _idle(self) -> list[IdleArray]:
        return [array for array in self._arrays.values() if array.idle]
