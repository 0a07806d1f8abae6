"""The message lane of one device: one completion queue for the sends and receives of all its links.

Owns the road from a completion to the queue pair that it belongs to, in passes: everything at hand
(within a bound), then the receives are posted again, then each link hears that the pass has ended.
It knows neither packets nor queue-pair states. All of it runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from ...errors import DeviceError, InternalError, OrbitError
from ...transport.leaving import raise_later
from ..completion_source import BATCH, CompletionSource
from ..records import Completion
from .backstop import Backstop, LaneCounters
from .receive_queue import ReceiveQueue
from .settings import RdmaMessagesConfig
from .wr_ids import RECEIVE, SERIAL_MAX

logger = logging.getLogger("orbit.verbs")

_SPIN_SLICE_US = 20  # the loop looks at its other work in between


class LaneEnd(Protocol):
    """A queue pair as its lane sees it. No method raises OrbitError."""

    touched: bool  # the lane's own mark: it had a completion in this pass

    @property
    def serial(self) -> int: ...

    @property
    def qp_num(self) -> int: ...

    @property
    def outstanding(self) -> int:
        """Sends that have not completed."""

    def on_send_completion(self, completion: Completion) -> None: ...

    def deliver(self, packet: memoryview) -> None: ...

    def on_pass_end(self) -> None: ...

    def fail(self, cause: OrbitError) -> None: ...

    def on_receive_error(self, completion: Completion) -> None: ...

    def on_last_receive(self) -> None: ...


class MessageLane:
    """`start` it once; `depth` entries hold every receive, send and flush at the same time."""

    def __init__(
        self,
        source: CompletionSource,
        receives: ReceiveQueue,
        config: RdmaMessagesConfig,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._source = source
        self._receives = receives
        self._spin_us = config.effective_spin_us
        self._pass_max = config.pass_completions_max
        self._loop = loop
        self._by_serial: dict[int, LaneEnd] = {}
        self._by_qp_num: dict[int, LaneEnd] = {}
        self._touched: list[LaneEnd] | None = None  # None: no pass is going on
        self._next_serial = 1
        self._again: asyncio.Handle | None = None  # the pass that goes on, or spins
        self._spin_until = 0.0
        self.counters = LaneCounters()
        self._backstop = Backstop(self, source, self.counters, loop, config.backstop_s)
        self.failed: OrbitError | None = None  # the queue cannot be polled any more
        self.broken: OrbitError | None = None  # what is left can be drained, nothing new may start

    @property
    def source(self) -> CompletionSource:
        return self._source

    @property
    def ends(self) -> tuple[LaneEnd, ...]:
        return tuple(self._by_serial.values())

    def start(self) -> None:
        """Arm, and watch from now on. Raises DeviceError."""
        self._source.start(self._loop, self._run)

    def next_serial(self) -> int:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        if serial > SERIAL_MAX:
            raise InternalError("a message lane is out of queue-pair serials")
        return serial

    def add(self, end: LaneEnd) -> None:
        self._by_serial[end.serial] = end
        self._by_qp_num[end.qp_num] = end

    def remove(self, end: LaneEnd) -> None:
        """It is drained: what still comes for it is late, and goes nowhere."""
        self._by_serial.pop(end.serial, None)
        if self._by_qp_num.get(end.qp_num) is end:
            del self._by_qp_num[end.qp_num]

    def find(self, qp_num: int) -> LaneEnd | None:
        return self._by_qp_num.get(qp_num)

    def expect(self) -> None:
        """Something was sent: its completion must come, one way or the other."""
        self._backstop.arm()

    @property
    def sleeping(self) -> bool:
        """No pass is going on or to come: only an event wakes the lane."""
        return self._touched is None and self._again is None

    def poll(self) -> None:
        """Dispatch what is at hand now. Not from within a pass, where it does nothing."""
        self._run()

    def fail_links(self, cause: OrbitError) -> None:
        """Completions or receives may be lost: every link fails, and its drain goes on."""
        if self.broken is None:
            self.broken = cause
            logger.error("message lane: %s", cause)
        for end in self.ends:
            end.fail(cause)

    def stop(self) -> None:
        """Wake nobody any more, and join what polls."""
        self._cancel_again()
        self._backstop.stop()
        self._source.stop()

    def close(self) -> None:
        """Queue pairs and receive queue are gone. Raises DeviceError; a further call continues."""
        self.stop()
        self._source.close()

    # --- a pass -----------------------------------------------------------------------------------

    def _run(self, found: Sequence[Completion] = ()) -> None:
        """One pass; it goes on in the loop's next turn when it was cut short."""
        if self._touched is not None or self.failed is not None:
            return
        self._cancel_again()
        self._touched = []
        self._dispatch(found)
        more = self._gather()
        self._end_pass()
        if more and self.failed is None:
            self._again = self._loop.call_soon(self._spin if self._spin_us else self._run)

    def _gather(self) -> bool:
        """Dispatch what is at hand. True: there may be more, or it is worth spinning for."""
        count = 0
        while self.failed is None:
            found = self._poll()
            if found:
                self._dispatch(found)
                count += len(found)
                if self._spin_us:
                    self._spin_until = time.perf_counter() + self._spin_us / 1e6
            if count >= self._pass_max:
                return True
            if len(found) == BATCH:
                continue
            if self._spin_us and time.perf_counter() < self._spin_until:
                return True
            if self._park():
                return False
        return False

    def _cancel_again(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _spin(self) -> None:
        self._again = None
        try:
            found = self._source.spin(min(self._spin_us, _SPIN_SLICE_US))
        except DeviceError as error:
            self._fail_source(error)
            return
        if found:
            self._spin_until = time.perf_counter() + self._spin_us / 1e6
        self._run(found)

    def _poll(self) -> list[Completion]:
        try:
            return self._source.poll()
        except DeviceError as error:
            self._fail_source(error)
            return []

    def _park(self) -> bool:
        try:
            return self._source.park()
        except DeviceError as error:
            self._fail_source(error)
            return True

    def _dispatch(self, found: Sequence[Completion]) -> None:
        self.counters.completions += len(found)
        for completion in found:
            if completion.wr_id & RECEIVE:
                self._on_receive(completion)
                continue
            end = self._by_serial.get(completion.wr_id >> 32)
            if end is None:
                self.counters.unknown += 1
                continue
            self._touch(end)
            try:
                end.on_send_completion(completion)
            except Exception as error:  # one link's bug must not lose the others' completions
                _fail_by_bug(end, error)
            except BaseException as error:
                raise_later(error)

    def _on_receive(self, completion: Completion) -> None:
        slab = self._receives.take(completion.wr_id)
        if slab < 0:
            return
        end = self._by_qp_num.get(completion.qp_num)
        if end is None:
            self.counters.orphans += 1
        else:
            self._touch(end)
            try:
                if completion.status == 0:
                    end.deliver(self._receives.slabs.views[slab][: completion.byte_len])
                else:
                    end.on_receive_error(completion)
            except Exception as error:
                _fail_by_bug(end, error)
            except BaseException as error:  # of a handler
                raise_later(error)
        self._receives.recycle(slab)

    def _touch(self, end: LaneEnd) -> None:
        if not end.touched and self._touched is not None:
            end.touched = True
            self._touched.append(end)

    def _end_pass(self) -> None:
        """The slabs go back before the links speak: the credit that they return is then true."""
        self.counters.passes += 1
        self._receives.refill()
        if self._receives.failed is not None and self.broken is None:
            self.fail_links(self._receives.failed)
        for end in self._touched or ():
            end.touched = False
            try:
                end.on_pass_end()
            except Exception as error:
                _fail_by_bug(end, error)
        self._touched = None

    def _fail_source(self, error: DeviceError) -> None:
        """Nothing more can be learned from this queue."""
        if self.failed is None:
            self.failed = error
            self.stop()
            self.fail_links(error)


def _fail_by_bug(end: LaneEnd, error: Exception) -> None:
    logger.exception("a message link failed by an error of its own")
    end.fail(InternalError(f"a completion could not be handled: {error!r}"))
