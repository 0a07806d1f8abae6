"""One end of the engine's benchmark: a region of one size, its usage, and transfers on command.

Reads one JSON command per line and answers each with one. `{"op": "read", "size": n, "rounds": k}`
moves the first n bytes between the peer's region and this one's, with `"ranges": m` as one request
of m ranges; `{"crc": n}` is of the first n bytes; `{}` what was used so far. Without `--peer` it is
the source and moves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import zlib
from typing import Any, Literal

import numpy as np
from owner import say

import orbit
from orbit.cli.running import run
from orbit.verbs import turn

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PHASES = ("connect", "acquire", "queue", "move", "finish", "total")


async def serve(args: argparse.Namespace) -> None:
    memory = pattern(args.size, 0)
    async with orbit.TransferEngine(configured(args)) as engine:
        access = "local" if args.peer else "readwrite"
        async with await engine.register(memory, access=access) as region:
            remote = None
            if args.peer:
                offered = json.loads(args.peer)
                await engine.open_peer(offered["address"])
                remote = orbit.RemoteRegion.parse(offered["region"])
                say({"ready": True})
            else:
                say({"address": str(engine.address), "region": str(region.remote())})
            while line := await asyncio.to_thread(sys.stdin.readline):
                command = json.loads(line)
                if "crc" in command:
                    say({"crc": checksum(memory, command["crc"], 1)})
                elif remote is not None and "op" in command:
                    say(await Transfers(args, engine, region, remote, memory).measure(command))
                else:
                    say(usage(engine))


def configured(args: argparse.Namespace) -> orbit.EngineConfig:
    rdma = orbit.RdmaConfig(enabled=False)
    if args.devices:
        rdma = orbit.RdmaConfig(whitelist=tuple(args.devices), device_timeout_s=20.0)
    node = orbit.NodeConfig(listen=args.listen, rdma=rdma)
    rails = max(1, len(args.devices))
    return orbit.EngineConfig.for_bytes(args.size, rails=rails, node=node, progress=args.progress)


class Transfers:
    """The requester's part."""

    def __init__(
        self,
        args: argparse.Namespace,
        engine: orbit.TransferEngine,
        local: orbit.EngineRegion,
        remote: orbit.RemoteRegion,
        memory: Bytes,
    ) -> None:
        self.transport: Literal["rdma", "tcp"] = "rdma" if args.devices else "tcp"
        self.engine, self.local, self.remote, self.memory = engine, local, remote, memory

    async def measure(self, command: dict[str, Any]) -> dict[str, object]:
        """`seconds` of each request; `crc` is of what is here when all have ended."""
        size, rounds, ranges = command["size"], command["rounds"], command.get("ranges", 1)
        stamp = time.monotonic_ns() % 199
        self.memory[:size] = 0 if command["op"] == "read" else pattern(size, stamp)
        request = self.request(command["op"], size, ranges)
        await self.engine.submit(request)
        before = usage(self.engine)
        seconds, phases = [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            batch = self.engine.submit(request)
            (result,) = await batch
            seconds.append(time.perf_counter() - begin)
            phases.append(result.phases)
        after = usage(self.engine)
        (story,) = batch.explanation()
        return {
            "seconds": seconds,
            "phases": {
                name: statistics.median(one.get(name, 0.0) for one in phases) for name in PHASES
            },
            "used": {name: after[name] - before[name] for name in after},
            "parents": story.parents,
            "crc": checksum(self.memory, size, ranges),
        }

    def request(
        self, op: str, size: int, ranges: int
    ) -> orbit.TransferRequest | orbit.RangeRequest:
        if ranges == 1:
            local, remote = self.local[:size], self.remote[:size]
            return orbit.TransferRequest(op, local, remote, transport=self.transport)
        # Backwards on one side: no two ranges are neighbours on both.
        step = size // ranges
        offsets = np.arange(ranges, dtype=np.uint64) * np.uint64(step)
        return orbit.RangeRequest(
            op,
            self.local,
            self.remote,
            local_offsets=offsets[::-1].copy(),
            remote_offsets=offsets,
            lengths=np.full(ranges, step, dtype=np.uint64),
            transport=self.transport,
        )


def usage(engine: orbit.TransferEngine) -> dict[str, float]:
    """CPU seconds of this process so far, and calls into the helper by kind."""
    found: dict[str, float] = {"cpu_s": time.process_time()}
    rdma = engine.node.statistics().rdma
    if rdma is not None:
        found |= {"crossings": rdma.crossings, "receipts": rdma.counts["receipts_sent"]}
        for used in list(turn._turns):
            for kind in used.crossings.__slots__:
                found[kind] = found.get(kind, 0) + getattr(used.crossings, kind)
    return found


def pattern(size: int, stamp: int) -> Bytes:
    return np.resize(np.arange(251, dtype=np.uint8) + np.uint8(stamp), size)


def checksum(memory: Bytes, size: int, ranges: int) -> int:
    """Of the first `size` bytes, cut into that many parts of which the last comes first."""
    whole = memory[:size]
    if ranges > 1:
        whole = np.ascontiguousarray(whole.reshape(ranges, size // ranges)[::-1])
    return zlib.crc32(whole.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--devices", nargs="*", default=[])
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--progress", default="event")
    parser.add_argument("--peer")
    run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
