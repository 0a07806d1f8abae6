"""orbit and its peers side by side: the same payload, pulled into one reused buffer by one process
from another, one pull at a time. A recorded run by hand, never a part of CI.

The peers live in an environment of their own:

    python3 -m venv ~/.cache/orbit/peers-venv
    ~/.cache/orbit/peers-venv/bin/pip install --no-deps -r tests/bench/peers/requirements.txt

TCP on this host's loopback, one end on each of two processors (`--placement same`: both on one,
`free`: wherever the kernel puts them, which suits peers with many threads):

    .venv/bin/python tests/bench/peers/compare.py tcp

RDMA between two hosts of one boot of the lab:

    .venv/bin/orbit softroce --hosts 2 --mtu 4200 --memory 6144 --results results --timeout 900
        -- .venv/bin/python tests/bench/peers/compare.py rdma

Prints Markdown; all samples and versions go to a JSON file, in $ORBIT_RESULTS or results/. In
each repetition the contenders run in another order, which the seed decides; each is started,
warmed up, measured at all sizes and ended before the next, since some spin when idle. A contender
that fails is named with its reason and left out from then on. `--quick` proves that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
from child import Child, PeerFailed
from contenders import LAB, RDMA, TCP, WITHOUT_DEVICE, Contender, here
from limits import C_LOOP, READ_LAT, SEND_LAT, RdmaLimit, TcpLimit
from report import Report
from tables import ROUND_TRIP, Ends, Found, Sample

ROOT = Path(__file__).resolve().parents[3]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {
    "tcp": (64 * KIB, MIB, 16 * MIB, 64 * MIB, GIB),
    "placed": (64 * KIB, MIB, 16 * MIB, 64 * MIB),
    "rdma": (64 * KIB, MIB, 16 * MIB, 64 * MIB),
}
QUICK = (64 * KIB, 16 * MIB)
TRIPS = {"tcp": 3000, "rdma": 300}
BUDGET_S = {"tcp": 0.3, "rdma": 0.7}  # of one size in one repetition, at least three pulls
REPEATS = {"tcp": 4, "rdma": 3}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.found = Found()
        self.cpus = machine.placed(args.placement)
        self.packets: Callable[[], int] = lambda: 0
        if args.network == "rdma":
            from rdma import sent_packets

            self.packets = sent_packets

    def measure(self, one: Contender, repetition: int) -> None:
        """Starts both ends, measures everything, and ends them. Raises PeerFailed."""
        sizes = [size for size in self.args.sizes if size <= one.largest]
        with ExitStack() as stack:
            owner, consumer = self.pair(stack, one, self.args.network, sizes, 120.0)
            asked = {"round_trips": self.args.trips, "budget_s": self.args.budget_s}
            consumer.ask({**asked, "round_trips": 3})
            trips = consumer.ask(asked)["seconds"]
            self.found.samples.append(Sample(one.name, repetition, ROUND_TRIP, trips))
            for size in sizes:
                self.found.samples.append(self.pulls(one, repetition, size, owner, consumer))
            used = consumer.ask({})["rss_peak"]
            idle = [end.ask({"idle_s": self.args.idle_s})["idle_core"] for end in (consumer, owner)]
            beyond, largest = int(used - max(sizes)), max(sizes)
            ends = Ends(one.name, repetition, (idle[0], idle[1]), beyond, largest, self.version)
            self.found.ends.append(ends)

    def pair(
        self,
        stack: ExitStack,
        one: Contender,
        network: str,
        sizes: Sequence[int],
        timeout_s: float,
    ) -> tuple[Child, Child]:
        """Both start at once, and then hear of each other."""
        places = LAB if self.args.network == "rdma" else here(self.cpus)
        ends = []
        for role, place in zip(("owner", "consumer"), places, strict=True):
            command = one.command(self.args.venv / "bin/python", role, network, place, sizes)
            ends.append(Child(command, timeout_s))
            stack.callback(ends[-1].close)
        owner, consumer = ends
        hello, theirs = owner.answer(), consumer.answer()
        self.version = hello["version"]
        owner.ask({"connect": theirs["offer"]})
        consumer.ask({"connect": hello["offer"]})
        return owner, consumer

    def pulls(
        self, one: Contender, repetition: int, size: int, owner: Child, consumer: Child
    ) -> Sample:
        checked = consumer.ask({"check": size})
        if not checked["same"]:
            raise PeerFailed(f"wrong bytes of {size}")
        packets, before = self.packets(), owner.ask({})["cpu_s"]
        asked = {"pull": size, "most": self.args.most, "budget_s": self.args.budget_s}
        found = consumer.ask(asked)
        owner_cpu_s = owner.ask({})["cpu_s"] - before
        sent = self.packets() - packets
        return Sample(
            one.name,
            repetition,
            size,
            found["seconds"],
            found.get("release_s", ()),
            found["cpu_s"],
            owner_cpu_s,
            checked["first_s"],
            sent,
            found["path"],
        )

    def without_device(self) -> None:
        """What each does when it is asked for RDMA on a machine that has none."""
        if any(Path("/sys/class/infiniband").glob("*")):
            return
        for one in WITHOUT_DEVICE:
            with ExitStack() as stack:
                try:
                    _, consumer = self.pair(stack, one, "rdma", [64 * KIB], 20.0)
                    moved = consumer.ask({"check": 64 * KIB})["same"]
                    told = "moves the bytes all the same" if moved else "moves wrong bytes"
                except PeerFailed as error:
                    told = str(error)
            self.found.without[one.name] = told

    def run(self, contenders: Sequence[Contender], limit: TcpLimit | RdmaLimit) -> None:
        order = random.Random(self.args.seed)
        works: list[Contender | None] = [None, *contenders]  # None: the limit
        begin, longest = time.monotonic(), 0.0
        for repetition in range(self.args.repeats):
            if repetition and time.monotonic() + longest - begin > self.args.budget_all_s:
                break
            order.shuffle(works)
            began = time.monotonic()
            for one in list(works):
                name = one.name if one else "limit"
                spent = time.monotonic() - begin
                print(f"{spent:5.0f} s  {repetition + 1}: {name}", file=sys.stderr, flush=True)
                if one is None:
                    rounds = (self.args.trips, self.args.sizes, self.args.most)
                    self.found.samples += limit.samples(repetition, rounds[1], rounds[0])
                    continue
                try:
                    self.measure(one, repetition)
                except PeerFailed as error:
                    self.found.failed[one.name] = str(error)
                    works.remove(one)
            longest = max(longest, time.monotonic() - began)


def contenders(args: argparse.Namespace) -> list[Contender]:
    known = TCP if args.network == "tcp" else RDMA
    return [one for one in known if not args.only or one.name in args.only]


def write_json(args: argparse.Namespace, about: dict[str, Any], found: Found) -> Path:
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"peers-{args.network}-{args.placement}.json"
    path.write_text(json.dumps({"about": about, **asdict(found)}, indent=1) + "\n")
    return path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=("tcp", "rdma"))
    parser.add_argument("--placement", choices=("two", "same", "free"), default="two")
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache/orbit/peers-venv")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--repeats", type=int)
    parser.add_argument(
        "--budget-s", type=float, default=450.0, dest="budget_all_s", help="begins no more after it"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="names of contenders")
    parser.add_argument("--quick", action="store_true", help="one repetition, two sizes")
    results = os.environ.get("ORBIT_RESULTS", str(ROOT / "results"))
    parser.add_argument("--results", type=Path, default=Path(results))
    args = parser.parse_args()
    whole = args.network if args.placement == "two" else "placed"
    args.sizes = args.sizes or list(QUICK if args.quick else SIZES[whole])
    args.repeats = args.repeats or (1 if args.quick else REPEATS[args.network])
    args.trips = 50 if args.quick else TRIPS[args.network]
    args.budget_s = 0.05 if args.quick else BUDGET_S[args.network]
    args.idle_s = 0.2 if args.quick else 1.0
    args.most = args.trips
    return args


def main() -> None:
    args = parse()
    bench = Bench(args)
    about = machine.about(args, ROOT)
    with tempfile.TemporaryDirectory() as folder:
        tcp = args.network == "tcp"
        limit = TcpLimit(Path(folder), bench.cpus) if tcp else RdmaLimit()
        bench.run(contenders(args), limit)
        if tcp and args.placement == "two":
            bench.without_device()
    tcp_limits, rdma_limits = {C_LOOP: "echo"}, {READ_LAT: "READ", SEND_LAT: "echo"}
    limits = tcp_limits if args.network == "tcp" else rdma_limits
    names = limits | {one.name: one.round_trip for one in contenders(args)}
    about["repeats"] = len({one.repetition for one in bench.found.samples})
    about["versions"] = {one.who: one.version for one in bench.found.ends}
    print("\n".join(Report(bench.found, names, next(iter(limits)), args.sizes, about).lines()))
    print(f"All samples: {write_json(args, about, bench.found)}", file=sys.stderr)


if __name__ == "__main__":
    main()
