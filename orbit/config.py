"""Configuration: one tree of frozen values, checked once, and the one place that reads the
environment.

Code gives a `NodeConfig`; `resolve` lays the runtime pins of the environment over it, which win,
and loads the secret. Nothing here opens a device or a socket, and nothing else in orbit looks at
the environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .errors import ConfigError
from .model import Transport

if TYPE_CHECKING:
    from ssl import SSLContext

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_PAGE_BYTES = 4 * KIB

# rdma_min_bytes <= DEFAULT_THRESHOLD < DEFAULT_CHUNK_SIZE: a payload that is staged because it is
# large is then large enough for the RDMA path from its first byte over the threshold.
DEFAULT_THRESHOLD = 256 * KIB  # payloads of messages above it travel by rendezvous
DEFAULT_CHUNK_SIZE = 512 * KIB  # of the TCP path: a receiver wakes for so many bytes, or the rest
EP_IDLE_TIMEOUT_FLOOR = 0.5  # seconds; smaller values rise to it

_U64_MAX = (1 << 64) - 1
LEASE_TIMEOUT_FLOOR = 0.001  # 0 means "no deadline" on the wire, so nothing may round to it
_TRUE = frozenset({"1", "true", "yes", "on"})  # a kill switch must not fire on a typo

KILL_SWITCH = "ORBIT_RDMA_RENDEZVOUS_DISABLE"
_PINS = ("ORBIT_DEVICE", "ORBIT_PORT", "ORBIT_GID_INDEX", "ORBIT_PKEY", "ORBIT_TRANSPORT")
_LISTS = ("ORBIT_RDMA_WHITELIST", "ORBIT_RDMA_BLACKLIST")
_KNOWN = (*_PINS, *_LISTS, KILL_SWITCH)
# Read by the build, the lab and the command line, not by a node.
_ELSEWHERE = ("ORBIT_RESULTS", "ORBIT_SOAK", "ORBIT_WITHOUT_VERBS", "ORBIT_VERBS_INCLUDE")
_ELSEWHERE_PREFIXES = ("ORBIT_LAB",)
# Of the verbs libraries and of what runs the process.
_DIAGNOSED = (
    *("IBV_FORK_SAFE", "RDMAV_FORK_SAFE", "MLX5_SCATTER_TO_CQE"),
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "KUBERNETES_SERVICE_HOST"),
)

PROGRESS_MODES = ("event", "spin", "polling")
HOST_MEMORY = ("direct", "staged")

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPoolConfig:
    """Registered memory. Bytes are what the kernel pins: whole pages, once per device."""

    initial_arena_bytes: int = 64 * MIB  # the first pooled arena; each later one has twice as much
    max_arena_bytes: int = GIB  # the largest pooled arena
    dedicated_arena_min: int = 64 * MIB  # pieces from here on get an arena of their own
    registered_bytes_budget: int = GIB  # of arenas, regions and per-operation registrations
    arena_reclaim_after: float | None = None  # seconds an arena must be empty; None: kept
    retain_arena_bytes: int = 64 * MIB  # of pooled arenas, which reclamation leaves mapped

    def __post_init__(self) -> None:
        _check_range("rdma.pool.initial_arena_bytes", self.initial_arena_bytes, 4096, 1 << 40)
        _check_range(
            "rdma.pool.max_arena_bytes", self.max_arena_bytes, self.initial_arena_bytes, 1 << 40
        )
        _check_range("rdma.pool.dedicated_arena_min", self.dedicated_arena_min, 4096, 1 << 48)
        budget = self.registered_bytes_budget
        _check_range("rdma.pool.registered_bytes_budget", budget, 0, 1 << 48)
        if self.arena_reclaim_after is not None:
            _check_seconds("rdma.pool.arena_reclaim_after", self.arena_reclaim_after)
        _check_range("rdma.pool.retain_arena_bytes", self.retain_arena_bytes, 0, 1 << 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaConfig:
    """Devices and registered memory. Pins are strict: a pinned value that cannot be had is never
    replaced.
    """

    enabled: bool = True  # False: open no device at all
    device: str | None = None
    port: int | None = None
    gid_index: int | None = None
    gid: str | None = None
    pkey: int | None = None
    # Names of devices. What the whitelist does not name is not opened; where it is empty, what the
    # blacklist names is not.
    whitelist: tuple[str, ...] = ()
    blacklist: tuple[str, ...] = ()
    service_level: int = 0  # of InfiniBand, 0 to 15
    traffic_class: int = 0  # of RoCE: DSCP in the upper six bits
    require_range: bool = False  # refuse a device that does not enforce a window's range
    bulk_width: int = 2  # queue pairs of one bulk array; of two peers the smaller number holds
    num_lanes: int = 2  # completion queues for bulk work of each device, each with one poller
    max_endpoints: int = 64  # bulk queue pairs in both roles, all devices and peers together
    max_send_wr: int = 64  # unresolved work requests of one bulk queue pair, and its receives
    max_cqes: int = 4096  # capacity of one completion queue for bulk work
    monitor_interval: float = 1.0  # seconds between two looks at each rail's port and address
    pool: RdmaPoolConfig = field(default_factory=RdmaPoolConfig)
    shutdown_timeout: float = 30.0  # bound on giving registrations back at an unbounded shutdown
    drop_dereg_timeout: float = 30.0  # bound on the deregistration that a dropped guard starts
    window_key_indices_max: int = 65_536
    device_timeout_s: float = 2.0  # bound on one connect or teardown step
    # How completions are found (D10): "event" sleeps in the event loop, "spin" polls for `spin_us`
    # after activity first, "polling" has a native thread for each completion queue,
    # which takes a processor while there is traffic.
    progress: str = "event"
    spin_us: int | None = None  # None: by mode; none in event mode on one or two processors

    def __post_init__(self) -> None:
        _check_range("rdma.port", self.port, 1, 255)
        _check_range("rdma.gid_index", self.gid_index, 0, 65_535)
        _check_range("rdma.pkey", self.pkey, 0, 0xFFFF)
        for name in ("whitelist", "blacklist"):
            _check_names(f"rdma.{name}", getattr(self, name))
        _check_range("rdma.service_level", self.service_level, 0, 15)
        _check_range("rdma.traffic_class", self.traffic_class, 0, 255)
        _check_range("rdma.bulk_width", self.bulk_width, 1, 16)
        _check_range("rdma.num_lanes", self.num_lanes, 1, 64)
        _check_range("rdma.max_endpoints", self.max_endpoints, 1, 65_536)
        _check_range("rdma.max_send_wr", self.max_send_wr, 4, 16_384)
        _check_range("rdma.max_cqes", self.max_cqes, 16, 32_767)
        _check_seconds("rdma.monitor_interval", self.monitor_interval)
        if not isinstance(self.pool, RdmaPoolConfig):
            raise ConfigError("rdma.pool", self.pool, "is no RdmaPoolConfig")
        _check_seconds("rdma.shutdown_timeout", self.shutdown_timeout)
        _check_seconds("rdma.drop_dereg_timeout", self.drop_dereg_timeout)
        _check_range("rdma.window_key_indices_max", self.window_key_indices_max, 1, 1 << 24)
        _check_seconds("rdma.device_timeout_s", self.device_timeout_s)
        if self.progress not in PROGRESS_MODES:
            accepted = ", ".join(PROGRESS_MODES)
            raise ConfigError("rdma.progress", self.progress, f"must be one of {accepted}")
        _check_range("rdma.spin_us", self.spin_us, 0, 10_000)

    @property
    def pinned(self) -> bool:
        """Whether a particular device, port, GID or partition was asked for."""
        pins = (self.device, self.port, self.gid_index, self.gid, self.pkey)
        return any(pin is not None for pin in pins)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """How payloads are served and fetched by handle."""

    enabled: bool = True  # the kill switch of the RDMA path, for both roles
    rdma_min_bytes: int = 64 * KIB  # pinned payloads below it are served by TCP
    lease_timeout: float = 30.0  # seconds; life of a lease without a renewal
    inline_max_bytes: int = 64 * KIB  # payloads up to it ride on the acquire answer
    payload_max_bytes: int | None = None  # the largest payload this node fetches
    # Payloads of messages that peers send by rendezvous because they are large:
    staged_fetch_timeout: float | None = None  # seconds for one fetch; stream items are exempt
    staged_payload_max: int | None = None  # the largest; checked before anything is allocated

    def __post_init__(self) -> None:
        _check_range("rendezvous.rdma_min_bytes", self.rdma_min_bytes, 0, _U64_MAX)
        # The answer must fit one control frame (1 MiB) with its headers.
        _check_range("rendezvous.inline_max_bytes", self.inline_max_bytes, 0, 512 * KIB)
        _check_range("rendezvous.payload_max_bytes", self.payload_max_bytes, 0, _U64_MAX)
        _check_range("rendezvous.staged_payload_max", self.staged_payload_max, 0, _U64_MAX)
        if self.staged_fetch_timeout is not None:
            _check_seconds("rendezvous.staged_fetch_timeout", self.staged_fetch_timeout)
        _check_seconds("rendezvous.lease_timeout", self.lease_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagingConfig:
    """Messages, calls and streams. Windows and slabs are what this node grants to each peer."""

    transports: tuple[str, ...] = ("rdma", "tcp")  # by priority; the first that can be had
    credits: int = 64  # slabs of messages and stream items that a peer may have on their way
    reply_credits: int = 16  # slabs of replies; at least a quarter of `credits`
    slab_bytes: int = 8 * KIB  # one receive buffer of a device
    eager_max_bytes: int = DEFAULT_THRESHOLD  # longer payloads travel by rendezvous
    inbound_max_bytes: int = 8 * MIB  # of one peer's messages that no handler has finished yet
    queue_frames: int = 1024  # of one peer, waiting to leave
    queue_bytes: int = 16 * MIB
    outstanding_calls: int = 65_535  # of this node, all peers together
    receive_slabs: int = 1024  # of one device's shared receive queue; bounds peers with RDMA links
    eager_endpoints: bool = False  # open the link when a peer is added: a hint, nobody waits for it
    ep_idle_timeout: float | None = None  # close links that were idle so long; None: never
    ready_timeout_s: float = 3.0  # an RDMA link that is not ready by then: TCP for this connection
    ping_timeout_s: float = 2.0
    heartbeat_s: float = 5.0  # of streams; three missed ones end a stream

    def __post_init__(self) -> None:
        unknown = set(self.transports) - {"rdma", "tcp"}
        if unknown or not self.transports or len(set(self.transports)) != len(self.transports):
            raise ConfigError(
                "messaging.transports", self.transports, "must order some of rdma, tcp"
            )
        _check_range("messaging.credits", self.credits, 1, 16_384)
        low = -(-self.credits // 4)
        _check_range("messaging.reply_credits", self.reply_credits, low, 16_384)
        _check_range("messaging.slab_bytes", self.slab_bytes, 512, MIB)
        _check_range("messaging.eager_max_bytes", self.eager_max_bytes, 0, 512 * KIB)
        # Otherwise one message that is only partly here could withhold its own credit for ever.
        _check_range(
            "messaging.inbound_max_bytes",
            self.inbound_max_bytes,
            2 * self.eager_max_bytes + KIB,
            1 << 40,
        )
        _check_range("messaging.queue_frames", self.queue_frames, 1, 1 << 20)
        _check_range("messaging.queue_bytes", self.queue_bytes, self.eager_max_bytes, 1 << 40)
        _check_range("messaging.outstanding_calls", self.outstanding_calls, 1, 65_535)
        _check_range("messaging.receive_slabs", self.receive_slabs, 32, 32_767)
        if self.ep_idle_timeout is not None:
            _check_seconds("messaging.ep_idle_timeout", self.ep_idle_timeout)
        for name in ("ready_timeout_s", "ping_timeout_s", "heartbeat_s"):
            _check_seconds(f"messaging.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """Every wait has its own bound; all are durations in seconds."""

    connect_s: float = 3.0  # one TCP connection attempt over all resolved addresses
    handshake_s: float = 3.0  # from the connection to the welcome
    call_s: float = 30.0  # one control call
    no_progress_s: float = 10.0  # a bulk transfer without one new byte
    close_s: float = 10.0  # everything that `Node.close` waits for, together

    def __post_init__(self) -> None:
        for entry in fields(self):
            _check_seconds(f"timeouts.{entry.name}", getattr(self, entry.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node. `listen` is "host:port" (port 0: any free one); loopback unless told otherwise.

    `advertise` replaces what a wildcard bind cannot say: the endpoints that peers dial. With
    `secret` (or the file's content) both ends prove it before anything else is acted on. TLS
    contexts are used as given: `server_tls` by the listener, `client_tls` by connections that this
    node dials.
    """

    listen: str = "127.0.0.1:0"
    advertise: str | tuple[str, ...] = ()
    worker_id: int | None = None  # None: random
    secret: bytes | str | None = None
    secret_file: str | os.PathLike[str] | None = None
    transport: Transport | str = Transport.AUTO
    server_tls: SSLContext | None = None
    client_tls: SSLContext | None = None
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    rendezvous: RendezvousConfig = field(default_factory=RendezvousConfig)
    messaging: MessagingConfig = field(default_factory=MessagingConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)

    def __post_init__(self) -> None:
        _check_range("worker_id", self.worker_id, 1, _U64_MAX)
        if self.secret is not None and self.secret_file is not None:
            raise ConfigError("secret_file", str(self.secret_file), "secret is given as well")
        if self.secret is not None and not self.secret:
            raise ConfigError("secret", "", "is empty", hint="leave it out for no secret")
        parse_transport("transport", self.transport)

    def __repr__(self) -> str:
        shown = (f.name for f in fields(self) if f.name != "secret")
        parts = [f"{name}={getattr(self, name)!r}" for name in shown]
        parts.append(f"secret={'set' if self.secret is not None else None}")
        return f"NodeConfig({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One transfer engine. What it needs of a node is laid over `node` (`node_config`), or is the
    business of the node that it is given.

    The defaults are those of the table of budgets in docs/guides/engine.md.
    """

    node: NodeConfig = field(default_factory=NodeConfig)
    # "direct": bytes move between the registered memory of both sides. "staged": through private
    # registered memory of this side. Each peer decides for itself.
    host_memory: str = "direct"
    device_mask: int | None = None  # bit i: transfers may use the NIC with the id i
    preferred_numa_node: int | None = None  # rails on that node are tried first
    block_bytes: int = 64 * KIB  # the smallest slice of a transfer that is cut
    read_slices_max: int = 64
    write_slices_max: int = 32
    num_lanes: int = 2  # completion queues per device, and queue pairs per array
    progress: str = "event"  # how completions are found: "event" or "polling"
    max_endpoints: int = 64
    max_grants: int = 64  # asked for by all transfers together; and once more, granted to peers
    max_send_wr: int = 16
    max_cqes: int = 1024
    max_direct_bytes: int = 64 * MIB  # of registered ranges on loan to transfers
    max_staging_bytes: int = 64 * MIB  # private registered memory of staged transfers
    max_cached_mrs: int = 64  # registrations of regions: each view of each on every device
    max_cached_mr_bytes: int = 64 * MIB  # likewise
    max_window_key_indices: int = 65_536
    teardown_timeout: float = 30.0  # one window for all that a transfer's end has to destroy
    monitor_interval: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.node, NodeConfig):
            raise ConfigError("engine.node", self.node, "is no NodeConfig")
        _check_choice("engine.host_memory", self.host_memory, HOST_MEMORY)
        _check_range("engine.device_mask", self.device_mask, 1, _U64_MAX)
        _check_range("engine.preferred_numa_node", self.preferred_numa_node, 0, 1023)
        _check_range("engine.block_bytes", self.block_bytes, 1, GIB)
        _check_range("engine.read_slices_max", self.read_slices_max, 1, 64)
        _check_range("engine.write_slices_max", self.write_slices_max, 1, 64)
        _check_range("engine.num_lanes", self.num_lanes, 1, 16)
        _check_choice("engine.progress", self.progress, ("event", "polling"))
        _check_range("engine.max_endpoints", self.max_endpoints, 1, 65_536)
        _check_range("engine.max_grants", self.max_grants, 1, 65_536)
        _check_range("engine.max_send_wr", self.max_send_wr, 4, 16_384)
        _check_range("engine.max_cqes", self.max_cqes, 16, 32_767)
        for name in ("max_direct_bytes", "max_staging_bytes", "max_cached_mr_bytes"):
            _check_range(f"engine.{name}", getattr(self, name), 1, 1 << 48)
        _check_range("engine.max_cached_mrs", self.max_cached_mrs, 1, 1 << 24)
        _check_range("engine.max_window_key_indices", self.max_window_key_indices, 1, 1 << 24)
        _check_seconds("engine.teardown_timeout", self.teardown_timeout)
        _check_seconds("engine.monitor_interval", self.monitor_interval)

    @classmethod
    def for_bytes(cls, nbytes: int, *, rails: int = 1, regions: int = 1, **changes: Any) -> Self:
        """Budgets under which `nbytes` of remotely accessible memory, in so many regions, can be
        registered on `rails` devices and be on their way at once. No smaller ones do that for all
        sizes and addresses of the regions; none is smaller than its default.

        A region that peers may reach has two registrations on every device, so the default of
        `max_cached_mr_bytes` allows one of 32 MiB on one device and one of 16 MiB on two.
        """
        _check_range("nbytes", nbytes, 1, 1 << 48)
        _check_range("rails", rails, 1, 64)
        _check_range("regions", regions, 1, nbytes)
        views = 2 * rails
        base = cls()
        pinned = _pages_max(nbytes, regions) * _PAGE_BYTES
        budgets = {
            "max_cached_mr_bytes": max(base.max_cached_mr_bytes, pinned * views),
            "max_cached_mrs": max(base.max_cached_mrs, regions * views),
            "max_direct_bytes": max(base.max_direct_bytes, nbytes),
            "max_staging_bytes": max(base.max_staging_bytes, nbytes),
        }
        return cls(**{**budgets, **changes})

    def node_config(self) -> NodeConfig:
        """`node` with what the engine needs of its devices."""
        rdma = replace(
            self.node.rdma,
            bulk_width=self.num_lanes,
            num_lanes=self.num_lanes,
            progress=self.progress,
            max_endpoints=self.max_endpoints,
            max_send_wr=self.max_send_wr,
            max_cqes=self.max_cqes,
            window_key_indices_max=self.max_window_key_indices,
            monitor_interval=self.monitor_interval,
        )
        pool = replace(
            rdma.pool,
            registered_bytes_budget=max(
                rdma.pool.registered_bytes_budget,
                self.max_cached_mr_bytes + self.max_staging_bytes,
            ),
        )
        return replace(self.node, rdma=replace(rdma, pool=pool))


@dataclass(frozen=True, slots=True)
class LabEnvironment:
    """What a command started inside the SoftRoCE lab can read about it."""

    hosts: int
    rails: int


def resolve(config: NodeConfig, environ: Mapping[str, str] | None = None) -> NodeConfig:
    """`config` with the environment's pins laid over it and the secret loaded as bytes.

    Reads the environment once, so that one node cannot answer half its calls one way and half the
    other. Unknown ORBIT_ names are a warning, and so are thresholds in the wrong order. Raises
    ConfigError.
    """
    env = os.environ if environ is None else environ
    _warn_unknown(env)
    rdma = config.rdma
    if (device := env.get("ORBIT_DEVICE")) is not None:
        rdma = replace(rdma, device=device or None)
    if (text := env.get("ORBIT_GID_INDEX")) is not None:
        rdma = replace(rdma, gid_index=_integer("ORBIT_GID_INDEX", text))
    if (text := env.get("ORBIT_PKEY")) is not None:
        rdma = replace(rdma, pkey=_integer("ORBIT_PKEY", text))
    if (text := env.get("ORBIT_PORT")) is not None and not _injected(text):
        rdma = replace(rdma, port=_integer("ORBIT_PORT", text))
    if (text := env.get("ORBIT_RDMA_WHITELIST")) is not None:
        rdma = replace(rdma, whitelist=_names(text))
    if (text := env.get("ORBIT_RDMA_BLACKLIST")) is not None:
        rdma = replace(rdma, blacklist=_names(text))
    rendezvous = config.rendezvous
    if env.get(KILL_SWITCH, "").strip().lower() in _TRUE:
        rendezvous = replace(rendezvous, enabled=False)
    if rendezvous.lease_timeout < LEASE_TIMEOUT_FLOOR:
        rendezvous = replace(rendezvous, lease_timeout=LEASE_TIMEOUT_FLOOR)
    transport = parse_transport("transport", config.transport)
    if text := env.get("ORBIT_TRANSPORT"):
        transport = parse_transport("ORBIT_TRANSPORT", text)
    _warn_order(rendezvous.rdma_min_bytes, config.messaging.eager_max_bytes)
    advertise = (config.advertise,) if isinstance(config.advertise, str) else config.advertise
    return replace(
        config,
        rdma=rdma,
        rendezvous=rendezvous,
        transport=transport,
        advertise=tuple(entry for entry in advertise if entry),
        secret=_load_secret(config),
        secret_file=None,
    )


def lab_environment(environ: Mapping[str, str] | None = None) -> LabEnvironment | None:
    """Facts about the SoftRoCE lab that this process runs in, or None outside it."""
    env = os.environ if environ is None else environ
    if env.get("ORBIT_LAB") != "1":
        return None
    return LabEnvironment(
        hosts=_integer("ORBIT_LAB_HOSTS", env.get("ORBIT_LAB_HOSTS", "1")),
        rails=_integer("ORBIT_LAB_RAILS", env.get("ORBIT_LAB_RAILS", "1")),
    )


def parse_transport(knob: str, value: Transport | str) -> Transport:
    """Raises ConfigError naming the accepted values."""
    try:
        return Transport(str(value).strip().lower())
    except ValueError:
        accepted = ", ".join(Transport)
        raise ConfigError(knob, value, f"must be one of {accepted}") from None


def _load_secret(config: NodeConfig) -> bytes | None:
    if isinstance(config.secret, str):
        return config.secret.encode()
    if config.secret is not None or config.secret_file is None:
        return config.secret
    path = Path(config.secret_file)
    try:
        content = path.read_bytes().rstrip(b"\r\n")  # editors end files with a newline
    except OSError as error:
        raise ConfigError("secret_file", str(path), error.strerror or "cannot be read") from error
    if not content:
        raise ConfigError("secret_file", str(path), "is empty")
    return content


def _warn_order(rdma_bytes_min: int, eager_bytes_max: int) -> None:
    if rdma_bytes_min > eager_bytes_max:
        _log.warning(
            "rendezvous.rdma_min_bytes=%d is above messaging.eager_max_bytes=%d: payloads of"
            " messages between the two are staged, in registered memory where that can be had, and"
            " never go by RDMA",
            rdma_bytes_min,
            eager_bytes_max,
        )


def unknown_names(env: Mapping[str, str]) -> dict[str, str]:
    """Names that begin like orbit's and are none, each with the nearest one that is."""
    found = {}
    for name in sorted(env):
        if not name.startswith("ORBIT_") or name in _ELSEWHERE or name in _KNOWN:
            continue
        if name == "ORBIT_LAB" or name.startswith(_ELSEWHERE_PREFIXES):
            continue
        found[name] = _nearest(name)
    return found


