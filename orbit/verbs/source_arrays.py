"""Bulk arrays at their source: which queue pairs serve which requester.

Answers `_connect_bulk` and `_close_bulk`, keeps the limits, picks the member for a grant and tells
the requester when one is gone. It knows grants only by their number per queue pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

from ..errors import (
    BudgetExceeded,
    BusyError,
    DeviceError,
    OrbitError,
    PathUnavailable,
    PeerRefused,
    Unquiesced,
)
from ..model import Direction, Incarnation, PathName, PathReason, PeerIdentity, WorkerId
from ..protocol.binding import process_id
from ..protocol.messages import (
    BulkLostNotice,
    BulkMember,
    CloseBulkRequest,
    ConnectBulkReply,
    ConnectBulkRequest,
    EmptyReply,
    Message,
)
from ..transport.interface import CallHandler, Session
from .bulk_context import BulkContext
from .device import DeviceContext, find_device
from .endpoints import EndpointSlot, IdleArray
from .grant_ends import GrantEnds
from .queue_pair import RemoteEnd
from .rail_pairs import is_gid, path_mtu
from .source import MemberNews, SourceMember, is_unused, oldest_bind_at

# The array that a requester builds for each direction. A source that knows READ only must not take
# the one for WRITEs for the other.
DEFAULT_ARRAYS: Final[Mapping[Direction, int]] = {Direction.READ: 0, Direction.WRITE: 1}
MEMBERS_MAX = 16  # of one array; a requester that asks for more is refused
_QPN_MAX = 0xFF_FFFF
# Who has not asked for a grant this long need not find a queue pair when it asks again: it dials.
_QUIET_S = 1.0


class SourceArray:
    """One requester's array. `attempt` rises with every connect; older ones are refused."""

    def __init__(
        self, session: Session, array_id: int, direction: int, device: DeviceContext
    ) -> None:
        self.session = session
        self.array_id = array_id
        self.direction = direction
        self.device = device
        self.attempt = 0
        self.members: dict[int, SourceMember] = {}
        self.connecting = asyncio.Lock()
        self.closed = False
        self.last_used = 0.0  # the loop's clock
        self._replacing = False  # members ended, since their domain was left; none was made anew

    @property
    def idle(self) -> bool:
        """Its queue pairs could go without anybody noticing."""
        busy = self.connecting.locked() or any(m.load for m in self.members.values())
        return bool(self.members) and not busy

    @property
    def endpoints(self) -> int:
        """Slots that its end gives back."""
        return len(self.members)

    @property
    def evictable_at(self) -> float:
        return self.last_used

    def least_used(self) -> SourceMember:
        """Of the members with room, the one for the next grant. Raises PathUnavailable."""
        ready = [member for member in self.members.values() if member.ready]
        if not ready:
            reason = PathReason.WINDOW_KEYS if self._replacing else PathReason.CONNECT_FAILED
            detail = f"array {self.array_id} is not connected"
            raise PathUnavailable(PathName.RDMA, reason, detail)
        free = [member for member in ready if member.has_room]
        if not free:
            detail = f"{sum(m.load for m in ready)} grants outstanding"
            raise PathUnavailable(PathName.RDMA, PathReason.WINDOWS_BUSY, detail)
        here = [member for member in free if not member.domain.left]
        if here:
            return min(here, key=lambda member: member.load)
        return max(free, key=lambda member: member.load)  # so that the others run empty

    def connected(self, members: Mapping[int, SourceMember]) -> None:
        self.members.update(members)
        self.last_used = asyncio.get_running_loop().time()
        self._replacing = False
        self.leave_old_domains()

    def leave_old_domains(self) -> None:
        """End the members without work whose domain was left. One of them stays until its requester
        has made others, which it does as soon as it hears of the first end; unless nobody asks for
        grants, or it has no keys to give.
        """
        ready = [member for member in self.members.values() if member.ready]
        left = [member for member in ready if member.domain.left]
        if not left:
            return
        quiet = asyncio.get_running_loop().time() - self.last_used >= _QUIET_S
        alone = len(self.members) == 1 and not self._replacing
        spent = any(member.domain.windows.history.ran_out for member in left)
        kept = 0 if len(left) < len(ready) or quiet or alone or spent else 1
        unused = [member for member in left if is_unused(member)]
        busy = len(left) - len(unused)
        for member in unused[max(0, kept - busy) :]:
            self._replacing = True
            member.abort(OrbitError("its protection domain has no window keys left"))

    def poll(self) -> None:
        """Look for receipts, which make room and end grants well."""
        for lane in {member.queue_pair.lane for member in self.members.values()}:
            lane.poll()

    def abort(self, cause: OrbitError) -> None:
        """End its members."""
        for member in list(self.members.values()):
            member.abort(cause)

    def evict(self) -> None:
        self.abort(OrbitError("evicted: other peers needed the queue pairs"))


