"""The composition root: one node out of a listener, the data paths, the handle API and messaging.

The only module that knows every backend. It opens them in order, says who this node is, and closes
them in the opposite order; what a handle means is runtime/'s.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .config import EP_IDLE_TIMEOUT_FLOOR, NodeConfig, resolve
from .errors import ClosedError, ConfigError, DeviceError, UsageError
from .events import EventSink, Recorder
from .model import (
    Incarnation,
    PathName,
    PathReason,
    PeerIdentity,
    Transport,
    WorkerId,
)
from .protocol.address import ENDPOINTS_MAX, NodeAddress
from .protocol.bootstrap import (
    ATTEMPT_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
)
from .protocol.connection import StartDial
from .protocol.endpoint import Endpoint
from .protocol.messages import Hello, Limits, RailHint
from .protocol.messaging.credits import Windows
from .protocol.messaging.packets import FIXED_BYTES, HEADER_BYTES_MAX, LENGTH_BYTES
from .protocol.streams.handle import StreamHandle
from .runtime.handle_calls import HandleCalls
from .runtime.live import Live
from .runtime.messaging.draining import ShutdownPolicy
from .runtime.messaging.handlers import Dispatch, Message, OrderedConfig, Overflow
from .runtime.messaging.health import Health, HealthKind
from .runtime.messaging.link_choice import Missing
from .runtime.messaging.messenger import Surroundings
from .runtime.messaging.node_calls import MessagingCalls
from .runtime.messaging.results import SendResult, SendState
from .runtime.messaging.service import MessagingService
from .runtime.messaging.serving import Serving
from .runtime.messaging.stream_objects import StreamInbox, StreamSender
from .runtime.options import Put, RegisterOptions
from .runtime.paths import Paths
from .runtime.peer import IncomingLink, OpenedLink
from .runtime.region_guards import RegionGuard, RegionSlice, RegionWatch
from .runtime.rendezvous import NodeStatistics, Rendezvous
from .runtime.sinks import PinnedPayload, PinnedWriter
from .transport.finding import find
from .transport.messages import LinkLimits, MessageTransport
from .transport.tcp_dial import DialOptions, dial
from .transport.tcp_listener import ListenOptions, TcpListener
from .transport.tcp_packets import TcpMessages
from .transport.tcp_path import TcpPath, TcpPathOptions

if TYPE_CHECKING:
    from .verbs.settings import RdmaPathConfig

__all__ = [
    "Dispatch",
    "Health",
    "HealthKind",
    "Message",
    "Node",
    "NodeStatistics",
    "OrderedConfig",
    "Overflow",
    "PinnedPayload",
    "PinnedWriter",
    "Put",
    "RegionGuard",
    "RegionSlice",
    "RegionWatch",
    "RegisterOptions",
    "SendResult",
    "SendState",
    "ShutdownPolicy",
    "StreamHandle",
    "StreamInbox",
    "StreamSender",
]

_log = logging.getLogger("orbit")

RailsNow = Callable[[], tuple[RailHint, ...]]


class Node(Live, HandleCalls, MessagingCalls):
    """One process's endpoint: registers data under handles, fetches by the handles of others, and
    sends, calls and streams to the handlers of others.

    `async with Node(config) as node` opens and closes it. Every method belongs to the event loop
    that opened it. `on_event` is told what happens, as typed events (orbit.events), and must not
    block.
    """

    _instead = "send its address (bytes) and the handles"

    def __init__(
        self, config: NodeConfig | None = None, *, on_event: EventSink | None = None
    ) -> None:
        self._config = config or NodeConfig()
        self._recorder = Recorder(on_event)
        self._listener: TcpListener | None = None
        self._rendezvous: Rendezvous | None = None
        self._serving = Serving(self, self._recorder.counters)
        self._service: MessagingService | None = None
        self._address: NodeAddress | None = None
        self._rails: RailsNow = tuple
        self._limits = Limits()
        self._identity = PeerIdentity(WorkerId(1), Incarnation(0))
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Resolve the configuration, open the devices and the port. Once.

        Raises ConfigError (a value, a pin, a taken port) and, where the configuration demands RDMA
        and this host cannot have it, PathUnavailable naming what is missing.
        """
        if self._rendezvous is not None:
            raise UsageError("this node was opened before")
        config = self._config = resolve(self._config)
        self._identity = PeerIdentity(
            WorkerId(config.worker_id or secrets.randbelow((1 << 64) - 1) + 1),
            Incarnation(secrets.randbits(64)),
        )
        paths, self._rails, limits = await _open_paths(config)
        self._limits = _granted(config, limits)
        rendezvous = Rendezvous(self._identity, config, paths, self._dial, self._recorder)
        self._rendezvous = rendezvous
        try:
            _check_demand(config, paths)
            service = _messaging_on(rendezvous, config, paths, self._serving, self._recorder)
            self._service = service
            idle_close_s = config.messaging.ep_idle_timeout
            if idle_close_s is not None:
                idle_close_s = max(idle_close_s, EP_IDLE_TIMEOUT_FLOOR)
            streams_idle = service.streams.wait_idle
            self._serving.attach(
                service.messenger, idle_close_s, streams_idle, self.close, rendezvous.sweep
            )
            self._listener = await _listen(config, paths, self._hello, self._accept)
            endpoints = _advertised(config, self._listener)
            _warn_of_loopback(config, endpoints)
            identity = self._identity
            self._address = NodeAddress(
                identity.worker_id, identity.incarnation, endpoints, self._rails()
            )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every transfer, lease, link and device of this node, within `timeouts.close_s`.

        Idempotent; concurrent callers share one close, and cancelling a caller does not stop it.
        """
        if self._rendezvous is None:
            return
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(self._rendezvous))
        await asyncio.shield(self._closing)

    # --- who is who -------------------------------------------------------------------------------

    @property
    def address(self) -> NodeAddress:
        """What peers give to `add_peer`: `bytes(address)` for machines, `str(address)` to paste."""
        if self._address is None:
            raise ClosedError("the node")
        return self._address

    @property
    def identity(self) -> PeerIdentity:
        """Worker id and this life's incarnation."""
        return self.address.identity

    def add_peer(self, address: NodeAddress | bytes | str) -> PeerIdentity:
        """Remember where a node is. No I/O: the first use dials (with `messaging.eager_endpoints`,
        a message link is opened in the background). Raises UsageError.
        """
        identity = self._open().add_peer(address)
        if self._config.messaging.eager_endpoints:
            self._messages().messenger.wire_up(identity)
        return identity

    async def find(self, endpoint: str) -> NodeAddress:
        """Ask who listens at `endpoint` ("host:port"), for `add_peer`. The secret is proven both
        ways first. The answer names the process that runs there now. Raises UsageError,
        PeerUnreachable, PeerRefused, PeerProtocolError.
        """
        self._open()
        there = Endpoint.parse(endpoint)
        config = self._config
        return await find(there, self._hello(), _secret(config), _dial_options(config))

    # --- how it is --------------------------------------------------------------------------------

    def statistics(self) -> NodeStatistics:
        """Slots, leases, sessions, memory, messaging and counters, as one frozen value."""
        found = self._open(even_closed=True).statistics()
        if self._service is None:
            return found
        return replace(
            found,
            messaging=self._service.messenger.statistics(),
            dispatch=self._serving.statistics(),
            streams=self._service.streams.statistics(),
        )

    # --- within -----------------------------------------------------------------------------------

    def _open(self, *, even_closed: bool = False) -> Rendezvous:
        if self._rendezvous is None or (self._closing is not None and not even_closed):
            raise ClosedError("the node")
        return self._rendezvous

    async def _close(self, rendezvous: Rendezvous) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._service is not None:
            # Half of the time: what rides on the sessions ends before them.
            await self._service.stop(self._config.timeouts.close_s / 2)
        await rendezvous.close()

    def _messages(self) -> MessagingService:
        if self._service is None or self._closing is not None:
            raise ClosedError("the node")
        return self._service

    def _hello(self, target: int = 0, start: StartDial | None = None) -> Hello:
        address = self._address
        return Hello(
            version_min=PROTOCOL_VERSION_MIN,
            version_max=PROTOCOL_VERSION,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            target=target,
            attempt=secrets.token_bytes(ATTEMPT_BYTES) if start is None else start.attempt,
            nonce=secrets.token_bytes(NONCE_BYTES),
            rails=self._rails(),
            limits=self._limits,
            endpoints=() if address is None else tuple(map(str, address.endpoints)),
            dial_number=0 if start is None else start.number,
            previous=b"" if start is None else start.previous,
        )

    def _accept(self, incoming: IncomingLink) -> None:
        if self._rendezvous is None:
            incoming.refuse("closing")
        else:
            self._rendezvous.accept(incoming)

    async def _dial(self, address: NodeAddress, start: StartDial) -> OpenedLink:
        established = await dial(
            [endpoint.pair for endpoint in address.endpoints],
            self._hello(address.worker_id, start),
            _secret(self._config),
            expected=address.identity,
            options=_dial_options(self._config),
        )
        return OpenedLink(established.epoch, established.link, (established.endpoint,))


