"""Dialer and listener over real sockets: good and bad openings of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import PeerProtocolError, PeerRefused, PeerRestarted, PeerUnreachable
from orbit.model import Incarnation, PeerIdentity, WorkerId
from orbit.protocol.bootstrap import Dialer, Opened, State, refusal_frame
from orbit.protocol.codec import encode
from orbit.protocol.framing import (
    PREFACE,
    FrameKind,
    FrameParser,
    SendFrame,
    encode_frame,
    encode_on_stream,
)
from orbit.testing.leftovers import nothing_left
from orbit.testing.sessions import make_hello
from orbit.testing.waiting import until
from orbit.transport.tcp_dial import DialOptions, dial
from orbit.transport.tcp_handshake import EstablishedLink
from orbit.transport.tcp_incoming import admit_all
from orbit.transport.tcp_listener import ListenOptions, TcpListener

Run = Callable[[Coroutine[Any, Any, None]], None]
QUICK = DialOptions(connect_timeout_s=5, handshake_timeout_s=0.05)
ME, IT = 1, 2
HELLO = make_hello(ME, 0, b"a" * 16, nonce=b"m" * 16)
TO_IT = make_hello(ME, IT, b"a" * 16, nonce=b"m" * 16)
THERE = PeerIdentity(WorkerId(IT), Incarnation(100 + IT))


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Server(TcpListener):
    """Counts up its nonces, keeps its links."""

    def __init__(self, secret: bytes | None = None, **options: Any) -> None:
        self.links: list[EstablishedLink] = []
        self._nonce = 0
        super().__init__(
            self._fresh_hello,
            secret,
            admit_all(self.links.append),
            options=ListenOptions(**options),
        )

    def _fresh_hello(self) -> Any:
        self._nonce += 1
        return make_hello(IT, 0, bytes(16), nonce=self._nonce.to_bytes(16, "big"))


@contextlib.asynccontextmanager
async def server(secret: bytes | None = None, **options: Any) -> AsyncIterator[Server]:
    async with nothing_left():
        it = Server(secret, **options)
        await it.open("127.0.0.1", 0)
        try:
            yield it
        finally:
            await it.close()
            for link in it.links:
                link.link.abort()


@contextlib.asynccontextmanager
async def scripted(*says: bytes, close: bool = False) -> AsyncIterator[tuple[str, int]]:
    """A stranger's server: says something to whoever connects, and then stays silent or leaves."""
    loop = asyncio.get_running_loop()
    accepted: list[socket.socket] = []

    async def serve() -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            accepted.append(sock)
            await loop.sock_sendall(sock, b"".join(says))
            if close:
                sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        task = asyncio.ensure_future(serve())
        try:
            yield listener.getsockname()
        finally:
            task.cancel()
            await asyncio.wait([task])
            for sock in accepted:
                sock.close()


async def open_by_hand(endpoint: tuple[str, int], secret: bytes) -> bytes:
    """A good handshake; returns every byte that the dialer sent."""
    loop = asyncio.get_running_loop()
    machine = Dialer(HELLO, secret, expected=None, endpoint="it", now=0.0, timeout_s=9.0)
    parser = FrameParser()
    sent = PREFACE
    effects = machine.step(Opened(), 0.0)
    with await connected(endpoint) as sock:
        await loop.sock_sendall(sock, PREFACE)
        while not machine.finished:
            for effect in effects:
                if isinstance(effect, SendFrame):
                    sent += encode_on_stream(effect.frame)
                    await loop.sock_sendall(sock, encode_on_stream(effect.frame))
            while (frame := parser.next_frame()) is None:
                parser.feed(await loop.sock_recv(sock, 65536))
            effects = machine.on_frame(frame, 0.0)
    assert machine.state is State.ESTABLISHED
    return sent


async def connected(endpoint: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, endpoint)
    return sock


