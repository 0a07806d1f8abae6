"""A bulk array at its requester: when it is dialed, replacing members that were lost, and its end.

Owns the dial (one at a time, however many wait for it), the back-off after a failed one, the
rebuild of single members and the eviction of an array that nobody uses. It runs no transfer: it
yields the queue pair that a grant names.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence

from ..errors import (
    BudgetExceeded,
    BusyError,
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PathUnavailable,
    Unquiesced,
)
from ..model import PathName, PathReason
from ..protocol.messages import BulkLostNotice, CloseBulkRequest, EmptyReply
from .bulk_context import BulkContext
from .bulk_dial import ArrayName, DirectionUnknown, connect_members
from .endpoints import EndpointBudget, EndpointSlot, Patience
from .outcomes import take_exception
from .rail_routes import RailPair
from .requester import RequesterMember
from .settings import RdmaPathConfig

# An offer that was made on an array is answered by then, or its grant fails as if the queue pair
# had died on the way.
EVICT_AFTER_S = 1.0
# So long it may go on being used in a protection domain that was left. It costs no keys here, but
# the domain holds registrations.
LEAVE_AFTER_S = 10.0

_DIALS_MAX = 2  # of one who waits: the second one for members that died as they were made


class _Dial:
    """One on its way. `patience`: until when those who asked for it wait for endpoints."""

    __slots__ = ("patience", "queued", "task")

    def __init__(self) -> None:
        self.patience: list[float] = []
        self.queued = True  # it has no endpoints yet
        self.task: asyncio.Task[None]

    def until(self) -> float:
        return max(self.patience, default=0.0)


# With the pair that did not work the last time. Raises PathUnavailable: no rails fit.
FindPair = Callable[[RailPair | None], RailPair]


class RequesterArray:
    """This node's queue pairs to one peer over one session, for READs or for WRITEs, all of them
    between one pair of rails at a time.
    """

    def __init__(self, name: ArrayName, find_pair: FindPair, context: BulkContext) -> None:
        ours, theirs = context.config.width, name.session.peer_hello.limits.bulk_width
        self.name = name
        self.width = min(ours, theirs or ours)  # members when it is whole: what both sides can
        self.failure: BaseException | None = None  # of the last dial that failed
        self._find_pair = find_pair
        self._context = context
        self._pair: RailPair | None = None  # of the last dial
        self._members: dict[int, RequesterMember] = {}
        self._ending: dict[RequesterMember, asyncio.Task[None]] = {}
        self._attempt = 0
        self._dial: _Dial | None = None
        self._retry_at = 0.0  # infinite: the source knows nothing of this direction
        self._last_offer = 0.0  # when somebody last was told that the array can be used
        self._leaving: asyncio.Task[None] | None = None  # the end of all members, on both sides
        self._unproven: Unquiesced | None = None  # the first of its members
        self._closed = False

    # --- what it is, from facts at hand ---

    @property
    def pair(self) -> RailPair:
        """Which rails it connects, or would with the next dial. Raises PathUnavailable."""
        if self._members and self._pair is not None:
            return self._pair
        return self._find_pair(None if self.failure is None else self._pair)

    @property
    def ready(self) -> bool:
        """At least one member is connected."""
        return any(member.ready for member in self._members.values())

    @property
    def idle(self) -> bool:
        """It could be evicted, as far as this side knows."""
        if self.name.private or self._closed or self._dial is not None or not self._members:
            return False
        return not any(member.load for member in self._members.values())

    @property
    def old_since(self) -> float:
        """Since when a member is in a protection domain that was left, by the loop's clock;
        infinite: none is.
        """
        return min((m.domain.left_at for m in self._members.values()), default=math.inf)

    @property
    def endpoints(self) -> int:
        """Slots that its end gives back."""
        return len(self._members)

    @property
    def evictable_at(self) -> float:
        return self._last_offer + EVICT_AFTER_S

    def availability(self) -> PathReason:
        """Whether `prepare` may succeed."""
        if self._closed:
            return PathReason.NOT_CONFIGURED
        if self.ready:
            old = asyncio.get_running_loop().time() >= self.old_since + LEAVE_AFTER_S
            return PathReason.WINDOW_KEYS if old else PathReason.OK
        try:
            self._find_pair(None)
        except PathUnavailable as error:
            return PathReason(error.reason)
        if self._retry_at == math.inf:
            return PathReason.PEER_WITHOUT
        if self._dial is None and asyncio.get_running_loop().time() < self._retry_at:
            return PathReason.CONNECT_FAILED
        return PathReason.OK

    def member(self, index: int) -> RequesterMember | None:
        member = self._members.get(index)
        return member if member is not None and member.ready else None

    # --- to have it ready ---

    async def prepare(self) -> PathReason:
        """At least one member is connected, after a dial if need be. Concurrent calls share it."""
        reason = self.availability()
        if reason is not PathReason.OK:
            return reason
        wait_s = self._context.config.connect_timeout_s
        if len(self._members) < self.width:
            dial = self._start_dial(asyncio.get_running_loop().time() + wait_s)
            if not self.ready and dial is not None:
                # For endpoints, for the answer, for the transitions. Others may wait longer.
                await asyncio.wait([dial.task], timeout=3 * wait_s)
        if self.ready:
            self._last_offer = asyncio.get_running_loop().time()
            return PathReason.OK
        return PathReason.PEER_WITHOUT if self._retry_at == math.inf else PathReason.CONNECT_FAILED

    async def connect(self, deadline: float | None) -> None:
        """As `prepare`, and wait for endpoints until `deadline` (loop time), which ends nobody
        else's wait. Raises PathUnavailable, BudgetExceeded, DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        began, dials = loop.time(), 0
        until = math.inf if deadline is None else deadline
        if self.ready and len(self._members) < self.width:
            self._start_dial(began + self._context.config.connect_timeout_s)
        while not self.ready:
            if isinstance(self.failure, BusyError | BudgetExceeded):
                self._retry_at = 0.0  # nobody else has failed, and there may be room by now
            reason = self.availability()
            if reason is not PathReason.OK or dials == _DIALS_MAX:
                raise _unavailable(reason, self.failure)
            left_s = None if until == math.inf else until - loop.time()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("connecting bulk queue pairs", until - began)
            dial = self._start_dial(until)
            assert dial is not None  # it is available, and neither ready nor backing off
            try:
                await asyncio.wait([dial.task], timeout=left_s)
            finally:
                self._give_up(dial, until)
            if dial.task.done() and isinstance(self.failure, BudgetExceeded):
                raise self.failure
            dials += dial.task.done() and not isinstance(self.failure, BusyError)
        self._last_offer = loop.time()

    async def connected(self, indexes: Sequence[int]) -> None:
        """After the dial in flight, where one of these members is not there: a source may grant on
        what it has connected before this side has heard so.
        """
        if self._dial is not None and any(self.member(index) is None for index in indexes):
            await asyncio.wait([self._dial.task])

    # --- what ends members ---

    def lost_at_source(self, notice: BulkLostNotice) -> None:
        """The source ended members of ours: end ours as well, and build new ones."""
        for index in notice.indexes[: self._context.config.width]:
            member = self._members.get(index)
            ends = member.ends if member is not None else None
            if member is not None and ends is not None:
                # A late notice about an earlier connection hits nothing.
                if ends.source_connection != notice.connection:
                    continue
                member.queue_pair.lane.poll()  # it may have ended what has done its work
                member.abort(OrbitError("the source ended the queue pair"))

    def evict(self) -> None:
        """End the members, and tell the source that they are gone. The next `prepare` dials."""
        cause = OrbitError("evicted: others needed the queue pairs")
        for member in list(self._members.values()):
            member.abort(cause)
        self._leaving = asyncio.get_running_loop().create_task(self._leave_quietly())

    async def close(self, cause: OrbitError) -> None:
        """End every member. Raises Unquiesced."""
        self._closed = True
        if self._dial is not None:
            self._dial.task.cancel()
            await asyncio.wait([self._dial.task])
        leaving = self._leaving
        if leaving is not None and not leaving.done() and leaving is not asyncio.current_task():
            if not self.name.private:
                leaving.cancel()  # the source has heard, or will find out
            await asyncio.wait([leaving])
        for member in list(self._members.values()):
            member.close_session(cause)
        await self._wait_members()

    def begin_end(self, cause: OrbitError) -> asyncio.Task[None]:
        """End it for good, here and at the source. The task raises Unquiesced; the same one while
        it runs.
        """
        self._closed = True
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.get_running_loop().create_task(self._end(cause))
            self._leaving.add_done_callback(take_exception)
        return self._leaving

    # --- parts ---

    def _start_dial(self, patience: float) -> _Dial | None:
        """The dial in flight, or a new one; None while backing off. It waits for endpoints as long
        as the most patient of all who asked.
        """
        if self._dial is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._retry_at or self._closed:
                return None
            dial = self._dial = _Dial()
            dial.task = loop.create_task(self._run_dial(dial))
        self._dial.patience.append(patience)
        return self._dial

    def _give_up(self, dial: _Dial, patience: float) -> None:
        """Whoever asked waits no longer. A dial that nobody waits for leaves its place among those
        who want endpoints; one that has them goes on.
        """
        dial.patience.remove(patience)
        if dial.queued and not dial.patience and self._dial is dial:
            dial.task.cancel()
            self._dial = None

    async def _run_dial(self, dial: _Dial) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._leaving is not None:
                await asyncio.wait([self._leaving])
            indexes = [i for i in range(self.width) if i not in self._members]
            slots = await _take_slots(self._context.endpoints, len(indexes), dial.until)
            dial.queued = False
            await self._connect(indexes, slots)
            self.failure = None
        except (OrbitError, TimeoutError) as error:
            # Everyone who waits fails now, and for a moment nobody tries again.
            self.failure = error
            self._context.counters.connect_failures += 1
            backoff_s = self._context.config.connect_backoff_s
            if isinstance(error, DirectionUnknown):
                backoff_s = math.inf
            self._retry_at = max(self._retry_at, loop.time() + backoff_s)
        finally:
            if self._dial is dial:
                self._dial = None

    async def _connect(self, indexes: Sequence[int], slots: list[EndpointSlot]) -> None:
        """Raises PathUnavailable, BudgetExceeded, PeerError, DeviceError, DeadlineExceeded, having
        ended what it made.
        """
        members: dict[int, RequesterMember] = {}
        try:
            pair = self._pair = self.pair
            for index in indexes:
                members[index] = RequesterMember(
                    pair.device, self.name.direction, index, slots[-1], self._context, self._lost
                )
                slots.pop()
                await members[index].prepare()
            self._attempt += 1
            await connect_members(self.name, pair, self._attempt, members, self._context.config)
            if self._closed:
                raise ClosedError("the bulk array")
            if not pair.device.active:
                raise PathUnavailable(PathName.RDMA, PathReason.PORT_DOWN, pair.device.name)
        except BaseException as error:
            for slot in slots:
                slot.give_back()
            cause = error if isinstance(error, OrbitError) else OrbitError("the dial was given up")
            for member in members.values():
                member.abort(cause)
            raise
        self._members.update({i: member for i, member in members.items() if member.ready})

    def _lost(self, member: RequesterMember) -> None:
        """A member failed or was ended. Keep it until it is gone, and replace it."""
        self._ending[member] = asyncio.get_running_loop().create_task(self._replace(member))
        if self._members.get(member.index) is member:
            del self._members[member.index]

    async def _replace(self, member: RequesterMember) -> None:
        try:
            await member.wait_closed()
        except Unquiesced as error:
            self._unproven = self._unproven or error  # listed among the retained
        finally:
            self._ending.pop(member, None)
        # A whole array that is gone was evicted, or the peer is in trouble: the next get dials.
        if self.ready and not self.name.session.closed:
            wait_s = self._context.config.connect_timeout_s
            self._start_dial(asyncio.get_running_loop().time() + wait_s)

    async def _wait_members(self) -> None:
        """Until those that are on their way out are gone. Raises Unquiesced, after all of them."""
        failure: Unquiesced | None = None
        for member in [*self._members.values(), *self._ending]:
            try:
                await member.wait_closed()
            except Unquiesced as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def _leave_quietly(self) -> None:
        with contextlib.suppress(Unquiesced):  # listed among the retained
            await self._wait_members()
        # An older source, or one that is gone, ends its side when it is dialed again, or by itself.
        with contextlib.suppress(OrbitError, TimeoutError):
            await _end_at_source(self.name, self._context.config)

    async def _end(self, cause: OrbitError) -> None:
        failure = self._unproven
        # A receipt that is on its way proves more than an abort.
        wait_s = self._context.config.receipt_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                for member in list(self._members.values()):
                    await member.wait_idle()
        try:
            await self.close(cause)
        except Unquiesced as error:
            failure = failure or error
        try:
            await _end_at_source(self.name, self._context.config)
        except (OrbitError, TimeoutError) as error:
            what = f"bulk array {self.name.number} at its source"
            failure = failure or Unquiesced(what, 0, str(error))
        if failure is not None:
            raise failure


def _unavailable(reason: PathReason, failure: BaseException | None) -> PathUnavailable:
    if reason is PathReason.OK:
        reason = PathReason.CONNECT_FAILED
    return PathUnavailable(PathName.RDMA, reason, "" if failure is None else str(failure))


async def _take_slots(
    endpoints: EndpointBudget, count: int, patience: Patience
) -> list[EndpointSlot]:
    """Raises BudgetExceeded, BusyError (none became free in time)."""
    try:
        return await endpoints.take(count, patience)
    except DeadlineExceeded as error:
        raise BusyError(str(error)) from error


async def _end_at_source(name: ArrayName, config: RdmaPathConfig) -> None:
    """Raises PeerError, ClosedError, DeadlineExceeded."""
    timeout_s = config.connect_timeout_s + 2 * config.drain_timeout_s
    await name.session.call(CloseBulkRequest(name.number), EmptyReply, timeout_s=timeout_s)