async def _listen(
    config: NodeConfig,
    paths: Paths,
    hello: Callable[[], Hello],
    accept: Callable[[IncomingLink], None],
) -> TcpListener:
    endpoint = _endpoint("listen", config.listen, 0)
    listener = TcpListener(
        hello,
        _secret(config),
        accept,
        paths.tcp if isinstance(paths.tcp, TcpPath) else None,
        ListenOptions(handshake_timeout_s=config.timeouts.handshake_s, tls=config.server_tls),
    )
    await listener.open(endpoint.host, endpoint.port)
    return listener


def _messaging_on(
    rendezvous: Rendezvous, config: NodeConfig, paths: Paths, serving: Serving, recorder: Recorder
) -> MessagingService:
    """Messages beside the handles, on the same sessions."""
    transports, missing, packets = _message_transports(config, paths)
    around = Surroundings(
        identity=rendezvous.identity,
        config=config,
        transports=transports,
        priority=_priority(config),
        missing=missing,
        store=rendezvous.payloads,
        session_to=rendezvous.session_to,
        spawn=rendezvous.spawn,
        recorder=recorder,
    )
    service = MessagingService(around, serving, rendezvous.payloads, packets)
    rendezvous.carry(service)
    return service


def _message_transports(
    config: NodeConfig, paths: Paths
) -> tuple[list[MessageTransport], dict[PathName, Missing], TcpMessages]:
    """What this node can send and receive by; why it lacks the rest; and who routes packets."""
    tcp = TcpMessages(config.messaging.inbound_max_bytes)
    found: dict[PathName, MessageTransport] = {PathName.TCP: tcp}
    missing: dict[PathName, Missing] = {}
    rdma = _rdma_messages(config, paths)
    if rdma is not None:
        found[PathName.RDMA] = rdma
    elif paths.rdma is None:
        missing[PathName.RDMA] = Missing(paths.rdma_reason, paths.rdma_detail)
    return list(found.values()), missing, tcp


