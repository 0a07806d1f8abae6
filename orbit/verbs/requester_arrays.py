"""Bulk arrays at their requester: dialing a peer's source, and replacing members that were lost.

Owns the dial (one at a time per array, however many wait for it), the back-off after a failed one
and the rebuild of single members. It runs no transfer: it yields the queue pair that a grant names.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence

from ..errors import ClosedError, OrbitError, PeerError, Unquiesced
from ..model import Direction, PathReason
from ..protocol.binding import process_id
from ..protocol.grants import GrantTimeouts
from ..protocol.messages import (
    BulkLostNotice,
    BulkMember,
    ConnectBulkReply,
    ConnectBulkRequest,
    RailHint,
)
from ..transport.interface import Session
from .counters import PathCounters
from .device import DeviceContext
from .grant_ends import GrantEnds
from .queue_pair import RemoteEnd
from .rail_pairs import choose_pair, is_gid, path_mtu
from .requester import RequesterMember
from .retention import Retained
from .settings import RdmaPathConfig
from .source_arrays import DEFAULT_ARRAYS, local_process


class RequesterArray:
    """This node's array to one peer, over one session, for READs or for WRITEs."""

    def __init__(
        self,
        session: Session,
        direction: Direction,
        devices: Sequence[DeviceContext],
        config: RdmaPathConfig,
        retained: Retained,
        counters: PathCounters,
        timeouts: GrantTimeouts,
    ) -> None:
        self._session = session
        self._direction = direction
        self._devices = tuple(devices)
        self._config = config
        self._retained = retained
        self._counters = counters
        self._timeouts = timeouts
        self._members: dict[int, RequesterMember] = {}
        self._ending: set[RequesterMember] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempt = 0
        self._dial: asyncio.Task[None] | None = None
        self._retry_at = 0.0  # infinite: the source knows nothing of this direction
        self._closed = False
        self.failure = ""  # why the last dial failed, for people

    @property
    def endpoints(self) -> int:
        return len(self._members) + len(self._ending)

    def availability(self) -> PathReason:
        """From facts at hand: whether `prepare` may succeed."""
        if self._closed or not self._devices:
            return PathReason.NOT_CONFIGURED
        if self._ready():
            return PathReason.OK
        if self._retry_at == math.inf or self._pair() is None:
            return PathReason.PEER_WITHOUT
        if self._dial is None and asyncio.get_running_loop().time() < self._retry_at:
            return PathReason.CONNECT_FAILED
        return PathReason.OK

    async def prepare(self) -> PathReason:
        """At least one member is connected, after a dial if need be. Concurrent calls share it."""
        reason = self.availability()
        if reason is not PathReason.OK:
            return reason
        if len(self._members) < self._config.width:
            dial = self._start_dial()
            if not self._ready() and dial is not None:
                await asyncio.wait([dial])
        if self._ready():
            return PathReason.OK
        return PathReason.PEER_WITHOUT if self._retry_at == math.inf else PathReason.CONNECT_FAILED

    def member(self, index: int) -> RequesterMember | None:
        member = self._members.get(index)
        return member if member is not None and member.ready else None

    async def connected(self, indexes: Sequence[int]) -> None:
        """After the dial in flight, where one of these members is not there: a source may grant on
        what it has connected before this side has heard so.
        """
        if self._dial is not None and any(self.member(index) is None for index in indexes):
            await asyncio.wait([self._dial])

    def lost_at_source(self, notice: BulkLostNotice) -> None:
        """The source ended members of ours: end ours as well, and build new ones."""
        for index in notice.indexes[: self._config.width]:
            member = self._members.get(index)
            ends = member.ends if member is not None else None
            if member is not None and ends is not None:
                # A late notice about an earlier connection hits nothing.
                if ends.source_connection != notice.connection:
                    continue
                member.abort(OrbitError("the source ended the queue pair"))

    async def close(self, cause: OrbitError) -> None:
        """End every member. Raises Unquiesced."""
        self._closed = True
        if self._dial is not None:
            self._dial.cancel()
            await asyncio.wait([self._dial])
        for member in list(self._members.values()):
            member.close_session(cause)
        failure: Unquiesced | None = None
        for member in [*self._members.values(), *self._ending]:
            try:
                await member.wait_closed()
            except Unquiesced as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _ready(self) -> bool:
        return any(member.ready for member in self._members.values())

    def _pair(self) -> tuple[DeviceContext, RailHint] | None:
        remote = self._session.peer_hello.rails
        chosen = choose_pair([device.rail for device in self._devices], remote)
        return None if chosen is None else (self._devices[chosen[0]], remote[chosen[1]])

    def _start_dial(self) -> asyncio.Task[None] | None:
        """The dial in flight, or a new one; None while backing off."""
        loop = asyncio.get_running_loop()
        if self._dial is None and loop.time() >= self._retry_at and not self._closed:
            self._dial = loop.create_task(self._run_dial())
        return self._dial

    async def _run_dial(self) -> None:
        loop = asyncio.get_running_loop()
        missing = [i for i in range(self._config.width) if i not in self._members]
        try:
            await self._connect(missing)
        except (OrbitError, TimeoutError) as error:
            # Everyone who waits fails now, and for a moment nobody tries again.
            self.failure = str(error)
            self._counters.connect_failures += 1
            self._retry_at = max(self._retry_at, loop.time() + self._config.connect_backoff_s)
        finally:
            self._dial = None

    async def _connect(self, indexes: Sequence[int]) -> None:
        """Raises PeerError, DeviceError, DeadlineExceeded, having ended what it made."""
        pair = self._pair()
        if pair is None:
            raise PeerError("the peer announced no rail that fits")
        device, remote_rail = pair
        members: dict[int, RequesterMember] = {}
        try:
            for index in indexes:
                members[index] = self._new_member(device, index)
                await members[index].prepare()
            await self._exchange(device, remote_rail, members)
            if self._closed:
                raise ClosedError("the bulk array")
        except BaseException as error:
            cause = error if isinstance(error, OrbitError) else OrbitError("the dial was given up")
            for member in members.values():
                member.abort(cause)
            raise
        self._members.update(members)

    def _new_member(self, device: DeviceContext, index: int) -> RequesterMember:
        return RequesterMember(
            device,
            self._direction,
            index,
            self._retained,
            self._counters,
            self._timeouts,
            self._lost,
        )

    async def _exchange(
        self, device: DeviceContext, remote_rail: RailHint, members: dict[int, RequesterMember]
    ) -> None:
        self._attempt += 1
        mine = {
            index: BulkMember(index, member.queue_pair.qp_num, secrets.randbelow(1 << 24))
            for index, member in members.items()
        }
        request = ConnectBulkRequest(
            array=DEFAULT_ARRAYS[self._direction],
            attempt=self._attempt,
            rail=device.rail,
            source_gid=remote_rail.gid,
            members=tuple(mine.values()),
            rd_atomic=self._initiator_depth(device),
            connection=secrets.token_bytes(16),
            direction=int(self._direction),
        )
        reply = await self._session.call(
            request, ConnectBulkReply, timeout_s=self._config.connect_timeout_s
        )
        theirs = {member.index: member for member in reply.members}
        _check_reply(request, reply)
        if reply.direction != request.direction:
            self._retry_at = math.inf  # it built an array for READs, and would again
            raise PeerError(f"the peer serves no {self._direction.name}")
        await asyncio.gather(
            *(
                members[index].connect(
                    mine[index].psn,
                    RemoteEnd(
                        gid=reply.rail.gid,
                        lid=reply.rail.lid,
                        qpn=theirs[index].qpn,
                        psn=theirs[index].psn,
                        path_mtu=path_mtu(device.rail.mtu, reply.rail.mtu),
                        rd_atomic=reply.rd_atomic,
                        link_layer=device.rail.link_layer,
                    ),
                    self._ends(request, reply, mine[index], theirs[index]),
                    self._config.connect_timeout_s,
                )
                for index in members
            )
        )

    def _initiator_depth(self, device: DeviceContext) -> int:
        """READs in flight that we may have, and that they said they can answer. Never 0: a queue
        pair with 0 stays silent for ever.
        """
        theirs = self._session.peer_hello.limits.max_dest_rd_atomic or self._config.rd_atomic
        return max(1, min(self._config.rd_atomic, device.limits.max_init_rd_atomic, theirs))

    def _ends(
        self,
        request: ConnectBulkRequest,
        reply: ConnectBulkReply,
        mine: BulkMember,
        theirs: BulkMember,
    ) -> GrantEnds:
        return GrantEnds(
            direction=request.direction,
            source_process=process_id(self._session.peer),
            requester_process=local_process(self._session),
            source_connection=reply.connection,
            requester_connection=request.connection,
            array=request.array,
            index=mine.index,
            source_qpn=theirs.qpn,
            requester_qpn=mine.qpn,
            session_key=self._session.key,
        )

    def _lost(self, member: RequesterMember) -> None:
        """A member failed or was ended. Keep it until it is gone, and replace it."""
        self._ending.add(member)
        replacing = asyncio.get_running_loop().create_task(self._replace(member))
        self._tasks.add(replacing)
        replacing.add_done_callback(self._tasks.discard)
        if self._members.get(member.index) is member:
            del self._members[member.index]

    async def _replace(self, member: RequesterMember) -> None:
        try:
            await member.wait_closed()
        except Unquiesced:
            pass  # listed among the retained
        finally:
            self._ending.discard(member)
        # A whole array that is gone was evicted, or the peer is in trouble: the next get dials.
        if self._ready() and not self._session.closed:
            self._start_dial()


def _check_reply(request: ConnectBulkRequest, reply: ConnectBulkReply) -> None:
    asked = {member.index for member in request.members}
    if {member.index for member in reply.members} != asked or len(reply.members) != len(asked):
        raise PeerError("connect_bulk answered for other members")
    if len(reply.connection) != 16 or not is_gid(reply.rail.gid):
        raise PeerError("connect_bulk answered without a connection id or a GID")
    if not 1 <= reply.rd_atomic <= request.rd_atomic:
        raise PeerError("connect_bulk answered with another rd_atomic")
