"""One connection for each pair of nodes, over real sockets: simultaneous dials, dead and silent
peers, connections that die while idle, restarts, and peers of other versions.

ORBIT_SOAK (`make soak`) makes it 500 simultaneous dials.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import orbit
from orbit.model import Incarnation, SlotId, WorkerId
from orbit.protocol.address import NodeAddress
from orbit.protocol.bootstrap import refusal_frame
from orbit.protocol.codec import decode, encode
from orbit.protocol.endpoint import Endpoint
from orbit.protocol.framing import (
    PREFACE,
    FrameKind,
    FrameParser,
    encode_frame,
    encode_on_stream,
    split_frame,
)
from orbit.protocol.messages import Hello, Refusal
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.sessions import make_hello
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS
from tests.integration.relay import relay
from tests.soak import SOAK

Run = Callable[[Coroutine[Any, Any, None]], None]
TCP = orbit.NodeConfig(transport="tcp")  # the same on a host with devices
QUICK = orbit.NodeConfig(
    transport="tcp",
    timeouts=orbit.TimeoutConfig(connect_s=0.2, handshake_s=0.2, no_progress_s=0.3),
    messaging=orbit.MessagingConfig(ping_timeout_s=0.2),
)
SMALL = pattern(4096)
LARGE = pattern(3 << 20)
RETAIN = orbit.RegisterOptions(retain=True)
ROUNDS = 500 if SOAK else 30
USERS = 8


async def fetch(node: orbit.Node, handle: orbit.Handle, payload: bytes = SMALL) -> None:
    data, lease = await node.get(handle)
    assert data == payload
    await node.detach(handle, lease)


def sessions(*nodes: orbit.Node) -> list[int]:
    return [node.statistics().sessions for node in nodes]


def opened(node: orbit.Node) -> int:
    counters = node.statistics().counters
    return sum(n for name, n in counters.items() if name.startswith("orbit_sessions_opened"))


@pytest.mark.parametrize("loop_kind", LOOP_KINDS)
def test_one_session_serves_both_directions(run_async: Run, loop_kind: str) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as a, orbit.Node(TCP) as b:
            a.add_peer(b.address)  # b never hears where a is
            for payload in (SMALL, LARGE):  # the large one needs bulk connections, both ways
                handles = [await node.register_data(payload) for node in (a, b)]
                await fetch(a, handles[1], payload)
                await fetch(b, handles[0], payload)
                await asyncio.gather(
                    *(fetch(a, handles[1], payload) for _ in range(4)),
                    *(fetch(b, handles[0], payload) for _ in range(4)),
                )
            assert sessions(a, b) == [1, 1]
            assert (opened(a), opened(b)) == (1, 1)

    run_async(main())


def test_a_peer_that_advertises_nothing_is_called_but_has_no_bulk_path(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as a, orbit.Node(TCP) as b:
            say = a._hello
            monkeypatch.setattr(a, "_hello", lambda *args: replace(say(*args), endpoints=()))
            a.add_peer(b.address)
            await fetch(a, await b.register_data(SMALL))
            await fetch(b, await a.register_data(SMALL))  # rides on the answer
            with pytest.raises(orbit.PathFailed) as caught:
                await b.get(await a.register_data(LARGE))
            assert caught.value.reason == orbit.PathReason.CONNECT_FAILED
            assert "advertises no endpoint" in str(caught.value)
            assert sessions(a, b) == [1, 1]

    run_async(main())


@pytest.mark.parametrize("delay_max_s", [0.0, 0.03])
def test_simultaneous_dials(run_async: Run, delay_max_s: float) -> None:
    async def one_round(number: int) -> None:
        async with (
            orbit.Node(TCP) as a,
            orbit.Node(TCP) as b,
            relay(a.address, delay_max_s, number) as to_a,
            relay(b.address, delay_max_s, -number) as to_b,
        ):
            a.add_peer(to_b.address(b.address))
            b.add_peer(to_a.address(a.address))
            handles = [await node.register_data(SMALL) for node in (a, b)]
            async with asyncio.timeout(2.0):
                await asyncio.gather(
                    *(fetch(a, handles[1]) for _ in range(USERS)),
                    *(fetch(b, handles[0]) for _ in range(USERS)),
                )
                await until(lambda: a._listener and not a._listener.statistics().half_open)
                await until(lambda: b._listener and not b._listener.statistics().half_open)
            assert sessions(a, b) == [1, 1]
            assert (opened(a), opened(b)) == (1, 1)

    async def main() -> None:
        async with nothing_left():
            for number in range(ROUNDS // 2):
                await one_round(number)

    run_async(main())


def test_simultaneous_dials_with_delays_around_the_timeout(run_async: Run) -> None:
    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(QUICK) as a,
            orbit.Node(QUICK) as b,
            relay(a.address, 0.12, 1) as to_a,
            relay(b.address, 0.12, 2) as to_b,
        ):
            a.add_peer(to_b.address(b.address))
            b.add_peer(to_a.address(a.address))
            handles = [await node.register_data(SMALL, RETAIN) for node in (a, b)]
            for _ in range(5):
                outcomes = await asyncio.gather(
                    *(fetch(a, handles[1]) for _ in range(USERS)),
                    *(fetch(b, handles[0]) for _ in range(USERS)),
                    return_exceptions=True,
                )
                failed = {repr(o) for o in outcomes if o and not isinstance(o, orbit.PeerError)}
                assert not failed
                to_a.end("rst")
                to_b.end("rst")
                await until(lambda: sessions(a, b) == [0, 0])
            to_a.delay_max_s = to_b.delay_max_s = 0.0
            await asyncio.sleep(0.3)  # the last attempts run out
            await asyncio.gather(fetch(a, handles[1]), fetch(b, handles[0]))
            await until(lambda: sessions(a, b) == [1, 1])

    run_async(main())


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_connection_that_died_while_idle_costs_no_operation(run_async: Run, how: str) -> None:
    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(TCP) as a,
            orbit.Node(TCP) as b,
            relay(b.address) as between,
        ):
            a.add_peer(between.address(b.address))
            handle = await b.register_data(LARGE, RETAIN)
            await fetch(a, handle, LARGE)
            for _ in range(5):
                between.end(how)
                await until(lambda: sessions(a, b) == [0, 0])  # at once, not at the next use
                await asyncio.gather(*(fetch(a, handle, LARGE) for _ in range(16)))
                assert sessions(a, b) == [1, 1]

    run_async(main())


def test_a_connection_that_went_silent_costs_one_bounded_wait(run_async: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            nothing_left(),
            orbit.Node(QUICK) as a,
            orbit.Node(QUICK) as b,
            relay(b.address) as between,
        ):
            a.add_peer(between.address(b.address))
            handle = await b.register_data(SMALL, RETAIN)
            await fetch(a, handle)
            between.end("silence")
            started = loop.time()
            outcomes = await asyncio.gather(
                *(fetch(a, handle) for _ in range(64)), return_exceptions=True
            )
            assert {type(outcome) for outcome in outcomes} == {orbit.PeerLost}
            assert loop.time() - started < 5.0  # silence, ping, verdict: 0.5 s
            await asyncio.gather(*(fetch(a, handle) for _ in range(64)))
            # b took the new one for the old one, of which it never heard the end.
            await until(lambda: sessions(a, b) == [1, 1])
            await fetch(b, await a.register_data(SMALL))

    run_async(main())


def black_hole() -> tuple[list[socket.socket], Endpoint]:
    """A port whose backlog is full: the kernel answers no further connection."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    held = [listener]
    for _ in range(3):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        held.append(filler)
    return held, Endpoint(*listener.getsockname())


