"""Every way in which a connection cannot be had has its own kind."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orbit.errors import PeerUnreachable
from orbit.testing.leftovers import nothing_left
from orbit.transport import tcp_connect
from orbit.transport.tcp_connect import connect

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def failure(*endpoints: tuple[str, int], timeout_s: float = 5.0) -> PeerUnreachable:
    async with nothing_left():
        with pytest.raises(PeerUnreachable) as caught:
            await connect(endpoints, timeout_s)
    return caught.value


def test_connects_and_tunes(run_async: Run) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            wanted = listener.getsockname()
            sock, endpoint = await connect([wanted], 5)
            assert endpoint == wanted
            assert sock.getpeername() == wanted
            assert sock.getblocking() is False
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            sock.close()

    run_async(body())


def test_refused(run_async: Run) -> None:
    async def body() -> None:
        error = await failure(("127.0.0.1", free_port()))
        assert error.kind == "refused"
        assert error.hint

    run_async(body())


def test_black_hole(run_async: Run) -> None:
    """A listener whose backlog is full answers no further connection attempt."""

    async def body() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            with socket.create_connection(listener.getsockname()):
                error = await failure(listener.getsockname(), timeout_s=0.1)
        assert error.kind == "timeout"

    run_async(body())


def test_a_black_hole_leaves_time_for_the_next_address(run_async: Run) -> None:
    async def body() -> None:
        with socket.socket() as hole, socket.create_server(("127.0.0.1", 0)) as good:
            hole.bind(("127.0.0.1", 0))
            hole.listen(0)
            with socket.create_connection(hole.getsockname()):
                endpoints = [hole.getsockname(), good.getsockname()]
                sock, endpoint = await connect(endpoints, 0.2)
            assert endpoint == good.getsockname()
            sock.close()

    run_async(body())


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".invalid", "bad\udc80name"])
def test_unresolvable(run_async: Run, host: str) -> None:
    async def body() -> None:
        assert (await failure((host, 1234))).kind == "address"

    run_async(body())


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
def test_impossible_port(run_async: Run, port: int) -> None:
    async def body() -> None:
        assert (await failure(("127.0.0.1", port))).kind == "address"

    run_async(body())


def test_no_endpoint_at_all(run_async: Run) -> None:
    async def body() -> None:
        assert (await failure()).kind == "address"

    run_async(body())


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENETUNREACH])
def test_shortage_of_this_host(run_async: Run, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> socket.socket:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tcp_connect, "_connect_one", fail)

    async def body() -> None:
        error = await failure(("127.0.0.1", 1234))
        assert error.kind == "local"
        assert os.strerror(code) in str(error)
        assert error.hint

    run_async(body())


def test_a_refusal_says_more_than_a_shortage(run_async: Run) -> None:
    async def body() -> None:
        # ::1 may be missing on this host; 127.0.0.1 is there, and refuses.
        error = await failure(("::1", free_port()), ("127.0.0.1", free_port()))
        assert error.kind == "refused"

    run_async(body())


def test_meeting_itself_is_a_refusal(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket bound to the port that it dials connects to itself, as an ephemeral port can."""
    port = free_port()

    class Bound(socket.socket):
        def connect_ex(self, address: Any) -> int:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(("127.0.0.1", port))
            return super().connect_ex(address)

    async def body() -> None:
        monkeypatch.setattr(tcp_connect.socket, "socket", Bound)
        error = await failure(("127.0.0.1", port))
        monkeypatch.undo()
        assert error.kind == "refused"

    run_async(body())


def test_name_with_ipv6_first(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener is on one of the two addresses of a name only; the other one is tried too."""

    async def both(endpoint: tuple[str, int]) -> list[tuple[int, object]]:
        port = endpoint[1]
        return [(socket.AF_INET6, ("::1", port)), (socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr(tcp_connect, "_resolve", both)

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock, endpoint = await connect([("localhost", listener.getsockname()[1])], 5)
            assert sock.family == socket.AF_INET
            assert endpoint[0] == "localhost"
            sock.close()

    run_async(body())


def test_cancel_leaves_nothing(run_async: Run) -> None:
    async def body() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            with socket.create_connection(listener.getsockname()):
                async with nothing_left():
                    task = asyncio.ensure_future(connect([listener.getsockname()], 20))
                    await asyncio.sleep(0.01)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task

    run_async(body())
