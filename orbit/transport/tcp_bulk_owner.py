"""The owner's end of a bulk connection: answers requests straight from, and into, exposed memory.

That memory is read only inside a send call and written only inside a receive call of this loop,
and the kernel's copy is complete when the call returns; that is what makes `close` an immediate and
proven end of access. Who may ask for what is the business of the function that finds a transfer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto

from ..model import Direction
from .tcp_bulk import ANSWER, MAGIC, MAGIC_PUSH, REQUEST, BulkStatus
from .tcp_cursor import Cursor, Pace
from .tcp_wire import Wire

_REQUESTS_PER_CALLBACK = 8
_DIRECTIONS = {MAGIC: Direction.READ, MAGIC_PUSH: Direction.WRITE}

_log = logging.getLogger("orbit.transport.tcp")


class Arrival(Enum):
    """What has come of a push. PARTIAL is final: the memory holds a part of some attempt."""

    NONE = auto()
    UNDER_WAY = auto()
    WHOLE = auto()
    PARTIAL = auto()


class Exposed:
    """Memory that one epoch may read, or write once."""

    __slots__ = ("_over", "_watcher", "arrival", "direction", "nbytes", "pieces", "transfer_id")

    def __init__(
        self,
        transfer_id: int,
        pieces: Sequence[memoryview],
        direction: Direction = Direction.READ,
    ) -> None:
        self.transfer_id = transfer_id
        self.pieces = pieces
        self.nbytes = sum(map(len, pieces))
        self.direction = direction
        self.arrival = Arrival.NONE if self.nbytes else Arrival.WHOLE
        self._over = not self.nbytes
        self._watcher: asyncio.Future[None] | None = None

    def finish(self) -> None:
        """All of it has moved, or it may not be accessed any more. Idempotent."""
        self._over = True
        if self._watcher is not None and not self._watcher.done():
            self._watcher.set_result(None)

    def watch_finished(self) -> asyncio.Future[None]:
        """Done when `finish` was called, now or before."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_future()
        if self._over:
            self.finish()
        return self._watcher