class SourceArrays:
    """All arrays that this node serves."""

    def __init__(self, devices: Sequence[DeviceContext], context: BulkContext) -> None:
        self._devices = tuple(devices)
        self._context = context
        self._arrays: dict[tuple[bytes, int], SourceArray] = {}
        self._ending: dict[SourceMember, SourceArray] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        context.endpoints.add_idle(self._idle)

    def grants_active(self) -> tuple[int, float]:
        """How many grants have not ended, and for how many seconds the oldest has been bound."""
        members = [m for array in self._arrays.values() for m in array.members.values()]
        oldest_at = oldest_bind_at(members)
        age_s = 0.0 if oldest_at is None else time.perf_counter() - oldest_at
        return sum(member.load for member in members), age_s

    def handlers(self) -> Mapping[str, CallHandler]:
        return {
            ConnectBulkRequest.METHOD: self._on_connect,
            CloseBulkRequest.METHOD: self._on_close,
        }

    def poll(self, session: Session, array_id: int, direction: Direction) -> None:
        """Look for receipts, and for queue pairs that have failed."""
        array = self._arrays.get((session.attempt, array_id or DEFAULT_ARRAYS[direction]))
        if array is not None:
            array.poll()

    def choose(self, session: Session, array_id: int, direction: Direction) -> SourceMember:
        """The least loaded member with room. Array 0 means the direction's own. Raises
        PathUnavailable.
        """
        array_id = array_id or DEFAULT_ARRAYS[direction]
        array = self._arrays.get((session.attempt, array_id))
        if array is None or array.direction != direction:
            detail = f"array {array_id} is not connected"
            raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, detail)
        array.last_used = asyncio.get_running_loop().time()
        return array.least_used()

    def leave_old_domains(self) -> None:
        """See `rollover.Leaving`."""
        for array in self._arrays.values():
            array.leave_old_domains()

    async def connect(self, session: Session, request: ConnectBulkRequest) -> ConnectBulkReply:
        """Build the asked members and connect them; members that they replace are ended first.
        Raises PeerRefused.
        """
        device = self._check(session, request)
        array = self._find_or_make(session, request, device)
        async with array.connecting:
            if request.attempt <= array.attempt:
                raise PeerRefused("stale_attempt", f"attempt {request.attempt}")
            array.attempt = request.attempt
            await self._replace(array, request, device)
            self._check_open(session, array)
            return await self._build(array, request)

    async def close_array(self, session: Session, array_id: int) -> None:
        """Its requester is done with it. Raises Unquiesced. Nothing for one that is not there."""
        array = self._arrays.pop((session.attempt, array_id), None)
        if array is None:
            return
        array.closed = True
        array.poll()
        array.abort(OrbitError("its requester is done with it"))
        await self._end([array])

    async def close_session(self, session: Session) -> None:
        """End every array of it. Raises Unquiesced (the first, after all were tried)."""
        arrays = [self._arrays.pop(key) for key in list(self._arrays) if key[0] == session.attempt]
        await self._kill(arrays, OrbitError("the epoch is over"))

    async def close(self) -> None:
        self._closed = True
        arrays, self._arrays = list(self._arrays.values()), {}
        await self._kill(arrays, OrbitError("the path is closed"))
        await self._wait(list(self._ending))

    async def _kill(self, arrays: Sequence[SourceArray], cause: OrbitError) -> None:
        for array in arrays:
            array.closed = True
            for member in list(array.members.values()):
                member.close_session(cause)
        await self._end(arrays)

    async def _end(self, arrays: Sequence[SourceArray]) -> None:
        """Until all of their members, which were aborted, are gone. Raises Unquiesced."""
        for array in arrays:
            async with array.connecting:  # a connect in progress sees the end and cleans up
                pass
        await self._wait([member for member, array in self._ending.items() if array in arrays])

    async def _wait(self, members: Sequence[SourceMember]) -> None:
        failure: Unquiesced | None = None
        for member in members:
            try:
                await member.wait_closed()
            except Unquiesced as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _check(self, session: Session, request: ConnectBulkRequest) -> DeviceContext:
        self._check_open(session)
        indexes = {member.index for member in request.members}
        if not 0 < len(request.members) <= MEMBERS_MAX or len(indexes) != len(request.members):
            raise PeerRefused("bad_request", f"{len(request.members)} members")
        if max(indexes) >= MEMBERS_MAX or len(request.connection) != 16:
            raise PeerRefused("bad_request", "member index or connection id")
        if any(m.qpn > _QPN_MAX or m.psn > _QPN_MAX for m in request.members):
            raise PeerRefused("bad_request", "a queue-pair number has 24 bits")
        if not is_gid(request.rail.gid) or request.rd_atomic < 1:
            raise PeerRefused("bad_request", "rail or rd_atomic")
        if request.direction not in (Direction.READ, Direction.WRITE):
            raise PeerRefused("bad_request", f"direction {request.direction}")
        device = find_device(self._devices, request.source_gid)
        if device is None:
            raise PeerRefused("no_rail", f"this node has no rail {request.source_gid[:64]}")
        if not device.active:
            raise PeerRefused(device.state.reason, f"{device.state}: {device.paused}")
        return device

    def _check_open(self, session: Session, array: SourceArray | None = None) -> None:
        if self._closed or session.closed or (array is not None and array.closed):
            raise PeerRefused("closing")

    def _find_or_make(
        self, session: Session, request: ConnectBulkRequest, device: DeviceContext
    ) -> SourceArray:
        key = session.attempt, request.array
        array = self._arrays.get(key)
        if array is None:
            count = sum(1 for attempt, _ in self._arrays if attempt == session.attempt)
            if count >= self._context.config.arrays_per_session_max:
                raise PeerRefused("busy", f"{count} arrays to one peer")
            array = SourceArray(session, request.array, request.direction, device)
            self._arrays[key] = array
        elif array.direction != request.direction:
            raise PeerRefused("bad_request", "the array has another direction")
        return array

    async def _replace(
        self, array: SourceArray, request: ConnectBulkRequest, device: DeviceContext
    ) -> None:
        """End the members that are connected anew. On another rail that is all of them: their
        requester has left the old one.
        """
        left = array.device is not device
        indexes = array.members if left else {member.index for member in request.members}
        old = [array.members.pop(index) for index in list(indexes) if index in array.members]
        array.device = device
        for member in old:
            member.abort(OrbitError("replaced by a newer connection of the requester"))
        # What is retained is listed; the new members do not depend on it.
        with contextlib.suppress(Unquiesced):
            await self._wait(old)

    async def _take_slots(self, count: int) -> list[EndpointSlot]:
        """Room for that many queue pairs, after idle arrays have gone if need be. Raises
        PeerRefused.
        """
        try:
            return await self._context.endpoints.take(count)
        except (BusyError, BudgetExceeded) as error:
            raise PeerRefused("busy", str(error)) from error

    async def _build(self, array: SourceArray, request: ConnectBulkRequest) -> ConnectBulkReply:
        connection = secrets.token_bytes(16)
        device = array.device
        config = self._context.config
        rd_atomic = min(request.rd_atomic, config.rd_atomic, max(1, device.limits.max_rd_atomic))
        slots = await self._take_slots(len(request.members))
        built: list[tuple[BulkMember, SourceMember]] = []
        try:
            for theirs in request.members:
                self._check_open(array.session, array)
                member = SourceMember(
                    device,
                    slots[-1],
                    self._context,
                    MemberNews(lambda lost: self._lost(array, lost), array.leave_old_domains),
                )
                slots.pop()
                mine = BulkMember(
                    theirs.index, member.queue_pair.qp_num, secrets.randbelow(1 << 24)
                )
                built.append((mine, member))
                await member.prepare()
                self._check_open(array.session, array)
                remote = RemoteEnd(
                    gid=request.rail.gid,
                    lid=request.rail.lid,
                    qpn=theirs.qpn,
                    psn=theirs.psn,
                    path_mtu=path_mtu(device.rail.mtu, request.rail.mtu),
                    rd_atomic=rd_atomic,
                    link_layer=device.rail.link_layer,
                )
                ends = self._ends(array.session, request, connection, mine, theirs)
                await member.connect(mine.psn, remote, ends, config.connect_timeout_s)
            self._check_open(array.session, array)
            if not all(member.ready for _, member in built):  # its device was paused meanwhile
                raise PeerRefused("device_failed" if device.active else "port_down", device.name)
        except BaseException as error:
            self._context.counters.connect_failures += 1
            for slot in slots:
                slot.give_back()
            cause = error if isinstance(error, OrbitError) else OrbitError("the dial was given up")
            for _, member in built:
                member.abort(cause)
            if isinstance(error, DeviceError | TimeoutError):
                raise PeerRefused("device_failed", str(error)) from error
            if isinstance(error, PathUnavailable | BudgetExceeded):
                reason = "port_down" if isinstance(error, PathUnavailable) else "busy"
                raise PeerRefused(reason, str(error)) from error
            raise
        array.connected({mine.index: member for mine, member in built})
        return ConnectBulkReply(
            rail=device.rail,
            members=tuple(mine for mine, _ in built),
            rd_atomic=rd_atomic,
            connection=connection,
            direction=request.direction,
        )

    def _ends(
        self,
        session: Session,
        request: ConnectBulkRequest,
        connection: bytes,
        mine: BulkMember,
        theirs: BulkMember,
    ) -> GrantEnds:
        return GrantEnds(
            direction=request.direction,
            source_process=local_process(session),
            requester_process=process_id(session.peer),
            source_connection=connection,
            requester_connection=request.connection,
            array=request.array,
            index=mine.index,
            source_qpn=mine.qpn,
            requester_qpn=theirs.qpn,
            session_key=session.key,
        )

    def _lost(self, array: SourceArray, member: SourceMember) -> None:
        """A member failed or was ended: tell the requester, and keep it until it is gone."""
        self._ending[member] = array
        ending = asyncio.get_running_loop().create_task(self._forget(member))
        self._tasks.add(ending)
        ending.add_done_callback(self._tasks.discard)
        ends = member.ends
        if ends is None or array.members.get(ends.index) is not member:
            return
        del array.members[ends.index]
        if not array.session.closed:
            array.session.notify(
                BulkLostNotice(array.array_id, ends.source_connection, (ends.index,))
            )

    async def _forget(self, member: SourceMember) -> None:
        try:
            await member.wait_closed()
        except Unquiesced:
            pass  # listed among the retained
        finally:
            self._ending.pop(member, None)

    def _idle(self) -> list[IdleArray]:
        return [array for array in self._arrays.values() if array.idle]

    async def _on_connect(self, session: Session, body: object) -> Message:
        return await self.connect(session, ConnectBulkRequest.from_wire(body))

    async def _on_close(self, session: Session, body: object) -> Message:
        try:
            await self.close_array(session, CloseBulkRequest.from_wire(body).array)
        except Unquiesced as error:
            raise PeerRefused("unquiesced", str(error)) from error
        return EmptyReply()


def local_process(session: Session) -> bytes:
    """This node's id in grant records of that session."""
    hello = session.local_hello
    return process_id(PeerIdentity(WorkerId(hello.worker_id), Incarnation(hello.incarnation)))