async def talk(endpoint: tuple[str, int], data: bytes) -> bytes:
    """Everything that the listener answers to `data` until it closes."""
    loop = asyncio.get_running_loop()
    with await connected(endpoint) as sock:
        await loop.sock_sendall(sock, data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(sock, 65536):
                answer += piece
        return answer


@pytest.mark.parametrize("secret", [None, b"shared"])
def test_an_epoch_opens(run_async: Run, secret: bytes | None) -> None:
    async def body() -> None:
        async with server(secret) as it:
            mine = await dial(it.endpoints, TO_IT, secret, expected=THERE)
            await until(lambda: it.links)
            theirs = it.links[0]
            assert mine.epoch.peer == THERE
            assert theirs.epoch.peer.worker_id == ME
            assert mine.epoch.key == theirs.epoch.key
            assert mine.epoch.attempt == theirs.epoch.attempt == b"a" * 16
            assert mine.endpoint == it.endpoints[0]
            assert it.statistics().control == 1
            mine.link.abort()

    run_async(body())


def test_a_frame_right_behind_the_welcome_is_not_lost(run_async: Run) -> None:
    async def body() -> None:
        async with server() as it:
            got: list[bytes] = []

            def speak(link: EstablishedLink) -> None:
                it.links.append(link)
                link.link.send_nowait(b"\x10early")

            it._on_control = admit_all(speak)
            mine = await dial(it.endpoints, HELLO, None)
            mine.link.start(lambda frame: got.append(bytes(frame)), lambda cause: None)
            await until(lambda: got)
            assert got == [b"\x10early"]
            mine.link.abort()

    run_async(body())


@pytest.mark.parametrize(("mine", "theirs"), [(b"a", b"b"), (None, b"b"), (b"a", None)])
def test_secrets_differ(run_async: Run, mine: bytes | None, theirs: bytes | None) -> None:
    async def body() -> None:
        async with server(theirs) as it:
            with pytest.raises(PeerRefused) as caught:
                await dial(it.endpoints, HELLO, mine)
            assert caught.value.reason == "auth"
            assert "--secret-file" in caught.value.hint
            await until(lambda: it.statistics().refused)
            assert not it.links

    run_async(body())


def test_versions_without_overlap(run_async: Run) -> None:
    async def body() -> None:
        async with server() as it:
            with pytest.raises(PeerRefused) as caught:
                await dial(it.endpoints, replace(HELLO, version_min=7, version_max=9), None)
            assert caught.value.reason == "version"
            assert "7..9" in str(caught.value)
            await until(lambda: it.statistics().refused)
            assert it.statistics().refused == {"version": 1}

    run_async(body())


def test_another_worker_listens_there(run_async: Run) -> None:
    async def body() -> None:
        async with server() as it:
            other = PeerIdentity(WorkerId(77), Incarnation(1))
            with pytest.raises(PeerRefused) as caught:
                await dial(it.endpoints, replace(HELLO, target=77), None, expected=other)
            assert caught.value.reason == "wrong_peer"

    run_async(body())


def test_it_was_restarted(run_async: Run) -> None:
    async def body() -> None:
        async with server() as it:
            older = PeerIdentity(WorkerId(IT), Incarnation(5))
            with pytest.raises(PeerRestarted):
                await dial(it.endpoints, TO_IT, None, expected=older)
            await until(lambda: not it.statistics().half_open)
            assert not it.links

    run_async(body())


def test_dialing_a_silent_peer(run_async: Run) -> None:
    async def body() -> None:
        for says in ((), (PREFACE,), (PREFACE, b"\x00\x00")):
            async with scripted(*says) as endpoint:
                with pytest.raises(PeerUnreachable) as caught:
                    await dial([endpoint], HELLO, None, options=QUICK)
                assert caught.value.kind == "silent"

    run_async(body())


def test_dialing_a_peer_that_hangs_up(run_async: Run) -> None:
    async def body() -> None:
        async with scripted(close=True) as endpoint:
            with pytest.raises(PeerUnreachable) as caught:
                await dial([endpoint], HELLO, None)
            assert caught.value.kind == "silent"

    run_async(body())


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        PREFACE + b"\xff\xff\xff\xff",
        PREFACE + b"\x00\x00\x00\x00",
        PREFACE + encode_on_stream(b"\x01junk"),
        PREFACE + encode_on_stream(encode_frame(FrameKind.PONG, encode([1]))),
        PREFACE + encode_on_stream(encode_frame(FrameKind.HELLO, encode({"version_min": -1}))),
    ],
)
def test_dialing_a_stranger(run_async: Run, says: bytes) -> None:
    async def body() -> None:
        async with scripted(says) as endpoint:
            with pytest.raises(PeerProtocolError):
                await dial([endpoint], HELLO, None)

    run_async(body())


