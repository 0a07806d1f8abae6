"""Baselines between two ends in this process: real sockets, and queue pairs of scripted devices."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orbit.bench.baselines import BaselineServer, baseline_rows
from orbit.bench.baselines.measuring import rail_that_ran
from orbit.bench.ends import NodeSettings
from orbit.bench.plan import Plan, Verb
from orbit.bench.report import Row, Source
from orbit.errors import PeerProtocolError
from orbit.model import Incarnation, Transport, WorkerId
from orbit.protocol.address import NodeAddress
from orbit.protocol.codec import decode, encode
from orbit.protocol.endpoint import Endpoint
from orbit.protocol.messages import RailHint
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider
from orbit.verbs.status import RETRY_EXC_ERR
from orbit.verbs.turn import READ

SIZE = 3_000_000  # several pieces of the chain, the last one shorter
SETTINGS = NodeSettings(buffer_bytes=64 << 20)
ENDPOINTS = (Endpoint("127.0.0.1", 1),)


def plan(verb: Verb, **more: Any) -> Plan:
    return Plan(verb=verb, sizes=(SIZE,), iterations=5, transport=Transport.TCP, **more)


def address(rails: tuple[RailHint, ...] = ()) -> NodeAddress:
    return NodeAddress(WorkerId(1), Incarnation(1), ENDPOINTS, rails)


def asking(server: BaselineServer) -> Callable[[str, Any], Any]:
    """As a node carries it."""

    async def ask(kind: str, request: Any) -> Any:
        return decode(encode(await server.answer(kind, decode(encode(dict(request))))))

    return ask


def socket_row(verb: Verb, **more: Any) -> Row:
    async def run() -> list[Row]:
        server = BaselineServer(SETTINGS, address())
        rows = await baseline_rows(plan(verb, **more), SIZE, 5, asking(server), SETTINGS)
        await server.close()
        return rows

    [row] = asyncio.run(run())
    return row


@pytest.mark.parametrize("verb", [Verb.GET_INTO, Verb.WRITE, Verb.UNARY])
def test_the_socket_loop_moves_what_an_operation_moves(verb: Verb) -> None:
    row = socket_row(verb, batch=2, inflight=2)
    assert (row.source, row.reason, row.errors) == (Source.SOCKET, "ok", 0)
    assert (row.ops, row.batch, row.inflight, row.paths) == (5, 2, 2, {"tcp": 5})
    assert 0 < row.latency.p50 <= row.latency.max < row.seconds * 1e6 * 1.01
    assert row.client.cpu_s is not None
    assert row.server.cpu_s is not None
    assert row.client.cpu_s > 0 < row.server.cpu_s
    assert threading.active_count() == 1


def test_more_at_once_than_operations_is_no_more_than_those() -> None:
    assert socket_row(Verb.PUT, inflight=9, warmup=0).inflight == 5


def test_a_plan_of_seconds_bounds_its_baseline() -> None:
    """However many operations orbit did in them."""

    async def run() -> list[Row]:
        server = BaselineServer(SETTINGS, address())
        timed = Plan(verb=Verb.GET, sizes=(4096,), duration=0.05, inflight=2)
        return await baseline_rows(timed, 4096, 10**6, asking(server), SETTINGS)

    [row] = asyncio.run(run())
    assert 0 < row.ops < 10**6
    assert row.reason == "ok"


def test_an_end_without_room_says_so() -> None:
    async def run() -> list[Row]:
        small = NodeSettings(buffer_bytes=SIZE)
        server = BaselineServer(small, address())
        return await baseline_rows(plan(Verb.PUT, inflight=2), SIZE, 5, asking(server), SETTINGS)

    [row] = asyncio.run(run())
    assert (row.ops, row.errors) == (0, 1)
    assert str(SIZE) in row.reason


def test_nobody_else_is_served() -> None:
    """A stranger's connection is closed, and the port with the last one of the run."""

    async def run() -> None:
        server = BaselineServer(SETTINGS, address())
        asked = {"out": 1, "back": 1, "connections": 1, "warmup": 0}
        told = await server.answer("socket.open", asked)
        where = ("127.0.0.1", told["port"])
        await asyncio.to_thread(_refused, where)
        known = socket.create_connection(where, 5)
        known.sendall(told["token"] + b"x")
        assert await asyncio.to_thread(known.recv, 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, 5)
        known.close()
        assert (await server.answer("socket.finish", {}))["cpu_s"] >= 0
        with pytest.raises(PeerProtocolError):
            await server.answer("socket.finish", {})

    asyncio.run(run())


def _refused(where: tuple[str, int]) -> None:
    with socket.create_connection(where, 5) as stranger:
        stranger.sendall(bytes(32) + b"x")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_client_that_dies_frees_the_server() -> None:
    async def run() -> None:
        server = BaselineServer(SETTINGS, address())
        asked = {"out": 9, "back": 1, "connections": 2, "warmup": 0}
        await server.answer("socket.open", asked)
        await server.answer("socket.open", asked)
        await server.close()

    asyncio.run(asyncio.wait_for(run(), 5))
    assert threading.active_count() == 1


