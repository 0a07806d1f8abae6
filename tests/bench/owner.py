"""One end of a benchmark: registers payloads, says so as JSON, and answers commands, one line each.

`{"register": size, "count": n}` gives n more handles, `{"copy": size, "rounds": n}` the seconds of
pinned registrations beside plain copies of the same bytes; anything else its usage so far. A
process of its own, so that its CPU time and memory are the owner's alone. Ends when its input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np

import orbit
from orbit.cli.running import run

RETAIN = orbit.RegisterOptions(retain=True)


async def serve(args: argparse.Namespace) -> None:
    pool = orbit.RdmaPoolConfig(
        initial_arena_bytes=args.arena_mib << 20, registered_bytes_budget=2 << 30
    )
    rdma = orbit.RdmaConfig(pool=pool)
    config = orbit.NodeConfig(listen=args.listen, rdma=rdma, transport=args.transport)
    async with orbit.Node(config) as node:
        handles = {}
        for size in args.sizes:
            (handles[str(size)],) = await register(node, args.pinned, size, 1)
        say({"address": str(node.address), "handles": handles})
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await reader.readline():
            command = json.loads(line)
            if "register" in command:
                count = command["count"]
                say({"handles": await register(node, args.pinned, command["register"], count)})
            elif "copy" in command:
                say(await copies(node, command["copy"], command["rounds"]))
            else:
                say(usage(node))


async def register(node: orbit.Node, pinned: bool, size: int, count: int) -> list[str]:
    payload = np.resize(np.arange(251, dtype=np.uint8), size)
    one = node.register_data_pinned if pinned else node.register_data
    return [str(await one(payload, RETAIN)) for _ in range(count)]


async def copies(node: orbit.Node, size: int, rounds: int) -> dict[str, object]:
    """Seconds of each `register_data_pinned`, and of each memcpy into memory that is there."""
    payload, plain = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    pinned_s, memcpy_s = [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        np.copyto(plain, payload)
        copied = time.perf_counter()
        handle = await node.register_data_pinned(payload)
        pinned_s.append(time.perf_counter() - copied)
        memcpy_s.append(copied - begin)
        pinned = (await node.metadata(handle)).pinned
        await node.withdraw(handle)
    return {"pinned_s": pinned_s[1:], "memcpy_s": memcpy_s[1:], "pinned": pinned}


def usage(node: orbit.Node) -> dict[str, Any]:
    """CPU seconds of this process so far, its largest resident size in bytes, and what the RDMA
    path counted.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    found: dict[str, Any] = {"cpu_s": time.process_time(), "rss_peak": used.ru_maxrss * 1024}
    rdma = node.statistics().rdma
    if rdma is not None:
        counts = rdma.counts
        found |= {"bind_s": rdma.bind_s, "binds": counts["binds_completed"]}
        found |= {"receipt_s": rdma.receipt_s, "receipts": counts["receipts_sent"]}
        found |= {"crossings": rdma.crossings}
    return found


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--arena-mib", type=int, default=64)
    parser.add_argument("--cpu", type=int)
    args = parser.parse_args()
    if args.cpu is not None:
        os.sched_setaffinity(0, {args.cpu})
    run(serve(args))


if __name__ == "__main__":
    main()
