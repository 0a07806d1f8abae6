"""What can go wrong in a simulated world, as plain values that a test sets before or during a run.

Only faults that the real thing can have: a link never reorders or loses single frames (TCP and RC
do not either), it ends. Delays come from the seeded generator of the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model import PathReason


@dataclass(slots=True)
class LinkFaults:
    """Delays are drawn evenly from [delay_min_s, delay_max_s] for each frame; frames keep order."""

    delay_min_s: float = 0.000_05
    delay_max_s: float = 0.000_5
    cut_after_frames: int | None = None  # of both directions together; then the link is lost
    stalled: bool = False  # frames are taken and never arrive; nothing reports it


@dataclass(slots=True)
class PathFaults:
    """`failures` are used up, one a pull or push: each names the bytes that still arrive and the
    reason.
    """

    bytes_per_s: float = 1e9
    chunk_bytes: int = 64 << 10
    availability: PathReason = PathReason.OK
    prepare: PathReason = PathReason.OK
    prepare_s: float = 0.001
    expose: PathReason = PathReason.OK
    failures: list[tuple[int, PathReason]] = field(default_factory=list)
    stall_at_bytes: int | None = None  # it stops there until its no-progress deadline


@dataclass(slots=True)
class RailFaults:
    """What else a path over rails can suffer. `withheld` and `receipts_lost` are used up, one a
    pull or push of the requester whose path it is.
    """

    connect: PathReason = PathReason.OK
    notice_s: float | None = 0.001  # until a requester knows that its source lost an array
    withheld: list[int] = field(default_factory=list)  # bytes after which completions are lost
    receipts_lost: int = 0
    receipt_timeout_s: float = 0.5  # that a source waits for one that was promised
    retracts_unproven: int = 0  # of the next ends of an exposure
    closes_unproven: int = 0  # of the next ends of a private array
    ghost_s: float = 1.0  # when what was not proven to be over touches memory once more
