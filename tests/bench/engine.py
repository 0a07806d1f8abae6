"""The transfer engine against perftest, and against a bare chain of work requests without windows,
in one boot of the SoftRoCE lab.

Run inside it: `orbit softroce --hosts 2 --rails 2 --mtu 4200 --memory 4096 -- python
tests/bench/engine.py`. Rounds of all of them alternate; figures are ratios within a round, with
their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ends import End, size_name, spread, table_head
from perftest import CONSUMER, OWNER, bandwidth

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
RANGES = (1, 16, 256, 4096)
RANGES_BYTES = 4 << 20
OPS = {"read": "ib_read_bw", "write": "ib_write_bw"}
# perftest has two buffers of its size on both sides, and its rate does not grow any more.
PERFTEST_SIZE_MAX = 64 << 20
COLUMNS = (
    "op",
    "size",
    "rails",
    "perftest MB/s",
    "bare MB/s",
    "engine MB/s",
    "engine / perftest",
    "engine / bare",
    "engine - bare ms",
    "source CPU ms",
    "requester CPU ms",
)
PART_COLUMNS = ("op", "size", "rails", "connect", "acquire", "move", "finish", "total")
CROSSING_COLUMNS = (
    "op",
    "size",
    "rails",
    "queue pairs",
    "requester",
    "of it posts",
    "per queue pair",
    "source",
    "of it posts",
    "per queue pair",
)
POSTS = ("post", "post_send", "post_recv")


@dataclass(frozen=True)
class Sample:
    """One round of requests of one kind. Seconds and counts are of one request."""

    seconds: float
    phases: dict[str, float]
    here: dict[str, float]
    there: dict[str, float]  # of the source
    parents: int


@dataclass
class Case:
    """One row: bytes per second of perftest and of the bare chain, and our own rounds."""

    op: str
    size: int
    rails: int
    perftest: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    ours: list[Sample] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.op} | {size_name(self.size)} | {self.rails}"


class Pair:
    """A source and a requester over some rails; without any, over TCP."""

    def __init__(self, source: End, requester: End) -> None:
        self._source = source
        self._requester = requester

    def sample(self, op: str, size: int, rounds: int, ranges: int = 1) -> Sample:
        """Stops the benchmark when the bytes are wrong."""
        before = self._source.ask({})
        found = self._requester.ask({"op": op, "size": size, "rounds": rounds, "ranges": ranges})
        after = self._source.ask({})
        if found["crc"] != self._source.ask({"crc": size})["crc"]:
            raise SystemExit(f"wrong bytes: {op} of {size} bytes in {ranges} ranges")
        # The request that warms up is the source's, too.
        there = {name: (after[name] - before[name]) / (rounds + 1) for name in after}
        here = {name: used / rounds for name, used in found["used"].items()}
        seconds = statistics.median(found["seconds"])
        return Sample(seconds, found["phases"], here, there, found["parents"])


@contextmanager
def engines(rails: int, size: int, progress: str) -> Iterator[Pair]:
    common = ["--size", str(size), "--progress", progress]
    with ExitStack() as stack:

        def end(letter: str, prefix: Sequence[str], more: Sequence[str]) -> End:
            devices = [f"rx{letter}{number + 1}" for number in range(rails)]
            made = End("engine_end.py", [*common, *more, "--devices", *devices], prefix)
            stack.callback(made.close)
            return made

        source = end("a", OWNER, ["--listen", "10.9.0.1:0"])
        peer = ["--listen", "10.9.0.2:0", "--peer", json.dumps(source.hello)]
        yield Pair(source, end("b", CONSUMER, peer))


@contextmanager
def bare_chain(size: int) -> Iterator[End]:
    """The end that moves bytes, over the first rail."""
    with ExitStack() as stack:
        source, requester = (
            End("bare_chain.py", ["--device", device, "--size", str(size)], prefix)
            for device, prefix in (("rxa1", OWNER), ("rxb1", CONSUMER))
        )
        stack.callback(source.close)
        stack.callback(requester.close)
        source.ask({"connect": requester.hello})
        requester.ask({"connect": source.hello})
        yield requester


def take_round(pair: Pair, bare: End, case: Case, most: int) -> None:
    rounds = max(2, min(most, (16 << 20) // case.size))
    size = min(case.size, PERFTEST_SIZE_MAX)
    case.perftest.append(bandwidth(OPS[case.op], size, max(5, rounds), case.rails))
    found = bare.ask({"op": case.op, "size": case.size, "rounds": rounds})
    case.bare.append(case.size / statistics.median(found["seconds"]))
    case.ours.append(pair.sample(case.op, case.size, rounds))


def row(case: Case) -> str:
    rates = [case.size / one.seconds for one in case.ours]
    to_perftest = [rate / most for rate, most in zip(rates, case.perftest, strict=True)]
    to_bare = [rate / most for rate, most in zip(rates, case.bare, strict=True)]
    more = [one.seconds - case.size / rate for one, rate in zip(case.ours, case.bare, strict=True)]
    return (
        f"| {case.name} | {megabytes(case.perftest)} | {megabytes(case.bare)} | {megabytes(rates)}"
        f" | {spread(to_perftest)} | {spread(to_bare)} | {milliseconds(more)}"
        f" | {milliseconds([one.there['cpu_s'] for one in case.ours])}"
        f" | {milliseconds([one.here['cpu_s'] for one in case.ours])} |"
    )


def part_row(case: Case) -> str:
    names = PART_COLUMNS[3:]
    parts = [milliseconds([one.phases[name] for one in case.ours]) for name in names]
    return f"| {case.name} | {' | '.join(parts)} |"


def crossing_row(case: Case, lanes: int) -> str:
    """Calls into the helper of one request; the last round's, since they do not depend on time."""
    last = case.ours[-1]
    pairs = min(case.rails * lanes, max(1, round(last.here["receipts"])))
    cells = [str(pairs)]
    for side in (last.here, last.there):
        posts = sum(side[kind] for kind in POSTS)
        cells += [f"{side['crossings']:.1f}", f"{posts:.1f}", f"{side['crossings'] / pairs:.1f}"]
    return f"| {case.name} | {' | '.join(cells)} |"


