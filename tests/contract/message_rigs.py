"""Rigs of the message link's contract: simulated wires, and real control connections on loopback.

The TCP rig has sessions and sockets but no handshake: hellos that announce what each end grants are
made up, so that a case can choose its limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from orbit.model import Incarnation, PathName, PeerIdentity, WorkerId
from orbit.protocol.bootstrap import Epoch
from orbit.protocol.framing import FrameParser
from orbit.protocol.messages import Hello, Limits
from orbit.runtime.session import ControlSession, SessionSettings
from orbit.testing.message_link_rig import LinkEnd
from orbit.testing.packet_network import SimPacketNetwork, SimPacketWire, WireFaults
from orbit.testing.sessions import make_hello
from orbit.transport.message_link import LinkTerms, PacketLink
from orbit.transport.messages import LinkLimits
from orbit.transport.tcp_link import TcpLink
from orbit.transport.tcp_packets import TcpMessages
from orbit.transport.tcp_wire import Wire, tune


class SimRig:
    segments = True

    def __init__(self, seed: int, faults: WireFaults | None = None) -> None:
        self.network = SimPacketNetwork(seed, faults)
        self.wires: dict[LinkEnd, SimPacketWire] = {}

    async def open(self, left: LinkEnd, right: LinkEnd, after: LinkEnd | None = None) -> None:
        slab_bytes = min(left.limits.slab_bytes, right.limits.slab_bytes)
        wires = self.network.wire_pair(
            slab_bytes, left.limits.windows.slabs, right.limits.windows.slabs
        )
        for end, other, wire in zip((left, right), (right, left), wires, strict=True):
            terms = LinkTerms.between(PathName.TCP, "the other end", end.limits, other.limits)
            self.wires[end] = wire
            end.link = PacketLink(wire, end, terms)

    def cut(self, end: LinkEnd) -> None:
        self.network.cut(self.wires[end])

    def check(self) -> None:
        for wire in self.wires.values():
            assert not wire.underruns, f"{wire.underruns} packets found no slab"

    def close(self) -> None:
        for end in self.wires:
            end.link.abort()


class TcpRig:
    segments = False

    def __init__(self) -> None:
        self._sessions: dict[LinkEnd, ControlSession] = {}
        self._transports: dict[ControlSession, TcpMessages] = {}
        self._sockets: dict[ControlSession, socket.socket] = {}

    async def open(self, left: LinkEnd, right: LinkEnd, after: LinkEnd | None = None) -> None:
        ends = (left, right)
        if after is None:
            sockets = connected_sockets()
            sessions = tcp_sessions(
                sockets, len(self._sessions), (left.limits, right.limits), self._transports
            )
            self._sockets |= zip(sessions, sockets, strict=True)
        else:
            sessions = next(pair for pair in self._pairs() if self._sessions[after] in pair)
        for end, session in zip(ends, sessions, strict=True):
            self._sessions[end] = session
            end.link = await self._transports[session].open(session, end)

    def cut(self, end: LinkEnd) -> None:
        self._sockets[self._sessions[end]].shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """A stream has no slabs."""

    async def close(self) -> None:
        for session, transport in self._transports.items():
            session.close()
            await session.wait_closed()
            await asyncio.sleep(0)
            await transport.close()

    def _pairs(self) -> list[tuple[ControlSession, ControlSession]]:
        sessions = list(self._transports)
        return list(zip(sessions[::2], sessions[1::2], strict=True))


def tcp_sessions(
    sockets: tuple[socket.socket, socket.socket],
    number: int,
    limits: tuple[LinkLimits, LinkLimits],
    transports: dict[ControlSession, TcpMessages],
) -> tuple[ControlSession, ControlSession]:
    """Two started ends of one epoch; their transports are added to `transports`."""
    attempt = number.to_bytes(16)
    hellos = (
        _hello(1, 2, attempt, limits[0]),
        _hello(2, 1, attempt, limits[1]),
    )
    sessions = []
    for side in (0, 1):
        own, other = hellos[side], hellos[1 - side]
        transport = TcpMessages(limits[side].inbound_bytes_max)
        peer = PeerIdentity(WorkerId(other.worker_id), Incarnation(other.incarnation))
        epoch = Epoch(peer, attempt, bytes(32), 1, own, other)
        settings = SessionSettings({}, _spawn, lambda session: None, 5.0, transport)
        link = TcpLink(Wire(sockets[side], f"node {other.worker_id}"), FrameParser(preface=False))
        session = ControlSession(epoch, link, [], settings, dialed=not side)
        transports[session] = transport
        session.start()
        sessions.append(session)
    return sessions[0], sessions[1]


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        tune(sock)
    return near, far


def _hello(own: int, other: int, attempt: bytes, limits: LinkLimits) -> Hello:
    return replace(
        make_hello(own, other, attempt),
        limits=Limits(
            message_credits=limits.windows.messages,
            reserve_credits=limits.windows.replies,
            slab_bytes=limits.slab_bytes,
            eager_ceiling_bytes=limits.ceiling_bytes,
        ),
    )


def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)


@contextlib.asynccontextmanager
async def sim_rig(seed: int = 0, faults: WireFaults | None = None) -> AsyncIterator[SimRig]:
    rig = SimRig(seed, faults)
    try:
        yield rig
    finally:
        rig.close()


@contextlib.asynccontextmanager
async def tcp_rig() -> AsyncIterator[TcpRig]:
    rig = TcpRig()
    try:
        yield rig
    finally:
        await rig.close()