def _priority(config: NodeConfig) -> list[PathName]:
    """What sends go by when they do not say: as configured, or what the whole node demands."""
    demanded = None if config.transport is Transport.AUTO else PathName(config.transport)
    names = [PathName(name) for name in config.messaging.transports]
    return [name for name in names if demanded in (None, name)]


def _granted(config: NodeConfig, limits: Limits) -> Limits:
    """What the hello grants for messages that ride on the connection itself."""
    messaging = config.messaging
    return replace(
        limits,
        message_credits=messaging.credits,
        reserve_credits=messaging.reply_credits,
        slab_bytes=messaging.eager_max_bytes + HEADER_BYTES_MAX + FIXED_BYTES + LENGTH_BYTES,
        eager_ceiling_bytes=messaging.eager_max_bytes,
    )


async def _open_paths(config: NodeConfig) -> tuple[Paths, RailsNow, Limits]:
    """The paths, and what each hello says of them."""
    no_progress_s = config.timeouts.no_progress_s
    tcp = TcpPath(_dial_options(config), TcpPathOptions(no_progress_s=no_progress_s))
    if not config.rdma.enabled or config.transport is Transport.TCP:
        detail = "this node does not use RDMA by its configuration"
        return Paths(tcp, rdma_detail=detail), tuple, Limits()
    if sys.platform != "linux":
        return Paths(tcp, None, PathReason.NO_DEVICE, "RDMA needs Linux"), tuple, Limits()
    # Imported here: a TCP node needs no ctypes, and a build without verbs has no helper.
    from .verbs.opening import open_rdma_path

    rdma, reason, detail = await open_rdma_path(None, _rdma_path_config(config))
    if rdma is None:
        return Paths(tcp, None, reason, detail), tuple, Limits()
    return Paths(tcp, rdma, PathReason.OK, detail, rdma.memory), lambda: rdma.hints, rdma.limits


def _check_demand(config: NodeConfig, paths: Paths) -> None:
    if config.transport is not Transport.RDMA:
        return
    if paths.rdma is None:
        raise paths.unavailable(paths.rdma_reason)
    if not config.rendezvous.enabled:
        raise paths.unavailable(PathReason.KILL_SWITCH)


def _secret(config: NodeConfig) -> bytes | None:
    assert config.secret is None or isinstance(config.secret, bytes)  # resolve made it so
    return config.secret


def _dial_options(config: NodeConfig) -> DialOptions:
    return DialOptions(
        connect_timeout_s=config.timeouts.connect_s,
        handshake_timeout_s=config.timeouts.handshake_s,
        tls=config.client_tls,
    )


