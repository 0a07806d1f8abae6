"""TLS on the one port: certificates that are not trusted, and ends of which only one speaks TLS."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import PeerError, PeerProtocolError, PeerRefused, PeerUnreachable
from orbit.testing.leftovers import nothing_left
from orbit.testing.sessions import make_hello
from orbit.testing.waiting import until
from orbit.transport.tcp_dial import DialOptions, dial
from orbit.transport.tcp_incoming import admit_all
from orbit.transport.tcp_listener import ListenOptions, TcpListener
from tests.contract.tls_contexts import client_context, server_context

Run = Callable[[Coroutine[Any, Any, None]], None]
HELLO = make_hello(1, 0, b"a" * 16)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def listening(tls: ssl.SSLContext | None) -> AsyncIterator[TcpListener]:
    async with nothing_left():
        options = ListenOptions(tls=tls, handshake_timeout_s=0.3)
        listener = TcpListener(
            lambda: make_hello(2, 0, bytes(16)),
            None,
            admit_all(lambda link: link.link.abort()),
            options=options,
        )
        await listener.open("127.0.0.1", 0)
        try:
            yield listener
        finally:
            await listener.close()


async def dial_fails(
    listener: TcpListener, tls: ssl.SSLContext | None, kind: type[PeerError], name: str = ""
) -> PeerError:
    options = DialOptions(tls=tls, tls_name=name, handshake_timeout_s=0.3)
    with pytest.raises(kind) as caught:
        await dial(listener.endpoints, HELLO, None, options=options)
    await until(lambda: listener.statistics().refused)
    return caught.value


def test_untrusted_certificate(run_async: Run) -> None:
    async def body() -> None:
        async with listening(server_context()) as listener:
            stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            error = await dial_fails(listener, stranger, PeerRefused, "localhost")
            assert isinstance(error, PeerRefused)
            assert error.reason == "tls"
            assert "self-signed" in error.detail
            assert set(listener.statistics().refused) == {"tls"}

    run_async(body())


def test_certificate_of_another_name(run_async: Run) -> None:
    async def body() -> None:
        async with listening(server_context()) as listener:
            error = await dial_fails(listener, client_context(), PeerRefused, "elsewhere")
            assert "elsewhere" in str(error)

    run_async(body())


def test_the_peer_speaks_no_tls(run_async: Run) -> None:
    """It sees no preface and closes, which TLS reports in one way or another."""

    async def body() -> None:
        async with listening(None) as listener:
            await dial_fails(listener, client_context(), PeerError, "localhost")
            assert set(listener.statistics().refused) == {"peer_protocol"}

    run_async(body())


def test_the_dialer_speaks_no_tls(run_async: Run) -> None:
    async def body() -> None:
        async with listening(server_context()) as listener:
            error = await dial_fails(listener, None, PeerError)
            assert isinstance(error, PeerProtocolError | PeerUnreachable)
            assert set(listener.statistics().refused) <= {"tls", "closed"}

    run_async(body())
