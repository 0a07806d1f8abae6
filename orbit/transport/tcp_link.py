"""ControlLink over one TCP connection: a u32 length, then the frame.

Takes over a wire after its handshake. Owns its reading and writing, and the one report of how the
connection ended. Knows frame kinds only so far as the parser refuses unknown ones; calls, pings
and goodbyes belong to the session above.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence

from ..errors import ClosedError, InternalError, OrbitError, PeerLost, PeerProtocolError
from ..protocol.framing import FRAME_BYTES_MAX, FrameParser, encode_on_stream
from .interface import ClosedHandler, FrameHandler, LoopCallback
from .tcp_backlog import Backlog, gather
from .tcp_wire import Wire

# Four of the largest frames. A peer that lets more pile up than this is not reading.
BACKLOG_BYTES_MAX = 4 << 20
FLUSH_S = 1.0
_RECEIVE_BYTES = 64 << 10
_RECEIVES_PER_CALLBACK = 4

_log = logging.getLogger("orbit.transport.tcp")


class TcpLink:
    """Reads nothing until `start`. All callbacks come from the event loop, one at a time."""

    frames_stay = True  # the parser copies each frame into its own memory

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
        self._backlog = Backlog(wire, backlog_bytes_max)
        self._on_frame: FrameHandler = _ignore
        self._on_closed: ClosedHandler | None = None
        self._on_pass_end: LoopCallback = _nothing
        self._on_taken: LoopCallback = _nothing
        self._closing: asyncio.TimerHandle | None = None
        self._cause: OrbitError | None = None
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self.accepted_bytes = 0
        self.taken_bytes = 0

    @property
    def endpoint(self) -> str:
        return self._wire.endpoint

    @property
    def backlog_bytes(self) -> int:
        """Accepted, not yet taken by the kernel."""
        return self._backlog.nbytes

    def watch_taken(self, on_taken: LoopCallback) -> None:
        self._on_taken = on_taken

    def start(
        self,
        on_frame: FrameHandler,
        on_closed: ClosedHandler,
        on_pass_end: LoopCallback | None = None,
    ) -> None:
        self._on_frame, self._on_closed = on_frame, on_closed
        self._on_pass_end = on_pass_end or _nothing
        if self._gone.done():  # closed before anybody listened
            self._report_soon()
            return
        if self._reading():
            self._wire.watch_readable(self._on_readable)
            # Frames may have come with the last of the handshake, or wait inside TLS.
            self._loop.call_soon(self._deliver_early)

    def send_nowait(self, frame: bytes) -> None:
        self._submit((memoryview(encode_on_stream(frame)),))

    def send_gathered(self, frames: Sequence[tuple[bytes, memoryview]]) -> None:
        self._submit(gather(frames))

    def close(self) -> None:
        if self._wire.closed or self._closing is not None:
            return
        self._wire.unwatch_readable()
        if self._backlog.nbytes:
            self._closing = self._loop.call_later(FLUSH_S, self._end, None)
        else:
            self._end(None)

    def abort(self) -> None:
        if not self._wire.closed:
            self._wire.abort()
            self._end(None)

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)

    def _submit(self, pieces: Sequence[memoryview]) -> None:
        if self._wire.closed or self._closing is not None:
            raise ClosedError(f"the link to {self.endpoint}")
        waiting = self._backlog.nbytes > 0
        self.accepted_bytes += self._backlog.add(pieces)
        if waiting:
            return
        self._drain()
        if self._backlog.nbytes and not self._wire.closed:
            self._wire.watch_writable(self._on_writable)

    def _deliver_early(self) -> None:
        self._deliver()
        if self._reading() and self._wire.has_buffered():
            self._receive()
        self._end_pass()

    def _reading(self) -> bool:
        return not self._wire.closed and self._closing is None

    def _on_readable(self) -> None:
        self._receive()
        self._end_pass()

    def _receive(self) -> None:
        parser = self._parser
        for _ in range(_RECEIVES_PER_CALLBACK):
            if self._wire.closed or self._closing is not None:
                return
            space = parser.space()
            target = self._buffer if space is None else space
            try:
                count = self._wire.recv_into(target)
            except OSError as error:
                self._lose(_cause(error))
                return
            if count is None:
                return
            if count == 0:
                inside = parser.pending_bytes > 0
                self._lose("closed inside a frame" if inside else "closed by the peer")
                return
            try:
                if space is None:
                    parser.feed(target[:count])
                else:
                    parser.filled(count)
            except PeerProtocolError as error:
                self._end(error)
                return
            self._deliver()
            if count < len(target) and not self._wire.tls:
                return  # that was all; a TLS record says nothing about what is behind it
        # The rest must not wait for another event: a reset behind it ends uvloop's events.
        self._loop.call_soon(self._on_readable)

    def _deliver(self) -> None:
        wire, next_frame = self._wire, self._parser.next_frame
        try:
            # A handler may close either.
            while not wire.closed and self._closing is None and (frame := next_frame()) is not None:
                self._on_frame(frame)
        except Exception as error:
            self._on_failure(error)

    def _end_pass(self) -> None:
        try:
            self._on_pass_end()
        except Exception as error:
            self._on_failure(error)

    def _on_failure(self, error: Exception) -> None:
        if isinstance(error, PeerProtocolError):
            self._end(error)
            return
        # A handler's bug must not leave a link that delivers half.
        _log.error("%s: a frame handler failed", self.endpoint, exc_info=error)
        self._end(InternalError(f"a frame handler failed: {error!r}"))

    def _drain(self) -> None:
        try:
            self._backlog.drain()
            self.taken_bytes = self.accepted_bytes - self._backlog.nbytes
        except OSError as error:
            # The reader's handlers must not run inside somebody's send.
            self._wire.abort()
            self._loop.call_soon(self._end, PeerLost(self.endpoint, _cause(error)))

    def _on_writable(self) -> None:
        before = self._backlog.nbytes
        self._drain()
        if not self._backlog.nbytes:
            self._wire.unwatch_writable()
            if self._closing is not None:
                self._end(None)
                return
        if self._backlog.nbytes < before:
            self._on_taken()

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
        self._cause = cause
        self._report_soon()
        self._gone.set_result(None)

    def _report_soon(self) -> None:
        # From the loop, never from inside the caller's close or send.
        on_closed, self._on_closed, self._on_frame = self._on_closed, None, _ignore
        self._on_pass_end = self._on_taken = _nothing
        if on_closed is not None:
            self._loop.call_soon(on_closed, self._cause)


def _ignore(frame: memoryview) -> None:
    pass


def _nothing() -> None:
    pass


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return error.strerror or type(error).__name__
