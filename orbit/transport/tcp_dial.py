"""Dialing: connect, TLS if asked for, handshake; each step with its own deadline and its own error.

`dial` opens an epoch, `dial_bulk` joins a bulk connection to one. Retrying and back-off belong to
whoever wants the peer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PeerProtocolError, PeerRefused, PeerUnreachable
from ..model import PeerIdentity
from ..protocol.bootstrap import Dialer, Opened, printable
from ..protocol.codec import decode, encode
from ..protocol.framing import FrameKind, encode_frame, split_frame
from ..protocol.messages import BulkHello, Hello, Refusal
from .tcp_connect import connect
from .tcp_handshake import EstablishedLink, HandshakeStream, StreamEnded, run_handshake
from .tcp_link import TcpLink
from .tcp_wire import Endpoint, Wire, format_endpoint, secure


@dataclass(frozen=True, slots=True)
class DialOptions:
    """`handshake_timeout_s` covers TLS and the handshake together. `tls_name` is the name that the
    certificate must carry; empty: the host that is dialed."""

    connect_timeout_s: float = 5.0
    handshake_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    tls_name: str = ""


async def dial(
    endpoints: Sequence[Endpoint],
    hello: Hello,
    secret: bytes | None,
    *,
    expected: PeerIdentity | None = None,
    options: DialOptions | None = None,
) -> EstablishedLink:
    """A control connection to `expected` (None: to whoever listens there), its link not started
    yet.

    Raises PeerUnreachable (refused, timeout, silent, address, local), PeerRefused, PeerRestarted,
    PeerProtocolError ("not an orbit peer").
    """
    options = options or DialOptions()
    loop = asyncio.get_running_loop()
    sock, endpoint = await connect(endpoints, options.connect_timeout_s)
    deadline = loop.time() + options.handshake_timeout_s
    wire = await _wire(sock, endpoint, options, deadline)
    stream = HandshakeStream(wire)
    try:
        machine = Dialer(
            hello,
            secret,
            expected=expected,
            endpoint=wire.endpoint,
            now=loop.time(),
            timeout_s=max(deadline - loop.time(), 0.0),
        )
        epoch = await run_handshake(stream, machine, machine.step(Opened(), loop.time()))
    except BaseException:
        wire.close()
        raise
    return EstablishedLink(epoch, TcpLink(wire, stream.parser), endpoint)


async def dial_bulk(endpoints: Sequence[Endpoint], hello: BulkHello, options: DialOptions) -> Wire:
    """A bulk connection that the owner has admitted. Raises as `dial` does."""
    loop = asyncio.get_running_loop()
    sock, endpoint = await connect(endpoints, options.connect_timeout_s)
    deadline = loop.time() + options.handshake_timeout_s
    wire = await _wire(sock, endpoint, options, deadline)
    stream = HandshakeStream(wire)
    try:
        async with asyncio.timeout_at(deadline):
            await stream.send(encode_frame(FrameKind.BULK_HELLO, encode(hello.to_wire())))
            kind, body = split_frame(await stream.next_frame())
        if kind is FrameKind.REFUSAL:
            refusal = Refusal.from_wire(decode(body))
            raise PeerRefused(printable(refusal.reason, 32), printable(refusal.detail, 200))
        if kind is not FrameKind.WELCOME or stream.parser.pending_bytes:
            raise PeerProtocolError(f"{wire.endpoint}: {kind.name} in answer to a bulk hello")
    except TimeoutError as error:
        wire.close()
        detail = f"waited {options.handshake_timeout_s:g} s"
        raise PeerUnreachable(wire.endpoint, "silent", detail) from error
    except StreamEnded as ended:
        wire.close()
        raise PeerUnreachable(wire.endpoint, "silent", str(ended)) from ended
    except BaseException:
        wire.close()
        raise
    return wire


async def _wire(
    sock: socket.socket, endpoint: Endpoint, options: DialOptions, deadline: float
) -> Wire:
    name = format_endpoint(endpoint)
    if options.tls is None:
        return Wire(sock, name)
    try:
        async with asyncio.timeout_at(deadline):
            host = options.tls_name or endpoint[0]
            return await secure(sock, name, options.tls, server_hostname=host)
    except TimeoutError as error:
        detail = f"no TLS answer in {options.handshake_timeout_s:g} s"
        raise PeerUnreachable(name, "silent", detail) from error
    except ssl.SSLCertVerificationError as error:
        raise PeerRefused("tls", f"{name}: {error.verify_message}") from error
    except ssl.SSLError as error:
        hint = "does the peer speak TLS, and with a certificate from the same authority?"
        raise PeerRefused("tls", f"{name}: {error.reason or error}", hint=hint) from error
    except OSError as error:
        raise PeerUnreachable(name, "silent", f"TLS: {error.strerror or error}") from error
