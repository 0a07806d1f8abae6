"""TcpPath against a plain C send/recv loop, interleaved: prints numbers, asserts nothing.

    python tests/bench/tcp_path_bench.py [--sizes 65536,...] [--pin same|two|none]

Each row is one size: best and median MB/s of both, the ratio of the medians, and CPU seconds per
GiB of each end. One consumer process pulls from one owner process, into one reused buffer.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from orbit.model import LeaseId
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession, make_hello
from orbit.transport.interface import Exposure, Span, Target
from orbit.transport.tcp_incoming import admit_all
from orbit.transport.tcp_listener import TcpListener
from orbit.transport.tcp_path import TcpPath

GIB = 1 << 30
PINS = {"same": (0, 0), "two": (0, 1), "none": (-1, -1)}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def pin(cpu: int) -> None:
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


async def serve(pipe: Connection, nbytes: int) -> None:
    path = TcpPath()
    listener = TcpListener(
        lambda: make_hello(2, 0, bytes(16)), b"", admit_all(lambda link: link.link.abort()), path
    )
    await listener.open("127.0.0.1", 0)
    span = Span(memoryview(pattern(nbytes)))
    exposure = await path.expose(StubSession(1, dialer=False), span, LeaseId(1))
    pipe.send((listener.endpoints[0], exposure.transfer_id))
    start = cpu_s()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), stop.set)
    await stop.wait()
    loop.remove_reader(pipe.fileno())
    pipe.send(cpu_s() - start)
    await path.close()
    await listener.close()


def owner(pipe: Connection, nbytes: int, cpu: int, loop_kind: str) -> None:
    pin(cpu)
    with asyncio.Runner(loop_factory=lambda: new_loop(loop_kind)) as runner:
        runner.run(serve(pipe, nbytes))


async def consume(
    endpoint: tuple[str, int], transfer_id: int, nbytes: int, rounds: int
) -> tuple[list[float], float]:
    """MB/s of each pull, and the CPU seconds of all of them."""
    path = TcpPath()
    session = StubSession(1, dialer=True, endpoint=endpoint)
    target = Target(memoryview(bytearray(b"\1") * nbytes))  # pages are there already
    rates = []
    start = cpu_s()
    for _ in range(rounds):
        started = time.perf_counter()
        report = await path.pull(session, Exposure(transfer_id), LeaseId(1), target)
        rates.append(nbytes / (time.perf_counter() - started) / 1e6)
    used = cpu_s() - start
    assert bytes(target.view[-257:]) == pattern(nbytes)[-257:]
    print(f"    wakeups of the last pull: {report.counts['wakeups']}", file=sys.stderr)
    await path.close()
    return rates, used


def run_orbit(nbytes: int, rounds: int, cpus: tuple[int, int], loop_kind: str) -> list[float]:
    """Best and median MB/s, CPU s/GiB of owner and consumer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=owner, args=(theirs, nbytes, cpus[0], loop_kind))
    process.start()
    endpoint, transfer_id = ours.recv()
    before = os.sched_getaffinity(0)
    pin(cpus[1])
    with asyncio.Runner(loop_factory=lambda: new_loop(loop_kind)) as runner:
        rates, used = runner.run(consume(endpoint, transfer_id, nbytes, rounds))
    os.sched_setaffinity(0, before)
    ours.send("stop")
    owner_used = ours.recv()
    process.join()
    gib = nbytes * rounds / GIB
    return [max(rates), statistics.median(rates), owner_used / gib, used / gib]


def run_c(binary: Path, nbytes: int, rounds: int, cpus: tuple[int, int]) -> list[float]:
    command = [str(binary), str(nbytes), str(rounds), str(cpus[0]), str(cpus[1])]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [float(word) for word in words[3::2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="65536,1048576,16777216,67108864")
    parser.add_argument("--rounds", type=int, default=0, help="0: about 1 GiB a size")
    parser.add_argument("--pin", choices=PINS, default="two")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "tcp_baseline"
        source = Path(__file__).with_name("tcp_baseline.c")
        subprocess.run(["cc", "-O2", "-o", str(binary), str(source)], check=True)
        for size in map(int, options.sizes.split(",")):
            rounds = options.rounds or min(2000, max(3, GIB // size))
            cpus = PINS[options.pin]
            ours, theirs = [], []
            for _ in range(options.repeat):
                theirs.append(run_c(binary, size, rounds, cpus))
                ours.append(run_orbit(size, rounds, cpus, options.loop))
            mine = [statistics.median(column) for column in zip(*ours, strict=True)]
            plain = [statistics.median(column) for column in zip(*theirs, strict=True)]
            print(
                f"{size:>11} B  orbit {mine[0]:6.0f} best {mine[1]:6.0f} median MB/s"
                f"  C {plain[0]:6.0f} {plain[1]:6.0f}  ratio {mine[1] / plain[1]:4.2f}"
                f"  cpu s/GiB {mine[2]:.2f}+{mine[3]:.2f}  C {plain[2]:.2f}+{plain[3]:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