class Chain:
    """Two hosts, each with one scripted device."""

    def __init__(self) -> None:
        fabric = ScriptedFabric()
        self.devices = [fabric.add_device(name) for name in ("one", "two")]
        self.rails = [RailHint(d.name, 1, d.gids[1], 1, 1024) for d in self.devices]
        providers = [lambda n=d.name: ScriptedProvider(fabric, [n]) for d in self.devices]
        self.mine, theirs = providers
        self.server = BaselineServer(SETTINGS, address((self.rails[1],)), theirs)

    def rows(self, verb: Verb, *, perftest: bool = False, **more: Any) -> list[Row]:
        async def run() -> list[Row]:
            rows = await baseline_rows(
                plan(verb, **more),
                SIZE,
                5,
                asking(self.server),
                SETTINGS,
                perftest=perftest,
                rails=self.rails[:1],
                path="rdma/one:1 gid 1",
                provider=self.mine,
            )
            await self.server.close()
            return rows

        return asyncio.run(run())

    def check_left(self) -> None:
        for device in self.devices:
            counters = device.counters()
            assert not counters.misuse, counters
            assert counters.live_objects == 0, counters


@pytest.mark.parametrize("verb", [Verb.GET, Verb.WRITE])
def test_the_chain_moves_the_same_bytes_on_the_rail_that_ran(verb: Verb) -> None:
    chain = Chain()
    row, beside = chain.rows(verb, batch=2, inflight=3, warmup=1)
    assert (row.source, row.reason) == (Source.READ_CHAIN, "ok")
    assert (row.ops, row.paths) == (5, {"rdma/one:1 gid 1": 5})
    assert beside.source is Source.SOCKET
    # Warm-ups move as well. It is the sender of the bytes that counts them.
    sender = chain.devices[1 if verb is Verb.GET else 0]
    assert sender.counters().sent_bytes == 6 * 2 * SIZE
    assert (row.server.cpu_s, row.client.copied_bytes) == (0.0, 0)
    assert row.client.crossings is not None
    assert row.client.crossings >= 5
    chain.check_left()


def test_messages_have_no_chain() -> None:
    assert [row.source for row in Chain().rows(Verb.MSG)] == [Source.SOCKET]


def test_a_chain_that_breaks_says_why_and_leaves_nothing() -> None:
    chain = Chain()
    chain.devices[0].fail(READ, RETRY_EXC_ERR, skip=2)
    row, _ = chain.rows(Verb.READ)
    assert (row.ops, row.errors) == (0, 1)
    assert "transport retries exceeded" in row.reason
    chain.check_left()


def test_a_device_that_cannot_be_opened_says_so() -> None:
    chain = Chain()
    chain.devices[1].fail_verb("reg_mr", 12)
    row, _ = chain.rows(Verb.READ)
    assert "reg_mr" in row.reason
    chain.check_left()


def test_a_perftest_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = Chain().rows(Verb.READ, perftest=True)
    (told,) = [row for row in rows if row.source is Source.PERFTEST]
    assert told.is_missing
    assert "perftest is not installed at the server" in told.reason


def test_one_baseline_is_open_at_a_time() -> None:
    """However many a client asks for: what they may use together is the memory of one."""

    async def run() -> None:
        server = BaselineServer(SETTINGS, address())
        asked = {"out": 9, "back": 1, "connections": 1, "warmup": 0}
        told = await server.answer("socket.open", asked)
        with pytest.raises(PeerProtocolError):
            await server.answer("chain.open", {})
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", told["port"]), 5)
        both_ways = {**asked, "out": 40 << 20, "back": 40 << 20}
        with pytest.raises(PeerProtocolError, match="may use"):
            await server.answer("socket.open", both_ways)

    asyncio.run(run())


def test_which_rail_ran() -> None:
    rails = [RailHint(name, 1, f"::{n}", 12, 1024) for n, name in enumerate(("a", "b"), 1)]
    assert rail_that_ran("tcp", rails) is None
    assert rail_that_ran("rdma/b:1 gid 12", rails) is rails[1]
    assert rail_that_ran("rdma/b:1 gid 12 + a:1 gid 12", rails) is rails[0]
    assert rail_that_ran("rdma/b", rails) is rails[1]
    assert rail_that_ran("rdma", rails) is rails[0]
    assert rail_that_ran("rdma", ()) is None


def test_requests_are_checked() -> None:
    async def refused(kind: str, request: dict[str, Any]) -> str:
        server = BaselineServer(SETTINGS, address(tuple(Chain().rails)))
        with pytest.raises(PeerProtocolError) as raised:
            await server.answer(kind, request)
        return str(raised.value)

    rail = {"device": "../x", "port": 1, "gid": "::1", "gid_index": 0, "mtu": 1024}
    whole = {**rail, "link_layer": "ethernet", "lid": 0, "pkey": 0xFFFF, "range_enforced": True}
    assert "no request" in asyncio.run(refused("nonsense", {}))
    assert "connections=65" in asyncio.run(
        refused("socket.open", {"out": 1, "back": 1, "connections": 65, "warmup": 0})
    )
    for offered in (rail, whole, None):
        asked = {"nbytes": 1, "write": 0, "rail": offered}
        assert "rail" in asyncio.run(refused("chain.open", asked)) or offered is whole
    assert "no name" in asyncio.run(refused("chain.open", {"nbytes": 1, "write": 0, "rail": whole}))
