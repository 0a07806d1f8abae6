"""Round trips and one-way messages by orbit, as a messenger and as the bare link below it.

`serve` prints its address and answers; `run ADDRESS` measures. The bare link is the messenger's
own, with its client replaced once it is open: the same wire, credits and packets, and nothing above
them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from figures import report

import orbit
from orbit.config import RdmaConfig
from orbit.errors import OrbitError
from orbit.protocol.messaging.packets import PacketKind
from orbit.runtime.messaging.routes import Route
from orbit.transport.messages import MessageLink, OutgoingFrame

BURST = 64
_MESSAGE, _RESPONSE = int(PacketKind.MESSAGE), int(PacketKind.RESPONSE)


class BareEcho:
    """Answers every message whose first byte is not 1. Implements LinkClient."""

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        link.consumed(charge)
        if payload[0] != 1:
            link.send(OutgoingFrame(_RESPONSE, b"", payload))

    def on_link_lost(self, link: MessageLink, error: OrbitError | None) -> None:
        pass

    def may_close(self, link: MessageLink) -> bool:
        return True


class BareCaller(BareEcho):
    """Wakes whoever waits for the next answer."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] | None = None

    def on_frame(
        self, link: MessageLink, kind: int, header: bytes, payload: memoryview, charge: int
    ) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(None)


class Posted(OutgoingFrame):
    """A frame of a burst: the last one says when the burst has left."""

    __slots__ = ("_left",)

    def __init__(self, payload: bytes, left: asyncio.Future[None]) -> None:
        super().__init__(_MESSAGE, b"", payload)
        self._left = left

    def posted(self) -> None:
        if not self._left.done():
            self._left.set_result(None)


def config(args: argparse.Namespace) -> orbit.NodeConfig:
    rdma = RdmaConfig(
        enabled=args.transport == "rdma", progress=args.progress, spin_us=args.spin_us
    )
    return orbit.NodeConfig(listen=args.listen, transport=args.transport, rdma=rdma)


def routes(node: orbit.Node) -> list[Route]:
    return list(node._messages().messenger.routes())  # the link itself is no public thing


async def serve(args: argparse.Namespace) -> None:
    async with orbit.Node(config(args)) as node:
        node.handler("echo", lambda message: message.payload)
        node.handler("count", lambda message: None)

        def bare(message: orbit.Message) -> None:
            for route in routes(node):
                route.link._client = BareEcho()  # type: ignore[attr-defined]

        node.handler("bare", bare)
        print(node.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def by_messenger(
    node: orbit.Node, peer: orbit.PeerIdentity, size: int, rounds: int, messages: int
) -> tuple[list[float], float]:
    payload, times = bytes(size), []
    for _ in range(rounds):
        begin = time.perf_counter()
        await node.unary(peer, "echo", payload)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(0, messages, BURST):
        for _ in range(BURST - 1):
            node.send(peer, "count", payload, wait=True)
        await node.send(peer, "count", payload, wait=True)
    await node.unary(peer, "echo", payload)
    return times, messages / (time.perf_counter() - begin)


async def by_bare_link(
    link: MessageLink, size: int, rounds: int, messages: int
) -> tuple[list[float], float]:
    loop, caller = asyncio.get_running_loop(), BareCaller()
    link._client = caller  # type: ignore[attr-defined]
    payload, times = bytes(size), []

    async def bounce() -> None:
        caller.answered = loop.create_future()
        link.send(OutgoingFrame(_MESSAGE, b"", payload))
        await caller.answered

    for _ in range(rounds):
        begin = time.perf_counter()
        await bounce()
        times.append(time.perf_counter() - begin)
    quiet = b"\1" + bytes(size - 1)
    begin = time.perf_counter()
    for _ in range(0, messages, BURST):
        left = loop.create_future()
        for _ in range(BURST - 1):
            link.send(OutgoingFrame(_MESSAGE, b"", quiet))
        link.send(Posted(quiet, left))
        await left
    await bounce()
    return times, messages / (time.perf_counter() - begin)


async def run(args: argparse.Namespace) -> None:
    async with orbit.Node(config(args)) as node:
        peer = node.add_peer(args.address)
        await node.unary(peer, "echo", b"x", timeout=60)
        (route,) = routes(node)
        if str(route.transport) != args.transport:
            raise SystemExit(f"asked for {args.transport}, got {route.transport}")
        cpu, begin = time.process_time(), time.perf_counter()
        if args.bare:
            await node.sync(peer, "bare")
            times, rate = await by_bare_link(route.link, args.size, args.rounds, args.messages)
        else:
            times, rate = await by_messenger(node, peer, args.size, args.rounds, args.messages)
        busy = (time.process_time() - cpu) / (time.perf_counter() - begin)
        report(times[args.rounds // 10 :], rate, busy=busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("serve", "run"))
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--transport", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--progress", choices=("event", "spin", "polling"), default="event")
    parser.add_argument("--spin-us", type=int, default=None)
    parser.add_argument("--bare", action="store_true", help="the link without the messenger")
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--messages", type=int, default=20_000)
    args = parser.parse_args()
    work = serve if args.role == "serve" else run
    if args.uvloop:
        import uvloop

        uvloop.run(work(args))
    else:
        asyncio.run(work(args))


if __name__ == "__main__":
    main()
