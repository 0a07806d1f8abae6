"""get_into over TCP against a plain C send/recv loop on the same host, interleaved, ends pinned.

Prints one Markdown row per placement and size. Asserts nothing but that the bytes are right.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from ends import HERE, End, size_name, spread, table_head, two_ends

COLUMNS = (
    "placement",
    "size",
    "C MB/s",
    "orbit MB/s",
    "ratio",
    "C CPU s/GiB",
    "orbit CPU s/GiB",
    "consumer memory beyond payload",
)
SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 1 << 30)


def baseline(binary: Path, size: int, rounds: int, cpus: tuple[int, int]) -> tuple[float, float]:
    """Median MB/s and CPU s/GiB of both ends of the C loop."""
    command = [str(binary), str(size), str(rounds), str(cpus[0]), str(cpus[1])]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    figures = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    return figures["median_mb_s"], figures["cpu_s_gib_sender"] + figures["cpu_s_gib_receiver"]


def measured(owner: End, consumer: End, size: int, rounds: int) -> tuple[float, float, float]:
    """Median MB/s, CPU s/GiB of both ends, and the consumer's peak memory beyond the payload."""
    before = owner.ask({})
    result = consumer.ask({"size": size, "rounds": rounds})
    after = owner.ask({})
    if not result["same"] or result["path"] != "tcp":
        raise SystemExit(f"wrong bytes or path: {result['same']}, {result['path']}")
    cpu = result["cpu_s"] + after["cpu_s"] - before["cpu_s"]
    # The warm-up get is the owner's too, before its second reading.
    rate = size / statistics.median(result["seconds"]) / 1e6
    return rate, cpu * (1 << 30) / (size * rounds), result["rss_peak"] - size


def run(args: argparse.Namespace, binary: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    print(table_head(COLUMNS))
    for name, pair in (("same core", (cpus[0], cpus[0])), ("two cores", (cpus[0], cpus[-1]))):
        owner_args = ["--cpu", str(pair[0]), "--transport", "tcp"]
        owner_args += ["--sizes", *map(str, args.sizes)]
        consumer_args = ["--cpu", str(pair[1]), "--transport", "tcp"]
        with two_ends(owner_args, consumer_args) as (owner, consumer):
            for size in args.sizes:
                rounds = max(3, min(400, (1 << 30) // size))
                plain, ours = [], []
                for _ in range(args.repeats):
                    plain.append(baseline(binary, size, rounds, pair))
                    ours.append(measured(owner, consumer, size, rounds))
                ratios = [o[0] / p[0] for o, p in zip(ours, plain, strict=True)]
                print(
                    f"| {name} | {size_name(size)} | {spread([p[0] for p in plain])}"
                    f" | {spread([o[0] for o in ours])} | {spread(ratios)}"
                    f" | {spread([p[1] for p in plain])} | {spread([o[1] for o in ours])}"
                    f" | {max(o[2] for o in ours) / (1 << 20):.0f} MiB |",
                    flush=True,
                )
            print(f"\nidle consumer: {consumer.ask({'idle_s': 5})['idle_core']:.4f} core\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "tcp_baseline"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-o", binary, HERE / "tcp_baseline.c"], check=True)
        run(args, binary)


if __name__ == "__main__":
    main()
