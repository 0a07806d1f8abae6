"""Who this node knows: one connection for each peer, whoever dialed it, and the address book.

A peer's address is stored without I/O; the first use dials, or takes the session that the peer has
opened. A peer that dialed us is known by what its hello says, so it can be called back. What
happens to one connection is `peer.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ClosedError, UnknownPeer
from ..model import PeerIdentity, WorkerId
from ..protocol.address import NodeAddress
from ..protocol.connection import ConnectionSettings
from .peer import IncomingLink, Peer, PeerWays
from .session import ControlSession

# Of peers that only ever dialed us: strangers may come under any number of names.
LEARNED_MAX = 1024


@dataclass(frozen=True, slots=True)
class PeersSettings:
    """See ConnectionSettings."""

    authenticated: bool = False
    park_s: float = 1.0
    check_s: float = 1.0


class Peers:
    """The address book and the current session of each peer."""

    def __init__(self, own: PeerIdentity, ways: PeerWays, settings: PeersSettings) -> None:
        self._own = own
        self._ways = ways
        self._settings = settings
        self._peers: dict[WorkerId, Peer] = {}
        self._learned = 0
        self._closed = False

    def add(self, address: NodeAddress) -> PeerIdentity:
        """Remember where a node is; another life of a known node takes the old one's place."""
        if address.worker_id != self._own.worker_id:
            peer = self._peers.get(address.worker_id) or self._make(address.worker_id)
            if not peer.added:
                self._learned -= 1
            peer.add(address)
        return address.identity

    def address(self, worker_id: WorkerId) -> NodeAddress:
        """Where that node can be dialed. Raises UnknownPeer."""
        address = self._lookup(worker_id).address
        if address is None:
            raise UnknownPeer(worker_id)
        return address

    async def session(self, worker_id: WorkerId) -> ControlSession:
        """The open session with that node, whoever dialed it; dialed if there is none. Cancelling
        one waiter leaves the dial to the others.

        Raises UnknownPeer, PeerUnreachable, PeerRefused, PeerRestarted, PeerProtocolError.
        """
        peer = self._lookup(worker_id)
        if self._closed:
            raise ClosedError("the node")
        return await peer.reach()

    def current(self, worker_id: WorkerId) -> ControlSession | None:
        """The open session with that node, if there is one. No I/O."""
        peer = self._peers.get(worker_id)
        return None if peer is None else peer.session

    def sessions(self) -> Iterator[ControlSession]:
        """The current session of each connected peer."""
        return (peer.session for peer in list(self._peers.values()) if peer.session is not None)

    def offer(self, incoming: IncomingLink) -> None:
        """A peer has dialed this node: it is admitted, refused, or has to wait."""
        worker_id = incoming.epoch.peer.worker_id
        if self._closed:
            incoming.refuse("closing")
            return
        peer = self._peers.get(worker_id) or self._make(worker_id)
        peer.offer(incoming)

    def session_closed(self, session: ControlSession) -> None:
        """A session is over."""
        peer = self._peers.get(session.peer.worker_id)
        if peer is not None:
            peer.session_closed(session)

    def close(self) -> None:
        """No more dials, and nobody is let in."""
        self._closed = True
        for peer in list(self._peers.values()):
            peer.close()

    def _lookup(self, worker_id: WorkerId) -> Peer:
        peer = self._peers.get(worker_id)
        if peer is None:
            raise UnknownPeer(worker_id)
        return peer

    def _make(self, worker_id: WorkerId) -> Peer:
        if self._learned >= LEARNED_MAX:
            self._forget_one()
        settings = ConnectionSettings(
            self._own.worker_id,
            worker_id,
            self._settings.authenticated,
            self._settings.park_s,
            self._settings.check_s,
        )
        peer = self._peers[worker_id] = Peer(settings, self._ways)
        self._learned += 1
        return peer

    def _forget_one(self) -> None:
        """The one that came first and is gone. When all are here, the cap on sessions is theirs."""
        for worker_id, peer in self._peers.items():
            if peer.idle and not peer.added:
                del self._peers[worker_id]
                self._learned -= 1
                return
