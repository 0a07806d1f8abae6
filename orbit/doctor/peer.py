"""Stage by stage towards one peer: which one fails first, why, and what to do.

A ticket lets the payload be fetched for real, over TCP and under a grant; an address or an endpoint
ends with the message link and the rails. A stage after the one that failed is skipped. Nothing here
raises for what is wrong with the peer, and nothing is left open.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
from collections.abc import AsyncIterator
from dataclasses import replace

from ..config import NodeConfig, resolve
from ..errors import OrbitError, PathFailed
from ..events import Event, TransportChosen
from ..model import Lease, PathName, PathReason, PeerIdentity, Transport
from ..node import Node
from ..protocol.messages import RailHint
from ..protocol.ticket import Ticket
from ..verbs.gid_ranking import family_of
from ..verbs.rail_pairs import pair_rails, path_mtu
from .advice import fix_for, hint_of, rdma_level, reason_of
from .finding import Finding, Level
from .greeting import PEER, Greeted, Target, greet
from .proof import OPEN_S, STEP_S, Steps, trial_config

_PINGS = 9
_PING_S = 2.0
# A payload is fetched whole: a longer one would make a transfer of what should be a question.
_PAYLOAD_BYTES_MAX = 16 << 20
_LOGS = "look at what the peer logs"
_NO_PAYLOAD = "it needs a payload: run `orbit doctor --serve` there, and give its ticket"


async def peer_findings(target: str, config: NodeConfig) -> list[Finding]:
    """`target`: a ticket, a node address or HOST:PORT. Raises UsageError for anything else, and
    ConfigError for a secret file that cannot be read.
    """
    wanted, resolved = Target.parse(target), resolve(config)
    found: list[Finding] = []
    greeted = await greet(wanted, resolved, found)
    if greeted is None:
        return [*found, PEER.skip("peer_rest_skipped", "messages, payloads and rails: not reached")]
    check = _PeerCheck(wanted, greeted, resolved, found)
    try:
        await check.run()
    except (OrbitError, OSError) as error:
        found.append(check.broken(error))
        found.append(PEER.skip("peer_rest_skipped", "what comes after it was not reached"))
    return found


class _PeerCheck:
    """One node of this process against a peer that has answered the handshake."""

    def __init__(
        self, target: Target, greeted: Greeted, config: NodeConfig, found: list[Finding]
    ) -> None:
        self._address = target.address or greeted.address
        self._rails_there = greeted.epoch.peer_hello.rails
        self._ticket = target.ticket
        self._config = config
        self._found = found
        self._steps = Steps()
        self._chosen: TransportChosen | None = None

    async def run(self) -> None:
        """Adds its findings. Raises OrbitError, OSError at the stage `broken` names."""
        async with self._node() as node:
            peer = node.add_peer(self._address)
            await self._messages(node, peer)
            if self._ticket is not None and self._fits(self._ticket):
                await self._by_tcp(node, self._ticket)
            if self._rails(node):
                await self._by_rdma(node)

    def broken(self, error: BaseException) -> Finding:
        """What ended `run`."""
        stage = self._steps.current
        fix = hint_of(error) or _LOGS
        text = f"{stage}: {error or type(error).__name__}"
        return PEER.fail("peer_failed", text, fix, stage=stage, reason=str(reason_of(error) or ""))

    @contextlib.asynccontextmanager
    async def _node(self) -> AsyncIterator[Node]:
        asked = Transport(self._config.transport)
        wanted = Transport.TCP if asked is Transport.TCP else Transport.AUTO
        config = trial_config(self._config, wanted)
        node = Node(replace(config, messaging=self._config.messaging), on_event=self._on_event)
        async with self._steps.step("open", OPEN_S):
            await node.open()
        try:
            yield node
        finally:
            await node.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TransportChosen):
            self._chosen = event

    # --- messages ---------------------------------------------------------------------------------

    async def _messages(self, node: Node, peer: PeerIdentity) -> None:
        """A link, a call over it, and pings."""
        async with self._steps.step("messages"):
            await node.list_handlers(peer, timeout=STEP_S / 2)
        rtts = []
        async with self._steps.step("ping"):
            for _ in range(_PINGS):
                health = await node.check_health(peer, timeout=_PING_S)
                if health.rtt_s is not None:
                    rtts.append(health.rtt_s)
        chosen = self._chosen
        path, why = (chosen.transport, chosen.reason) if chosen else (PathName.TCP, PathReason.OK)
        median_s = statistics.median(rtts) if rtts else None
        rtt = "no ping was answered" if median_s is None else f"RTT {median_s * 1e3:.2f} ms"
        text = f"messages: by {path}{'' if why is PathReason.OK else f' ({why})'}, {rtt}"
        data = {"transport": str(path), "reason": str(why), "rtt_s": median_s, "pings": len(rtts)}
        level = Level.OK
        if median_s is None or (path is PathName.TCP and why is not PathReason.OK and self._both()):
            level = Level.WARN
        code = "peer_messages" if level is Level.OK else "peer_messages_degraded"
        fix = "" if level is Level.OK else fix_for(why, _LOGS)
        self._found.append(PEER.at(level, code, text, fix, **data))

    def _both(self) -> bool:
        """Whether RDMA was to be had, as far as both sides announce it."""
        return bool(self._rails_there) and self._config.transport != Transport.TCP

    # --- payloads ---------------------------------------------------------------------------------

    def _fits(self, ticket: Ticket) -> bool:
        if ticket.size <= _PAYLOAD_BYTES_MAX:
            return True
        text = f"payload: {ticket.size} bytes are more than doctor fetches; {_NO_PAYLOAD}"
        self._found.append(PEER.skip("peer_payload_skipped", text))
        return False

    async def _by_tcp(self, node: Node, ticket: Ticket) -> None:
        async with self._steps.step("payload over tcp"):
            lease = await self._fetch(node, ticket, Transport.TCP)
        text = f"payload: {lease.nbytes} bytes over tcp, as the ticket says"
        self._found.append(PEER.ok("peer_tcp", text, phases=dict(lease.phases)))

    async def _by_rdma(self, node: Node) -> None:
        ticket = self._ticket
        if ticket is None or ticket.size > _PAYLOAD_BYTES_MAX or not ticket.size:
            self._found.append(PEER.skip("peer_grant_skipped", f"grant: {_NO_PAYLOAD}"))
            return
        try:
            async with self._steps.step("grant"):
                lease = await self._fetch(node, ticket, Transport.RDMA)
        except (OrbitError, OSError) as error:
            self._no_grant(error, node)
            return
        phases = lease.phases
        ms = {name: phases.get(name, 0.0) * 1e3 for name in ("prepare", "acquire", "pull")}
        connected = f"queue pairs: connected in {ms['prepare']:.1f} ms"
        self._found.append(PEER.ok("peer_queue_pairs", connected, ms=ms["prepare"]))
        text = f"grant: {lease.nbytes} bytes by rdma"
        text += f" (acquire {ms['acquire']:.1f} ms, read {ms['pull']:.1f} ms)"
        self._found.append(PEER.ok("peer_grant", text, phases=dict(phases)))
        self._found.append(PEER.ok("peer_release", "release: the lease was given back"))

    def _no_grant(self, error: BaseException, node: Node) -> None:
        reason, level = reason_of(error), rdma_level(self._config)
        data = {"reason": str(reason or "")}
        rdma = node.statistics().rdma
        connected = rdma is not None and rdma.counts["connects"] > 0
        if reason is PathReason.CONNECT_FAILED or (reason is None and not connected):
            fix = fix_for(PathReason.CONNECT_FAILED)
            text = f"queue pairs: {error}"
            self._found.append(PEER.at(level, "peer_queue_pairs_failed", text, fix, **data))
            self._found.append(PEER.skip("peer_grant_skipped", "grant: not reached"))
            return
        # A payload in plain memory, or a small one, is the owner's decision and no fault.
        if reason in (PathReason.NOT_PINNED, PathReason.BELOW_MIN):
            fix = "serve pinned memory: `orbit doctor --serve` there does"
        elif reason in (None, PathReason.GET_FAILED):
            fix = fix_for(PathReason.CONNECT_FAILED)  # connecting sends no packet by RDMA yet
        else:
            fix = hint_of(error)
        text = f"grant: {error}"
        self._found.append(PEER.at(level, "peer_grant_failed", text, fix or _LOGS, **data))

    async def _fetch(self, node: Node, ticket: Ticket, transport: Transport) -> Lease:
        """The payload, compared and given back."""
        data, lease = await node.get(ticket.handle, transport=transport, timeout=STEP_S / 2)
        await node.detach(ticket.handle, lease)
        if hashlib.sha256(data).hexdigest() != ticket.sha256:
            raise PathFailed(lease.path, PathReason.GET_FAILED, "other bytes arrived")
        return lease

    # --- rails ------------------------------------------------------------------------------------

    def _rails(self, node: Node) -> bool:
        """Whether a grant is worth trying."""
        if self._config.transport == Transport.TCP:
            self._found.append(PEER.skip("peer_rails_skipped", "rails: RDMA was not asked for"))
            return False
        found = rails_finding(node, self._rails_there, rdma_level(self._config))
        self._found.append(found)
        if found.code != "peer_rails_missing":
            return True
        self._found.append(PEER.skip("peer_grant_skipped", "grant: not reached"))
        return False


def rails_finding(node: Node, there: tuple[RailHint, ...], level: Level) -> Finding:
    """Which rails of both sides fit each other, with GID family and path MTU."""
    here, state = node.address.rails, node.statistics()
    sides = {"here": _names(here), "there": _names(there)}
    if not here:
        reason = state.rdma_reason
        text = f"rails: this host has none: {state.rdma_detail or reason}"
        fix = fix_for(reason, "`orbit doctor` without --peer says more")
        return PEER.at(level, "peer_rails_missing", text, fix, reason=str(reason), **sides)
    if not there:
        reason = PathReason.PEER_WITHOUT
        text = "rails: the peer announces none"
        return PEER.at(level, "peer_rails_missing", text, fix_for(reason), reason=reason, **sides)
    pairs = [(here[i], there[j]) for i, j in pair_rails(here, there)]
    if not pairs:
        text = "rails: none of both sides have the same link layer"
        fix = "InfiniBand and RoCE do not reach each other"
        return PEER.at(level, "peer_rails_missing", text, fix, reason="link_layer", **sides)
    said = "; ".join(_pair_text(mine, theirs) for mine, theirs in pairs)
    data = {**sides, "mtu": [path_mtu(mine.mtu, theirs.mtu) for mine, theirs in pairs]}
    if not any(_family(mine) == _family(theirs) for mine, theirs in pairs):
        fix = "give both ports an address of one family; orbit takes IPv4 before IPv6"
        return PEER.at(Level.WARN, "peer_gid_families", f"rails: {said}", fix, **data)
    if any(mine.mtu != theirs.mtu for mine, theirs in pairs):
        fix = "set one MTU on both interfaces, 4200 or more: ip link set dev INTERFACE mtu 9000"
        return PEER.at(Level.WARN, "peer_mtu_differs", f"rails: {said}", fix, **data)
    return PEER.ok("peer_rails", f"rails: {said}", **data)


def _names(rails: tuple[RailHint, ...]) -> list[str]:
    return [f"{rail.device}:{rail.port} gid {rail.gid_index} {rail.gid}" for rail in rails]


def _pair_text(mine: RailHint, theirs: RailHint) -> str:
    families = " and ".join(dict.fromkeys((_family(mine), _family(theirs))))
    mtu = path_mtu(mine.mtu, theirs.mtu)
    sizes = "" if mine.mtu == theirs.mtu else f" (of {mine.mtu} here and {theirs.mtu} there)"
    return f"{mine.device} to {theirs.device}, {families}, path MTU {mtu}{sizes}"


def _family(rail: RailHint) -> str:
    if rail.link_layer == "infiniband":
        return "InfiniBand"
    return str(family_of(rail.gid))
