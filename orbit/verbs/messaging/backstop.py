"""A bounded wait under the events of a message lane: finds completions that no event told of.

Owns one timer, which runs only while sends are outstanding. A completion that it finds is counted
as missed when its event has not come a moment later either; that count stays 0 on a sound device
and a sound lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import DeviceError, OrbitError
from ..completion_source import CompletionSource

# An event follows its completion at once; this long after it, there is none.
_EVENT_GRACE_S = 0.01


@dataclass(slots=True)
class LaneCounters:
    completions: int = 0
    passes: int = 0
    unknown: int = 0  # send completions of no living queue pair: late or doubled
    orphans: int = 0  # packets for a queue pair that is gone
    woken_by_backstop: int = 0  # times that no event told of a completion: somebody's bug


class WatchedEnd(Protocol):
    @property
    def outstanding(self) -> int: ...


class WatchedLane(Protocol):
    failed: OrbitError | None

    @property
    def ends(self) -> Sequence[WatchedEnd]: ...

    @property
    def sleeping(self) -> bool: ...

    def poll(self) -> None: ...


class Backstop:
    def __init__(
        self,
        lane: WatchedLane,
        source: CompletionSource,
        counters: LaneCounters,
        loop: asyncio.AbstractEventLoop,
        period_s: float,
    ) -> None:
        self._lane = lane
        self._source = source
        self._counters = counters
        self._loop = loop
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self._confirming: asyncio.TimerHandle | None = None
        self._stopped = False

    def arm(self) -> None:
        if self._timer is None and not self._stopped:
            self._timer = self._loop.call_later(self._period_s, self._look)

    def stop(self) -> None:
        self._stopped = True
        for timer in (self._timer, self._confirming):
            if timer is not None:
                timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._lane.failed or not any(end.outstanding for end in self._lane.ends):
            return
        self.arm()
        if not self._lane.sleeping:
            return
        before, events = self._counters.completions, self._source.events
        self._lane.poll()
        if self._counters.completions > before and self._source.events == events:
            self._confirming = self._loop.call_later(_EVENT_GRACE_S, self._confirm, events)

    def _confirm(self, events: int) -> None:
        if self._stopped:
            return
        try:
            missed = self._source.events == events and not self._source.look_for_event()
        except DeviceError:
            missed = False  # the next poll says the same, to somebody who can act on it
        if missed:
            self._counters.woken_by_backstop += 1
        self._lane.poll()
