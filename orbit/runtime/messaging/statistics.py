"""The messenger's state as frozen values, for `Node.statistics` and what exports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from ...model import PathName, WorkerId
from ...transport.messages import LinkStatistics


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One open message link."""

    peer: WorkerId
    transport: PathName
    calls: int  # that went by it and are not answered
    serving: int  # received by it and not answered
    counts: LinkStatistics


@dataclass(frozen=True, slots=True)
class Traffic:
    """What all links of one transport have carried, closed ones included."""

    transport: PathName
    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    packets_sent: int = 0
    packets_received: int = 0
    segmented_sent: int = 0
    grants_sent: int = 0
    credit_stalls: int = 0

    def plus(self, counts: LinkStatistics) -> Traffic:
        """With one link's counts."""
        names = [entry.name for entry in fields(self) if entry.name != "transport"]
        sums = {name: getattr(self, name) + getattr(counts, name) for name in names}
        return Traffic(self.transport, **sums)


@dataclass(frozen=True, slots=True)
class MessagingStatistics:
    """Calls that wait for an answer, what waits to leave, the open links, and what was carried."""

    pending_calls: int = 0
    late_replies: int = 0
    peers: int = 0  # that something was sent to
    queued_frames: int = 0  # admitted, not on the wire yet
    queued_bytes: int = 0
    waiting_sends: int = 0  # in line for admission
    staged_payloads: int = 0  # of this node, that peers have yet to fetch
    links: tuple[LinkReport, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)  # of the RDMA transport


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Of a node, now; `promised_bytes` are the windows of all attached producers."""

    inboxes: int = 0
    senders: int = 0
    buffered_items: int = 0
    buffered_bytes: int = 0
    promised_bytes: int = 0
    waiting_sends: int = 0


def total_traffic(closed: Iterable[Traffic], links: Iterable[LinkReport]) -> tuple[Traffic, ...]:
    """By transport."""
    sums = {traffic.transport: traffic for traffic in closed}
    for link in links:
        so_far = sums.get(link.transport) or Traffic(link.transport)
        sums[link.transport] = so_far.plus(link.counts)
    return tuple(sums.values())
