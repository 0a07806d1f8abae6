"""Sizes at their limits between nodes that differ, and peers that break the rules: one disconnect
each, with a reason on both sides, and traffic goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import orbit
from orbit.events import Event, MessageLinkClosed, SessionClosed
from orbit.protocol.codec import encode
from orbit.protocol.framing import FrameKind
from orbit.protocol.messaging.call_header import (
    MAP_BYTES_MAX,
    NAME_BYTES_MAX,
    VALUE_BYTES_MAX,
    Wants,
    pack_call,
)
from orbit.protocol.messaging.packets import PacketFlags, PacketKind, Returned, pack_head
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.integration.messages.settled import SOAK, TCP, counter, settle

Run = Callable[[Coroutine[Any, Any, None]], None]
SMALL, LARGE = 4 << 10, 64 << 10
NOTHING = Returned()
CALL = pack_call(Wants.NOTHING, 0, b"echo")


def with_ceiling(nbytes: int) -> orbit.NodeConfig:
    return replace(TCP, messaging=orbit.MessagingConfig(eager_max_bytes=nbytes))


def test_limits_that_differ(run_async: Run) -> None:
    """The smaller one counts, on both sides; what is longer travels by rendezvous, both ways."""

    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(with_ceiling(SMALL)) as small,
            orbit.Node(with_ceiling(LARGE)) as large,
        ):
            small.add_peer(large.address)
            large.add_peer(small.address)
            for node, peer in ((small, large), (large, small)):
                peer.handler("echo", lambda message: message.payload)
                for limit in (SMALL, LARGE):
                    for nbytes in (0, 1, limit - 1, limit, limit + 1):
                        staged = counter(node, "orbit_messenger_staged_payloads_total")
                        answer = await node.unary(peer.identity, "echo", pattern(nbytes))
                        assert answer == pattern(nbytes)
                        staged = counter(node, "orbit_messenger_staged_payloads_total") - staged
                        assert staged == (nbytes > SMALL)
                assert node.statistics().messaging.links[0].counts.segmented_sent == 0
            await settle(small, large)
            assert counter(small, "orbit_sessions_opened_total") == 1

    run_async(main())


def test_headers_and_names_at_their_limits(run_async: Run) -> None:
    """Over the limit it fails here, typed, and nothing leaves."""

    entries = {f"k{n:02}": "v" * VALUE_BYTES_MAX for n in range(15)}
    filler = {**entries, "k15": "v" * 500}
    room = MAP_BYTES_MAX - len(encode(filler)) + 500
    headers = {**entries, "k15": "é" * (room // 2) + "v" * (room % 2)}

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as node:
            peer = node.add_peer(server.address)
            heard: list[dict[str, str]] = []
            name = "n" * NAME_BYTES_MAX
            server.handler(name, lambda message: heard.append(dict(message.headers)))
            await node.sync(peer, name, headers=headers)
            await node.sync(peer, name, pattern(300_000), headers=entries)  # and a staged payload
            assert heard == [headers, entries]
            sent = node.statistics().messaging.traffic
            longer = {**headers, "k15": headers["k15"] + "v"}
            for bad in (longer, {"k": "v" * (VALUE_BYTES_MAX + 1)}, {"_mine": "v"}):
                with pytest.raises(orbit.UsageError):
                    node.send(peer, name, headers=bad)
            with pytest.raises(orbit.UsageError):
                node.send(peer, name + "n")
            with pytest.raises(orbit.UsageError):  # no room for the handle beside them
                await node.send(peer, name, pattern(300_000), headers=headers)
            assert node.statistics().messaging.traffic == sent
            await settle(server, node)

    run_async(main())


ROGUE_PACKETS = {
    "a packet cut short": b"\1\0\0",
    "an empty packet": b"",
    "another version": b"\2" + pack_head(0, 0, NOTHING, len(CALL))[1:] + CALL,
    "an unknown kind": b"\1\x0f" + bytes(6),
    "a reserved flag": b"\1\0\x80" + bytes(5),
    "a reserved report": b"\1\0\0\0\0\x80\0\0",
    "a header longer than its packet": pack_head(0, 0, NOTHING, 4000) + CALL,
    "a header over the limit": pack_head(0, 0, NOTHING, (32 << 10) + 1) + bytes(33 << 10),
    "no call header": pack_head(0, 0, NOTHING, 0),
    "another call schema": pack_head(0, 0, NOTHING, len(CALL)) + b"\x09" + CALL[1:],
    "junk behind the call header": pack_head(0, 0, NOTHING, len(CALL) + 1) + CALL + b"\0",
    "a call without a name": pack_head(0, 0, NOTHING, 13) + pack_call(Wants.NOTHING, 0),
    "a payload over the ceiling": pack_head(0, 0, NOTHING, len(CALL)) + CALL + bytes(LARGE + 1),
    "a segment announced over the ceiling": (
        pack_head(0, PacketFlags.MORE, NOTHING, len(CALL), LARGE + 1) + CALL + bytes(100)
    ),
    "a continuation of nothing": pack_head(0, PacketFlags.CONTINUED, NOTHING, 0) + bytes(10),
    "a segmented ping": pack_head(PacketKind.PING, PacketFlags.MORE, NOTHING, 0, 10),
    "a control packet with a body": pack_head(PacketKind.GRANT, 0, NOTHING, 0) + b"junk",
    "credit that nobody owes": pack_head(PacketKind.GRANT, 0, Returned(255, 0, 0), 0),
    "a second ping before the answer's report": 2 * (pack_head(PacketKind.PING, 0, NOTHING, 0),),
    "an answer to no ping": pack_head(PacketKind.PONG, 0, NOTHING, 0),
    "more messages than its window": 65 * (pack_head(0, 0, NOTHING, len(CALL)) + CALL,),
    "an answer that is none": pack_head(PacketKind.RESPONSE, 0, NOTHING, 3) + b"\1\0\0",
    "an unknown event": (pack_head(PacketKind.EVENT, 0, NOTHING, 13) + pack_call(99, 1)),
}


def causes(events: list[Event]) -> list[str]:
    return [event.cause for event in events if isinstance(event, SessionClosed)]


@pytest.mark.parametrize("what", ROGUE_PACKETS)
def test_a_rogue_packet_costs_one_disconnect(run_async: Run, what: str) -> None:
    packets = ROGUE_PACKETS[what]
    packets = packets if isinstance(packets, tuple) else (packets,)

    async def main() -> None:
        told: dict[str, list[Event]] = {"server": [], "rogue": []}
        async with (
            nothing_left(),
            orbit.Node(with_ceiling(LARGE), on_event=told["server"].append) as server,
            orbit.Node(with_ceiling(LARGE), on_event=told["rogue"].append) as rogue,
            orbit.Node(TCP) as bystander,
        ):
            server.handler("echo", lambda message: message.payload)
            server.handler("hang", lambda message: asyncio.sleep(60))
            peer = rogue.add_peer(server.address)
            bystander.add_peer(server.address)
            await bystander.unary(peer, "echo")
            rounds = 20 if SOAK else 2
            for number in range(rounds):
                assert await rogue.unary(peer, "echo", b"x") == b"x"
                session = rogue._open()._peers.current(peer.worker_id)
                assert session is not None
                session.link.send_gathered(
                    [(bytes((FrameKind.PACKET,)) + packet, memoryview(b"")) for packet in packets]
                )
                await until(lambda: len(causes(told["rogue"])) == number + 1)  # noqa: B023
                await until(lambda: len(causes(told["server"])) == number + 1)  # noqa: B023
            # Traffic resumes by itself, and nobody dials more than once for each disconnect.
            assert await rogue.unary(peer, "echo", b"again") == b"again"
            assert counter(rogue, "orbit_sessions_opened_total") == rounds + 1
            for name, events in told.items():
                said = causes(events)
                assert len(said) == rounds
                assert all(said), (name, said)
                links = [e.cause for e in events if isinstance(e, MessageLinkClosed)]
                assert len(links) == rounds
                assert all(links), (name, links)
            # The bystander never noticed.
            assert await bystander.unary(peer, "echo", b"y") == b"y"
            assert counter(bystander, "orbit_sessions_opened_total") == 1
            await settle(server, rogue, bystander)

    run_async(main())


def test_who_breaks_the_rules_again_and_again_dials_no_faster(run_async: Run) -> None:
    """Each use dials at most once: there is no loop of its own that dials."""

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as rogue:
            server.handler("echo", lambda message: message.payload)
            peer = rogue.add_peer(server.address)
            uses = 50
            for _ in range(uses):
                try:
                    await rogue.unary(peer, "echo")
                except orbit.PeerError:
                    continue
                session = rogue._open()._peers.current(peer.worker_id)
                if session is not None:
                    session.link.send_gathered([(b"\x17\x09", memoryview(b""))])
            await asyncio.sleep(0.05)
            assert counter(rogue, "orbit_sessions_opened_total") <= uses
            assert counter(server, "orbit_sessions_opened_total") <= uses
            await settle(server, rogue)

    run_async(main())