def diagnostic_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a diagnosis may see: orbit's own names, and those that change what it diagnoses."""
    env = os.environ if environ is None else environ
    return {k: v for k, v in env.items() if k.startswith("ORBIT_") or k in _DIAGNOSED}


def _warn_unknown(env: Mapping[str, str]) -> None:
    if _injected(text := env.get("ORBIT_PORT", "")):
        _log.warning("ORBIT_PORT=%s is ignored: it is a service link, not a port", text)
    for name, nearest in unknown_names(env).items():
        _log.warning("unknown environment variable %s; did you mean %s?", name, nearest)


def _injected(text: str) -> bool:
    # Kubernetes sets <SERVICE>_PORT=tcp://address:port for a service that happens to be named
    # orbit.
    return "://" in text


def _nearest(name: str) -> str:
    import difflib

    return difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.0)[0]


def _integer(knob: str, text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise ConfigError(knob, text, "is not a number") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pages_max(nbytes: int, regions: int) -> int:
    """Pages that so many bytes lie in, however they are divided among the regions: the first byte
    of each may be the last of its page, and each but one may have one byte more behind it.
    """
    short = min(regions - 1, nbytes - regions)
    return regions + short - (regions + short - nbytes) // _PAGE_BYTES


def _check_range(knob: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(knob, value, f"must be a whole number from {low} to {high}")


def _check_choice(knob: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(knob, value, f"must be one of {', '.join(accepted)}")


def _check_names(knob: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
        raise ConfigError(knob, value, "must be a tuple of names")


def _check_seconds(knob: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
        raise ConfigError(knob, value, "must be a number of seconds above 0")
