"""The one listening port of a node: accepts, greets, and hands each connection to whom it is for.

The first frame says what a connection is: a hello starts a handshake and ends as a control link, a
bulk hello joins an open epoch. Until then a connection costs one task, has one absolute deadline
and counts against a cap; what it says wrong ends it and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..errors import OrbitError, PeerProtocolError, PeerRefused
from ..protocol.bootstrap import Listener, printable, refusal_frame
from ..protocol.codec import decode, encode
from ..protocol.framing import PREFACE, FrameKind, encode_frame, encode_on_stream, split_frame
from ..protocol.messages import BulkHello, Hello, Welcome
from .tcp_bind import bind
from .tcp_handshake import HandshakeStream, StreamEnded, run_handshake
from .tcp_incoming import IncomingLink
from .tcp_wire import Endpoint, Wire, endpoint_of, format_endpoint, secure, tune

_ACCEPTS_PER_CALLBACK = 32
# Out of descriptors the listening socket stays readable: without a pause the loop would spin.
_ACCEPT_PAUSE_S = 0.1
_OUT_OF = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger("orbit.transport.tcp")


class BulkHost(Protocol):
    """Who takes accepted bulk connections (TcpPath does)."""

    def admit_bulk(self, hello: BulkHello) -> None:
        """Raises PeerRefused."""

    def serve_bulk(self, wire: Wire, hello: BulkHello) -> None:
        """The peer was welcomed; the wire is yours."""


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """`half_open_max`: connections that have proven nothing yet; further ones are refused."""

    handshake_timeout_s: float = 5.0
    half_open_max: int = 64
    backlog: int = 256
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class ListenerStatistics:
    """`refused` counts by reason: protocol, silent, tls, busy, version, auth, wrong_peer ..."""

    accepted: int
    half_open: int
    control: int
    bulk: int
    refused: Mapping[str, int]


class TcpListener:
    """`hello` makes a fresh Hello (new nonce) for each connection. `on_control` gets each dialer
    that has proven itself, and admits it, refuses it or lets it wait. Open it with `open`."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        secret: bytes | None,
        on_control: Callable[[IncomingLink], None],
        bulk: BulkHost | None = None,
        options: ListenOptions | None = None,
    ) -> None:
        self._hello = hello
        self._secret = secret
        self._on_control = on_control
        self._bulk = bulk
        self._options = options or ListenOptions()
        self._sockets: list[socket.socket] = []
        self._greetings: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._closed = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """What the kernel says after the bind; wildcard addresses as they are."""
        return tuple(endpoint_of(sock.getsockname()) for sock in self._sockets)

    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(
            accepted=self._counts["accepted"],
            half_open=len(self._greetings),
            control=self._counts["control"],
            bulk=self._counts["bulk"],
            refused=dict(self._refused),
        )

    async def open(self, host: str, port: int) -> None:
        """Bind and listen. Raises ConfigError naming host and port."""
        loop = asyncio.get_running_loop()
        # Resolving a name may block, so it is done in a thread.
        self._sockets = await loop.run_in_executor(None, bind, host, port, self._options.backlog)
        for sock in self._sockets:
            loop.add_reader(sock, self._on_acceptable, sock)

    async def close(self) -> None:
        """Stop listening and end every greeting. Established links and bulk wires live on."""
        self._closed = True
        loop = asyncio.get_running_loop()
        for pause in self._pauses.values():
            pause.cancel()
        for sock in self._sockets:
            loop.remove_reader(sock)
            sock.close()
        self._sockets, self._pauses = [], {}
        greetings = tuple(self._greetings)
        for task in greetings:
            task.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)

    def _on_acceptable(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_CALLBACK):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF:
                    self._pause(listener, error)
                    return
                continue  # that connection died in the backlog
            self._counts["accepted"] += 1
            self._welcome(sock, endpoint_of(address))

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        _log.warning("cannot accept connections: %s", error.strerror)
        loop.remove_reader(listener)

        def resume() -> None:
            del self._pauses[listener]
            loop.add_reader(listener, self._on_acceptable, listener)

        self._pauses[listener] = loop.call_later(_ACCEPT_PAUSE_S, resume)

    def _welcome(self, sock: socket.socket, endpoint: Endpoint) -> None:
        try:
            sock.setblocking(False)
            tune(sock)
        except OSError:  # gone already
            sock.close()
            return
        if len(self._greetings) >= self._options.half_open_max:
            self._refused["busy"] += 1
            _turn_away(sock, plain=self._options.tls is None)
            return
        task = asyncio.get_running_loop().create_task(self._greet(sock, endpoint))
        self._greetings.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._greetings.discard(task)
            if task.cancelled():  # perhaps before it ran at all, and could close anything
                sock.close()

        task.add_done_callback(ended)

    async def _greet(self, sock: socket.socket, endpoint: Endpoint) -> None:
        deadline = asyncio.get_running_loop().time() + self._options.handshake_timeout_s
        name = format_endpoint(endpoint)
        wire: Wire | None = None
        handed_over = False
        try:
            async with asyncio.timeout_at(deadline):
                wire = await self._secure(sock, name)
                stream = HandshakeStream(wire)
                frame = await stream.next_frame()
            kind, body = split_frame(frame)
            if kind is FrameKind.BULK_HELLO:
                await self._greet_bulk(stream, BulkHello.from_wire(decode(body)), deadline)
            else:
                await self._greet_control(stream, endpoint, frame, deadline)
            handed_over = True
        except TimeoutError:
            self._refuse("silent", name, "nothing was said in time")
        except StreamEnded as ended:
            self._refuse("closed", name, str(ended))
        except OrbitError as error:
            reason = error.reason if isinstance(error, PeerRefused) else error.code
            self._refuse(reason, name, str(error))
        except OSError as error:  # of TLS
            self._refuse("tls", name, str(error))
        finally:
            if not handed_over and wire is not None:
                wire.close()

    async def _secure(self, sock: socket.socket, name: str) -> Wire:
        if self._options.tls is None:
            return Wire(sock, name)
        return await secure(sock, name, self._options.tls, server_hostname=None)

    async def _greet_control(
        self, stream: HandshakeStream, endpoint: Endpoint, frame: memoryview, deadline: float
    ) -> None:
        now = asyncio.get_running_loop().time()
        machine = Listener(
            self._hello(),
            self._secret,
            endpoint=stream.wire.endpoint,
            now=now,
            timeout_s=max(deadline - now, 0.0),
        )
        epoch = await run_handshake(stream, machine, machine.on_frame(frame, now))
        incoming = IncomingLink(machine, stream, epoch, endpoint)
        self._on_control(incoming)
        async with asyncio.timeout_at(deadline):
            await incoming.wait_decided()
        self._counts["control"] += 1

    async def _greet_bulk(self, stream: HandshakeStream, hello: BulkHello, deadline: float) -> None:
        try:
            if self._bulk is None:
                raise PeerRefused("closing", "no bulk connections here")
            if stream.parser.pending_bytes:
                raise PeerProtocolError("bytes after a bulk hello")
            self._bulk.admit_bulk(hello)
        except PeerRefused as error:
            async with asyncio.timeout_at(deadline):
                await stream.send(refusal_frame(error.reason, error.detail))
            raise
        async with asyncio.timeout_at(deadline):
            await stream.send(encode_frame(FrameKind.WELCOME, encode(Welcome(1).to_wire())))
        self._counts["bulk"] += 1
        self._bulk.serve_bulk(stream.wire, hello)

    def _refuse(self, reason: str, name: str, detail: str) -> None:
        self._refused[reason] += 1
        _log.info("%s: connection refused: %s (%s)", name, reason, printable(detail, 200))


def _turn_away(sock: socket.socket, *, plain: bool) -> None:
    """Say busy as far as the empty send buffer of a new connection takes it, which it does."""
    try:
        if plain:
            sock.send(PREFACE + encode_on_stream(refusal_frame("busy", "too many handshakes")))
    except OSError:
        pass
    finally:
        sock.close()
