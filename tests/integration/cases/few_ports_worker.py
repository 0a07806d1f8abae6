"""Transfers on a host with 32 outgoing ports, in a network namespace of its own (`unshare -rn`):
one scenario by name, its facts in one JSON line.

Listeners are outside of the range, so that only what is dialed uses it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orbit
import orbit.node
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.transport.tcp_path import TcpPathOptions

PORTS = range(50_000, 50_032)
NBYTES = 4096
AT_ONCE = 64
PEERS, AT_ONCE_EACH = 10, 100
IDLE_S = 0.5
RETAIN = orbit.RegisterOptions(retain=True)
ESTABLISHED = "01"


def few_ports() -> None:
    """What `ip link set lo up` and `sysctl` do, in this namespace only."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    range_file.write_text(f"{PORTS[0]} {PORTS[-1]}")


def dialed(*states: str) -> list[int]:
    """The local port of each socket that was dialed and is in one of these states, or in any:
    TIME_WAIT holds a port too. Connections to different places may share one.
    """
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        port = int(local.rpartition(":")[2], 16)
        if port in PORTS and (not states or state in states):
            found.append(port)
    return found


def config_at(port: int = 0) -> orbit.NodeConfig:
    """Nothing rides on an answer: each payload takes a bulk connection."""
    return orbit.NodeConfig(
        listen=f"127.0.0.1:{port or 7000}",
        transport="tcp",
        rendezvous=orbit.RendezvousConfig(inline_max_bytes=0),
    )


async def fetch(node: orbit.Node, handle: orbit.Handle, times: int) -> None:
    into = bytearray(NBYTES)
    for _ in range(times):
        into[:] = bytes(NBYTES)
        lease = await node.get_into(handle, into)
        await node.detach(handle, lease)
        assert into == pattern(NBYTES)


@contextlib.asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[orbit.Node, orbit.Node, orbit.Handle]]:
    async with orbit.Node(config_at(7000)) as owner, orbit.Node(config_at(7001)) as consumer:
        consumer.add_peer(owner.address)
        yield owner, consumer, await owner.register_data(pattern(NBYTES), RETAIN)


async def many(count: int) -> dict[str, Any]:
    """`count` transfers, AT_ONCE of them at a time."""
    async with two_nodes() as (_, consumer, handle):
        each = -(-count // AT_ONCE)
        await asyncio.gather(*(fetch(consumer, handle, each) for _ in range(AT_ONCE)))
        return {"moved": each * AT_ONCE, "ports": len(dialed())}


async def reads(count: int) -> dict[str, Any]:
    """The same, by requests of transfer engines."""
    engines = [orbit.EngineConfig(node=config_at(port)) for port in (7000, 7001)]
    async with (
        orbit.TransferEngine(engines[0]) as source,
        orbit.TransferEngine(engines[1]) as requester,
    ):
        there = await source.register(bytearray(pattern(NBYTES)), "read")
        into = bytearray(NBYTES * AT_ONCE)
        here = await requester.register(into)
        await requester.open_peer(source.address)
        for _ in range(-(-count // AT_ONCE)):
            into[:] = bytes(len(into))
            parts = [here[n * NBYTES : (n + 1) * NBYTES] for n in range(AT_ONCE)]
            await requester.submit(
                [orbit.TransferRequest("read", part, there.remote(), "tcp") for part in parts]
            )
            assert into == pattern(NBYTES) * AT_ONCE
        return {"moved": -(-count // AT_ONCE) * AT_ONCE, "ports": len(dialed())}


async def peers() -> dict[str, Any]:
    """Many transfers from each of many peers, and what is left of the sockets when all is idle."""
    orbit.node.TcpPathOptions = functools.partial(  # type: ignore[misc]
        TcpPathOptions, idle_s=IDLE_S
    )
    async with contextlib.AsyncExitStack() as stack:
        consumer = await stack.enter_async_context(orbit.Node(config_at(7001)))
        handles = []
        for number in range(PEERS):
            owner = await stack.enter_async_context(orbit.Node(config_at(7100 + number)))
            consumer.add_peer(owner.address)
            handles.append(await owner.register_data(pattern(NBYTES), RETAIN))
        fetching = [fetch(consumer, handle, 1) for handle in handles for _ in range(AT_ONCE_EACH)]
        task = asyncio.ensure_future(asyncio.gather(*fetching))
        most = 0
        while not task.done():
            await asyncio.sleep(0.01)
            most = max(most, len(dialed(ESTABLISHED)))
        await task
        await until(lambda: len(dialed(ESTABLISHED)) <= PEERS)
        floor = len(dialed(ESTABLISHED))
        await fetch(consumer, handles[0], 1)  # and again, by a fresh connection
        return {"most": most, "floor": floor, "again": len(dialed(ESTABLISHED)) - floor}


@contextlib.contextmanager
def occupied() -> Any:
    """Another process holds every outgoing port that is free."""
    program = (
        "import socket, sys\n"
        "held = []\n"
        f"for port in range({PORTS[0]}, {PORTS[-1] + 1}):\n"
        "    try:\n"
        "        held.append(socket.create_server(('127.0.0.1', port)))\n"
        "    except OSError:\n"
        "        pass\n"
        "print(len(held), flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate()


def facts_of(error: orbit.OrbitError) -> dict[str, Any]:
    causes = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append([type(cause).__name__, getattr(cause, "kind", "")])
        cause = cause.__cause__
    return {"causes": causes, "text": str(error), "hint": error.hint}


async def without_ports() -> dict[str, Any]:
    """A first transfer, a first call, and a transfer between connected nodes."""
    found: dict[str, Any] = {}
    async with two_nodes() as (owner, consumer, handle), orbit.Node(config_at(7002)) as other:
        other.add_peer(owner.address)
        await other.metadata(handle)  # connected, and has no bulk connection
        with occupied() as held:
            found["held"] = held
            for name, failing in (
                ("transfer", fetch(consumer, handle, 1)),
                ("call", consumer.sync(owner.identity, "anything")),
                ("connected", fetch(other, handle, 1)),
            ):
                try:
                    await failing
                except orbit.OrbitError as error:
                    found[name] = facts_of(error)
        for node in (consumer, other):
            await until_fetched(node, handle)  # nobody was taken for dead
    return found


async def until_fetched(node: orbit.Node, handle: orbit.Handle) -> None:
    """A failed dial is not tried again at once."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await fetch(node, handle, 1)
            except orbit.OrbitError:
                await asyncio.sleep(0.05)


async def main(words: list[str]) -> None:
    few_ports()
    scenario = {"many": many, "reads": reads, "peers": peers, "without_ports": without_ports}
    print(json.dumps(await scenario[words[0]](*map(int, words[1:]))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
