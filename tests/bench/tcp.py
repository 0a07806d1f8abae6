"""get_into over TCP against a plain C send/recv loop on the same host, interleaved, ends pinned.

Prints one Markdown row per placement and size. Asserts nothing but that the bytes are right.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gets
from ends import HERE, End, size_name, spread, table_head, two_ends

COLUMNS = (
    "placement",
    "size",
    "C MB/s",
    "orbit MB/s",
    "ratio",
    "C CPU s/GiB",
    "orbit CPU s/GiB",
    "p50 us",
    "p99 us",
    "consumer memory beyond payload",
)
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 1 << 30)
SMALL = (64 << 10, 1 << 20)


def baseline(binary: Path, size: int, rounds: int, cpus: tuple[int, int]) -> tuple[float, float]:
    """Median MB/s and CPU s/GiB of both ends of the C loop."""
    command = [str(binary), str(size), str(rounds), str(cpus[0]), str(cpus[1])]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    figures = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    return figures["median_mb_s"], figures["cpu_s_gib_sender"] + figures["cpu_s_gib_receiver"]


def rate(one: gets.Warm, size: int) -> float:
    """Median MB/s of the gets themselves; giving the lease back moves nothing."""
    return size / statistics.median(one.gets) / 1e6


def per_gib(one: gets.Warm, size: int) -> float:
    """CPU seconds per GiB of both ends."""
    return (one.owner_cpu + one.consumer_cpu) * (1 << 30) / size


def row(name: str, size: int, plain: Sequence[tuple[float, float]], ours: list[gets.Warm]) -> str:
    rates = [rate(one, size) for one in ours]
    ratios = [mine / theirs for mine, (theirs, _) in zip(rates, plain, strict=True)]
    p50, p99, _ = gets.rate_cells(ours, size).split(" | ")
    return (
        f"| {name} | {size_name(size)} | {spread([p[0] for p in plain], 0)}"
        f" | {spread(rates, 0)} | {spread(ratios)} | {spread([p[1] for p in plain])}"
        f" | {spread([per_gib(one, size) for one in ours])} | {p50} | {p99}"
        f" | {(max(one.rss_peak for one in ours) - size) / (1 << 20):.0f} MiB |"
    )


def run(args: argparse.Namespace, binary: Path) -> None:
    first, last = gets.processors()
    parts: list[str] = []
    print(table_head(COLUMNS))
    for name, pair in (("same core", (first, first)), ("two cores", (first, last))):
        owner_args = ["--cpu", str(pair[0]), "--transport", "tcp"]
        owner_args += ["--sizes", *map(str, args.sizes)]
        consumer_args = ["--cpu", str(pair[1]), "--transport", "tcp"]
        with two_ends(owner_args, consumer_args) as (owner, consumer):
            for size in args.sizes:
                rounds = max(3, min(400, (1 << 30) // size))
                plain, ours = [], []
                for _ in range(args.repeats):
                    plain.append(baseline(binary, size, rounds, pair))
                    ours.append(gets.warm(owner, consumer, size, rounds, "tcp", pinned=False))
                print(row(name, size, plain, ours), flush=True)
                parts.append(f"| {name} | {size_name(size)} | {gets.part_row(ours)} |")
            idle = consumer.ask({"idle_s": 5})["idle_core"]
            if pair == (first, last) and not args.quick:
                gets.concurrent(owner, consumer, SMALL, 640)
                beside_a_neighbour(owner, consumer, first)
                gets.pinned_copy(owner, args.sizes, 10)
                gets.cold(consumer, SMALL, 5)
    print("\nParts of a get in us\n")
    print("\n".join([table_head(("placement", "size", *gets.PART_COLUMNS)), *parts]))
    print(f"\nidle consumer: {idle:.4f} core")


def beside_a_neighbour(owner: End, consumer: End, cpu: int) -> None:
    """While another process takes the owner's processor."""
    print("\nWith one processor taken by another process\n")
    print(table_head(("size", "alone us", "beside it us", "times")))
    for size in SMALL:
        alone = gets.warm(owner, consumer, size, 100, "tcp", pinned=False).median * 1e6
        with gets.busy_core(cpu):
            beside = gets.warm(owner, consumer, size, 100, "tcp", pinned=False).median * 1e6
        print(f"| {size_name(size)} | {alone:.0f} | {beside:.0f} | {beside / alone:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="warm gets only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "tcp_baseline"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-o", binary, HERE / "tcp_baseline.c"], check=True)
        run(args, binary)


if __name__ == "__main__":
    main()
