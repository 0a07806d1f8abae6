"""Node.find: from an endpoint that people know to the address that `add_peer` needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import orbit
import orbit.sync
from orbit.errors import PeerRefused, PeerUnreachable, UsageError
from orbit.testing import waiting

Run = Callable[[Any], Any]
SECRET = orbit.NodeConfig(secret="shared")


def test_whoever_listens_is_found_and_keeps_nothing(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(SECRET) as server, orbit.Node(SECRET) as client:
            endpoint = str(server.address.endpoints[0])
            found = await client.find(endpoint)
            assert found == server.address
            await waiting.until(lambda: server.statistics().sessions == 0)
            assert client.statistics().sessions == 0
            server.handler("ping", lambda _: b"pong")
            assert bytes(await client.unary(client.add_peer(found), "ping")) == b"pong"
            assert await client.find(endpoint) == found  # beside an open session
            assert bytes(await client.unary(found, "ping")) == b"pong"
            assert client.statistics().sessions == 1

    run_async(main())


def test_the_endpoint_that_worked_stands_first(run_async: Run) -> None:
    async def main() -> None:
        config = orbit.NodeConfig(advertise=("192.0.2.1:7000",))
        async with orbit.Node(config) as server, orbit.Node() as client:
            (advertised,) = server.address.endpoints
            assert server._listener is not None
            host, port = server._listener.endpoints[0]
            found = await client.find(f"{host}:{port}")
            assert [str(one) for one in found.endpoints] == [f"{host}:{port}", str(advertised)]
            assert found.identity == server.identity

    run_async(main())


def test_nobody_without_the_secret_is_found(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(SECRET) as server, orbit.Node() as client:
            endpoint = str(server.address.endpoints[0])
            with pytest.raises(PeerRefused) as caught:
                await client.find(endpoint)
            assert caught.value.reason == "auth"
            with pytest.raises(UsageError):
                await client.find("127.0.0.1")  # without a port
        async with orbit.Node() as client:
            with pytest.raises(PeerUnreachable):
                await client.find(endpoint)

    run_async(main())


def test_the_twin_finds_as_well() -> None:
    with orbit.sync.Node() as server, orbit.sync.Node() as client:
        assert client.find(str(server.address.endpoints[0])) == server.address


def test_a_stranger_that_is_no_node_is_told_apart(run_async: Run) -> None:
    async def main() -> None:
        stranger = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with stranger, orbit.Node() as client:
            host, port = stranger.sockets[0].getsockname()
            with pytest.raises(PeerUnreachable) as caught:
                await client.find(f"{host}:{port}")
            assert caught.value.kind == "silent"

    run_async(main())
