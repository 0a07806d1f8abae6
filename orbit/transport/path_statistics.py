"""What a path over registered memory tells about itself: its counts and its hardware, as of now.

It stands here because the layers above export it and must not know the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PathStatistics:
    """What `RdmaPath.statistics` answers."""

    counts: Mapping[str, int]
    grants_active: int
    queue_pairs: int
    windows_parked: int
    window_keys_used: int
    window_keys_remaining: int
    registered_bytes: int
    unknown_completions: int
    crossings: int  # calls into the helper
    retained_bytes: int
    bind_s: float = 0.0  # from the post of a bind to its completion, all binds together
    receipt_s: float = 0.0  # from a transfer's last byte to its receipt's completion, likewise
    retained: tuple[object, ...] = field(default=())
    grant_age_s: float = 0.0  # since the bind of the oldest active grant
    # Of each device's current protection domain: keys that are left, and all there ever were.
    device_window_keys: Mapping[str, tuple[int, int]] = field(default_factory=dict)
