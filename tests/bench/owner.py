"""One end of a benchmark: registers one payload per size, says so as JSON, and answers `usage`.

A process of its own, so that its CPU time and memory are the owner's alone. Ends when its input
ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time

import numpy as np

import orbit
from orbit.cli.running import run


async def serve(args: argparse.Namespace) -> None:
    rdma = orbit.RdmaConfig(
        pool=orbit.RdmaPoolConfig(
            initial_arena_bytes=args.arena_mib << 20, registered_bytes_budget=2 << 30
        )
    )
    config = orbit.NodeConfig(listen=args.listen, rdma=rdma, transport=args.transport)
    async with orbit.Node(config) as node:
        handles = {}
        for size in args.sizes:
            payload = np.resize(np.arange(251, dtype=np.uint8), size)
            register = node.register_data_pinned if args.pinned else node.register_data
            handle = await register(payload, orbit.RegisterOptions(retain=True))
            handles[str(size)] = str(handle)
        say({"address": str(node.address), "handles": handles})
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while await reader.readline():
            say(usage())


def usage() -> dict[str, float]:
    """CPU seconds of this process so far and its largest resident size in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": time.process_time(),
        "rss_peak": used.ru_maxrss * 1024,
    }


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
