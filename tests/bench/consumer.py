"""The other end of a benchmark: get_into reused destinations, again and again, on command.

Reads one JSON command per line and answers each with one. `{"size": ..., "rounds": ...}` is one
consumer, with `"pinned": true` into registered memory; with `"clients"` and `"handles"` that many
at once; `{"cold": size, "rounds": ...}` the first get of a fresh node; `{"idle_s": ...}` nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from owner import say, usage

import orbit
from orbit.cli.running import run


async def consume(args: argparse.Namespace) -> None:
    offered = json.loads(args.owner)
    async with orbit.Node(configured(args)) as node:
        node.add_peer(offered["address"])
        say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if "idle_s" in command:
                before = time.process_time()
                await asyncio.sleep(command["idle_s"])
                say({"idle_core": (time.process_time() - before) / command["idle_s"]})
            elif "cold" in command:
                handle = orbit.Handle.parse(offered["handles"][str(command["cold"])])
                say(await measure_cold(args, handle, command["cold"], command["rounds"]))
            elif "clients" in command:
                handles = [orbit.Handle.parse(text) for text in command["handles"]]
                say(await measure_many(node, handles, command))
            else:
                handle = orbit.Handle.parse(offered["handles"][str(command["size"])])
                say(await measure(node, handle, command))


def configured(args: argparse.Namespace) -> orbit.NodeConfig:
    pool = orbit.RdmaPoolConfig(initial_arena_bytes=args.arena_mib << 20)
    return orbit.NodeConfig(
        listen=args.listen, transport=args.transport, rdma=orbit.RdmaConfig(pool=pool)
    )


async def measure(
    node: orbit.Node, handle: orbit.Handle, command: dict[str, Any]
) -> dict[str, object]:
    """`seconds` are of the gets, `release_s` of giving each lease back."""
    size, rounds = command["size"], command["rounds"]
    writer = await node.alloc_pinned_writer(size) if command.get("pinned") else None
    # Touched: page faults are not the path's.
    dest = np.ones(size, dtype=np.uint8) if writer is None else writer
    seconds, release_s, phases = [], [], []
    lease = await node.get_into(handle, dest)
    await node.detach(handle, lease)
    before = usage(node)
    for _ in range(rounds):
        start = time.perf_counter()
        lease = await node.get_into(handle, dest)
        arrived = time.perf_counter()
        await node.detach(handle, lease)
        release_s.append(time.perf_counter() - arrived)
        seconds.append(arrived - start)
        phases.append(dict(lease.phases))
    after = usage(node)
    got = np.frombuffer(dest, dtype=np.uint8) if writer is None else writer.view
    same = hashlib.sha256(got).digest() == expected_digest(size)
    if writer is not None:
        writer.free()
    return {
        "seconds": seconds,
        "release_s": release_s,
        "phases": phases,
        "path": lease.path,
        "reason": lease.reason,
        "same": same,
        "rss_peak": after["rss_peak"],
        "used": {name: after[name] - before[name] for name in after if name != "rss_peak"},
    }


async def measure_many(
    node: orbit.Node, handles: Sequence[orbit.Handle], command: dict[str, Any]
) -> dict[str, object]:
    """`clients` tasks, each with a destination of its own, take the handles in turn."""
    size, clients, rounds = command["size"], command["clients"], command["rounds"]
    seconds: list[float] = []
    paths: set[str] = set()

    async def client(number: int, gets: int) -> None:
        dest = np.ones(size, dtype=np.uint8)
        handle = handles[number % len(handles)]
        for _ in range(gets):
            start = time.perf_counter()
            lease = await node.get_into(handle, dest)
            await node.detach(handle, lease)
            seconds.append(time.perf_counter() - start)
            paths.add(lease.path)

    async def all_clients(gets: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(client(number, gets) for number in range(clients)))
        return time.perf_counter() - start

    await all_clients(1)
    seconds.clear()
    elapsed = await all_clients(max(1, rounds // clients))
    return {"seconds": seconds, "elapsed_s": elapsed, "paths": sorted(paths)}


async def measure_cold(
    args: argparse.Namespace, handle: orbit.Handle, size: int, rounds: int
) -> dict[str, object]:
    """The first get of a node that is open and has never spoken to the owner."""
    offered, seconds = json.loads(args.owner), []
    dest = np.ones(size, dtype=np.uint8)
    lease: orbit.Lease | None = None
    for _ in range(rounds):
        async with orbit.Node(configured(args)) as fresh:
            fresh.add_peer(offered["address"])
            start = time.perf_counter()
            lease = await fresh.get_into(handle, dest)
            seconds.append(time.perf_counter() - start)
            await fresh.detach(handle, lease)
    return {"seconds": seconds, "path": lease.path if lease else "none"}


def expected_digest(size: int) -> bytes:
    """Of the owner's payload, in pieces: a second whole one would count as memory of the path."""
    block = bytes(range(251)) * 4096
    digest = hashlib.sha256()
    for start in range(0, size, len(block)):
        digest.update(block[: size - start])
    return digest.digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--owner", required=True)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--arena-mib", type=int, default=64)
    parser.add_argument("--cpu", type=int)
    args = parser.parse_args()
    if args.cpu is not None:
        os.sched_setaffinity(0, {args.cpu})
    run(consume(args))


if __name__ == "__main__":
    main()
