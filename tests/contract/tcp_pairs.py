"""TCP implementations for the contract suites: real sockets on loopback, both ends in one loop."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

from orbit.testing.sessions import StubSession, make_hello
from orbit.transport.interface import Target
from orbit.transport.tcp_dial import DialOptions, dial
from orbit.transport.tcp_handshake import EstablishedLink
from orbit.transport.tcp_incoming import admit_all
from orbit.transport.tcp_link import TcpLink
from orbit.transport.tcp_listener import ListenOptions, TcpListener
from orbit.transport.tcp_path import TcpPath, TcpPathOptions

SECRET = b"contract"
OWNER, CONSUMER = 2, 1


@dataclass(eq=False)
class TcpPathPair:
    """An owner that listens and a consumer that dials."""

    owner: TcpPath
    consumer: TcpPath
    owner_session: StubSession
    consumer_session: StubSession
    listener: TcpListener
    big_bytes: int = 32 << 20

    def allocate_source(self, nbytes: int) -> Target:
        return Target(memoryview(bytearray(nbytes)))

    def allocate_target(self, nbytes: int) -> Target:
        return Target(memoryview(bytearray(nbytes)))

    def free(self, memory: Target) -> None:
        memory.view.release()

    async def kill_owner(self) -> None:
        """What a consumer sees of a killed owner: every socket ends, nothing listens."""
        await self.owner.close()
        await self.listener.close()


@contextlib.asynccontextmanager
async def tcp_path_pair(
    number: int = 1,
    options: TcpPathOptions | None = None,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
) -> AsyncIterator[TcpPathPair]:
    # Longer than any case waits: an end that only this deadline would notice fails the case.
    options = options or TcpPathOptions(no_progress_s=60)
    owner = TcpPath(options=options)
    dial_options = DialOptions(tls=client_tls, tls_name="localhost" if client_tls else "")
    consumer = TcpPath(dial_options, options)
    listener = TcpListener(
        lambda: make_hello(OWNER, 0, bytes(16)),
        SECRET,
        admit_all(lambda link: link.link.abort()),
        owner,
        ListenOptions(tls=server_tls),
    )
    await listener.open("127.0.0.1", 0)
    owner_session = StubSession(number, dialer=False)
    consumer_session = StubSession(number, dialer=True, endpoint=listener.endpoints[0])
    owner_session.connect(consumer_session)
    try:
        yield TcpPathPair(owner, consumer, owner_session, consumer_session, listener)
    finally:
        await consumer.close()
        await owner.close()
        await listener.close()


@contextlib.asynccontextmanager
async def tcp_link_pair(
    server_tls: ssl.SSLContext | None = None, client_tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[TcpLink, TcpLink]]:
    """Dialing end first. Neither is started."""
    accepted: list[EstablishedLink] = []
    listener = TcpListener(
        lambda: make_hello(OWNER, 0, bytes(16), nonce=b"n" * 16),
        SECRET,
        admit_all(accepted.append),
        options=ListenOptions(tls=server_tls),
    )
    await listener.open("127.0.0.1", 0)
    try:
        dialed = await dial(
            listener.endpoints,
            make_hello(CONSUMER, 0, b"a" * 16),
            SECRET,
            options=DialOptions(tls=client_tls, tls_name="localhost" if client_tls else ""),
        )
        yield dialed.link, accepted[0].link
    finally:
        await listener.close()
        for established in (*accepted, dialed):
            established.link.abort()
