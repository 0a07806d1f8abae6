"""What happens to a received request: gate, handler, mode, answer. Each is answered exactly once.

It holds the drain guard of a request from its arrival until its answer was handed over, and runs
plain functions where they arrive and the others in tasks or lanes. Links, calls and the wire are
the messenger's; what becomes of one request is its job's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...events import DURATION_BOUNDS_S, Counters
from ..runner import TaskRunner
from .contract import Request
from .draining import DrainGate
from .handlers import Dispatch, Handler, HandlerRegistry, Message
from .jobs import Job
from .lanes import Lanes, LaneStatistics

DISPATCH_FAILURES_TOTAL: Final = "orbit_messenger_dispatch_failures_total"

_NO_LANES: Final = LaneStatistics()

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True)
class HandlerStatistics:
    """Of one handler, since it was registered. `buckets` counts runs by DURATION_BOUNDS_S, the last
    one those above all bounds.
    """

    name: str
    mode: str
    requests: int = 0
    failures: int = 0
    rejected: int = 0
    in_flight: int = 0  # taken on and not answered: queued or running
    request_bytes: int = 0
    response_bytes: int = 0
    seconds: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(DURATION_BOUNDS_S) + 1)
    lanes: LaneStatistics = _NO_LANES


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """Of a node's dispatcher."""

    draining: bool = False
    guards: int = 0  # requests that were taken on and not answered
    turned_away: int = 0  # arrived while draining
    dropped: int = 0  # given up by a shutdown that ran out of time
    handlers: tuple[HandlerStatistics, ...] = ()


class Dispatcher:
    """Implements contract.RequestSink. `node` is what handlers find in `message.node`."""

    def __init__(self, node: object, counters: Counters) -> None:
        self.registry = HandlerRegistry()
        self.gate = DrainGate()
        self.dropped = 0
        self._node = node
        self._counters = counters
        self._runner = TaskRunner()  # of the lanes
        self._queued: set[Job] = set()  # those that wait or run in a lane
        self._tasks: dict[asyncio.Task[None], Job] = {}  # of the spawn mode
        self._lanes: dict[Handler, Lanes] = {}  # removed handlers' too, while they have work

    # --- handlers ---------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        function: Callable[..., object],
        mode: Dispatch | None = None,
        *,
        typed: bool = False,
        reserved: bool = False,
    ) -> None:
        """See HandlerRegistry.add."""
        self.registry.add(name, function, mode, typed=typed, reserved=reserved)

    def remove(self, name: str) -> None:
        """No further request finds it; those that were taken on are handled. Raises UsageError."""
        self.registry.remove(name)
        registered = set(self.registry)
        for handler, lanes in list(self._lanes.items()):
            if handler not in registered and not lanes.statistics().depth:
                lanes.close()
                del self._lanes[handler]

    # --- requests ---------------------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        """Never raises, beside what must end the process."""
        if not self.gate.enter():
            request.reject_draining()
            return
        handler = self.registry.find(request.name)
        if handler is None:
            self.failed("dispatch", "unknown_handler")
            request.fail("unknown_handler", request.name)
            self.gate.leave()
            return
        message = Message(
            request.name, request.payload, request.headers, request.sender, self._node
        )
        job = Job(self, request, handler, message)
        counts = handler.counts
        counts.requests += 1
        counts.in_flight += 1
        counts.request_bytes += len(request.payload)
        if handler.dispatch.lanes is not None:
            self._queue(job)
        elif job.plain:
            job.run_now()
        else:
            task = asyncio.get_running_loop().create_task(job.run(), name=handler.task_name)
            self._tasks[task] = job
            task.add_done_callback(self._task_ended)

    def failed(self, stage: str, reason: str) -> None:
        """Count a request that no handler answered well."""
        self._counters.add(DISPATCH_FAILURES_TOTAL, stage=stage, reason=reason)

    def _queue(self, job: Job) -> None:
        handler = job.handler
        config = handler.dispatch.lanes
        assert config is not None
        lanes = self._lanes.get(handler)
        if lanes is None:  # handlers may be registered before there is a loop
            lanes = self._lanes[handler] = Lanes(handler.name, config, self._runner.spawn)
        self._queued.add(job)
        try:
            key = job.request.sender.worker_id if config.key is None else config.key(job.message)
            taken = lanes.submit(key, job)
        except Exception as error:  # the user's key function, or a key that cannot be hashed
            job.raised(error)
            return
        if not taken:
            handler.counts.rejected += 1
            job.refuse("overflow", f"a lane of {handler.name!r} is full")

    def closed(self, job: Job) -> None:
        """A job's request was settled."""
        self._queued.discard(job)
        self.gate.leave()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # what ends the process was raised out of the loop as well

    # --- the end ----------------------------------------------------------------------------------

    def drop(self) -> int:
        """Give up what is queued (its senders hear that this node drains) and cancel what runs. How
        many requests that was.
        """
        dropped = sum(lanes.drop() for lanes in list(self._lanes.values()))
        for task, job in list(self._tasks.items()):
            if job.began:
                task.cancel()
            else:
                job.drop()  # its task finds it settled
            dropped += 1
        self.dropped += dropped
        return dropped

    async def close(self, timeout_s: float) -> bool:
        """Drop everything and wait for the handlers to end. False: some ignore their cancellation;
        they were answered all the same.
        """
        self.gate.shut()
        self.drop()
        for lanes in self._lanes.values():
            lanes.close()
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)
        if await self._runner.drain(deadline) and not self._tasks:
            return True
        left = [*self._tasks.values(), *self._queued]
        _log.warning("%d handlers still run after their cancellation", len(left))
        for job in left:
            job.raised(asyncio.CancelledError())
        return False

    def statistics(self) -> DispatchStatistics:
        return DispatchStatistics(
            draining=self.gate.draining,
            guards=self.gate.guards,
            turned_away=self.gate.turned_away,
            dropped=self.dropped,
            handlers=tuple(self._handler_statistics(handler) for handler in self.registry),
        )

    def _handler_statistics(self, handler: Handler) -> HandlerStatistics:
        counts, lanes = handler.counts, self._lanes.get(handler)
        return HandlerStatistics(
            name=handler.name,
            mode=handler.dispatch.mode,
            requests=counts.requests,
            failures=counts.failures,
            rejected=counts.rejected,
            in_flight=counts.in_flight,
            request_bytes=counts.request_bytes,
            response_bytes=counts.response_bytes,
            seconds=counts.seconds,
            buckets=tuple(counts.buckets),
            lanes=_NO_LANES if lanes is None else lanes.statistics(),
        )
