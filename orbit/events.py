"""What happens in a node, as typed events, and the counters that are kept from them.

Series names are the seeds' with the `orbit_` prefix; an exporter reads `Counters.snapshot`. Events
carry facts, never formatted text. A sink that raises is dropped from the path of the work, not the
other way round. This module knows no backend and no I/O.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from .model import Handle, LeaseEnd, LeaseId, PathName, PathReason, WorkerId

PATH_TOTAL = "orbit_rendezvous_rdma_path_total"
LEASES_REAPED_TOTAL = "orbit_rendezvous_rdma_leases_reaped_total"
LEASES_ENDED_TOTAL = "orbit_rendezvous_leases_ended_total"
FALLBACKS_TOTAL = "orbit_rendezvous_fallbacks_total"
FETCHED_BYTES_TOTAL = "orbit_rendezvous_fetched_bytes_total"
SESSIONS_OPENED_TOTAL = "orbit_sessions_opened_total"
SESSIONS_CLOSED_TOTAL = "orbit_sessions_closed_total"
RETAINED_BYTES_TOTAL = "orbit_retained_bytes_total"
MESSAGE_LINKS_OPENED_TOTAL = "orbit_transport_links_opened_total"
MESSAGE_LINKS_CLOSED_TOTAL = "orbit_transport_links_closed_total"
TRANSPORT_CHOSEN_TOTAL = "orbit_transport_chosen_total"
TRANSPORT_REFUSED_TOTAL = "orbit_transport_refused_total"
REJECTIONS_TOTAL = "orbit_transport_rejections_total"
SEND_BACKPRESSURE_TOTAL = "orbit_transport_send_backpressure_total"
SENDS_FAILED_TOTAL = "orbit_messenger_sends_failed_total"
LATE_REPLIES_TOTAL = "orbit_messenger_late_replies_total"
REPLIES_DROPPED_TOTAL = "orbit_messenger_replies_dropped_total"
SLOTS_EXHAUSTED_TOTAL = "orbit_messenger_response_slot_exhausted_total"
STAGED_TOTAL = "orbit_messenger_staged_payloads_total"
STAGED_TIMEOUTS_TOTAL = "orbit_messenger_staged_fetch_timeouts_total"
STAGED_REFUSALS_TOTAL = "orbit_messenger_staged_refusals_total"

# Upper bounds that durations are counted by, in seconds: a handler on the loop and a warm READ are
# expected within the first few, a call to a peer in the middle.
DURATION_BOUNDS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

_log = logging.getLogger("orbit")

Labels = tuple[tuple[str, str], ...]


class Side(StrEnum):
    """Which role of a handle took a decision."""

    OWNER = "owner"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class PathDecided:
    """One routing decision. Decisions are counted, not transfers: the consumer's `rdma/ok` is the
    only proof that a READ completed; the owner's says that a descriptor went out.
    """

    side: Side
    path: PathName
    reason: PathReason


@dataclass(frozen=True, slots=True)
class FellBack:
    """A fetch gave up the RDMA path after an offer or a descriptor and took TCP, once."""

    peer: WorkerId
    reason: PathReason


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch completed; its lease is with the caller. `read_s`: of an RDMA get, what the READ took
    of the `seconds`, without the acquire.
    """

    handle: Handle
    path: PathName
    reason: PathReason
    nbytes: int
    seconds: float
    read_s: float | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease of this owner is over."""

    handle: Handle
    lease_id: LeaseId
    how: LeaseEnd


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An epoch with a peer began. `dialed`: this node opened it, for its own calls."""

    peer: WorkerId
    dialed: bool


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """An epoch ended. `cause` is empty for an orderly close."""

    peer: WorkerId
    dialed: bool
    cause: str


@dataclass(frozen=True, slots=True)
class MemoryRetained:
    """The end of access to memory could not be proven; it stays held as long as the process."""

    what: str
    nbytes: int
    cause: str


@dataclass(frozen=True, slots=True)
class MessageLinkOpened:
    """Messages can go to a peer, and come from it, by this transport."""

    peer: WorkerId
    transport: PathName


@dataclass(frozen=True, slots=True)
class MessageLinkClosed:
    """That link is gone. `cause` is empty when it was closed by agreement, or by this side."""

    peer: WorkerId
    transport: PathName
    cause: str


@dataclass(frozen=True, slots=True)
class TransportChosen:
    """What an epoch's messages go by. `reason` OK: the first by priority; else why not that one."""

    peer: WorkerId
    transport: PathName
    reason: PathReason


@dataclass(frozen=True, slots=True)
class TransportRefused:
    """A transport that cannot carry an epoch's messages."""

    peer: WorkerId
    transport: PathName
    reason: PathReason