class BulkOwner:
    """Owner's end. Answers requests until the peer leaves, breaks the protocol, moves nothing for
    `no_progress_s`, or `close` is called. `on_closed` runs exactly once.
    """

    def __init__(
        self,
        wire: Wire,
        find: Callable[[int], Exposed | None],
        on_closed: Callable[[BulkOwner], None],
        no_progress_s: float,
    ) -> None:
        self.wire = wire
        self.exposed: Exposed | None = None  # whose bytes are moving
        self._find = find
        self._on_closed = on_closed
        self._no_progress_s = no_progress_s
        self._loop = asyncio.get_running_loop()
        self._request = memoryview(bytearray(REQUEST.size))
        self._received = 0
        self._cursor: Cursor | None = None
        self._to_the_end = False  # the last byte of it is asked for
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._await_request()

    def close(self) -> None:
        """Close at once; no exposed byte is read or written afterwards. Idempotent."""
        if self.wire.closed:
            return
        self.wire.abort()
        self._end_transfer()
        self._on_closed(self)

    def _on_readable(self) -> None:
        for _ in range(_REQUESTS_PER_CALLBACK):
            if self.wire.closed:
                return
            if self.exposed is not None:
                if self.exposed.direction is Direction.WRITE:
                    self._move()
                return
            try:
                count = self.wire.recv_into(self._request[self._received :])
            except OSError:
                count = 0
            if count is None:
                return
            self._received += count
            if count == 0:
                self.close()
            elif self._received == REQUEST.size:
                self._received = 0
                self._begin(*REQUEST.unpack(self._request))
        self._loop.call_soon(self._on_readable)

    def _begin(self, magic: int, transfer_id: int, offset: int, length: int) -> None:
        if magic not in _DIRECTIONS:
            self.close()
            return
        direction = _DIRECTIONS[magic]
        exposed = self._find(transfer_id)
        try:
            status = _verdict(exposed, direction, offset, length)
            if exposed is None or status is not BulkStatus.OK:
                self._answer(status, 0)
                return
            # A pull's answer goes out with the first bytes: in one packet, if they are few.
            head = ANSWER.pack(MAGIC, status, length) if direction is Direction.READ else b""
            self._cursor = Cursor(exposed.pieces, offset, length, head)
        except ValueError:  # the owner released a view under its exposure
            self._answer(BulkStatus.SOURCE_FAILED, 0)
            return
        self.exposed = exposed
        self._to_the_end = offset + length == exposed.nbytes
        self._moved_at = self._loop.time()
        if direction is Direction.READ:
            self._give(self._cursor)
        else:
            exposed.arrival = Arrival.UNDER_WAY
            self._answer(BulkStatus.OK, length)
        if self.exposed is not None:  # a short pull is over by now
            self._timer = self._loop.call_later(self._no_progress_s, self._on_timer)

    def _answer(self, status: BulkStatus, length: int) -> None:
        try:
            sent = self.wire.send(ANSWER.pack(MAGIC, status, length))
        except OSError:
            sent = None
        if sent != ANSWER.size:  # room for 16 bytes is missing only when the peer does not read
            self.close()

    def _move(self) -> None:
        """The next step of the transfer, either way."""
        if self.exposed is None or self._cursor is None:
            return
        if self.exposed.direction is Direction.READ:
            self._give(self._cursor)
        else:
            self._take(self._cursor, self.exposed)

    def _give(self, cursor: Cursor) -> None:
        before = cursor.position
        try:
            pace = cursor.send(self.wire)
        except OSError as error:
            self._give_failed(error, untouched=before == 0)
            return
        if cursor.position != before:
            self._moved_at = self._loop.time()
        if pace is Pace.DONE:
            if self.exposed is not None and self._to_the_end:
                self.exposed.finish()
            self._end_transfer()
            self._await_request()
        else:
            # Requests behind this one wait in the kernel. A peer that leaves makes the next send
            # fail, so nothing is missed by not reading.
            self.wire.unwatch_readable()
            self.wire.watch_writable(self._move)

    def _give_failed(self, error: OSError, *, untouched: bool) -> None:
        if error.errno != errno.EFAULT:
            self.close()
            return
        # The memory went away under us: a mapped file was truncated. Only the transfer fails.
        self._warn_of_memory("read")
        if untouched:
            self._end_transfer()
            self._answer(BulkStatus.SOURCE_FAILED, 0)
            self._await_request()
        else:
            self.close()

    def _take(self, cursor: Cursor, exposed: Exposed) -> None:
        before = cursor.position
        try:
            pace = cursor.receive(self.wire)
        except OSError as error:
            if error.errno == errno.EFAULT:
                self._warn_of_memory("written")
            self.close()
            return
        if cursor.position != before:
            self._moved_at = self._loop.time()
        if pace is Pace.AGAIN:
            # Not with the next event: a reset behind the rest ends uvloop's events.
            self._loop.call_soon(self._move)
        elif pace is Pace.DONE:
            exposed.arrival = Arrival.WHOLE
            exposed.finish()
            self._end_transfer()
            self._answer(BulkStatus.OK, cursor.nbytes)
            self._await_request()

    def _warn_of_memory(self, done: str) -> None:
        if self.exposed is not None:
            number = self.exposed.transfer_id
            _log.warning("transfer %s: its memory cannot be %s any more", number, done)

    def _await_request(self) -> None:
        if self.wire.closed:
            return
        self.wire.set_receive_low_water(1)
        self.wire.watch_readable(self._on_readable)
        if self.wire.has_buffered():
            self._loop.call_soon(self._on_readable)

    def _end_transfer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wire.unwatch_writable()
        exposed, cursor, self.exposed, self._cursor = self.exposed, self._cursor, None, None
        if cursor is None or exposed is None:
            return
        if exposed.arrival is Arrival.UNDER_WAY:
            exposed.arrival = Arrival.PARTIAL if cursor.position else Arrival.NONE
            if cursor.position:
                exposed.finish()  # there is no second attempt
        cursor.release()

    def _on_timer(self) -> None:
        # Bytes below the low water mark, and room below a third of a full send buffer, wake nobody.
        self._move()
        if self.exposed is None:
            return
        left = self._moved_at + self._no_progress_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._on_timer)
        else:
            self.close()


def _verdict(exposed: Exposed | None, direction: Direction, offset: int, length: int) -> BulkStatus:
    """On a request. Python's integers do not wrap: a sum beyond 64 bits is just too large."""
    if exposed is None:
        return BulkStatus.UNKNOWN_TRANSFER
    if exposed.direction is not direction:
        return BulkStatus.DIRECTION
    if length == 0 or offset + length > exposed.nbytes:
        return BulkStatus.RANGE
    if direction is Direction.READ:
        return BulkStatus.OK
    if offset or length != exposed.nbytes:
        return BulkStatus.RANGE
    return BulkStatus.OK if exposed.arrival is Arrival.NONE else BulkStatus.WRITTEN
