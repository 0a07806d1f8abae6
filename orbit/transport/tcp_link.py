"""ControlLink over one TCP connection: a u32 length, then the frame.

Takes over a wire after its handshake. Owns the write backlog, its limit and the one report of how
the connection ended. Knows frame kinds only so far as the parser refuses unknown ones; calls, pings
and goodbyes belong to the session above.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque

from ..errors import BusyError, ClosedError, InternalError, OrbitError, PeerLost, PeerProtocolError
from ..protocol.framing import FRAME_BYTES_MAX, FrameParser, encode_on_stream
from .interface import ClosedHandler, FrameHandler
from .tcp_wire import Wire

# Four of the largest frames. A peer that lets more pile up than this is not reading.
BACKLOG_BYTES_MAX = 4 << 20
FLUSH_S = 1.0
_RECEIVE_BYTES = 64 << 10
_RECEIVES_PER_CALLBACK = 4

_log = logging.getLogger("orbit.transport.tcp")


class TcpLink:
    """Reads nothing until `start`. All callbacks come from the event loop, one at a time."""

    def __init__(
        self,
        wire: Wire,
        parser: FrameParser,
        *,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        """`parser` is the one that read the handshake; it may hold frames that came behind."""
        parser.frame_bytes_max = FRAME_BYTES_MAX
        self._wire = wire
        self._parser = parser
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._backlog_bytes_max = backlog_bytes_max
        self._on_frame: FrameHandler = _ignore
        self._on_closed: ClosedHandler | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._cause: OrbitError | None = None
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def endpoint(self) -> str:
        return self._wire.endpoint

    @property
    def backlog_bytes(self) -> int:
        """Accepted by `send_nowait`, not yet taken by the kernel."""
        return self._backlog_bytes

    def start(self, on_frame: FrameHandler, on_closed: ClosedHandler) -> None:
        self._on_frame, self._on_closed = on_frame, on_closed
        if self._gone.done():  # closed before anybody listened
            self._report_soon()
            return
        if self._reading():
            self._wire.watch_readable(self._on_readable)
            # Frames may have come with the last of the handshake, or wait inside TLS.
            self._loop.call_soon(self._deliver_early)

    def send_nowait(self, frame: bytes) -> None:
        if self._wire.closed or self._closing is not None:
            raise ClosedError(f"the link to {self.endpoint}")
        data = encode_on_stream(frame)
        if self._backlog:
            if self._backlog_bytes + len(data) > self._backlog_bytes_max:
                raise BusyError(
                    f"{self.endpoint}: {self._backlog_bytes} bytes wait to be sent",
                    hint="the peer does not keep up",
                )
            self._queue(memoryview(data))
            return
        sent = self._try_send(data)
        if sent is not None and sent < len(data):
            self._queue(memoryview(data)[sent:])
            self._wire.watch_writable(self._on_writable)

    def close(self) -> None:
        if self._wire.closed or self._closing is not None:
            return
        self._wire.unwatch_readable()
        if self._backlog:
            self._closing = self._loop.call_later(FLUSH_S, self._end, None)
        else:
            self._end(None)

    def abort(self) -> None:
        if not self._wire.closed:
            self._wire.abort()
            self._end(None)

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)

    def _deliver_early(self) -> None:
        self._deliver()
        if self._reading() and self._wire.has_buffered():
            self._on_readable()

    def _reading(self) -> bool:
        return not self._wire.closed and self._closing is None

    def _on_readable(self) -> None:
        for _ in range(_RECEIVES_PER_CALLBACK):
            if not self._reading():
                return
            try:
                count = self._wire.recv_into(self._buffer)
            except OSError as error:
                self._lose(_cause(error))
                return
            if count is None:
                return
            if count == 0:
                inside = self._parser.pending_bytes > 0
                self._lose("closed inside a frame" if inside else "closed by the peer")
                return
            try:
                self._parser.feed(self._buffer[:count])
            except PeerProtocolError as error:
                self._end(error)
                return
            self._deliver()
        # The rest must not wait for another event: a reset behind it ends uvloop's events.
        self._loop.call_soon(self._on_readable)

    def _deliver(self) -> None:
        try:
            while self._reading() and (frame := self._parser.next_frame()) is not None:
                self._on_frame(frame)
        except PeerProtocolError as error:
            self._end(error)
        except Exception as error:  # a handler's bug must not leave a link that delivers half
            _log.exception("%s: a frame handler failed", self.endpoint)
            self._end(InternalError(f"a frame handler failed: {error!r}"))

    def _try_send(self, data: memoryview | bytes) -> int | None:
        """Bytes taken; None when the connection is lost."""
        try:
            return self._wire.send(data) or 0
        except OSError as error:
            # The reader's handlers must not run inside somebody's send.
            self._wire.abort()
            self._loop.call_soon(self._end, PeerLost(self.endpoint, _cause(error)))
            return None

    def _queue(self, data: memoryview) -> None:
        self._backlog.append(data)
        self._backlog_bytes += len(data)

    def _on_writable(self) -> None:
        while self._backlog:
            head = self._backlog[0]
            sent = self._try_send(head)
            if not sent:  # lost, or full again
                return
            self._backlog_bytes -= sent
            if sent < len(head):
                self._backlog[0] = head[sent:]
                return
            self._backlog.popleft()
        self._wire.unwatch_writable()
        if self._closing is not None:
            self._end(None)

    def _lose(self, cause: str) -> None:
        self._end(PeerLost(self.endpoint, cause))

    def _end(self, cause: OrbitError | None) -> None:
        """The one way out. What comes later changes nothing any more."""
        if self._gone.done():
            return
        if self._closing is not None:
            self._closing.cancel()
            cause = None  # we ended it; how the flush went is nobody's business
        self._wire.close()
        self._backlog.clear()
        self._backlog_bytes = 0
        self._cause = cause
        self._report_soon()
        self._gone.set_result(None)

    def _report_soon(self) -> None:
        # From the loop, never from inside the caller's close or send.
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, _ignore
        if on_closed is not None:
            self._loop.call_soon(on_closed, self._cause)


def _ignore(frame: memoryview) -> None:
    pass


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return error.strerror or type(error).__name__