def handle_at(node: orbit.Node, worker: int, endpoint: Endpoint) -> orbit.Handle:
    node.add_peer(NodeAddress(WorkerId(worker), Incarnation(1), (endpoint,)))
    return orbit.Handle(WorkerId(worker), SlotId(1))


def test_dead_peers_of_three_kinds_fail_together_and_a_live_one_is_not_disturbed(
    run_async: Run,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        held, hole = black_hole()
        silent = socket.create_server(("127.0.0.1", 0))
        closed = socket.create_server(("127.0.0.1", 0))
        refusing = Endpoint(*closed.getsockname())
        closed.close()
        async with nothing_left(), orbit.Node(QUICK) as live, orbit.Node(QUICK) as node:
            node.add_peer(live.address)
            handle = await live.register_data(SMALL)
            places = (
                ("timeout", hole),
                ("silent", Endpoint(*silent.getsockname())),
                ("refused", refusing),
            )
            dead = {
                kind: handle_at(node, 1000 + n, place) for n, (kind, place) in enumerate(places)
            }
            started = loop.time()
            live_ones = [asyncio.ensure_future(node.metadata(handle)) for _ in range(1000)]
            dead_ones = {
                kind: [asyncio.ensure_future(node.get(h)) for _ in range(100)]
                for kind, h in dead.items()
            }
            await asyncio.gather(*live_ones)
            for kind, tasks in dead_ones.items():
                for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(outcome, orbit.PeerUnreachable)
                    assert outcome.kind == kind
            assert loop.time() - started < 10.0  # 100 waits one after the other take 20 s each
            await fetch(node, handle)
        for sock in (*held, silent):
            sock.close()

    run_async(main())


@pytest.mark.parametrize("secret", [None, "shared"])
def test_restart_on_the_same_address_and_worker_id(run_async: Run, secret: str | None) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(replace(TCP, secret=secret)) as a:
            config = replace(TCP, secret=secret, worker_id=7)
            async with orbit.Node(config) as first:
                address = first.address
                a.add_peer(address)
                await fetch(a, await first.register_data(SMALL))
            await until(lambda: sessions(a) == [0])
            place = replace(config, listen=str(address.endpoints[0]))
            async with orbit.Node(place) as second:
                assert second.address.endpoints == address.endpoints
                handle = await second.register_data(SMALL)
                with pytest.raises(orbit.PeerRestarted):  # the address is of the first life
                    await a.get(handle)
                second.add_peer(a.address)
                await fetch(second, await a.register_data(SMALL))
                await fetch(a, handle)  # the new life has dialed: nobody gave its address
                assert sessions(a, second) == [1, 1]
                assert a._open()._peers.address(WorkerId(7)) == replace(
                    second.address, rails=second._rails()
                )

    run_async(main())


def test_a_killed_life_is_replaced_while_its_connection_still_looks_alive(run_async: Run) -> None:
    async def main() -> None:
        for secret in (None, "shared"):
            quick = replace(QUICK, secret=secret)
            config = replace(quick, worker_id=7)
            async with nothing_left(), orbit.Node(quick) as a:
                handle = await a.register_data(SMALL, RETAIN)
                async with orbit.Node(config) as first, relay(a.address) as between:
                    first.add_peer(between.address(a.address))
                    await fetch(first, handle)
                    async with orbit.Node(config) as second:
                        second.add_peer(a.address)
                        if secret is None:  # the old one answers a ping: it stays
                            with pytest.raises(orbit.PeerRefused) as caught:
                                await fetch(second, handle)
                            assert caught.value.reason == "superseded"
                            await asyncio.sleep(0.1)  # past the back-off
                        between.end("silence")
                        await fetch(second, handle)
                        await fetch(a, await second.register_data(SMALL))

    run_async(main())


# --- other versions -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listener_of_version(low: int, high: int) -> AsyncIterator[tuple[Endpoint, list[Refusal]]]:
    """A peer that refuses what it does not speak, and keeps what it was told."""
    told: list[Refusal] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser()
        while (frame := parser.next_frame()) is None:
            parser.feed(await reader.read(4096))
        hello = Hello.from_wire(decode(split_frame(frame)[1]))
        yours = f"yours {hello.version_min}..{hello.version_max}, mine {low}..{high}"
        told.append(Refusal("version", yours))
        writer.write(PREFACE + encode_on_stream(refusal_frame("version", yours)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Endpoint(*server.sockets[0].getsockname()), told
    finally:
        server.close()
        await server.wait_closed()


def test_dialing_a_peer_of_another_version_is_typed_and_not_repeated(run_async: Run) -> None:
    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(TCP) as node,
            listener_of_version(2, 3) as (endpoint, told),
        ):
            handle = handle_at(node, 9, endpoint)
            for _ in range(20):
                with pytest.raises(orbit.PeerRefused) as caught:
                    await node.metadata(handle)
                assert caught.value.reason == "version"
                assert "yours 1..1, mine 2..3" in str(caught.value)
                await asyncio.sleep(0.01)
            assert len(told) == 1

    run_async(main())


@pytest.mark.parametrize(
    ("low", "high", "reason"),
    [(2, 3, "version"), (2**32 - 1, 2**32 - 1, "version"), (0, 0, ""), (3, 2, ""), (0, 1, "")],
)
def test_being_dialed_by_another_version(run_async: Run, low: int, high: int, reason: str) -> None:
    """A range that makes sense is answered; nonsense ends the connection. Nobody else notices."""

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node:
            hello = replace(make_hello(9, 0, b"a" * 16), version_min=low, version_max=high)
            frame = encode_frame(FrameKind.HELLO, encode(hello.to_wire()))
            reader, writer = await asyncio.open_connection(*node.address.endpoints[0].pair)
            writer.write(PREFACE + encode_on_stream(frame))
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            if reason:
                parser = FrameParser()
                parser.feed(answer)
                said = parser.next_frame()
                assert said is not None
                refusal = Refusal.from_wire(decode(split_frame(said)[1]))
                assert refusal.reason == reason
                assert f"yours {low}..{high}, mine 1..1" in refusal.detail
            else:
                assert answer == b""
            async with orbit.Node(TCP) as other:
                other.add_peer(node.address)
                await fetch(other, await node.register_data(SMALL))

    run_async(main())
