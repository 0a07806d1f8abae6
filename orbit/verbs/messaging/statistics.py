"""What RC message links counted, as one frozen value. Owns numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .rail import MessageRail


@dataclass(slots=True)
class MessagesCounters:
    """Written by the links of all epochs."""

    opened: int = 0  # links that became ready
    not_ready: int = 0  # connected, but nothing crossed them in time
    refused: int = 0  # dials that failed before there was a link
    lost: int = 0  # ready links that ended by an error


@dataclass(frozen=True, slots=True)
class MessagesStatistics:
    """What `RdmaMessages.statistics` answers."""

    opened: int
    not_ready: int
    refused: int
    lost: int
    links: int  # queue pairs that exist now
    completions: int
    passes: int
    unknown_completions: int  # late or doubled
    orphans: int  # packets of a queue pair that was gone
    woken_by_backstop: int  # stays 0, or an event was missed
    receives_posted: int
    refills: int
    limit_hits: int  # the shared receive queue came close to running dry
    receive_slabs_free: int  # not promised to any peer
    send_slabs_free: int
    registered_bytes: int


def collect(counters: MessagesCounters, rails: Iterable[MessageRail]) -> MessagesStatistics:
    rails = tuple(rails)
    parts = [rail.parts for rail in rails if rail.parts is not None]
    lanes = [part.lane.counters for part in parts]
    receives = [part.receives.counters for part in parts]
    return MessagesStatistics(
        opened=counters.opened,
        not_ready=counters.not_ready,
        refused=counters.refused,
        lost=counters.lost,
        links=sum(len(part.lane.ends) for part in parts),
        completions=sum(lane.completions for lane in lanes),
        passes=sum(lane.passes for lane in lanes),
        unknown_completions=sum(lane.unknown for lane in lanes)
        + sum(receive.unknown for receive in receives),
        orphans=sum(lane.orphans for lane in lanes),
        woken_by_backstop=sum(lane.woken_by_backstop for lane in lanes),
        receives_posted=sum(receive.posted for receive in receives),
        refills=sum(receive.refills for receive in receives),
        limit_hits=sum(receive.limit_hits for receive in receives),
        receive_slabs_free=sum(part.ledger.free for part in parts),
        send_slabs_free=sum(part.sending.free for part in parts),
        registered_bytes=sum(rail.registered_bytes for rail in rails),
    )