@dataclass(frozen=True, slots=True)
class SendRejected:
    """A send failed. `reason` is the code of its error."""

    peer: WorkerId
    reason: str


Event = (
    PathDecided
    | FellBack
    | Fetched
    | LeaseEnded
    | SessionOpened
    | SessionClosed
    | MemoryRetained
    | MessageLinkOpened
    | MessageLinkClosed
    | TransportChosen
    | TransportRefused
    | SendRejected
)
EventSink = Callable[[Event], None]


@dataclass(slots=True)
class Counters:
    """Monotonic counts by series and labels. One event loop writes them."""

    _values: dict[tuple[str, Labels], int] = field(default_factory=dict)

    def add(self, series: str, amount: int = 1, **labels: str) -> None:
        """Count `amount` under `series` with these labels."""
        key = (series, tuple(sorted(labels.items())))
        self._values[key] = self._values.get(key, 0) + amount

    def value(self, series: str, **labels: str) -> int:
        """The sum over every entry of `series` whose labels include these."""
        wanted = labels.items()
        return sum(
            amount
            for (name, have), amount in self._values.items()
            if name == series and wanted <= dict(have).items()
        )

    def snapshot(self) -> Mapping[str, int]:
        """Every count, keyed as an exporter prints it: name{label="value",...}."""
        return {_series_text(name, labels): n for (name, labels), n in sorted(self._values.items())}


@dataclass(frozen=True, slots=True)
class DurationCounts:
    """How often something took how long. `buckets` by DURATION_BOUNDS_S, the last one above them
    all; `seconds` is the sum.
    """

    buckets: tuple[int, ...] = (0,) * (len(DURATION_BOUNDS_S) + 1)
    seconds: float = 0.0


class Durations:
    """Counts durations, for a histogram. One event loop writes it."""

    __slots__ = ("_buckets", "_seconds")

    def __init__(self) -> None:
        self._buckets = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        self._buckets[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def snapshot(self) -> DurationCounts:
        return DurationCounts(tuple(self._buckets), self._seconds)


class Recorder:
    """Where the shells report: counts each event, then hands it to the caller's sink."""

    __slots__ = ("_sink", "counters", "rdma_get_seconds")

    def __init__(self, sink: EventSink | None = None) -> None:
        self.counters = Counters()
        self.rdma_get_seconds = Durations()  # from the first READ to the last byte
        self._sink = sink

    def record(self, event: Event) -> None:
        """Count and pass on. Never raises: a sink's mistake must not end a transfer."""
        self._count(event)
        if self._sink is None:
            return
        try:
            self._sink(event)
        except Exception:
            _log.exception("the event sink failed")

    def _count(self, event: Event) -> None:
        add = self.counters.add
        match event:
            case PathDecided(side, path, reason):
                add(PATH_TOTAL, path=path.value, reason=reason.value, side=side.value)
            case FellBack(_, reason):
                add(FALLBACKS_TOTAL, reason=reason.value)
            case Fetched(path=path, nbytes=nbytes, read_s=read_s):
                add(FETCHED_BYTES_TOTAL, nbytes, path=path.value)
                if read_s is not None:
                    self.rdma_get_seconds.add(read_s)
            case LeaseEnded(how=how):
                add(LEASES_ENDED_TOTAL, how=how.value)
                if how is LeaseEnd.REAPED:
                    add(LEASES_REAPED_TOTAL)
            case SessionOpened(_, dialed):
                add(SESSIONS_OPENED_TOTAL, direction="out" if dialed else "in")
            case SessionClosed(_, dialed, _):
                add(SESSIONS_CLOSED_TOTAL, direction="out" if dialed else "in")
            case MemoryRetained(nbytes=nbytes):
                add(RETAINED_BYTES_TOTAL, nbytes)
            case _:
                self._count_messaging(event)

    def _count_messaging(self, event: Event) -> None:
        add = self.counters.add
        match event:
            case MessageLinkOpened(_, transport):
                add(MESSAGE_LINKS_OPENED_TOTAL, transport=transport.value)
            case MessageLinkClosed(_, transport, cause):
                how = "lost" if cause else "agreed"
                add(MESSAGE_LINKS_CLOSED_TOTAL, transport=transport.value, how=how)
            case TransportChosen(_, transport, reason):
                add(TRANSPORT_CHOSEN_TOTAL, transport=transport.value, reason=reason.value)
            case TransportRefused(_, transport, reason):
                add(TRANSPORT_REFUSED_TOTAL, transport=transport.value, reason=reason.value)
            case SendRejected(_, reason):
                add(SENDS_FAILED_TOTAL, reason=reason)


def _series_text(name: str, labels: Labels) -> str:
    if not labels:
        return name
    inside = ",".join(f'{key}="{value}"' for key, value in labels)
    return f"{name}{{{inside}}}"
