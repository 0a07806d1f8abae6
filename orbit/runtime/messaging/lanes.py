"""Ordered lanes: jobs of one key run one after another, different keys beside each other.

A lane is a queue and, while there is work, one task that runs it. Lanes that idle are forgotten
after a while; no timer exists while none idles. What a job does, and whose message it is, is not
known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from ...transport.timer import DeadlineTimer
from .handlers import OrderedConfig, Overflow

_log = logging.getLogger("orbit")

_CLOCK_TICK_S = 0.001  # a loop timer may come that much early

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Job(Protocol):
    """One message with its handler. None of the methods raises what the handler raised, except
    what must end the process or the task (KeyboardInterrupt, a cancellation of the task).
    """

    @property
    def plain(self) -> bool:
        """Whether `run_now` runs it to its end."""

    def run_now(self) -> None: ...

    async def run(self) -> None: ...

    def drop(self) -> None:
        """It never begins."""


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Of one handler's lanes."""

    lanes: int = 0
    depth: int = 0  # queued and running, all lanes
    running: int = 0
    created: int = 0
    reaped: int = 0
    rejected: int = 0
    wait_seconds: float = 0.0  # spent in queues by everything that began


class _Lane:
    __slots__ = ("busy", "idle_since", "key", "queue", "warned", "worked")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.queue: deque[tuple[float, Job]] = deque()
        self.busy = False  # a job of it runs
        self.worked = False  # a task runs it, or it stands in line for one
        self.idle_since = 0.0
        self.warned = False

    @property
    def depth(self) -> int:
        return len(self.queue) + self.busy


class Lanes:
    """The lanes of one handler."""

    def __init__(self, name: str, config: OrderedConfig, spawn: Spawn) -> None:
        self._name = name
        self._config = config
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[Hashable, _Lane] = {}
        self._idle: dict[Hashable, _Lane] = {}  # by the time at which they fell idle
        self._in_line: deque[_Lane] = deque()  # lanes with work and no room under max_concurrent
        self._workers: dict[asyncio.Task[None], _Lane] = {}
        self._timer = DeadlineTimer(self._reap)
        self._running = 0  # workers, and inline runs
        self._created = 0
        self._reaped = 0
        self._rejected = 0
        self._wait_seconds = 0.0
        self._closed = False

    def submit(self, key: Hashable, job: Job) -> bool:
        """Run `job` behind everything of its key. False: the lane is full and overflow is REJECT;
        the job was not taken.
        """
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
            self._created += 1
        elif not self._has_room(lane):
            self._rejected += 1
            return False
        self._idle.pop(key, None)
        if job.plain and not lane.busy and not lane.worked and self._may_start():
            self._run_inline(lane, job)
            return True
        lane.queue.append((self._loop.time(), job))
        if not lane.busy and not lane.worked:
            self._start(lane)
        return True

    def drop(self) -> int:
        """Give up every job that has not begun, and cancel those that have. How many it was; the
        cancelled ones end within their tasks.
        """
        dropped = 0
        for lane in list(self._lanes.values()):
            while lane.queue:
                lane.queue.popleft()[1].drop()
                dropped += 1
        for task, lane in self._workers.items():
            if lane.busy:  # one that has not begun finds its queue empty, and ends
                task.cancel()
                dropped += 1
        self._in_line.clear()
        return dropped

    def close(self) -> None:
        """No timer is left behind. What runs goes on."""
        self._closed = True
        self._timer.arm(None)
        self._idle.clear()

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(
            lanes=len(self._lanes),
            depth=sum(lane.depth for lane in self._lanes.values()),
            running=self._running,
            created=self._created,
            reaped=self._reaped,
            rejected=self._rejected,
            wait_seconds=self._wait_seconds,
        )

    # --- within -----------------------------------------------------------------------------------

    def _has_room(self, lane: _Lane) -> bool:
        limit = self._config.max_queue_depth
        if limit is None or lane.depth < limit:
            return True
        if self._config.overflow is Overflow.REJECT:
            return False
        if not lane.warned:
            lane.warned = True  # once, until the lane has run dry
            _log.warning("a lane of handler %s is over its depth of %d", self._name, limit)
        return True

    def _may_start(self) -> bool:
        limit = self._config.max_concurrent
        return limit is None or self._running < limit

    def _run_inline(self, lane: _Lane, job: Job) -> None:
        # The flag comes first: a handler that sends to its own node arrives here again.
        lane.busy = True
        self._running += 1
        try:
            job.run_now()
        finally:
            lane.busy = False
            self._running -= 1
            if lane.queue:
                self._start(lane)
            else:
                self._fell_idle(lane)
            self._start_next()

    def _start(self, lane: _Lane) -> None:
        lane.worked = True
        if not self._may_start():
            self._in_line.append(lane)
            return
        self._running += 1
        task = self._spawn(self._work(lane), f"lane of {self._name}")
        self._workers[task] = lane
        task.add_done_callback(self._worker_ended)

    def _start_next(self) -> None:
        while self._in_line and self._may_start():
            self._start(self._in_line.popleft())

    async def _work(self, lane: _Lane) -> None:
        while lane.queue:
            queued_at, job = lane.queue.popleft()
            self._wait_seconds += self._loop.time() - queued_at
            lane.busy = True
            try:
                if job.plain:
                    job.run_now()
                else:
                    await job.run()
            finally:
                lane.busy = False
            if self._in_line:
                return  # one job each, while others stand in line
            if job.plain and lane.queue:
                await asyncio.sleep(0)  # a long backlog must not hold up the loop

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        lane = self._workers.pop(task)
        lane.worked = False
        self._running -= 1
        self._start_next()
        if lane.queue:
            self._start(lane)
        else:
            self._fell_idle(lane)

    def _fell_idle(self, lane: _Lane) -> None:
        lane.warned = False
        lane.idle_since = self._loop.time()
        self._idle[lane.key] = lane
        if not self._timer.armed and not self._closed:
            self._timer.arm(lane.idle_since + self._config.idle_lane_ttl_s)

    def _reap(self) -> None:
        # The timer is armed for the lane that idled first and may find it busy by now: then it
        # follows the next one, or rests until one falls idle.
        now = self._loop.time()
        for key, lane in list(self._idle.items()):
            due = lane.idle_since + self._config.idle_lane_ttl_s
            if due > now + _CLOCK_TICK_S:
                self._timer.arm(due)
                return
            del self._idle[key]
            if self._lanes.get(key) is lane and not lane.depth and not lane.worked:
                del self._lanes[key]
                self._reaped += 1
