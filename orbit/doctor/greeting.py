"""The first steps towards a peer: resolve, connect, shake hands. One connection, which ends.

What the handshake says of the peer is all that later stages need; what went wrong is a finding
with the stage's name.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Self

from ..config import NodeConfig
from ..errors import (
    OrbitError,
    PeerProtocolError,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    UsageError,
)
from ..model import Incarnation, WorkerId
from ..protocol.address import ADDRESS_PREFIX, NodeAddress
from ..protocol.bootstrap import (
    ATTEMPT_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Epoch,
)
from ..protocol.endpoint import Endpoint
from ..protocol.messages import Hello
from ..protocol.ticket import TICKET_PREFIX, Ticket
from ..transport.tcp_dial import DialOptions, dial
from .finding import Area, Finding

PEER = Area("peer")


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask. `address` None: whoever listens at the endpoint. `ticket` None: no payload."""

    endpoints: tuple[Endpoint, ...]
    address: NodeAddress | None = None
    ticket: Ticket | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """A ticket, a node address or HOST:PORT. Raises UsageError."""
        words = text.strip()
        if words.startswith(TICKET_PREFIX):
            ticket = Ticket.parse(words)
            return cls(ticket.address.endpoints, ticket.address, ticket)
        if words.startswith(ADDRESS_PREFIX):
            address = NodeAddress.parse(words)
            return cls(address.endpoints, address)
        endpoint = Endpoint.parse(words)
        if endpoint.port == 0 or endpoint.is_wildcard:
            raise UsageError(f"{endpoint} cannot be dialed", hint="name the peer's host and port")
        return cls((endpoint,))

    def __str__(self) -> str:
        return ", ".join(map(str, self.endpoints))


@dataclass(frozen=True, slots=True)
class Greeted:
    """Who answered, where, and what it said of itself."""

    address: NodeAddress
    epoch: Epoch


async def greet(target: Target, config: NodeConfig, found: list[Finding]) -> Greeted | None:
    """Adds the findings of the stages resolve, connect and handshake. None: one of them failed."""
    bounds = config.timeouts
    resolved = await _resolve(target, bounds.connect_s)
    if not resolved:
        fix = "check the spelling, and /etc/hosts or the name server of this host"
        found.append(PEER.fail("peer_resolve_failed", f"resolve: no address of {target}", fix))
        return None
    found.append(PEER.ok("peer_resolve", f"resolve: {target} is {', '.join(resolved)}"))
    started = time.perf_counter()
    address = target.address
    options = DialOptions(bounds.connect_s, bounds.handshake_s, config.client_tls)
    try:
        established = await dial(
            [endpoint.pair for endpoint in target.endpoints],
            _hello(0 if address is None else address.worker_id),
            config.secret if isinstance(config.secret, bytes) else None,
            expected=None if address is None else address.identity,
            options=options,
        )
    except OrbitError as error:
        found += _refused(error)
        return None
    established.link.close()
    seconds = time.perf_counter() - started
    epoch, endpoint = established.epoch, Endpoint(*established.endpoint)
    peer = epoch.peer
    found.append(PEER.ok("peer_connect", f"connect: {endpoint} answers"))
    proof = "the secret is proven both ways" if config.secret else "neither side has a secret"
    text = f"handshake: node {peer}, protocol {epoch.version}, {proof} ({seconds * 1e3:.1f} ms)"
    data = {"worker_id": f"{peer.worker_id:016x}", "version": epoch.version, "seconds": seconds}
    found.append(PEER.ok("peer_handshake", text, **data))
    rails = epoch.peer_hello.rails
    return Greeted(NodeAddress(peer.worker_id, peer.incarnation, (endpoint,), rails), epoch)


async def _resolve(target: Target, timeout_s: float) -> list[str]:
    """Every address of every endpoint, as text; nothing where none is known in time."""
    loop = asyncio.get_running_loop()
    texts: list[str] = []
    for host, port in (endpoint.pair for endpoint in target.endpoints):
        try:
            async with asyncio.timeout(timeout_s):
                rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            continue
        texts += [str(row[4][0]) for row in rows]
    return list(dict.fromkeys(texts))


def _hello(target: int) -> Hello:
    """Of a node that lives for this one question."""
    return Hello(
        version_min=PROTOCOL_VERSION_MIN,
        version_max=PROTOCOL_VERSION,
        worker_id=WorkerId(secrets.randbelow((1 << 64) - 1) + 1),
        incarnation=Incarnation(secrets.randbits(64)),
        target=target,
        attempt=secrets.token_bytes(ATTEMPT_BYTES),
        nonce=secrets.token_bytes(NONCE_BYTES),
    )


_SILENT = "is the port orbit's, does one side speak TLS alone, does a firewall drop packets?"
_FRESH = "get a fresh ticket or address from the peer"
_UPGRADE = "bring both hosts to the same version of orbit (orbit --version)"


def _refused(error: OrbitError) -> list[Finding]:
    """One for what failed, after one for the connection, where there was one."""
    text, hint = str(error), error.hint
    if isinstance(error, PeerUnreachable) and error.kind != "silent":
        fix = hint or "is the peer running, and does a firewall between the hosts drop packets?"
        return [PEER.fail("peer_connect_failed", f"connect: {text}", fix, reason=error.kind)]
    connected = PEER.ok("peer_connect", "connect: something listens there")
    if isinstance(error, PeerProtocolError):
        code, reason, fix = "peer_not_orbit", "protocol", "ask the peer for its address again"
    elif isinstance(error, PeerRestarted):
        code, reason, fix = "peer_restarted", "restarted", _FRESH
    elif isinstance(error, PeerRefused):
        codes = {"auth": "peer_secret", "version": "peer_version", "wrong_peer": "peer_restarted"}
        fixes = {"version": _UPGRADE, "wrong_peer": _FRESH}
        code, reason = codes.get(error.reason, "peer_refused"), error.reason
        fix = fixes.get(reason, hint or "look at what the peer logs")
    else:
        code, reason, fix = "peer_silent", "silent", hint or _SILENT
    return [connected, PEER.fail(code, f"handshake: {text}", fix, reason=reason)]
