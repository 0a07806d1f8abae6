"""A lane: one completion queue and the work of the queue pairs on it.

Owns the road from a completion to the code that waits for it, by work-request id and queue pair,
and the count of entries that are promised. How completions are found is its source's business. It
knows nothing of queue-pair states, grants or retries. All of it runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import DeviceError, InternalError, OrbitError
from ..transport.leaving import raise_later
from .completion_source import BATCH, CompletionSource
from .provider import NativeObject
from .records import Completion
from .turn import Posted

logger = logging.getLogger("orbit.verbs")

Handler = Callable[[Completion], None]

_NAP_OUTSTANDING_MAX = 8
_BATCHES_PER_CALLBACK = 8  # then other callbacks of the loop get their turn
_SPIN_SLICE_US = 20  # likewise


class CompletionTable:
    """Handlers by wr_id = index | generation << 32.

    The generation makes a late or doubled completion of an earlier use unknown instead of wrong.
    """

    def __init__(self) -> None:
        self._handlers: list[Handler | None] = []
        self._generations: list[int] = []
        self._qp_nums: list[int | None] = []
        self._free: list[int] = []
        self.unknown = 0  # completions that nobody waited for: late, doubled or foreign

    def __len__(self) -> int:
        return len(self._handlers) - len(self._free)

    def reserve(self, handler: Handler, qp_num: int | None = None) -> int:
        """An id for one work request of the queue pair `qp_num` (None: of any)."""
        if self._free:
            index = self._free.pop()
            self._handlers[index] = handler
            self._qp_nums[index] = qp_num
        else:
            index = len(self._handlers)
            self._handlers.append(handler)
            self._generations.append(0)
            self._qp_nums.append(qp_num)
        self._generations[index] = (self._generations[index] + 1) & 0xFFFF_FFFF
        return index | self._generations[index] << 32

    def take(self, wr_id: int, qp_num: int) -> Handler | None:
        """The handler, once. None (and counted) for an id that is not waited for, or not from that
        queue pair: then whoever waits goes on waiting.
        """
        index = wr_id & 0xFFFF_FFFF
        if index < len(self._qp_nums) and self._qp_nums[index] in (None, qp_num):
            handler = self._release(wr_id)
            if handler is not None:
                return handler
        self.unknown += 1
        return None

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


class LaneUser(Protocol):
    """A queue pair as its lane sees it."""

    @property
    def sends(self) -> int:
        """Send work whose end is not known yet."""

    @property
    def receives(self) -> int:
        """Likewise."""

    def fail(self, cause: OrbitError) -> None:
        """The lane has failed: no new work. Raises nothing."""


class Lane:
    """One completion queue with room for `capacity` completions. `start` it once."""

    def __init__(
        self, source: CompletionSource, capacity: int, spin_us: int, *, spins: bool = False
    ) -> None:
        """`spin_us`: how long to poll before sleeping in a nap; `spins`: and after each activity,
        before sleeping in the event loop.
        """
        self._source = source
        self._spin_us = spin_us
        self._spins = spins
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users: set[LaneUser] = set()
        self._closed = False
        self._after_batch: list[Callable[[], None]] | None = None  # None: nothing is dispatched
        self.capacity = capacity
        self.charged = 0  # entries that are promised to queue pairs
        self.table = CompletionTable()
        self.failed: DeviceError | None = None
        self.quarantined = False  # its own end was refused
        self.completions = 0
        # When the completions that are being dispatched were found, by time.perf_counter.
        self.found_at = 0.0
        self.naps = 0

    @property
    def cq(self) -> NativeObject:
        return self._source.cq

    @property
    def source(self) -> CompletionSource:
        return self._source

    @property
    def room(self) -> int:
        """Entries not yet promised to a queue pair."""
        return self.capacity - self.charged

    @property
    def outstanding(self) -> tuple[int, int]:
        """Sends and receives of all its queue pairs whose end is not known yet."""
        users = self._users
        return sum(user.sends for user in users), sum(user.receives for user in users)

    def charge(self, entries: int) -> None:
        """Promise room for that many completions, flushes included: an overrun loses them
        silently.
        """
        if entries > self.room:
            raise InternalError(f"lane: {entries} completion entries asked, {self.room} left")
        self.charged += entries

    def repay(self, entries: int) -> None:
        self.charged -= entries

    def attach(self, user: LaneUser) -> None:
        """It hears of the lane's failure from now on."""
        self._users.add(user)

    def detach(self, user: LaneUser) -> None:
        self._users.discard(user)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the queue from now on. Raises DeviceError."""
        self._loop = loop
        self._source.start(loop, self._run)

    def post(self, qp: int, receives: Sequence[bytes], sends: Sequence[bytes]) -> Posted:
        """Post to a queue pair of this lane, as `Turn.post`. What has completed by then is
        dispatched by the next poll or nap, or from the loop.
        """
        posted = self._source.post(qp, receives, sends)
        if posted.look is not None and posted.look.found and self._loop is not None:
            self._loop.call_soon(self._take)
        return posted

    def after_batch(self, act: Callable[[], None]) -> bool:
        """Call it when the completions that are being dispatched have been. False: none are."""
        if self._after_batch is None:
            return False
        self._after_batch.append(act)
        return True

    def poll(self) -> int:
        """Dispatch up to one batch; how many. A lane that has failed is polled all the same: what
        it still gives proves to a drain that the device is done.
        """
        if self._closed:
            return 0
        try:
            found = self._source.poll()
        except DeviceError as error:
            self.fail(error)
            return 0
        self._dispatch(found)
        return len(found)

    def poll_before_failing(self) -> None:
        """Take in what completed well before a queue pair is given up: it counts. Not from within a
        handler: what the batch still has comes before what a poll finds.
        """
        if self._after_batch is None:
            self.poll()

    def nap(self, done: Callable[[], bool], nap_us: int) -> None:
        """Sleep in the helper, without the GIL, until `done` or for about `nap_us`.

        Waking an event loop costs more than a short transfer takes. The loop stands still
        meanwhile, so this is for waits that are expected to be shorter than one wake-up, and with
        much in flight, when the loop has other things to do, it only polls.
        """
        if self._loop is None or self._closed or self.failed is not None:
            return
        self._take()
        if len(self.table) > _NAP_OUTSTANDING_MAX:
            if not done():
                self.poll()
            return
        found: list[Completion] = []
        left_us = nap_us
        # Not the loop's clock: uvloop's stands still within a callback.
        deadline = time.perf_counter() + nap_us / 1e6
        while left_us > 0 and not done():
            self.naps += 1
            try:
                found = self._source.nap(self._spin_us, left_us)
            except DeviceError as error:
                self.fail(error)
                return
            self._dispatch(found)
            left_us = int((deadline - time.perf_counter()) * 1e6)
        if found:
            self._rest(len(found))

    def fail(self, error: DeviceError) -> None:
        """Nothing is promised of this queue any more: what uses it is told, and drains."""
        if self.failed is not None or self._closed:
            return
        self.failed = error
        logger.error("completion queue failed: %s", error)
        self._source.stop()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._fail_users)  # this may be within a post or a poll of theirs

    def close(self) -> None:
        """Queue pairs are gone by now. Raises DeviceError; a further call continues."""
        self._closed = True
        self._source.close()

    def _fail_users(self) -> None:
        assert self.failed is not None
        for user in tuple(self._users):
            user.fail(self.failed)

    def _take(self) -> None:
        """Dispatch what is at hand."""
        found = self._source.take()
        if found and not self._closed:
            self._dispatch(found)
            self._rest(len(found))

    def _rest(self, count: int) -> None:
        """After a batch of that many, not of `_run`: go to sleep, or on."""
        try:
            if count < BATCH and not self._spins and self._source.park():
                return
        except DeviceError as error:
            self.fail(error)
            return
        self._run()

    def _run(self) -> None:
        """Dispatch what is there and go to sleep; in a later turn of the loop if it is much."""
        for _ in range(_BATCHES_PER_CALLBACK):
            found = self.poll()
            if self.failed is not None or self._closed:
                return
            if found == BATCH:
                continue  # there may be more; fewer means that the queue was empty
            spin_until = self.found_at + self._spin_us / 1e6
            if self._spins and self._loop is not None and time.perf_counter() < spin_until:
                self._loop.call_soon(self._spin)
                return
            try:
                if self._source.park():
                    return
            except DeviceError as error:
                self.fail(error)
                return
        if self._loop is not None:
            self._loop.call_soon(self._run)

    def _spin(self) -> None:
        """After activity: more may come before the loop could be woken for it."""
        if self.failed is not None or self._closed:
            return
        try:
            found = self._source.spin(min(self._spin_us, _SPIN_SLICE_US))
        except DeviceError as error:
            self.fail(error)
            return
        self._dispatch(found)
        self._run()

    def _dispatch(self, found: list[Completion]) -> None:
        if not found:
            return
        self.completions += len(found)
        self.found_at = time.perf_counter()
        outermost = self._after_batch is None
        if outermost:
            self._after_batch = []
        for completion in found:
            handler = self.table.take(completion.wr_id, completion.qp_num)
            if handler is None:
                continue
            try:
                handler(completion)
            except Exception:  # one handler's bug must not lose the others' completions
                logger.exception("completion handler failed")
            except BaseException as error:
                raise_later(error)
        if outermost:
            self._end_batch()

    def _end_batch(self) -> None:
        """What follows may cause more that does."""
        acts = self._after_batch or []
        for act in acts:
            try:
                act()
            except Exception:
                logger.exception("what follows completions failed")
            except BaseException as error:
                raise_later(error)
        self._after_batch = None
