"""A lane: one completion queue with its channel, driven by the event loop.

Owns the road from a completion to the code that waits for it: arm, poll again, wait on the
channel's descriptor, dispatch by work-request id. An idle lane stays armed and costs nothing.
It knows nothing of queue-pair states, grants or retries. All of it runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ..errors import DeviceError, InternalError
from .provider import NativeChannel, NativeContext, NativeObject
from .records import Completion
from .turn import Turn

logger = logging.getLogger("orbit.verbs")

Handler = Callable[[Completion], None]

_POLL_BATCH = 64
_NAP_OUTSTANDING_MAX = 8
_BATCHES_PER_CALLBACK = 8  # then other callbacks of the loop get their turn


class CompletionTable:
    """Handlers by wr_id = index | generation << 32.

    The generation makes a late or doubled completion of an earlier use unknown instead of wrong.
    """

    def __init__(self) -> None:
        self._handlers: list[Handler | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self.unknown = 0  # completions that nobody waited for: late, doubled or foreign

    def __len__(self) -> int:
        return len(self._handlers) - len(self._free)

    def reserve(self, handler: Handler) -> int:
        if self._free:
            index = self._free.pop()
            self._handlers[index] = handler
        else:
            index = len(self._handlers)
            self._handlers.append(handler)
            self._generations.append(0)
        self._generations[index] = (self._generations[index] + 1) & 0xFFFF_FFFF
        return index | self._generations[index] << 32

    def take(self, wr_id: int) -> Handler | None:
        """The handler, once. None (and counted) for an id that is not waited for."""
        handler = self._release(wr_id)
        if handler is None:
            self.unknown += 1
        return handler

    def forget(self, wr_id: int) -> None:
        """Nothing will complete under this id, or it does not matter any more."""
        self._release(wr_id)

    def _release(self, wr_id: int) -> Handler | None:
        index, generation = wr_id & 0xFFFF_FFFF, wr_id >> 32
        if index >= len(self._handlers) or self._generations[index] != generation:
            return None
        handler = self._handlers[index]
        if handler is not None:
            self._handlers[index] = None
            self._free.append(index)
        return handler


class Lane:
    """One completion queue of `depth` entries. `open` it with `Lane.open`, then `start`."""

    def __init__(
        self, turn: Turn, channel: NativeChannel, cq: NativeObject, depth: int, spin_us: int
    ) -> None:
        self._turn = turn
        self._channel = channel
        self._cq = cq
        self._spin_us = spin_us
        self._room = depth
        self._loop: asyncio.AbstractEventLoop | None = None
        self._armed = False
        self._fd = -1
        self.table = CompletionTable()
        self.failed: DeviceError | None = None
        self.completions = 0
        self.found_at = 0.0  # when the completions that are being dispatched were found
        self.naps = 0

    @classmethod
    def open(cls, turn: Turn, context: NativeContext, depth: int, spin_us: int) -> Lane:
        """Raises DeviceError, having closed what it made."""
        channel = context.create_channel()
        try:
            cq = context.create_cq(depth, channel)
        except DeviceError:
            channel.close()
            raise
        return cls(turn, channel, cq, depth, spin_us)

    @property
    def cq(self) -> NativeObject:
        return self._cq

    @property
    def room(self) -> int:
        """Entries not yet promised to a queue pair."""
        return self._room

    def charge(self, entries: int) -> None:
        """Promise room for that many completions, flushes included: an overrun loses them
        silently.
        """
        if entries > self._room:
            raise InternalError(f"lane: {entries} completion entries asked, {self._room} left")
        self._room -= entries

    def repay(self, entries: int) -> None:
        self._room += entries

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Arm, and watch the channel from now on."""
        self._loop = loop
        self._fd = self._channel.fd
        loop.add_reader(self._fd, self._on_readable)
        self._drain_and_arm()

    def poll(self) -> int:
        """Dispatch up to one batch; how many."""
        if self.failed is not None:
            return 0
        try:
            found = self._turn.poll(self._cq.native, _POLL_BATCH)
        except DeviceError as error:
            self._fail(error)
            return 0
        self._dispatch(found)
        return len(found)

    def nap(self, done: Callable[[], bool], nap_us: int) -> None:
        """Sleep in the helper, without the GIL, until `done` or for about `nap_us`.

        Waking an event loop costs more than a short transfer takes. The loop stands still
        meanwhile, so this is for waits that are expected to be shorter than one wake-up, and with
        much in flight, when the loop has other things to do, it only polls.
        """
        if self._loop is None or self.failed is not None:
            return
        if len(self.table) > _NAP_OUTSTANDING_MAX:
            self.poll()
            return
        left_us = nap_us
        # Not the loop's clock: uvloop's stands still within a callback.
        deadline = time.perf_counter() + nap_us / 1e6
        while left_us > 0 and not done():
            self.naps += 1
            try:
                found = self._turn.wait(
                    self._cq.native, self._channel.native, self._spin_us, left_us, _POLL_BATCH
                )
            except DeviceError as error:
                self._fail(error)
                return
            # The helper leaves the queue armed only when it found nothing.
            self._armed = not found
            self._dispatch(found)
            left_us = int((deadline - time.perf_counter()) * 1e6)
        if not self._armed:
            # What was found had raised an event if the queue was armed: the loop needs no waking.
            self._on_readable()

    def close(self) -> None:
        """Queue pairs are gone by now. Raises DeviceError; a further call continues."""
        self._stop_watching()
        self._cq.close()
        self._channel.close()

    def _stop_watching(self) -> None:
        if self._loop is not None and self._fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._fd = -1

    def _on_readable(self) -> None:
        try:
            self._turn.drain_events(self._channel.native, self._cq.native)
        except DeviceError as error:
            self._fail(error)
            return
        self._armed = False
        self._drain_and_arm()

    def _drain_and_arm(self) -> None:
        for _ in range(_BATCHES_PER_CALLBACK):
            if self.failed is not None or self._fd < 0:
                return
            if self.poll() == _POLL_BATCH:
                continue  # there may be more; fewer means that the queue was empty
            if self._armed:
                return
            try:
                self._turn.arm(self._cq.native)
            except DeviceError as error:
                self._fail(error)
                return
            # A completion that was there at arm time raises no event: poll once more.
            self._armed = True
        if self._loop is not None:
            self._loop.call_soon(self._drain_and_arm)

    def _dispatch(self, found: list[Completion]) -> None:
        if not found:
            return
        self.completions += len(found)
        self.found_at = time.perf_counter()
        for completion in found:
            handler = self.table.take(completion.wr_id)
            if handler is None:
                continue
            try:
                handler(completion)
            except Exception:  # one handler's bug must not lose the others' completions
                logger.exception("completion handler failed")

    def _fail(self, error: DeviceError) -> None:
        """Nothing more can be learned from this queue: waiters end at their own deadlines."""
        self.failed = error
        self._stop_watching()
        logger.error("completion queue failed: %s", error)


class LaneGroup:
    """Lanes of one device context; a further one opens when the others' room is spent."""

    def __init__(self, turn: Turn, context: NativeContext, depth: int, spin_us: int) -> None:
        self._turn = turn
        self._context = context
        self._depth = depth
        self._spin_us = spin_us
        self._lanes: list[Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def unknown_completions(self) -> int:
        return sum(lane.table.unknown for lane in self._lanes)

    @property
    def failed(self) -> DeviceError | None:
        return next((lane.failed for lane in self._lanes if lane.failed is not None), None)

    def place(self, entries: int, loop: asyncio.AbstractEventLoop) -> Lane:
        """A started lane with room for `entries`, already charged. Raises DeviceError."""
        for lane in self._lanes:
            if lane.failed is None and lane.room >= entries:
                lane.charge(entries)
                return lane
        lane = Lane.open(self._turn, self._context, max(self._depth, entries), self._spin_us)
        self._lanes.append(lane)
        lane.start(loop)
        lane.charge(entries)
        return lane

    def close(self) -> None:
        """Raises DeviceError; a further call continues where this one stopped."""
        while self._lanes:
            self._lanes[-1].close()
            self._lanes.pop()
