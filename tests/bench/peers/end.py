"""One end of one peer, as a process: JSON commands in, JSON answers out, one line each.

`end.py ADAPTER owner|consumer`. Runs under the interpreter that has the peer, so it and the
adapters need nothing but the standard library and that peer. The owner says at once what it offers.
The consumer is given that by `{"connect": offer}` and then measures: `{"check": n}` pulls n bytes
into a buffer that was overwritten and compares all of them, `{"pull": n, "most": k, "budget_s": s}`
times pulls of n bytes, `{"round_trips": k, "budget_s": s}` times 64 B there and back,
`{"idle_s": s}` nothing. Anything else is answered with what was used so far.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

BLOCK = bytes(range(251)) * 4096  # byte n of a payload is n % 251
MARKS = 8  # bytes that each timed pull is checked at


def memory(nbytes: int) -> memoryview:
    """Page-aligned, and every page is there already."""
    view = memoryview(mmap.mmap(-1, nbytes))
    for start in range(0, nbytes, len(BLOCK)):
        view[start : start + len(BLOCK)] = b"\xff" * min(len(BLOCK), nbytes - start)
    return view


def payload(nbytes: int) -> memoryview:
    view = memory(nbytes)
    for start in range(0, nbytes, len(BLOCK)):
        view[start : start + len(BLOCK)] = BLOCK[: nbytes - start]
    return view


def is_payload(view: memoryview) -> bool:
    return all(
        view[start : start + len(BLOCK)].tobytes() == BLOCK[: len(view) - start]
        for start in range(0, len(view), len(BLOCK))
    )


def usage() -> dict[str, float]:
    """CPU seconds of all threads, and the largest resident size of this program in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    return {"cpu_s": used.ru_utime + used.ru_stime, "rss_peak": int(peak.split()[1]) * 1024}


async def timed(step: Callable[[], Awaitable[Any]], most: int, budget_s: float) -> list[float]:
    """Seconds of each, three at least."""
    seconds: list[float] = []
    end = time.perf_counter() + budget_s
    while len(seconds) < most and (len(seconds) < 3 or time.perf_counter() < end):
        begin = time.perf_counter()
        await step()
        seconds.append(time.perf_counter() - begin)
    return seconds


async def pulls(peer: Any, nbytes: int, most: int, budget_s: float) -> dict[str, Any]:
    """`seconds` until the bytes are there, `release_s` of what the peer has to do afterwards."""
    view = peer.target(nbytes)
    places = [mark * (nbytes - 1) // (MARKS - 1) for mark in range(MARKS)]
    seconds: list[float] = []
    release_s: list[float] = []
    release = peer.release
    before, end = usage()["cpu_s"], time.perf_counter() + budget_s
    while len(seconds) < most and (len(seconds) < 3 or time.perf_counter() < end):
        for place in places:
            view[place] = 0xFF
        begin = time.perf_counter()
        await peer.pull(nbytes)
        arrived = time.perf_counter()
        seconds.append(arrived - begin)
        if release is not None:
            await release()
            release_s.append(time.perf_counter() - arrived)
        if wrong := [place for place in places if view[place] != place % 251]:
            raise SystemExit(f"wrong bytes at {wrong} of {nbytes}")
    cpu_s = usage()["cpu_s"] - before
    return {"seconds": seconds, "release_s": release_s, "cpu_s": cpu_s, "path": peer.path}


async def check(peer: Any, nbytes: int) -> dict[str, Any]:
    """Warms up and compares. The time is a first pull's, with whatever connects lazily."""
    view = peer.target(nbytes)
    for start in range(0, nbytes, len(BLOCK)):
        view[start : start + len(BLOCK)] = b"\xff" * min(len(BLOCK), nbytes - start)
    begin = time.perf_counter()
    await peer.pull(nbytes)
    seconds = time.perf_counter() - begin
    if peer.release is not None:
        await peer.release()
    return {"same": is_payload(view), "first_s": seconds}


async def obey(peer: Any, command: dict[str, Any]) -> dict[str, Any]:
    if "connect" in command:
        await peer.connect(command["connect"])
        return {"path": peer.path}
    if "check" in command:
        return await check(peer, command["check"])
    if "pull" in command:
        return await pulls(peer, command["pull"], command["most"], command["budget_s"])
    if "round_trips" in command:
        before = usage()["cpu_s"]
        seconds = await timed(peer.round_trip, command["round_trips"], command["budget_s"])
        return {"seconds": seconds, "cpu_s": usage()["cpu_s"] - before}
    if "idle_s" in command:
        before = usage()["cpu_s"]
        await asyncio.sleep(command["idle_s"])
        return {"idle_core": (usage()["cpu_s"] - before) / command["idle_s"]}
    return usage()


async def serve(args: argparse.Namespace, say: Callable[[object], None]) -> None:
    adapter = importlib.import_module(f"adapters.{args.adapter}")
    peer = adapter.Owner(args) if args.role == "owner" else adapter.Consumer(args)
    await peer.open()
    say({"offer": getattr(peer, "offer", None), "version": peer.version})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        say(await obey(peer, json.loads(line)))
    await peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter")
    parser.add_argument("role", choices=("owner", "consumer"))
    parser.add_argument("--network", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--variant", default="", help="what the adapter knows several ways of")
    parser.add_argument("--host", default="127.0.0.1", help="this end's address")
    parser.add_argument("--device", default="", help="this end's RDMA device")
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    args = parser.parse_args()
    # Libraries print; answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    loop = None
    if args.variant.startswith("uvloop"):
        uvloop = importlib.import_module("uvloop")
        loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(serve(args, say))
    answers.flush()
    os._exit(0)  # some peers' threads outlive their objects


if __name__ == "__main__":
    main()
