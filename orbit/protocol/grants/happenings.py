"""What both ends of a grant share: the fate of the queue pair under it, and how long each wait
lasts.

An abort is per queue pair. Whoever carries out `KillQueuePair` moves the queue pair to the error
state, feeds `QueuePairFailed` to every grant on it (the one that asked included), drains its
completions, and then feeds `Drained` or `DrainUnproven` to every grant on it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrantTimeouts:
    """Durations of the waits of one grant, in seconds."""

    bind_s: float = 2.0  # a bind is local: microseconds on hardware, half a millisecond on rxe
    receipt_s: float = 5.0  # from DONE to its receipt, which left the requester before DONE did
    progress_s: float = 10.0  # between two READ completions
    cancel_s: float = 1.0  # for the READs in flight and the receipt of a cancelled pull
    drain_s: float = 5.0  # error state, flushed completions, window freed


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueuePairFailed:
    """The queue pair is in the error state, whoever put it there. `cause` is the first one."""

    cause: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The queue pair is in the error state and no completion of it can come any more."""


@dataclass(frozen=True, slots=True)
class DrainUnproven:
    """The end of the queue pair's work could not be proven."""

    cause: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The epoch is over: no DONE will come, and nobody is left to read."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The machine's deadline passed. Feed it through `on_deadline`."""


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KillQueuePair:
    """Move the queue pair to the error state, unless it is there already, and drain it."""

    cause: str


@dataclass(frozen=True, slots=True)
class Retain:
    """The end of access is not proven: keep the memory and the registration, and report
    Unquiesced.
    """

    cause: str
