"""What transfers cost in memory, measured in a process of its own, which says it in one JSON line.

`own NBYTES` and `fetch ADDRESS HANDLE NBYTES` are two ends; `handles PATH COUNT` is both.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import sys
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orbit
from orbit.testing.pattern import pattern

TCP = orbit.NodeConfig(transport="tcp")
_CHUNK = 1 << 20


def status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    raise KeyError(name)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def checksum(memory: mmap.mmap) -> int:
    """Without a copy of more than a chunk."""
    found = 0
    for at in range(0, len(memory), _CHUNK):
        found = zlib.crc32(memory[at : at + _CHUNK], found)
    return found


async def own(nbytes: int) -> None:
    baseline = status("VmHWM")
    memory = private(nbytes)
    for at in range(0, nbytes, _CHUNK):
        memory[at : at + _CHUNK] = pattern(min(_CHUNK, nbytes - at), at // _CHUNK % 97)
    async with orbit.Node(TCP) as node:
        handle = await node.register_data(memory, orbit.RegisterOptions(retain=True))
        say(address=str(node.address), handle=str(handle))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await node.withdraw(handle)
    say(grown=status("VmHWM") - baseline, checksum=checksum(memory))


async def fetch(address: str, handle: str, nbytes: int) -> None:
    baseline = status("VmHWM")
    async with orbit.Node(TCP) as node:
        node.add_peer(address)
        memory = private(nbytes)
        lease = await node.get_into(orbit.Handle.parse(handle), memory)
        await node.detach(lease.handle, lease)
    grown = status("VmHWM") - baseline
    say(grown=grown, checksum=checksum(memory))


# --- handles --------------------------------------------------------------------------------------

Turn = Callable[[int], Awaitable[None]]


async def grown_by(turn: Turn, count: int) -> dict[str, int]:
    """Resident bytes that each half of `count` turns leaves behind."""
    sizes = []
    for half in range(3):  # the first is for caches to fill
        for number in range(count // 2 if half else count // 4):
            await turn(number)
        gc.collect()
        sizes.append(status("VmRSS"))
    return {"first": sizes[1] - sizes[0], "second": sizes[2] - sizes[1]}


async def handles_by_tcp(count: int) -> dict[str, int]:
    async with orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
        consumer.add_peer(owner.address)

        async def turn(number: int) -> None:
            handle = await owner.register_data(pattern(100, number % 97))
            data, lease = await consumer.get(handle)
            assert data == pattern(100, number % 97)
            await consumer.release(handle, lease)

        return await grown_by(turn, count)


async def handles_by_rdma(count: int) -> dict[str, int]:
    from tests.integration.test_rendezvous_scripted_rdma import two_hosts

    config = orbit.NodeConfig(
        rendezvous=orbit.RendezvousConfig(rdma_min_bytes=0, inline_max_bytes=0)
    )
    async with two_hosts(config) as (_, owner, consumer):
        serving = owner.node.rendezvous.owner
        fetching = consumer.node.rendezvous.consumer

        async def turn(number: int) -> None:
            handle = await serving.register_data_pinned(pattern(100, number % 97))
            data, lease = await fetching.get(handle, transport="rdma", timeout=None)
            assert data == pattern(100, number % 97)
            await fetching.release(handle, lease)
            owner.node.events.clear()  # which the simulated world keeps
            consumer.node.events.clear()

        return await grown_by(turn, count)


def main() -> None:
    match sys.argv[1:]:
        case ["own", nbytes]:
            asyncio.run(own(int(nbytes)))
        case ["fetch", address, handle, nbytes]:
            asyncio.run(fetch(address, handle, int(nbytes)))
        case ["handles", "tcp", count]:
            say(**asyncio.run(handles_by_tcp(int(count))))
        case ["handles", "rdma", count]:
            say(**asyncio.run(handles_by_rdma(int(count))))


if __name__ == "__main__":
    main()
