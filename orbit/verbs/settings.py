"""Knobs of the RDMA path, with the reason for each default.

Owns the values and their check, and nothing else: who sets them (code, file, environment) is
`config`'s business, and the composition root translates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..config import PROGRESS_MODES, RdmaPoolConfig
from ..errors import ConfigError

PIECE_BYTES = 1 << 20
INFLIGHT_BYTES = 4 << 20
_SPIN_MODE_US = 50  # about what one wake-up of an event loop costs


@dataclass(frozen=True, slots=True)
class RdmaPathConfig:
    """All durations are seconds unless the name says otherwise."""

    # Which port: empty means every usable one, ranked. A named one that cannot be used is an error.
    device: str = ""
    port: int = 0
    gid_index: int | None = None
    gid: str = ""
    pkey: int | None = None
    whitelist: tuple[str, ...] = ()  # of device names; empty: all but the blacklist's
    blacklist: tuple[str, ...] = ()
    service_level: int = 0  # of InfiniBand
    traffic_class: int = 0  # of RoCE
    require_range: bool = False  # refuse a device that ignores the range of a window

    width: int = 2  # queue pairs per array: one aborted grant leaves the other serving
    num_lanes: int = 2  # completion queues of each device, at most
    progress: str = "event"  # "polling": a native thread for each lane
    endpoints_max: int = 64  # queue pairs in both roles, all peers together
    arrays_per_session_max: int = 64
    send_depth: int = 64
    recv_depth: int = 64  # bounds the grants outstanding on one queue pair
    # Work requests of all queue pairs on one lane: 64 queue pairs fill two lanes exactly.
    cq_depth: int = 4096

    # Above 4 MiB in flight a software device answers slower than its own retry timeout.
    piece_bytes: int = PIECE_BYTES
    inflight_bytes: int = INFLIGHT_BYTES
    rd_atomic: int = 16

    # Registering a megabyte costs about as much as copying it; below, one copy is cheaper.
    crossover_bytes: int = 1 << 20
    pool: RdmaPoolConfig = field(default_factory=RdmaPoolConfig)
    # Cuts registrations into parts, as a device's own limit does; 0: only the device's.
    mr_bytes_max: int = 0

    window_key_indices_max: int = 65_536  # times 255 tags: 16.7 million grants per domain

    connect_timeout_s: float = 5.0  # RTR towards an absent neighbour alone blocks for 1 s
    connect_backoff_s: float = 1.0
    bind_timeout_s: float = 2.0
    receipt_timeout_s: float = 2.0
    progress_timeout_s: float = 10.0
    drain_timeout_s: float = 2.0
    monitor_interval_s: float = 1.0

    # 4.096 us x 2^14 = 67 ms a try, 0.48 s to learn that a peer is dead. 7 retries mean for ever
    # on rdma_rxe, hence 6 at most (D6).
    qp_timeout: int = 14
    retry_cnt: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 1

    # Spinning starves the kernel's own receive work where cores are few (D10).
    spin_us: int | None = None
    # Ends with the completion: microseconds on hardware, 0.7 to 2 ms for 64 KiB on an emulated
    # processor, where parking in the event loop costs as much again. A silent peer costs all of it.
    nap_us: int = 3000
    nap_bytes_max: int = 256 << 10

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(name, value, f"must lie between {low} and {high}")
        if self.inflight_bytes < self.piece_bytes:
            raise ConfigError("inflight_bytes", self.inflight_bytes, "smaller than piece_bytes")
        if self.progress not in PROGRESS_MODES:
            raise ConfigError("progress", self.progress, f"must be one of {PROGRESS_MODES}")
        if self.cq_depth < self.work_entries:
            problem = f"one queue pair may have {self.work_entries} work requests"
            raise ConfigError(
                "rdma.max_cqes", self.cq_depth, problem, hint="lower rdma.max_send_wr"
            )

    @property
    def work_entries(self) -> int:
        """Completions that one queue pair may owe, beside the markers of its end."""
        return self.send_depth + self.recv_depth

    @property
    def effective_spin_us(self) -> int:
        """0 on one or two cores unless asked for."""
        if self.spin_us is not None:
            return self.spin_us
        if self.progress == "spin":
            return _SPIN_MODE_US
        return 0 if (os.cpu_count() or 1) <= 2 else 20


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("width", 1, 16),
    ("num_lanes", 1, 64),
    ("endpoints_max", 1, 65_536),
    ("arrays_per_session_max", 1, 4096),
    ("send_depth", 4, 16_384),
    ("recv_depth", 1, 16_384),
    ("cq_depth", 5, 32_767),  # of a device with short queues
    ("piece_bytes", 1, 1 << 30),
    ("inflight_bytes", 1, 1 << 34),
    ("rd_atomic", 1, 255),
    ("crossover_bytes", 0, 1 << 40),
    ("mr_bytes_max", 0, 1 << 48),
    ("window_key_indices_max", 1, 1 << 24),
    ("connect_timeout_s", 0.001, 3600),
    ("connect_backoff_s", 0, 3600),
    ("bind_timeout_s", 0.001, 3600),
    ("receipt_timeout_s", 0.001, 3600),
    ("progress_timeout_s", 0.001, 3600),
    ("drain_timeout_s", 0.001, 3600),
    ("monitor_interval_s", 0.001, 3600),
    ("service_level", 0, 15),
    ("traffic_class", 0, 255),
    ("qp_timeout", 1, 31),
    ("retry_cnt", 0, 6),
    ("rnr_retry", 0, 6),
    ("min_rnr_timer", 1, 31),
    ("nap_us", 0, 100_000),
    ("nap_bytes_max", 0, 1 << 30),
)