def test_dialing_a_busy_peer(run_async: Run) -> None:
    async def body() -> None:
        async with scripted(PREFACE + encode_on_stream(refusal_frame("busy"))) as endpoint:
            with pytest.raises(PeerRefused) as caught:
                await dial([endpoint], HELLO, None)
            assert caught.value.reason == "busy"

    run_async(body())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "peer_protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "peer_protocol"),
        (PREFACE + b"\xff\xff\xff\xff" + b"x" * 1000, "peer_protocol"),
        (PREFACE + (4097).to_bytes(4, "big"), "peer_protocol"),
        (PREFACE + encode_on_stream(b"\x63"), "peer_protocol"),
        (PREFACE + encode_on_stream(encode_frame(FrameKind.CALL, b"\x90")), "peer_protocol"),
        (PREFACE + encode_on_stream(encode_frame(FrameKind.HELLO, b"\xc1")), "peer_protocol"),
        (PREFACE + encode_on_stream(encode_frame(FrameKind.BULK_HELLO, b"\x80")), "peer_protocol"),
    ],
)
def test_garbage_costs_one_connection(run_async: Run, data: bytes, reason: str) -> None:
    async def body() -> None:
        async with server() as it:
            await talk(it.endpoints[0], data)
            await until(lambda: it.statistics().refused)
            assert it.statistics().refused == {reason: 1}
            mine = await dial(it.endpoints, HELLO, None)  # and everybody else is served
            mine.link.abort()

    run_async(body())


def test_a_replayed_opening_gets_nowhere(run_async: Run) -> None:
    """The listener's nonce is fresh, so that recorded bytes prove nothing."""

    async def body() -> None:
        async with server(b"secret") as it:
            sent = await open_by_hand(it.endpoints[0], b"secret")
            await until(lambda: it.links)
            await talk(it.endpoints[0], sent)
            await until(lambda: it.statistics().refused)
            assert it.statistics().refused == {"auth": 1}
            assert len(it.links) == 1

    run_async(body())


def test_silence_has_a_deadline(run_async: Run) -> None:
    async def body() -> None:
        async with server(handshake_timeout_s=0.05) as it:
            hello = PREFACE + encode_on_stream(
                encode_frame(FrameKind.HELLO, encode(HELLO.to_wire()))
            )
            for says in (b"", PREFACE[:3], hello):
                await talk(it.endpoints[0], says)
            await until(lambda: sum(it.statistics().refused.values()) == 3)
            assert it.statistics().half_open == 0

    run_async(body())


def test_a_trickle_does_not_extend_the_deadline(run_async: Run) -> None:
    async def body() -> None:
        async with server(handshake_timeout_s=0.05) as it:
            with await connected(it.endpoints[0]) as sock:
                for byte in PREFACE + b"\x00\x00\x0f\x00":
                    with contextlib.suppress(ConnectionError):
                        sock.send(bytes([byte]))
                    await asyncio.sleep(0.01)
                await until(lambda: it.statistics().refused)

    run_async(body())


def test_half_open_connections_are_capped(run_async: Run) -> None:
    async def body() -> None:
        async with server(half_open_max=2) as it:
            strangers = [await connected(it.endpoints[0]) for _ in range(2)]
            await until(lambda: it.statistics().half_open == 2)
            with pytest.raises(PeerRefused) as caught:
                await dial(it.endpoints, HELLO, None)
            assert caught.value.reason == "busy"
            for stranger in strangers:
                stranger.close()
            await until(lambda: it.statistics().half_open == 0)
            mine = await dial(it.endpoints, HELLO, None)
            mine.link.abort()

    run_async(body())


def test_close_ends_greetings(run_async: Run) -> None:
    async def body() -> None:
        async with server() as it:
            stranger = await connected(it.endpoints[0])
            await until(lambda: it.statistics().half_open == 1)
            endpoint = it.endpoints[0]
            await it.close()
            await it.close()
            assert it.statistics().half_open == 0
            with pytest.raises(PeerUnreachable):
                await dial([endpoint], HELLO, None)
            stranger.close()

    run_async(body())


def test_close_before_a_greeting_ran(run_async: Run) -> None:
    async def body() -> None:
        async with server() as it:
            stranger = await connected(it.endpoints[0])
            it._on_acceptable(it._sockets[0])
            assert it.statistics().half_open == 1
            await it.close()
            stranger.close()

    run_async(body())


def test_out_of_descriptors_pauses_and_recovers(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with server() as it:
            real, failing = it._sockets[0], [True]
            calls = 0

            class Exhausted:
                def accept(self) -> Any:
                    nonlocal calls
                    calls += 1
                    if failing[0]:
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    return real.accept()

                def fileno(self) -> int:
                    return real.fileno()

            loop = asyncio.get_running_loop()
            loop.remove_reader(real)
            stand_in: Any = Exhausted()
            loop.add_reader(stand_in, it._on_acceptable, stand_in)
            dialing = asyncio.ensure_future(dial(it.endpoints, HELLO, None))
            await asyncio.sleep(0.05)
            assert calls == 1  # it does not spin
            failing[0] = False
            mine = await dialing
            mine.link.abort()
        assert "Too many open files" in caplog.text

    run_async(body())
