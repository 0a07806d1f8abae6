"""The rows of a benchmark that are the same for every path: warm gets with their parts, concurrent
consumers, the first get, the pinned copy, and a neighbour that takes a core.

What they are compared with, and where the ends run, is for `rdma` and `tcp` to say.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ends import End, percentile, size_name, spread, table_head

# What a get is made of, as its lease tells; bind, receipt and release are known to others.
PARTS = ("prepare", "acquire", "target", "queue", "connect", "read", "copy", "deregister", "total")
PART_COLUMNS = ("acquire", "of it bind", "target", "READ", "hand over", "get", "receipt", "release")
CLIENTS = (1, 4, 16, 64)


@dataclass(frozen=True)
class Warm:
    """One round of warm gets. Durations in seconds, of one get; `whole` has the release in it."""

    gets: Sequence[float]
    whole: Sequence[float]
    parts: dict[str, float]  # medians
    owner_cpu: float
    consumer_cpu: float
    rss_peak: int

    @property
    def median(self) -> float:
        return statistics.median(self.whole)


def warm(owner: End, consumer: End, size: int, rounds: int, path: str, *, pinned: bool) -> Warm:
    """Stops the benchmark when the bytes are wrong, or came by another path."""
    before = owner.ask({})
    result = consumer.ask({"size": size, "rounds": rounds, "pinned": pinned})
    after = owner.ask({})
    if not result["same"] or result["path"] != path:
        raise SystemExit(f"not {path}, or wrong bytes: {result['path']} {result['reason']}")
    pairs = zip(result["seconds"], result["release_s"], strict=True)
    parts = {
        name: statistics.median(phases.get(name, 0.0) for phases in result["phases"])
        for name in PARTS
    }
    parts["release"] = statistics.median(result["release_s"])
    parts["bind"] = mean(after, before, "bind_s", "binds")
    parts["receipt"] = mean(result["used"], {}, "receipt_s", "receipts")
    return Warm(
        result["seconds"],
        [get + release for get, release in pairs],
        parts,
        (after["cpu_s"] - before["cpu_s"]) / (rounds + 1),  # the warm-up get is the owner's, too
        result["used"]["cpu_s"] / rounds,
        result["rss_peak"],
    )


def mean(after: dict[str, Any], before: dict[str, Any], total: str, count: str) -> float:
    """Of what happened between two readings of a sum and its count; 0 when nothing did."""
    times = after.get(count, 0) - before.get(count, 0)
    return (after.get(total, 0.0) - before.get(total, 0.0)) / times if times else 0.0


def part_row(rounds: Sequence[Warm]) -> str:
    """In microseconds, as PART_COLUMNS names them."""

    def cell(*names: str) -> str:
        return spread([sum(one.parts[name] for name in names) * 1e6 for one in rounds], 0)

    cells = (
        cell("prepare", "acquire"),
        cell("bind"),
        cell("target", "queue", "connect"),
        cell("read"),
        cell("copy", "deregister"),
        cell("total"),
        cell("receipt"),
        cell("release"),
    )
    return " | ".join(cells)


def rate_cells(rounds: Sequence[Warm], size: int) -> str:
    """p50 and p99 in microseconds, and GB/s, of whole gets."""
    p50 = spread([percentile(one.whole, 50) * 1e6 for one in rounds], 0)
    p99 = max(percentile(one.whole, 99) for one in rounds) * 1e6
    rate = spread([size / one.median / 1e9 for one in rounds], 3)
    return f"{p50} | {p99:.0f} | {rate}"


def concurrent(owner: End, consumer: End, sizes: Sequence[int], rounds: int) -> None:
    """1 to 64 consumers of one handle and of a handle each."""
    print("\nConcurrent consumers in one process, release included\n")
    columns = ("size", "handles", "consumers", "path", "gets/s", "GB/s", "p50 us", "p99 us")
    print(table_head(columns))
    for size in sizes:
        handles = owner.ask({"register": size, "count": max(CLIENTS)})["handles"]
        for clients in CLIENTS:
            for kind, offered in (("one", handles[:1]), ("many", handles[:clients])):
                if clients == 1 and kind == "many":
                    continue
                command = {"clients": clients, "handles": offered, "size": size, "rounds": rounds}
                result = consumer.ask(command)
                gets, elapsed = len(result["seconds"]), result["elapsed_s"]
                print(
                    f"| {size_name(size)} | {kind} | {clients} | {', '.join(result['paths'])}"
                    f" | {gets / elapsed:.0f}"
                    f" | {gets * size / elapsed / 1e9:.3f}"
                    f" | {percentile(result['seconds'], 50) * 1e6:.0f}"
                    f" | {percentile(result['seconds'], 99) * 1e6:.0f} |",
                    flush=True,
                )


def cold(consumer: End, sizes: Sequence[int], rounds: int) -> None:
    """Dial, handshake, queue pairs if there are any, and the get."""
    print("\nFirst get of a fresh node\n")
    print(table_head(("size", "path", "ms")))
    for size in sizes:
        result = consumer.ask({"cold": size, "rounds": rounds})
        milliseconds = [seconds * 1e3 for seconds in result["seconds"]]
        print(f"| {size_name(size)} | {result['path']} | {spread(milliseconds)} |", flush=True)


def pinned_copy(owner: End, sizes: Sequence[int], rounds: int) -> None:
    """What `register_data_pinned` costs beside the copy that it makes."""
    print("\nThe pinned copy\n")
    print(table_head(("size", "pinned", "memcpy us", "register_data_pinned us", "times")))
    for size in sizes:
        result = owner.ask({"copy": size, "rounds": rounds})
        plain, pinned = result["memcpy_s"], result["pinned_s"]
        times = statistics.median(pinned) / statistics.median(plain)
        print(
            f"| {size_name(size)} | {'yes' if result['pinned'] else 'no'}"
            f" | {spread([s * 1e6 for s in plain], 0)} | {spread([s * 1e6 for s in pinned], 0)}"
            f" | {times:.2f} |",
            flush=True,
        )


@contextlib.contextmanager
def busy_core(cpu: int) -> Iterator[None]:
    """A process that never sleeps, on that processor."""
    loop = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def processors() -> tuple[int, int]:
    """The first and the last that this process may use."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[0], cpus[-1]
