"""The lanes of one device: how many there are, who goes on which, and their replacement.

Owns the bound on completion entries and the order of ending. A queue pair stays on the lane that it
was placed on. It looks at no completion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import BudgetExceeded, ClosedError, DeviceError
from .completion_source import open_source
from .lane import Lane
from .provider import NativeContext
from .settings import RdmaPathConfig
from .turn import Turn

logger = logging.getLogger("orbit.verbs")

KNOB: Final = "rdma.max_cqes"
# Completions of a queue pair's end: a marker on each of its queues, while they may be full.
MARKERS: Final = 2


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Of one device, or of several together. The last two only grow."""

    lanes: int = 0
    lanes_failed: int = 0  # not replaced yet
    entries: int = 0  # completions that are promised to queue pairs, of `entries_max`
    entries_max: int = 0
    sends: int = 0  # work whose end is not known yet
    receives: int = 0
    unknown_completions: int = 0  # late, doubled or foreign
    recoveries: int = 0


def fitted(config: RdmaPathConfig, max_cqe: int) -> tuple[int, int, int]:
    """The depths of a queue pair's send and receive queue, and the capacity of one completion
    queue, on a device whose queues hold `max_cqe`: one queue pair fits in any case.
    """
    room = max(MARKERS, max_cqe - MARKERS)
    send_depth = min(config.send_depth, max(room // 2, room - config.recv_depth))
    recv_depth = min(config.recv_depth, room - send_depth)
    entries = send_depth + recv_depth
    queue_pairs = max(1, max_cqe // (entries + MARKERS))
    return send_depth, recv_depth, min(config.cq_depth, queue_pairs * entries)


class LaneGroup:
    """Lanes open as they are needed, `config.num_lanes` at most, each with room for
    `config.cq_depth` completions of work and for the markers of the queue pairs on it.
    """

    def __init__(
        self,
        turn: Turn,
        context: NativeContext,
        config: RdmaPathConfig,
        cpus: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """`cpus`: where threads that poll may run; asked once a lane opens, none means anywhere."""
        self._turn = turn
        self._context = context
        self._config = config
        self._cpus = cpus
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lanes: list[Lane] = []
        self._closing = False
        self._vacant = 0  # lanes that have ended and whose replacement has not opened
        self._recoveries = 0
        self._unknown_before = 0  # of lanes that were replaced

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes)

    @property
    def failed(self) -> DeviceError | None:
        return next((lane.failed for lane in self._lanes if lane.failed is not None), None)

    @property
    def unknown_completions(self) -> int:
        return self._unknown_before + sum(lane.table.unknown for lane in self._lanes)

    def place(self, loop: asyncio.AbstractEventLoop) -> Lane:
        """The least loaded lane, charged with the entries of one queue pair. Raises BudgetExceeded
        (no lane has room), DeviceError, ClosedError.
        """
        if self._closing:
            raise ClosedError(f"device {self._context.device}")
        self._loop = loop
        lane = self._least_loaded()
        if lane is None and self.recover():
            lane = self._least_loaded()
        if lane is None:
            raise self._refusal()
        lane.charge(self._config.work_entries)
        return lane

    def fail_queue(self, native: int, cause: DeviceError) -> bool:
        """The device says that a completion queue is broken (CQ_ERR). False: none of these is."""
        for lane in self._lanes:
            if lane.cq.native == native:
                lane.fail(cause)
                return True
        return False

    def recover(self) -> int:
        """Replace the lanes that have failed and that no queue pair is left on, on the same context
        and with the same registrations; how many. Not a lane with a queue pair that is not drained
        or that the device refused to destroy, and none whose own end was refused.
        """
        if self._closing:
            return 0
        before = self._recoveries
        for lane in self._lanes[:]:
            if lane.failed is not None and not lane.charged and not lane.quarantined:
                self._end(lane)
        while self._vacant:
            try:
                self._open()
            except DeviceError as error:
                logger.error("%s: no new completion queue: %s", self._context.device, error)
                break
        return self._recoveries - before

    def statistics(self) -> LaneStatistics:
        outstanding = [lane.outstanding for lane in self._lanes]
        return LaneStatistics(
            lanes=len(self._lanes),
            lanes_failed=sum(lane.failed is not None for lane in self._lanes) + self._vacant,
            entries=sum(lane.charged for lane in self._lanes),
            entries_max=self._config.num_lanes * self._config.cq_depth,
            sends=sum(sends for sends, _ in outstanding),
            receives=sum(receives for _, receives in outstanding),
            unknown_completions=self.unknown_completions,
            recoveries=self._recoveries,
        )

    def close(self) -> None:
        """Raises DeviceError; a further call continues where this one stopped."""
        self._closing = True
        while self._lanes:
            self._lanes[-1].close()
            self._lanes.pop()
        self._vacant = 0

    def _least_loaded(self) -> Lane | None:
        usable = [
            lane
            for lane in self._lanes
            if lane.failed is None and lane.room >= self._config.work_entries
        ]
        best = min(usable, key=lambda lane: lane.charged, default=None)
        if best is not None and not best.charged:
            return best
        # One that is to be replaced keeps its place.
        if len(self._lanes) + self._vacant < self._config.num_lanes:
            try:
                return self._open()
            except DeviceError as error:
                if best is None:
                    raise
                logger.warning("%s: lanes are shared: %s", self._context.device, error)
        return best

    def _open(self) -> Lane:
        """Raises DeviceError, having closed what it made."""
        assert self._loop is not None
        config = self._config
        depth = config.cq_depth + MARKERS * (config.cq_depth // self._config.work_entries)
        polling, spins = config.progress == "polling", config.progress == "spin"
        source = open_source(
            self._turn,
            self._context,
            depth,
            polling=polling,
            spins=spins,
            cpus=self._cpus() if polling else (),
        )
        lane = Lane(source, config.cq_depth, config.effective_spin_us, spins=spins)
        try:
            lane.start(self._loop)
        except DeviceError:
            lane.close()
            raise
        self._lanes.append(lane)
        if self._vacant:
            self._vacant -= 1
            self._recoveries += 1
        return lane

    def _end(self, lane: Lane) -> None:
        try:
            lane.close()
        except DeviceError as error:
            lane.quarantined = True
            logger.error("%s: a completion queue is kept: %s", self._context.device, error)
            return
        self._lanes.remove(lane)
        self._vacant += 1
        self._unknown_before += lane.table.unknown

    def _refusal(self) -> BudgetExceeded | DeviceError:
        if self.failed is not None and all(lane.failed is not None for lane in self._lanes):
            return self.failed
        return BudgetExceeded(
            f"completion queues of {self._context.device}",
            self._config.work_entries,
            self._config.num_lanes * self._config.cq_depth,
            sum(lane.charged for lane in self._lanes),
            KNOB,
        )


def total(groups: Iterable[LaneGroup]) -> LaneStatistics:
    """Of all devices together."""
    parts = [group.statistics() for group in groups]
    names = LaneStatistics.__slots__
    return LaneStatistics(*(sum(getattr(part, name) for part in parts) for name in names))
