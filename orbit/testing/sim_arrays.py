"""Arrays of queue pairs between simulated rails: dialing, eviction, loss and the end.

A dial is shared by all who wait for it, and goes on when they give up. What one side has lost the
other may still hold, as between processes. Nothing here moves bytes, and an epoch is only a name.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count

from ..errors import DeadlineExceeded, PathUnavailable, Unquiesced
from ..model import Direction, PathName, PathReason
from .faults import PathFaults, RailFaults
from .sim_rails import SimEndpoints, SimRail

Key = tuple[bytes, Direction, int]  # epoch, direction, number
_WIDTH = 2  # queue pairs of one array
_KEPT_S = 0.1  # that a requester's array is not evicted after somebody was given it
_FIRST_NUMBER = 2  # those below are the default arrays of each direction


@dataclass(eq=False)
class SimArray:
    """Queue pairs from `near`, a rail of the requester, to `far`, one of the source."""

    key: Key
    near: SimRail
    far: SimRail
    requester: SimArrays
    source: SimArrays
    private: bool = False
    moves: int = 0  # pulls and pushes that use it
    grants: int = 0  # exposed on it
    last_used: float = 0.0
    lost: str = ""  # why, as the requester knows
    lost_at_source: str = ""
    retained: bool = False  # the requester's end is not proven: its places stay taken
    still: asyncio.Event = field(default_factory=asyncio.Event)  # lost, and no move uses it

    @property
    def idle(self) -> bool:
        return not (self.moves or self.grants or self.private)

    @property
    def broken(self) -> str:
        """Why nothing moves through it any more; empty: it does."""
        return self.lost or self.lost_at_source

    def begin_move(self) -> None:
        self.moves += 1

    def end_move(self) -> None:
        self.moves -= 1
        self._settle()
        self._make_room()

    def end_grant(self) -> None:
        self.grants -= 1
        self._make_room()

    def lose(self, cause: str) -> None:
        """The requester's queue pairs fail; the source hears nothing."""
        if self.lost:
            return
        self.lost = cause
        if self.requester.requested.get(self.key) is self:
            del self.requester.requested[self.key]
        self._settle()

    def lose_at_source(self, cause: str, notice_s: float | None = None) -> None:
        """Those of the source do. The requester hears of it after `notice_s`; None: never."""
        if self.lost_at_source:
            return
        self.lost_at_source = cause
        if self.source.served.get(self.key) is self:
            del self.source.served[self.key]
        self.source.endpoints.give_back(_WIDTH)
        if notice_s is not None:
            text = f"lost at the source: {cause}"
            asyncio.get_running_loop().call_later(notice_s, self.lose, text)

    def _make_room(self) -> None:
        for side in (self.requester, self.source):
            side.make_room()

    def _settle(self) -> None:
        if self.lost and not self.moves and not self.still.is_set():
            self.still.set()
            if not self.retained:
                self.requester.endpoints.give_back(_WIDTH)


