"""One non-blocking stream socket, plain or TLS, with the same few calls for both.

Owns the socket, its options and its registration with the event loop. Knows no frames and no bulk
protocol: whoever holds a wire decides what the bytes mean. Every error here is an OSError
(ssl.SSLError is one); the owner of the wire turns it into a typed error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Sequence

Endpoint = tuple[str, int]

# A dead host is seen after KEEPALIVE_IDLE_S + USER_TIMEOUT_MS at the latest when idle, and after
# USER_TIMEOUT_MS when something is in flight. Below 10 s a paused virtual machine or a long switch
# reboot would already cut epochs.
KEEPALIVE_IDLE_S = 4
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_COUNT = 5
USER_TIMEOUT_MS = 10_000

_PLAIN_CALL_BYTES = 4 << 20
# OpenSSL hides the progress of one write: a big one would look like a stall to the no-progress
# deadline.
_TLS_CALL_BYTES = 64 << 10

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_BYTES_ACKED = slice(120, 128)  # tcpi_bytes_acked in struct tcp_info


class Wire:
    """Sole owner of `sock`. `recv_into` and `send` answer None when they would have to wait."""

    __slots__ = (
        "_loop",
        "_low_water",
        "_readable",
        "_sock",
        "_writable",
        "call_bytes",
        "closed",
        "endpoint",
        "tls",
    )

    def __init__(self, sock: socket.socket, endpoint: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._low_water = 1
        self._readable = False
        self._writable = False
        self.endpoint = endpoint
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.call_bytes = _TLS_CALL_BYTES if self.tls else _PLAIN_CALL_BYTES
        self.closed = False

    def recv_into(self, view: memoryview) -> int | None:
        """Bytes read, 0 at the end of the stream, None when nothing is there."""
        try:
            return self._sock.recv_into(view)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        except ssl.SSLWantWriteError as error:
            raise ConnectionResetError("TLS renegotiation is not supported") from error

    def recv_vector(self, pieces: Sequence[memoryview]) -> int | None:
        """As `recv_into`, into several pieces in one call. TLS fills the first."""
        if self.tls or len(pieces) == 1:
            return self.recv_into(pieces[0])
        try:
            return self._sock.recvmsg_into(pieces)[0]
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, view: memoryview | bytes) -> int | None:
        """Bytes that the kernel took (a copy is made by then), None when it takes none now."""
        try:
            return self._sock.send(view)
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLWantReadError as error:
            raise ConnectionResetError("TLS renegotiation is not supported") from error

    def send_vector(self, pieces: Sequence[memoryview]) -> int | None:
        """Several pieces in one call; the kernel may take a part of them. TLS sends the first."""
        if self.tls or len(pieces) == 1:
            return self.send(pieces[0])
        try:
            return self._sock.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return None

    def has_buffered(self) -> bool:
        """Decrypted bytes wait inside TLS, where the event loop cannot see them."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def set_receive_low_water(self, nbytes: int) -> None:
        """Wake the reader only when `nbytes` are there (or the stream ended). The kernel also
        raises the receive buffer to twice that, without ending its autotuning. TLS hides record
        sizes, so it has no low water."""
        if nbytes != self._low_water and not self.tls and not self.closed:
            self._low_water = nbytes
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def acknowledged_bytes(self) -> int:
        """How much of all that was sent the other end's kernel has confirmed, TLS's own bytes
        included; 0 where the system does not say.
        """
        if _TCP_INFO is None:
            return 0
        try:
            facts = self._sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.stop)
        except OSError:
            return 0
        return int.from_bytes(facts[_BYTES_ACKED], sys.byteorder)

    def watch_readable(self, callback: Callable[[], None]) -> None:
        """Until `unwatch_readable`; a second call keeps the first callback."""
        if not self._readable:
            self._readable = True
            self._loop.add_reader(self._sock, callback)

    def unwatch_readable(self) -> None:
        if self._readable:
            self._readable = False
            self._loop.remove_reader(self._sock)

    def watch_writable(self, callback: Callable[[], None]) -> None:
        """Until `unwatch_writable`; a second call keeps the first callback."""
        if not self._writable:
            self._writable = True
            self._loop.add_writer(self._sock, callback)

    def unwatch_writable(self) -> None:
        if self._writable:
            self._writable = False
            self._loop.remove_writer(self._sock)

    async def wait_readable(self) -> None:
        """For the few awaits of a handshake; later readers keep one callback registered."""
        if not self.has_buffered():
            await self._wait(self.watch_readable, self.unwatch_readable)

    async def wait_writable(self) -> None:
        await self._wait(self.watch_writable, self.unwatch_writable)

    async def send_all(self, data: bytes) -> None:
        """Handshake frames only: small, so that waiting here is rare."""
        view = memoryview(data)
        while view:
            sent = self.send(view)
            if sent is None:
                await self.wait_writable()
            else:
                view = view[sent:]

    async def _wait(
        self, watch: Callable[[Callable[[], None]], None], unwatch: Callable[[], None]
    ) -> None:
        future: asyncio.Future[None] = self._loop.create_future()

        def ready() -> None:
            if not future.done():
                future.set_result(None)

        watch(ready)
        try:
            await future
        finally:
            unwatch()

    def close(self) -> None:
        """End the stream after what the kernel already holds. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.unwatch_readable()
        self.unwatch_writable()
        # A forked child may hold a copy of the descriptor: only shutdown ends the connection for
        # certain.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def abort(self) -> None:
        """End the stream at once with a reset; what the kernel holds is dropped. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.unwatch_readable()
        self.unwatch_writable()
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


async def secure(
    sock: socket.socket, endpoint: str, context: ssl.SSLContext, *, server_hostname: str | None
) -> Wire:
    """TLS handshake on a connected socket, as the server when `server_hostname` is None. Takes
    `sock` over; closes it on any failure."""
    sock.setblocking(False)
    try:
        secured = context.wrap_socket(
            sock,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
    except BaseException:
        sock.close()
        raise
    wire = Wire(secured, endpoint)
    try:
        while True:
            try:
                secured.do_handshake()
            except ssl.SSLWantReadError:
                await wire.wait_readable()
            except ssl.SSLWantWriteError:
                await wire.wait_writable()
            else:
                return wire
    except BaseException:
        wire.close()
        raise


def tune(sock: socket.socket) -> None:
    """Options of every connection, dialed or accepted. Missing ones (off Linux) are left out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def endpoint_of(sockaddr: Sequence[object]) -> Endpoint:
    """Host and port of what getsockname, getpeername or accept returned. The scope of a link-local
    address stays."""
    host, port = str(sockaddr[0]), int(str(sockaddr[1]))
    if len(sockaddr) > 3 and sockaddr[3] and "%" not in host:
        host = f"{host}%{sockaddr[3]}"
    return host, port


def format_endpoint(endpoint: Endpoint) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
