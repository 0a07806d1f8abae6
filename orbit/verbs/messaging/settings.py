"""Knobs of RC message links, with the reason for each default.

Owns the values and their check; the composition root translates the configuration into them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from ...config import PROGRESS_MODES
from ...errors import ConfigError
from ...transport.messages import LinkLimits

_SPIN_MODE_US: Final = 50  # about what one wake-up of an event loop costs
_EVENT_MODE_SPIN_US: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaMessagesConfig:
    """All durations are seconds unless the name says otherwise."""

    limits: LinkLimits = field(default_factory=LinkLimits)  # what each peer is granted
    receive_slabs: int = 1024  # of one device's shared receive queue; bounds the peers
    send_slabs: int = 1024  # of one device, shared out to its links
    link_slabs_max: int = 512  # send slabs of one link, whatever its peer grants
    inline_bytes: int = 256  # asked for; packets up to what was granted need no DMA read

    progress: str = "event"
    spin_us: int | None = None  # None: by mode and cores
    # Then other callbacks of the loop get their turn: a flood must not starve them.
    pass_completions_max: int = 256
    # A missed event is a bug of somebody's; it must cost a moment and a count, not a hang (D10).
    backstop_s: float = 0.1

    connect_timeout_s: float = 5.0  # RTR towards an absent neighbour alone blocks for 1 s
    connect_backoff_s: float = 1.0
    ready_timeout_s: float = 3.0
    close_timeout_s: float = 1.0  # for the last packets of a link that closes
    drain_timeout_s: float = 2.0

    # As on bulk queue pairs: 67 ms a try, 0.48 s to learn that a peer is dead.
    qp_timeout: int = 14
    retry_cnt: int = 6
    # A receive that is missing is a refill race here, never a bug: wait for it (D6).
    rnr_retry: int = 7
    min_rnr_timer: int = 1

    def __post_init__(self) -> None:
        if self.progress not in PROGRESS_MODES:
            raise ConfigError("progress", self.progress, f"must be one of {PROGRESS_MODES}")
        if self.spin_us is not None and not 0 <= self.spin_us <= 10_000:
            raise ConfigError("spin_us", self.spin_us, "must lie between 0 and 10000")
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(name, value, f"must lie between {low} and {high}")

    @property
    def polling(self) -> bool:
        return self.progress == "polling"

    @property
    def effective_spin_us(self) -> int:
        """How long to poll after activity. Spinning starves the kernel's own receive work where
        cores are few (D10), so on one or two it must be asked for.
        """
        if self.polling:
            return 0
        if self.spin_us is not None:
            return self.spin_us
        if self.progress == "spin":
            return _SPIN_MODE_US
        return 0 if (os.cpu_count() or 1) <= 2 else _EVENT_MODE_SPIN_US

    @property
    def detection_s(self) -> float:
        """About how long a send to a dead peer is retried before the link fails."""
        return float(4.096e-6 * 2**self.qp_timeout * (self.retry_cnt + 1))


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("receive_slabs", 32, 32_767),
    ("send_slabs", 32, 32_767),
    ("link_slabs_max", 16, 4096),
    ("inline_bytes", 0, 4096),
    ("pass_completions_max", 1, 65_536),
    ("backstop_s", 0.001, 3600),
    ("connect_timeout_s", 0.001, 3600),
    ("connect_backoff_s", 0, 3600),
    ("ready_timeout_s", 0.001, 3600),
    ("close_timeout_s", 0.001, 3600),
    ("drain_timeout_s", 0.001, 3600),
    ("qp_timeout", 1, 31),
    ("retry_cnt", 0, 6),  # 7 is for ever on rdma_rxe
    ("rnr_retry", 0, 7),
    ("min_rnr_timer", 1, 6),
)
