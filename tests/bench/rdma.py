"""get_into and its READ phase over RDMA against perftest, in one boot of the SoftRoCE lab.

Run inside the lab: `orbit softroce --hosts 2 --mtu 4200 -- python tests/bench/rdma.py`. Rounds of
ib_read_lat, ib_read_bw and orbit alternate; figures are ratios within a round, with their spread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import gets
from ends import HERE, End, size_name, spread, table_head, two_ends
from gets import Warm
from perftest import CONSUMER, OWNER, perftest

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
SMALL = (64 << 10, 1 << 20)
COLUMNS = (
    "size",
    "destination",
    "ib_read_lat us",
    "READ / ib_read_lat",
    "p50 us",
    "p99 us",
    "GB/s",
    "whole / ib_read_lat",
    "whole / ib_read_bw",
    "owner CPU us",
    "consumer CPU us",
)
DESTINATIONS = {"plain": False, "pinned": True}


@dataclass
class Rounds:
    """Of one size: seconds of ib_read_lat, bytes per second of ib_read_bw, and our own, by
    destination.
    """

    latency: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)
    ours: dict[str, list[Warm]] = field(default_factory=lambda: {d: [] for d in DESTINATIONS})


def sent_packets() -> int:
    command = ["rdma", "-j", "statistic", "show", "link", "rxa1/1"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(text.split('"sent_pkts":')[1].split(",")[0].strip(" }]"))


def measured(owner: End, consumer: End, size: int, rounds: int, *, pinned: bool) -> Warm:
    """The device's own count proves that the bytes came by RDMA."""
    packets = sent_packets()
    found = gets.warm(owner, consumer, size, rounds, "rdma", pinned=pinned)
    if (sent := sent_packets() - packets) < size * rounds // 4096:
        raise SystemExit(f"{sent} packets are too few for {rounds} READs of {size} bytes")
    return found


def round_trip() -> float:
    """Seconds of a round trip of a few hundred bytes between two bare event loops, which no control
    call of a get can be faster than.
    """
    command = [sys.executable, str(HERE / "echo.py")]
    server = subprocess.Popen(
        [*OWNER, *command, "serve", "10.9.0.1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        at = server.stdout.readline().decode().split()
        done = subprocess.run(
            [*CONSUMER, *command, "run", *at], check=True, capture_output=True, text=True
        )
        return float(done.stdout)
    finally:
        server.kill()
        server.wait()


def take_round(owner: End, consumer: End, size: int, most: int, rounds: Rounds) -> None:
    count = max(5, min(most, (32 << 20) // size))
    rounds.latency.append(float(perftest("ib_read_lat", size, count)[4]) / 1e6)
    for name, pinned in DESTINATIONS.items():
        rounds.ours[name].append(measured(owner, consumer, size, count, pinned=pinned))
    rounds.bandwidth.append(float(perftest("ib_read_bw", size, count)[3]) * (1 << 20))


def row(size: int, destination: str, rounds: Rounds) -> str:
    ours = rounds.ours[destination]
    reads = [plain / one.parts["read"] for plain, one in zip(rounds.latency, ours, strict=True)]
    whole = [plain / one.median for plain, one in zip(rounds.latency, ours, strict=True)]
    rates = [size / one.median / most for most, one in zip(rounds.bandwidth, ours, strict=True)]
    return (
        f"| {size_name(size)} | {destination} | {spread([s * 1e6 for s in rounds.latency], 0)}"
        f" | {spread(reads)} | {gets.rate_cells(ours, size)} | {spread(whole)} | {spread(rates)}"
        f" | {spread([one.owner_cpu * 1e6 for one in ours], 0)}"
        f" | {spread([one.consumer_cpu * 1e6 for one in ours], 0)} |"
    )


def warm_tables(owner: End, consumer: End, args: argparse.Namespace) -> None:
    print(table_head(COLUMNS))
    found: dict[int, Rounds] = {}
    for size in args.sizes:
        rounds = found[size] = Rounds()
        for _ in range(args.repeats):
            take_round(owner, consumer, size, args.most, rounds)
        for destination in DESTINATIONS:
            print(row(size, destination, rounds), flush=True)
    print("\nParts of a get in us: the receipt is not waited for, the release is one more call\n")
    print(table_head(("size", "destination", *gets.PART_COLUMNS)))
    for size, rounds in found.items():
        for destination, ours in rounds.ours.items():
            print(f"| {size_name(size)} | {destination} | {gets.part_row(ours)} |", flush=True)


def beside_a_neighbour(owner: End, consumer: End, sizes: Sequence[int], repeats: int) -> None:
    """Whole gets and ib_read_lat, alone and while another process takes a processor."""
    print("\nWith one processor taken by another process, pinned destination\n")
    columns = ("size", "alone us", "beside it us", "times", "ib_read_lat alone us", "beside it us")
    print(table_head(columns))
    for size in sizes:
        count = max(5, min(30, (16 << 20) // size))
        alone, beside = Rounds(), Rounds()
        for _ in range(repeats):
            take_pinned(owner, consumer, size, count, alone)
            with gets.busy_core(gets.processors()[0]):
                take_pinned(owner, consumer, size, count, beside)
        ours = [[one.median * 1e6 for one in r.ours["pinned"]] for r in (alone, beside)]
        plain = [[seconds * 1e6 for seconds in r.latency] for r in (alone, beside)]
        times = statistics.median(ours[1]) / statistics.median(ours[0])
        print(
            f"| {size_name(size)} | {spread(ours[0], 0)} | {spread(ours[1], 0)} | {times:.2f}"
            f" | {spread(plain[0], 0)} | {spread(plain[1], 0)} |",
            flush=True,
        )


def take_pinned(owner: End, consumer: End, size: int, count: int, rounds: Rounds) -> None:
    rounds.latency.append(float(perftest("ib_read_lat", size, count)[4]) / 1e6)
    rounds.ours["pinned"].append(measured(owner, consumer, size, count, pinned=True))


def run(args: argparse.Namespace) -> None:
    names = ", ".join(map(size_name, args.sizes))
    print(f"RDMA in one boot: {names}; {args.repeats} interleaved rounds; median (range)\n")
    bare = [round_trip() * 1e6 for _ in range(args.repeats)]
    print(f"A round trip of two bare event loops over TCP: {spread(bare, 0)} us\n")
    texts = [str(size) for size in sorted({*args.sizes, *SMALL})]
    owner_args = ["--listen", "10.9.0.1:0", "--pinned", "--arena-mib", "256", "--sizes", *texts]
    consumer_args = ["--listen", "10.9.0.2:0", "--arena-mib", "128"]
    with two_ends(owner_args, consumer_args, OWNER, CONSUMER) as (owner, consumer):
        warm_tables(owner, consumer, args)
        print(f"\nidle consumer: {consumer.ask({'idle_s': 5})['idle_core']:.4f} core")
        if args.quick:
            return
        gets.concurrent(owner, consumer, SMALL, 64)
        beside_a_neighbour(owner, consumer, SMALL, args.repeats)
        gets.pinned_copy(owner, args.sizes, 5)
        gets.cold(consumer, SMALL, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=100, help="gets of a round, at most")
    parser.add_argument("--quick", action="store_true", help="warm gets only")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