def _rdma_path_config(config: NodeConfig) -> RdmaPathConfig:
    from .verbs.settings import RdmaPathConfig

    rdma = config.rdma
    return RdmaPathConfig(
        device=rdma.device or "",
        port=rdma.port or 0,
        gid_index=rdma.gid_index,
        gid=rdma.gid or "",
        pkey=rdma.pkey,
        whitelist=rdma.whitelist,
        blacklist=rdma.blacklist,
        service_level=rdma.service_level,
        traffic_class=rdma.traffic_class,
        require_range=rdma.require_range,
        width=rdma.bulk_width,
        num_lanes=rdma.num_lanes,
        endpoints_max=rdma.max_endpoints,
        send_depth=rdma.max_send_wr,
        recv_depth=rdma.max_send_wr,
        cq_depth=rdma.max_cqes,
        progress=rdma.progress,
        monitor_interval_s=rdma.monitor_interval,
        pool=rdma.pool,
        window_key_indices_max=rdma.window_key_indices_max,
        connect_timeout_s=rdma.device_timeout_s,
        drain_timeout_s=rdma.device_timeout_s,
        progress_timeout_s=config.timeouts.no_progress_s,
    )


def _rdma_messages(config: NodeConfig, paths: Paths) -> MessageTransport | None:
    """Messages on the devices of the RDMA path, where there is one; the path closes them before
    its devices. Nothing is made on a device before the first link.
    """
    if paths.rdma is None or "rdma" not in config.messaging.transports:
        return None
    from .verbs.messaging.settings import RdmaMessagesConfig
    from .verbs.opening import open_rdma_messages
    from .verbs.rdma_path import RdmaPath

    assert isinstance(paths.rdma, RdmaPath)
    messaging = config.messaging
    limits = LinkLimits(
        windows=Windows(messaging.credits, messaging.reply_credits),
        slab_bytes=messaging.slab_bytes,
        ceiling_bytes=messaging.eager_max_bytes,
        inbound_bytes_max=messaging.inbound_max_bytes,
    )
    settings = RdmaMessagesConfig(
        limits=limits,
        receive_slabs=messaging.receive_slabs,
        send_slabs=messaging.receive_slabs,
        progress=config.rdma.progress,
        spin_us=config.rdma.spin_us,
        connect_timeout_s=config.rdma.device_timeout_s,
        drain_timeout_s=config.rdma.device_timeout_s,
        ready_timeout_s=messaging.ready_timeout_s,
    )
    return open_rdma_messages(paths.rdma, settings)


def _endpoint(knob: str, text: str, default_port: int) -> Endpoint:
    try:
        return Endpoint.parse(text, default_port)
    except UsageError as error:
        raise ConfigError(knob, text, str(error), hint=error.hint) from error


def _advertised(config: NodeConfig, listener: TcpListener) -> tuple[Endpoint, ...]:
    """What peers are to dial: what was configured, else what was bound, else what this host has."""
    bound = [Endpoint(host, port) for host, port in listener.endpoints]
    if config.advertise:
        return tuple(_endpoint("advertise", text, bound[0].port) for text in config.advertise)
    found = [e for e in bound if not e.is_wildcard]
    for wildcard in (e for e in bound if e.is_wildcard):
        found += _host_endpoints(wildcard)
    return tuple(dict.fromkeys(found))[:ENDPOINTS_MAX]


def _warn_of_loopback(config: NodeConfig, told: Sequence[Endpoint]) -> None:
    """Who listens for others and tells them loopback is reached by nobody, or by the wrong one."""
    if not _endpoint("listen", config.listen, 0).is_loopback and all(e.is_loopback for e in told):
        names = ", ".join(map(str, told))
        _log.warning("peers are told %s, which leads other hosts to themselves", names)


def _host_endpoints(wildcard: Endpoint) -> list[Endpoint]:
    """This host's addresses of the families that a wildcard bind serves, routable ones first."""
    from .verbs.netdevs import read_netdevs  # reads the kernel's list; no device is touched

    try:
        texts = {a for dev in read_netdevs().values() if dev.up for a in dev.addresses}
    except DeviceError as error:
        _log.warning("the addresses of this host are unknown: %s", error)
        texts = {"127.0.0.1"}
    both = wildcard.host == "::"
    known = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    fit = [a for a in known if (both or a.version == 4) and not a.is_link_local]
    routable = [a for a in fit if not a.is_loopback] or fit
    routable.sort(key=lambda a: (a.version, not a.is_global, int(a)))
    return [Endpoint(str(address), wildcard.port) for address in routable]
