"""What happens in a node, as typed events, and the counters that are kept from them.

Series names are the seeds' with the `orbit_` prefix; an exporter reads `Counters.snapshot`. Events
carry facts, never formatted text. A sink that raises is dropped from the path of the work, not the
other way round. This module knows no backend and no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

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
    """A fetch completed; its lease is with the caller."""

    handle: Handle
    path: PathName
    reason: PathReason
    nbytes: int
    seconds: float


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


class Recorder:
    """Where the shells report: counts each event, then hands it to the caller's sink."""

    __slots__ = ("_sink", "counters")

    def __init__(self, sink: EventSink | None = None) -> None:
        self.counters = Counters()
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
            case Fetched(path=path, nbytes=nbytes):
                add(FETCHED_BYTES_TOTAL, nbytes, path=path.value)
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
