"""What nobody can be faster than: a C send/recv loop over TCP, perftest's READ and SEND by RDMA."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import neighbours  # noqa: F401
from ends import HERE
from perftest import perftest
from tables import GIB, ROUND_TRIP, Sample

C_LOOP, READ_LAT, SEND_LAT = "C send/recv loop", "ib_read_lat", "2 x ib_send_lat"


class TcpLimit:
    """Compiled once, into a folder that is given."""

    def __init__(self, folder: Path, cpus: tuple[str, str]) -> None:
        self.loop, self.ping = folder / "loop", folder / "ping_pong"
        self.cpus = cpus
        compiler = os.environ.get("CC", "cc")
        sources = {self.loop: "tcp_baseline.c", self.ping: "messages/ping_pong.c"}
        for binary, source in sources.items():
            subprocess.run([compiler, "-O2", "-o", binary, HERE / source], check=True)

    def samples(self, repetition: int, sizes: Sequence[int], most: int) -> list[Sample]:
        found = [Sample(C_LOOP, repetition, ROUND_TRIP, self.round_trip(most))]
        for size in sizes:
            rounds = max(3, min(most, (2 << 30) // size))
            command = [str(self.loop), str(size), str(rounds), *map(pin, self.cpus)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures = words(text)
            seconds = size / (figures["median_mb_s"] * 1e6)
            # It reports medians and CPU of all rounds; one round has the median's time here.
            each = size / GIB
            cpu = [figures[f"cpu_s_gib_{end}"] * each for end in ("receiver", "sender")]
            found.append(Sample(C_LOOP, repetition, size, [seconds], (), *cpu, path="tcp"))
        return found

    def round_trip(self, rounds: int) -> list[float]:
        """p50 and p99 as two values, which is what they are then found to be."""
        serve, run = (["taskset", "-c", cpu, str(self.ping)] for cpu in self.cpus)
        server = subprocess.Popen(
            [*serve, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            at = server.stdout.readline().strip()
            command = [*run, "run", at, "64", str(rounds), "64"]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        finally:
            server.kill()
            server.wait()
        figures = words(text.strip().splitlines()[-1])
        p50, p99 = figures["p50_us"] / 1e6, figures["p99_us"] / 1e6
        return [p50, p50, p99]


class RdmaLimit:
    """Both are 64 B figures: a READ is what engines are compared with, twice a SEND what calls
    are.
    """

    def samples(self, repetition: int, sizes: Sequence[int], most: int) -> list[Sample]:
        send = perftest("ib_send_lat", 64, most)
        trip = [2 * float(send[4]) / 1e6, 2 * float(send[4]) / 1e6, 2 * float(send[7]) / 1e6]
        found = [Sample(SEND_LAT, repetition, ROUND_TRIP, trip)]
        for size in (64, *sizes):
            rounds = max(5, min(most, (32 << 20) // size))
            line = perftest("ib_read_lat", size, rounds)
            p50, p99 = float(line[4]) / 1e6, float(line[7]) / 1e6
            at = ROUND_TRIP if size == 64 else size
            found.append(Sample(READ_LAT, repetition, at, [p50, p50, p99], path="rdma"))
        return found


def pin(cpus: str) -> str:
    """As the C loop takes it: one processor, or -1 for any."""
    return cpus if cpus.isdigit() else "-1"


def words(text: str) -> dict[str, float]:
    """`name value name value`, as the C programs print."""
    parts = text.split()
    return dict(zip(parts[::2], map(float, parts[1::2]), strict=True))