class SimArrays:
    """Those of one path in both roles. `faults` and `rail_faults` are the path's."""

    def __init__(self, faults: PathFaults, rail_faults: RailFaults, endpoints_max: int) -> None:
        self.endpoints = SimEndpoints(endpoints_max)
        self.requested: dict[Key, SimArray] = {}
        self.served: dict[Key, SimArray] = {}
        self.closed = False
        self._ended: set[bytes] = set()  # epochs
        self._faults = faults
        self._rail_faults = rail_faults
        self._numbers: dict[Key, int] = {}  # of shared arrays; the last part is the rail's
        self._dials: dict[Key, tuple[SimArray, asyncio.Task[SimArray]]] = {}
        self._fresh = count(_FIRST_NUMBER)
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def private(self) -> int:
        """How many that one caller requested for itself are connected."""
        return sum(array.private for array in self.requested.values())

    def number(self, attempt: bytes, direction: Direction, near: SimRail, *, first: bool) -> int:
        """That of the shared array from that rail: the default one if it lies there, or if there is
        none and this is the first rail.
        """
        default = int(direction) - 1
        key = attempt, direction, default
        dialed = self._dials.get(key)
        there = self.requested.get(key) or (dialed and dialed[0])
        if near is there.near if there else first:
            return default
        return self._numbers.setdefault((attempt, direction, near.nic), next(self._fresh))

    def new(
        self, key: Key, near: SimRail, far: SimRail, source: SimArrays, *, private: bool = False
    ) -> SimArray:
        """Not connected yet. A private one gets a number of its own."""
        if private:
            key = (*key[:2], next(self._fresh))
        return SimArray(key, near, far, self, source, private)

    async def connect(self, array: SimArray, deadline: float | None) -> SimArray:
        """That array, or the one that is there already. Raises PathUnavailable, BudgetExceeded,
        DeadlineExceeded.
        """
        there = self.requested.get(array.key)
        if there is not None:
            there.last_used = asyncio.get_running_loop().time()
            return there
        if array.key not in self._dials:
            started = asyncio.ensure_future(self._dial(array))
            started.add_done_callback(lambda done: self._dialed(array.key, done))
            self._dials[array.key] = array, started
        array, dial = self._dials[array.key]
        timeout = None if deadline is None else deadline - asyncio.get_running_loop().time()
        try:
            done, _ = await asyncio.wait([dial], timeout=timeout)
        except asyncio.CancelledError:
            self._given_up(array, dial)
            raise
        if not done:
            self._given_up(array, dial)
            raise DeadlineExceeded("connecting a simulated array", timeout or 0.0)
        if dial.cancelled():
            raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, "closed")
        return dial.result()

    async def close_array(self, key: Key) -> None:
        """See RailedPath.close_array."""
        array = self.requested.get(key)
        if array is None:
            return
        if self._rail_faults.closes_unproven:
            self._rail_faults.closes_unproven -= 1
            array.retained = True
        array.lose("closed by its requester")
        await array.still.wait()
        await asyncio.sleep(self._faults.prepare_s)
        array.lose_at_source("closed by its requester")
        if array.retained:
            raise Unquiesced(f"array {key[2]}", 0, "simulated")

    def fail_rail(self, rail: SimRail, cause: str) -> None:
        """Everything on it, in both roles."""
        for array in [a for a in self.requested.values() if a.near is rail]:
            array.lose(cause)
        self.fail_served(rail, cause)

    def fail_served(self, rail: SimRail, cause: str) -> None:
        """What it is the source of; who requested it hears of it later."""
        for array in [a for a in self.served.values() if a.far is rail]:
            array.lose_at_source(cause, self._rail_faults.notice_s)

    async def close(self, attempt: bytes | None = None) -> None:
        """Those of one epoch, or all; dials in flight end first."""
        if attempt is None:
            self.closed = True
        else:
            self._ended.add(attempt)
        dials = [dial for key, (_, dial) in self._dials.items() if attempt in (None, key[0])]
        for dial in dials:
            dial.cancel()
        if dials:
            await asyncio.wait(dials)
        for array in [a for a in self.requested.values() if attempt in (None, a.key[0])]:
            array.lose("closed")
            await array.still.wait()
        for array in [a for a in self.served.values() if attempt in (None, a.key[0])]:
            array.lose_at_source("closed", 0.0)

    async def _dial(self, array: SimArray) -> SimArray:
        await self.endpoints.take(_WIDTH, self.evict)
        try:
            await asyncio.sleep(self._faults.prepare_s)
            reason = self._rail_faults.connect
            if reason is not PathReason.OK or not array.near.active or self._over(array):
                reason = PathReason.CONNECT_FAILED if reason is PathReason.OK else reason
                raise PathUnavailable(PathName.RDMA, reason, array.near.detail or "simulated")
            array.source.serve(array)
        except BaseException:
            self.endpoints.give_back(_WIDTH)
            raise
        self.requested[array.key] = array
        array.last_used = asyncio.get_running_loop().time()
        self.make_room()
        array.source.make_room()
        return array

    def serve(self, array: SimArray) -> None:
        """As the source: answer a dial. Raises PathUnavailable."""
        if self._over(array) or not array.far.active:
            raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, "refused by the peer")
        if (old := self.served.get(array.key)) is not None:
            old.lose_at_source("replaced by a newer one")
        while not self.endpoints.take_nowait(_WIDTH):
            if not self.evict():
                raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, "the peer is busy")
        self.served[array.key] = array

    def find_served(self, key: Key) -> SimArray:
        """As the source. Raises PathUnavailable."""
        array = self.served.get(key)
        if array is None:
            detail = f"array {key[2]} is not connected"
            raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, detail)
        return array

    def make_room(self) -> None:
        """For those who wait, of arrays that have become idle."""
        while self.endpoints.waiting and self.evict():
            pass

    def evict(self) -> bool:
        """End the array that was idle longest, if there is one that may go by now; look again when
        another one may.
        """
        loop = asyncio.get_running_loop()
        idle = [a for a in (*self.requested.values(), *self.served.values()) if a.idle]
        idle.sort(key=self._evictable_at)
        if not idle:
            return False
        array, at = idle[0], self._evictable_at(idle[0])
        if at > loop.time():
            if self._look_again is None:
                self._look_again = loop.call_at(at, self._on_look_again)
            return False
        if array.requester is self:
            array.lose("evicted")
        else:
            array.lose_at_source("evicted", self._rail_faults.notice_s)
        return True

    def _evictable_at(self, array: SimArray) -> float:
        # A requester that has just been given one is about to use it.
        return array.last_used + (_KEPT_S if array.requester is self else 0.0)

    def _on_look_again(self) -> None:
        self._look_again = None
        self.make_room()

    def _over(self, array: SimArray) -> bool:
        return self.closed or array.key[0] in self._ended

    def _dialed(self, key: Key, dial: asyncio.Task[SimArray]) -> None:
        del self._dials[key]
        if not dial.cancelled():
            dial.exception()  # whoever still waits gets it

    def _given_up(self, array: SimArray, dial: asyncio.Task[SimArray]) -> None:
        # Nobody else can want a private one.
        if array.private and not dial.cancel() and array.key in self.requested:
            array.lose("given up")
            array.lose_at_source("given up")
