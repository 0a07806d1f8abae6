"""The consumer's end of a bulk connection: fills the caller's memory straight from the socket.

Bytes arrive in event loop callbacks of bounded size, with no copy and no allocation per chunk
beside them. The no-progress deadline is refreshed by bytes alone. Which connection to use, and
whether to ask again, is decided above.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import DeadlineExceeded, PathFailed
from ..model import PathName, PathReason
from .interface import Progress
from .tcp_bulk import ANSWER, CALLBACK_BYTES, MAGIC, NO_BYTES, REQUEST, BulkStatus, ConnectionDied
from .tcp_wire import Wire

# Waking for every segment costs more CPU than the copy does. The kernel makes the receive buffer at
# least twice this, so that one half fills while the other is read.
LOW_WATER_BYTES = 512 << 10

_REFUSALS = {
    BulkStatus.UNKNOWN_TRANSFER: "the owner knows no such transfer",
    BulkStatus.RANGE: "the range is outside of what the owner exposed",
    BulkStatus.SOURCE_FAILED: "the owner cannot read its memory",
}


class BulkReader:
    """Consumer's end. Fills one view at a time; in between the connection is watched, so that its
    death while idle is seen at once. `on_idle_death` runs at most once."""

    def __init__(self, wire: Wire, on_idle_death: Callable[[BulkReader], None]) -> None:
        self.wire = wire
        self.wakeups = 0  # callbacks that found something to do: the cost of a pull beside the copy
        self._on_idle_death = on_idle_death
        self._loop = asyncio.get_running_loop()
        self._head = memoryview(bytearray(ANSWER.size))
        self._view = NO_BYTES
        self._position = 0  # in head and view together
        self._progress: Progress | None = None
        self._done: asyncio.Future[None] | None = None
        self._low_water = 1
        self._moved_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        wire.watch_readable(self._on_readable)

    @property
    def idle_since(self) -> float:
        return self._moved_at

    def is_alive(self) -> bool:
        """Between two pulls: the peer neither closed the connection nor spoke out of turn."""
        if not self.wire.closed:
            self._check_idle()
        return not self.wire.closed

    async def pull(
        self,
        transfer_id: int,
        view: memoryview,
        no_progress_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Fill `view` (not empty) from the start of the transfer. Nothing touches it after this
        returned or raised. Raises ConnectionDied, PathFailed (the owner's no; the connection stays
        usable) and DeadlineExceeded; whatever else ends it also closes the connection."""
        self._view, self._position, self._progress = view, 0, progress
        self._done = done = self._loop.create_future()
        self._moved_at = self._loop.time()
        self._timer = self._loop.call_later(no_progress_s, self._on_timer, no_progress_s)
        usable = False
        try:
            self._request(REQUEST.pack(MAGIC, transfer_id, 0, len(view)))
            await done
            usable = True
        except PathFailed:
            usable = self._position == ANSWER.size  # an answer without bytes, taken whole
            raise
        finally:
            if not usable:
                self.wire.abort()
            if done.done() and not done.cancelled():
                done.exception()  # a cancelled task never looks at it; the loop would complain
            self._timer.cancel()
            self._set_low_water(1)
            self._done, self._view, self._progress = None, NO_BYTES, None

    def abort(self, cause: str) -> None:
        """Close now. A pull in progress fails; its view is not touched any more."""
        self.wire.abort()
        self._finish(ConnectionDied(cause, answered=self._position > 0))

    def _request(self, request: bytes) -> None:
        try:
            sent = self.wire.send(request)
        except OSError as error:
            raise ConnectionDied(str(error), answered=False) from error
        if sent != len(request):  # an idle connection has room for 28 bytes
            raise ConnectionDied("the peer takes no request", answered=False)

    def _on_readable(self) -> None:
        if self._done is None:
            self._check_idle()
        elif not self._done.done():
            self._advance()
        # else: over or cancelled, and its task has not run yet. The view is not ours any more.

    def _advance(self) -> None:
        before = self._position
        self.wakeups += 1
        try:
            self._fill()
        except OSError as error:
            self._finish(ConnectionDied(str(error), answered=self._position > 0))
        except (ConnectionDied, PathFailed) as error:
            self._finish(error)
        if self._position == before:
            return
        self._moved_at = self._loop.time()
        if self._progress is not None and self._position > ANSWER.size:
            try:
                self._progress(self._position - ANSWER.size)
            except Exception as error:  # the caller's callback: its pull fails, not the loop
                self._finish(error)

    def _fill(self) -> None:
        wire, view, end = self.wire, self._view, ANSWER.size + len(self._view)
        budget = CALLBACK_BYTES
        while budget > 0:
            if self._position < ANSWER.size:
                piece = self._head[self._position :]
            else:
                at = self._position - ANSWER.size
                piece = view[at : at + min(budget, wire.call_bytes)]
            count = wire.recv_into(piece)
            if count is None:
                break
            if count == 0:
                raise ConnectionDied("closed by the peer", answered=self._position > 0)
            in_head = self._position < ANSWER.size
            self._position += count
            budget -= count
            if self._position == end:
                self._finish(None)
                return
            if in_head and self._position == ANSWER.size:
                self._check_answer()
        else:
            # The rest must not wait for another event: a reset behind it ends uvloop's events.
            self._loop.call_soon(self._go_on)
            return
        if self._position >= ANSWER.size:
            # Never more than what is still to come: the last piece would not wake us.
            self._set_low_water(min(end - self._position, LOW_WATER_BYTES))

    def _check_answer(self) -> None:
        magic, status, length = ANSWER.unpack(self._head)
        if magic == MAGIC and status == BulkStatus.OK and length == len(self._view):
            return
        if magic == MAGIC and status in _REFUSALS and length == 0:
            raise PathFailed(PathName.TCP, PathReason.GET_FAILED, _REFUSALS[status])
        raise ConnectionDied("the answer is malformed", answered=True)

    def _go_on(self) -> None:
        if not self.wire.closed and self._done is not None and not self._done.done():
            self._advance()

    def _set_low_water(self, nbytes: int) -> None:
        if nbytes != self._low_water and not self.wire.closed:
            self.wire.set_receive_low_water(nbytes)
            self._low_water = nbytes

    def _check_idle(self) -> None:
        scratch = memoryview(bytearray(1))
        try:
            count = self.wire.recv_into(scratch)
        except OSError:
            count = 0
        if count is not None:  # closed, or bytes that nobody asked for
            self.wire.abort()
            self._on_idle_death(self)

    def _on_timer(self, no_progress_s: float) -> None:
        if self._done is None or self._done.done():
            return
        # Bytes below the low water mark wake nobody, but they are progress.
        self._advance()
        if self._done.done():
            return
        left = self._moved_at + no_progress_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._on_timer, no_progress_s)
        else:
            self._finish(
                DeadlineExceeded(f"progress of the pull from {self.wire.endpoint}", no_progress_s)
            )

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
