"""One dial of a bulk array, from its requester's side: the exchange of queue-pair numbers with the
source, and the transitions of the members that it is for.

It decides neither when to dial nor what becomes of the members afterwards.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PeerError
from ..model import Direction
from ..protocol.binding import process_id
from ..protocol.messages import BulkMember, ConnectBulkReply, ConnectBulkRequest
from ..transport.interface import Session
from .device import DeviceContext
from .grant_ends import GrantEnds
from .queue_pair import RemoteEnd
from .rail_pairs import is_gid, path_mtu
from .rail_routes import RailPair
from .requester import RequesterMember
from .settings import RdmaPathConfig
from .source_arrays import local_process


@dataclass(frozen=True, slots=True)
class ArrayName:
    """One array as both sides call it: its number, within one epoch."""

    session: Session
    direction: Direction
    number: int
    private: bool = False  # its requester uses it for one thing, and ends it


class DirectionUnknown(PeerError):
    """The source built an array for READs, whatever it was asked for, and would do so again."""

    code = "peer"


async def connect_members(
    name: ArrayName,
    pair: RailPair,
    attempt: int,
    members: Mapping[int, RequesterMember],
    config: RdmaPathConfig,
) -> None:
    """Raises PeerError, DirectionUnknown, DeviceError, DeadlineExceeded; then the members are the
    caller's to end.
    """
    device = pair.device
    mine = {
        index: BulkMember(index, member.queue_pair.qp_num, secrets.randbelow(1 << 24))
        for index, member in members.items()
    }
    request = ConnectBulkRequest(
        array=name.number,
        attempt=attempt,
        rail=device.rail,
        source_gid=pair.remote.gid,
        members=tuple(mine.values()),
        rd_atomic=_initiator_depth(name.session, device, config),
        connection=secrets.token_bytes(16),
        direction=int(name.direction),
    )
    reply = await name.session.call(request, ConnectBulkReply, timeout_s=config.connect_timeout_s)
    theirs = {member.index: member for member in reply.members}
    _check_reply(request, reply)
    await asyncio.gather(
        *(
            member.connect(
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
                _ends(name.session, request, reply, mine[index], theirs[index]),
                config.connect_timeout_s,
            )
            for index, member in members.items()
        )
    )


def _initiator_depth(session: Session, device: DeviceContext, config: RdmaPathConfig) -> int:
    """READs in flight that we may have, and that they said they can answer. Never 0: a queue pair
    with 0 stays silent for ever.
    """
    theirs = session.peer_hello.limits.max_dest_rd_atomic or config.rd_atomic
    return max(1, min(config.rd_atomic, device.limits.max_init_rd_atomic, theirs))


def _check_reply(request: ConnectBulkRequest, reply: ConnectBulkReply) -> None:
    asked = {member.index for member in request.members}
    if {member.index for member in reply.members} != asked or len(reply.members) != len(asked):
        raise PeerError("connect_bulk answered for other members")
    if len(reply.connection) != 16 or not is_gid(reply.rail.gid):
        raise PeerError("connect_bulk answered without a connection id or a GID")
    if not 1 <= reply.rd_atomic <= request.rd_atomic:
        raise PeerError("connect_bulk answered with another rd_atomic")
    if reply.direction != request.direction:
        raise DirectionUnknown(f"the peer serves no {Direction(request.direction).name}")


def _ends(
    session: Session,
    request: ConnectBulkRequest,
    reply: ConnectBulkReply,
    mine: BulkMember,
    theirs: BulkMember,
) -> GrantEnds:
    return GrantEnds(
        direction=request.direction,
        source_process=process_id(session.peer),
        requester_process=local_process(session),
        source_connection=reply.connection,
        requester_connection=request.connection,
        array=request.array,
        index=mine.index,
        source_qpn=theirs.qpn,
        requester_qpn=mine.qpn,
        session_key=session.key,
    )