def megabytes(rates: Sequence[float]) -> str:
    return spread([rate / 1e6 for rate in rates], 1)


def milliseconds(seconds: Sequence[float]) -> str:
    return spread([one * 1e3 for one in seconds], 1)


def size_tables(op: str, pairs: dict[int, Pair], bare: End, args: argparse.Namespace) -> None:
    print(table_head(COLUMNS), flush=True)
    cases = []
    for size in args.sizes:
        found = [Case(op, size, rails) for rails in pairs]
        for _ in range(args.repeats):
            for case in found:
                take_round(pairs[case.rails], bare, case, args.most)
        for case in found:
            print(row(case), flush=True)
        cases += found
    print("\nParts of a request in ms\n")
    print("\n".join([table_head(PART_COLUMNS), *map(part_row, cases)]))
    print("\nCalls into the helper for one request\n")
    rows = [crossing_row(case, args.lanes) for case in cases]
    print("\n".join([table_head(CROSSING_COLUMNS), *rows, ""]), flush=True)


def range_table(pairs: dict[int, Pair], args: argparse.Namespace) -> None:
    """One request of many ranges, which are of `RANGES_BYTES` together."""
    print(f"{size_name(RANGES_BYTES)} as ranges of one request\n")
    columns = ("op", "ranges", "rails", "ms", "times one range", "leases", "us per range")
    print(table_head(columns))
    for op in args.ops:
        for rails, pair in pairs.items():
            one: list[float] = []
            for ranges in args.ranges:
                samples = [pair.sample(op, RANGES_BYTES, 2, ranges) for _ in range(args.repeats)]
                seconds = [sample.seconds for sample in samples]
                one = one or seconds
                times = statistics.median(seconds) / statistics.median(one)
                each = spread([one_s / ranges * 1e6 for one_s in seconds], 0)
                print(
                    f"| {op} | {ranges} | {rails} | {milliseconds(seconds)} | {times:.2f}"
                    f" | {samples[-1].parents} | {each} |",
                    flush=True,
                )


def run(args: argparse.Namespace) -> None:
    left_out = [size_name(size) for size in args.sizes if size > args.max_size]
    args.sizes = [size for size in args.sizes if size <= args.max_size]
    names = ", ".join(map(size_name, args.sizes))
    print(f"The engine in one boot: {names}; {args.repeats} interleaved rounds; median (range)")
    if left_out:
        print(f"Left out, above --max-size: {', '.join(left_out)}")
    print()
    largest = max([*args.sizes, RANGES_BYTES])
    with ExitStack() as stack:
        bare = stack.enter_context(bare_chain(largest))
        pairs: dict[int, Pair] = {
            rails: stack.enter_context(engines(rails, largest, args.progress))
            for rails in args.rails
        }
        for op in args.ops:
            size_tables(op, pairs, bare, args)
        range_table(pairs, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    # Six processes hold a buffer of the largest size, and the guest has 4 GiB.
    parser.add_argument("--max-size", type=int, default=256 << 20)
    parser.add_argument("--ranges", type=int, nargs="+", default=list(RANGES))
    parser.add_argument("--rails", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=20, help="requests of a round, at most")
    parser.add_argument("--progress", default="event")
    args = parser.parse_args()
    args.lanes = 2  # the engine's default
    run(args)


if __name__ == "__main__":
    main()
