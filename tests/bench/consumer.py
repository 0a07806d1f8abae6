"""The other end of a benchmark: get_into one reused destination, again and again, on command.

Reads one JSON command per line ({"size": ..., "rounds": ...}) and answers each with the seconds of
every get, its phases, and the CPU time and memory of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time

import numpy as np
from owner import say, usage

import orbit
from orbit.cli.running import run


async def consume(args: argparse.Namespace) -> None:
    rdma = orbit.RdmaConfig(pool=orbit.RdmaPoolConfig(initial_arena_bytes=args.arena_mib << 20))
    config = orbit.NodeConfig(listen=args.listen, transport=args.transport, rdma=rdma)
    offered = json.loads(args.owner)
    async with orbit.Node(config) as node:
        node.add_peer(offered["address"])
        say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if command.get("idle_s"):
                before = time.process_time()
                await asyncio.sleep(command["idle_s"])
                say({"idle_core": (time.process_time() - before) / command["idle_s"]})
                continue
            handle = orbit.Handle.parse(offered["handles"][str(command["size"])])
            say(await measure(node, handle, command["size"], command["rounds"]))


async def measure(
    node: orbit.Node, handle: orbit.Handle, size: int, rounds: int
) -> dict[str, object]:
    dest = np.ones(size, dtype=np.uint8)  # touched: page faults are not the path's
    seconds, phases = [], []
    lease = await node.get_into(handle, dest)
    await node.detach(handle, lease)
    before = usage()
    for _ in range(rounds):
        start = time.perf_counter()
        lease = await node.get_into(handle, dest)
        seconds.append(time.perf_counter() - start)
        await node.detach(handle, lease)
        phases.append(dict(lease.phases))
    after = usage()
    return {
        "seconds": seconds,
        "phases": phases,
        "path": lease.path,
        "reason": lease.reason,
        "cpu_s": after["cpu_s"] - before["cpu_s"],
        "rss_peak": after["rss_peak"],
        "same": hashlib.sha256(dest).digest() == expected_digest(size),
    }


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
