"""The consumer's end of a bulk connection: fills the caller's memory straight from the socket, or
sends it.

Bytes move in event loop callbacks of bounded size, with no copy and no allocation per chunk beside
them. The no-progress deadline is refreshed by bytes alone. Which connection to use, and whether to
ask again, is decided above.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import DeadlineExceeded, PathFailed
from ..model import PathName, PathReason
from .interface import Progress
from .tcp_bulk import ANSWER, MAGIC, MAGIC_PUSH, REQUEST, BulkStatus, ConnectionDied
from .tcp_cursor import Cursor, Pace
from .tcp_wire import Wire

_REFUSALS = {
    BulkStatus.UNKNOWN_TRANSFER: "the owner knows no such transfer",
    BulkStatus.RANGE: "the range is not what the owner exposed",
    BulkStatus.SOURCE_FAILED: "the owner cannot read its memory",
    BulkStatus.DIRECTION: "the owner exposed it for the other direction",
    BulkStatus.WRITTEN: "it was written already, or a part of it",
}


@dataclass(slots=True, eq=False)
class _Transfer:
    magic: int
    cursor: Cursor
    progress: Progress | None
    done: asyncio.Future[None]
    answer_bytes: int = 0  # of all answers
    acknowledged_bytes: int = 0  # of a push, when the last byte was handed over
    refused: bool = False

    @property
    def pushes(self) -> bool:
        return self.magic == MAGIC_PUSH

    @property
    def answers(self) -> int:
        """Taken whole."""
        return self.answer_bytes // ANSWER.size

    @property
    def moved_bytes(self) -> int:
        return self.answer_bytes + self.cursor.position


class BulkConsumer:
    """Consumer's end. One transfer at a time; in between the connection is watched, so that its
    death while idle is seen at once. `on_idle_death` runs at most once.
    """

    def __init__(self, wire: Wire, on_idle_death: Callable[[BulkConsumer], None]) -> None:
        self.wire = wire
        self.wakeups = 0  # callbacks with something to do: the cost of a transfer beside the copy
        self._on_idle_death = on_idle_death
        self._loop = asyncio.get_running_loop()
        self._head = memoryview(bytearray(ANSWER.size))
        self._transfer: _Transfer | None = None
        self._moved_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        wire.watch_readable(self._on_readable)

    @property
    def idle_since(self) -> float:
        return self._moved_at

    def is_alive(self) -> bool:
        """Between two transfers: the peer neither closed the connection nor spoke out of turn."""
        if not self.wire.closed:
            self._check_idle()
        return not self.wire.closed

    async def pull(
        self,
        transfer_id: int,
        pieces: Sequence[memoryview],
        no_progress_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Fill `pieces` (not empty) from the start of the transfer. Nothing touches them after this
        returned or raised. Raises ConnectionDied, PathFailed (the owner's no; the connection stays
        usable) and DeadlineExceeded; whatever else ends it also closes the connection.
        """
        await self._run(MAGIC, transfer_id, pieces, no_progress_s, progress)

    async def push(
        self,
        transfer_id: int,
        pieces: Sequence[memoryview],
        no_progress_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Send `pieces` (not empty) as the whole of the transfer; returns when the owner has every
        byte. None was sent if the owner had not answered. Otherwise as `pull`.
        """
        await self._run(MAGIC_PUSH, transfer_id, pieces, no_progress_s, progress)

    async def _run(
        self,
        magic: int,
        transfer_id: int,
        pieces: Sequence[memoryview],
        no_progress_s: float,
        progress: Progress | None,
    ) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._transfer = transfer = _Transfer(magic, Cursor(pieces), progress, done)
        self._moved_at = self._loop.time()
        self._timer = self._loop.call_later(no_progress_s, self._on_timer, no_progress_s)
        usable = False
        try:
            self._request(REQUEST.pack(magic, transfer_id, 0, transfer.cursor.nbytes))
            await done
            usable = True
        except PathFailed:
            usable = transfer.refused  # an answer without bytes, taken whole
            raise
        finally:
            if not usable:
                self.wire.abort()
            if done.done() and not done.cancelled():
                done.exception()  # a cancelled task never looks at it; the loop would complain
            self._timer.cancel()
            self.wire.unwatch_writable()
            self.wire.set_receive_low_water(1)
            self._transfer = None
            transfer.cursor.release()

    def abort(self, cause: str) -> None:
        """Close now. A transfer in progress fails; its memory is not touched any more."""
        self.wire.abort()
        if self._transfer is not None:
            self._end(self._transfer, ConnectionDied(cause, self._transfer.answer_bytes > 0))

    def _request(self, request: bytes) -> None:
        try:
            sent = self.wire.send(request)
        except OSError as error:
            raise ConnectionDied(str(error), answered=False) from error
        if sent != len(request):  # an idle connection has room for 28 bytes
            raise ConnectionDied("the peer takes no request", answered=False)

    def _on_readable(self) -> None:
        if self._transfer is None:
            self._check_idle()
        else:
            self._advance()

    def _advance(self) -> None:
        transfer = self._transfer
        if transfer is None or transfer.done.done():
            return  # over or cancelled, and its task has not run yet: the memory is not ours
        moved_bytes, position = transfer.moved_bytes, transfer.cursor.position
        self.wakeups += 1
        try:
            pace = self._push_on(transfer) if transfer.pushes else self._pull_on(transfer)
            if pace is Pace.AGAIN:
                # Not with the next event: a reset behind the rest ends uvloop's events.
                self._loop.call_soon(self._advance)
        except OSError as error:
            self._end(transfer, ConnectionDied(str(error), transfer.answer_bytes > 0))
        except (ConnectionDied, PathFailed) as error:
            self._end(transfer, error)
        if transfer.moved_bytes == moved_bytes:
            return
        self._moved_at = self._loop.time()
        if transfer.progress is not None and transfer.cursor.position != position:
            try:
                transfer.progress(transfer.cursor.position)
            except Exception as error:  # the caller's callback: its transfer fails, not the loop
                self._end(transfer, error)

    def _pull_on(self, transfer: _Transfer) -> Pace:
        if transfer.answers == 0 and not self._take_answer(transfer):
            return Pace.WAIT
        pace = transfer.cursor.receive(self.wire)
        if pace is Pace.DONE:
            self._end(transfer, None)
        return pace

    def _push_on(self, transfer: _Transfer) -> Pace:
        cursor = transfer.cursor
        if self._take_answer(transfer) and transfer.answers == 2:
            if cursor.left:
                raise ConnectionDied("the owner has more than was sent", answered=True)
            self._end(transfer, None)
        elif transfer.answers and cursor.left:
            if cursor.send(self.wire) is not Pace.DONE:
                self.wire.watch_writable(self._advance)
            else:
                self.wire.unwatch_writable()
                transfer.acknowledged_bytes = self.wire.acknowledged_bytes()
        return Pace.WAIT

    def _take_answer(self, transfer: _Transfer) -> bool:
        """Whether one was completed now. Raises OSError, ConnectionDied and PathFailed."""
        taken = transfer.answer_bytes % ANSWER.size
        while taken < ANSWER.size:
            count = self.wire.recv_into(self._head[taken:])
            if count is None:
                return False
            if count == 0:
                raise ConnectionResetError("closed by the peer")
            transfer.answer_bytes += count
            taken += count
        magic, status, length = ANSWER.unpack(self._head)
        if magic == MAGIC and status == BulkStatus.OK and length == transfer.cursor.nbytes:
            return True
        if magic == MAGIC and status in _REFUSALS and length == 0 and transfer.answers == 1:
            transfer.refused = True
            raise PathFailed(PathName.TCP, PathReason.GET_FAILED, _REFUSALS[status])
        raise ConnectionDied("the answer is malformed", answered=True)

    def _check_idle(self) -> None:
        try:
            count = self.wire.recv_into(self._head)  # no answer is in it now
        except OSError:
            count = 0
        if count is not None:  # closed, or bytes that nobody asked for
            self.wire.abort()
            self._on_idle_death(self)

    def _on_timer(self, no_progress_s: float) -> None:
        transfer = self._transfer
        if transfer is None:
            return
        # Bytes below the low water mark, and room below a third of a full send buffer, wake nobody,
        # but they are progress. So is what the owner's kernel still takes of a push that was sent.
        self._advance()
        if transfer.done.done():
            return
        if transfer.pushes and not transfer.cursor.left:
            acknowledged = self.wire.acknowledged_bytes()
            if acknowledged > transfer.acknowledged_bytes:
                transfer.acknowledged_bytes = acknowledged
                self._moved_at = self._loop.time()
        left = self._moved_at + no_progress_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._on_timer, no_progress_s)
        else:
            what = "the push to" if transfer.pushes else "the pull from"
            self._end(
                transfer,
                DeadlineExceeded(f"progress of {what} {self.wire.endpoint}", no_progress_s),
            )

    def _end(self, transfer: _Transfer, error: Exception | None) -> None:
        if transfer.done.done():
            return
        if error is None:
            transfer.done.set_result(None)
        else:
            transfer.done.set_exception(error)
