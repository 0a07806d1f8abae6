"""Who this node knows and how it reaches them: addresses, one dial at a time, back-off after a
failure.

A peer's address is stored without I/O; the first use dials. While one dial runs, everybody who
needs that peer waits for it, and for a short while after it failed everybody gets its error at
once, so that a thousand queued fetches from a dead peer end within one connect deadline. It does
not know how a dial works or what is said over a session.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from ..errors import ClosedError, InternalError, OrbitError, PeerRestarted, UnknownPeer
from ..model import PeerIdentity, WorkerId
from ..protocol.address import NodeAddress
from .runner import TaskRunner
from .session import ControlSession

Dial = Callable[[NodeAddress], Awaitable[ControlSession]]

# A refused dial costs a round trip and a silent one its whole deadline; both may repeat, not
# hammer.
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0


@dataclass(slots=True)
class _Peer:
    address: NodeAddress
    session: ControlSession | None = None
    dialing: asyncio.Task[ControlSession | OrbitError] | None = None
    failures: int = 0
    retry_at: float = 0.0
    error: OrbitError | None = None


class Peers:
    """The address book and the sessions that this node dialed."""

    def __init__(
        self, own: PeerIdentity, dial: Dial, runner: TaskRunner, rng: random.Random
    ) -> None:
        self._own = own
        self._dial = dial
        self._runner = runner
        self._rng = rng
        self._peers: dict[WorkerId, _Peer] = {}
        self._closed = False

    def add(self, address: NodeAddress) -> PeerIdentity:
        """Remember where a node is; a newer life of a known node takes the old one's place."""
        identity = PeerIdentity(address.worker_id, address.incarnation)
        if identity.worker_id == self._own.worker_id:
            return identity
        known = self._peers.get(identity.worker_id)
        if known is not None and known.session is not None and not known.session.closed:
            if known.session.peer == identity:
                known.address = address
                return identity
            known.session.abort(PeerRestarted(f"{identity}: a newer process took its place"))
        # A dial to the old life may still run; it ends into the entry that nobody looks up any
        # more.
        self._peers[identity.worker_id] = _Peer(address)
        return identity

    def address(self, worker_id: WorkerId) -> NodeAddress:
        """Raises UnknownPeer."""
        return self._lookup(worker_id).address

    async def session(self, worker_id: WorkerId) -> ControlSession:
        """The open session to that node, dialed if need be. Cancelling one waiter leaves the dial
        to the others.

        Raises UnknownPeer, PeerUnreachable, PeerRefused, PeerRestarted, PeerProtocolError.
        """
        peer = self._lookup(worker_id)
        if self._closed:
            raise ClosedError("node")
        if peer.session is not None and not peer.session.closed:
            return peer.session
        if peer.dialing is None:
            if peer.error is not None and asyncio.get_running_loop().time() < peer.retry_at:
                raise peer.error.with_traceback(None)
            peer.dialing = self._runner.spawn(self._connect(peer), f"dial {worker_id:016x}")
        outcome = await asyncio.shield(peer.dialing)
        if isinstance(outcome, OrbitError):
            raise outcome.with_traceback(None)
        return outcome

    def sessions(self) -> Iterator[ControlSession]:
        """Every open session that this node dialed."""
        return (p.session for p in list(self._peers.values()) if p.session and not p.session.closed)

    def close(self) -> None:
        """No more dials."""
        self._closed = True

    def _lookup(self, worker_id: WorkerId) -> _Peer:
        peer = self._peers.get(worker_id)
        if peer is None:
            raise UnknownPeer(worker_id)
        return peer

    async def _connect(self, peer: _Peer) -> ControlSession | OrbitError:
        try:
            session = await self._dial(peer.address)
        except OrbitError as error:
            self._back_off(peer, error)
            return error
        except asyncio.CancelledError:
            return ClosedError("node")  # only shutdown cancels a dial
        finally:
            peer.dialing = None
        superseded = self._peers.get(peer.address.worker_id) is not peer
        if self._closed or superseded:
            cause = PeerRestarted(f"{session.peer}: a newer process took its place")
            session.abort(cause)
            return ClosedError("node") if self._closed else cause
        peer.session, peer.failures, peer.error = session, 0, None
        return session

    def _back_off(self, peer: _Peer, error: OrbitError) -> None:
        if isinstance(error, InternalError):
            return
        delay = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * (1 << min(peer.failures, 16)))
        peer.failures += 1
        peer.error = error
        # Jitter, so that nodes which lost one peer together do not come back together.
        peer.retry_at = asyncio.get_running_loop().time() + delay * self._rng.uniform(0.5, 1.0)
