"""The owner's end of a bulk connection: answers requests straight from exposed memory.

A source is read only inside a send call of this loop, whose copy is complete when the call returns;
that is what makes `close` an immediate and proven end of access. Who may ask for what is the
business of the function that finds a transfer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from .tcp_bulk import ANSWER, CALLBACK_BYTES, MAGIC, NO_BYTES, REQUEST, BulkStatus
from .tcp_wire import Wire

_REQUESTS_PER_CALLBACK = 8

_log = logging.getLogger("orbit.transport.tcp")


class BulkWriter:
    """Owner's end. Answers requests until the peer leaves, breaks the protocol, takes nothing for
    `no_progress_s`, or `close` is called. `on_closed` runs exactly once."""

    def __init__(
        self,
        wire: Wire,
        find: Callable[[int], memoryview | None],
        on_closed: Callable[[BulkWriter], None],
        no_progress_s: float,
    ) -> None:
        self.wire = wire
        self.transfer_id: int | None = None  # whose bytes are on their way to the kernel
        self._find = find
        self._on_closed = on_closed
        self._no_progress_s = no_progress_s
        self._loop = asyncio.get_running_loop()
        self._request = memoryview(bytearray(REQUEST.size))
        self._received = 0
        self._head = b""
        self._view = NO_BYTES
        self._position = 0
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._await_request()

    def close(self) -> None:
        """Close at once; no byte of a source is read afterwards. Idempotent."""
        if self.wire.closed:
            return
        self.wire.abort()
        self._end_answer()
        self._on_closed(self)

    def _on_readable(self) -> None:
        for _ in range(_REQUESTS_PER_CALLBACK):
            if self.wire.closed or self.transfer_id is not None:
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
        if magic != MAGIC:
            self.close()
            return
        try:
            source = self._find(transfer_id)
            if source is None:
                self._refuse(BulkStatus.UNKNOWN_TRANSFER)
                return
            # Python integers do not wrap: a sum beyond 64 bits is just too large.
            if length == 0 or offset + length > len(source):
                self._refuse(BulkStatus.RANGE)
                return
            self._view = source[offset : offset + length]
        except ValueError:  # the owner released the view under its exposure
            self._refuse(BulkStatus.SOURCE_FAILED)
            return
        self.transfer_id = transfer_id
        self._head, self._position = ANSWER.pack(MAGIC, BulkStatus.OK, length), 0
        self._moved_at = self._loop.time()
        self._timer = self._loop.call_later(self._no_progress_s, self._on_timer)
        self._pump()

    def _refuse(self, status: BulkStatus) -> None:
        try:
            sent = self.wire.send(ANSWER.pack(MAGIC, status, 0))
        except OSError:
            sent = None
        if sent != ANSWER.size:  # room for 16 bytes is missing only when the peer does not read
            self.close()

    def _pump(self) -> None:
        try:
            finished = self._send_some()
        except OSError as error:
            self._send_failed(error)
            return
        if finished:
            self._end_answer()
            self._await_request()
        else:
            # Requests behind this one wait in the kernel. A peer that leaves makes the next send
            # fail, so nothing is missed by not reading.
            self.wire.unwatch_readable()
            self.wire.watch_writable(self._pump)

    def _send_some(self) -> bool:
        """True when the kernel has the last byte."""
        wire, view, end = self.wire, self._view, len(self._view)
        budget = CALLBACK_BYTES
        while budget > 0:
            piece = view[self._position : self._position + min(budget, wire.call_bytes)]
            head = len(self._head)
            count = wire.send_pair(self._head, piece) if head else wire.send(piece)
            if count is None:
                return False
            self._moved_at = self._loop.time()
            self._head = self._head[count:]
            self._position += max(0, count - head)
            budget -= count
            if self._position == end:
                return True
            if count < head + len(piece) and not wire.tls:
                return False  # the socket is full: save the call that would say so
        return False

    def _send_failed(self, error: OSError) -> None:
        untouched = len(self._head) == ANSWER.size
        transfer_id = self.transfer_id
        if error.errno != errno.EFAULT:
            self.close()
            return
        # The memory went away under us: a mapped file was truncated. Only the transfer fails.
        _log.warning("transfer %s: its source memory cannot be read any more", transfer_id)
        if untouched:
            self._end_answer()
            self._refuse(BulkStatus.SOURCE_FAILED)
            self._await_request()
        else:
            self.close()

    def _await_request(self) -> None:
        if self.wire.closed:
            return
        self.wire.watch_readable(self._on_readable)
        if self.wire.has_buffered():
            self._loop.call_soon(self._on_readable)

    def _end_answer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.wire.closed:
            self.wire.unwatch_writable()
        view, self._view, self.transfer_id = self._view, NO_BYTES, None
        if view is not NO_BYTES:
            view.release()  # the owner may want to close what lies under it

    def _on_timer(self) -> None:
        left = self._moved_at + self._no_progress_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._on_timer)
        else:
            self.close()
