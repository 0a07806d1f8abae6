"""Messages side by side, interleaved, as Markdown tables: `compare.py tcp` on this host,
`compare.py rdma` inside the two-host lab. Figures, no verdict.

TCP: a plain C ping-pong is the limit, pyzmq the peer; one end on each of two processors. RDMA:
twice `ib_send_lat` and a bare pyverbs ping-pong in the same boot are what a link is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import parse_words

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
PORT = 18_515
Figures = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """`serve` prints a line that `run` is given in place of {at}."""

    name: str
    serve: Sequence[str]
    run: Sequence[str]


def measure(contender: Contender, words: dict[str, str]) -> Figures:
    def filled(command: Sequence[str]) -> list[str]:
        return [word.format(**words) for word in command]

    server = subprocess.Popen(
        filled(contender.serve), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
    )
    try:
        assert server.stdout is not None
        words = {**words, "at": server.stdout.readline().strip()}
        done = subprocess.run(
            filled(contender.run), check=True, capture_output=True, text=True, env=ENV, timeout=300
        )
        line = done.stdout.strip().splitlines()[-1]
        return parse_words(line) if line.startswith("p50_us") else json.loads(line)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{contender.name}: {error.stderr[-2000:]}") from error
    finally:
        server.kill()
        server.wait()


def table(
    contenders: Sequence[tuple[str, Callable[[int], Figures]]], sizes: Sequence[int], repeats: int
) -> None:
    print("| size | what | round trip p50 us | p99 us | messages/s |")
    print("| --- | --- | --- | --- | --- |")
    for size in sizes:
        found: dict[str, list[Figures]] = {name: [] for name, _ in contenders}
        for _ in range(repeats):
            for name, one in contenders:
                found[name].append(one(size))
        for name, figures in found.items():
            print(
                f"| {size} B | {name} | {spread(figures, 'p50_us')} | {spread(figures, 'p99_us')}"
                f" | {spread(figures, 'messages_s')} |",
                flush=True,
            )


def spread(rounds: Sequence[Figures], key: str) -> str:
    values = [figures[key] for figures in rounds if figures.get(key)]
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def orbit_contender(
    name: str, serve: Sequence[str], run: Sequence[str], flags: Sequence[str], more: Sequence[str]
) -> Contender:
    script = str(HERE / "orbit_peer.py")
    return Contender(
        name,
        [*serve, sys.executable, script, "serve", *flags],
        [*run, sys.executable, script, "run", "{at}", *flags, *more],
    )


def tcp(args: argparse.Namespace, folder: Path) -> None:
    binary = str(folder / "ping_pong")
    subprocess.run(["cc", "-O2", "-o", binary, str(HERE / "ping_pong.c")], check=True)
    cpus = sorted(os.sched_getaffinity(0))
    serve, run = ["taskset", "-c", str(cpus[0])], ["taskset", "-c", str(cpus[-1])]
    counts = ["{size}", str(args.rounds), str(args.messages)]
    zmq = [sys.executable, str(HERE / "zmq_peer.py")]
    counted = ["--size", "{size}", "--rounds", str(args.rounds), "--messages", str(args.messages)]
    plain = [
        Contender("C socket", [*serve, binary, "serve"], [*run, binary, "run", "{at}", *counts]),
        Contender("pyzmq, blocking", [*serve, *zmq, "serve"], [*run, *zmq, "run", "{at}", *counts]),
        Contender(
            "pyzmq, asyncio",
            [*serve, *zmq, "serve-async"],
            [*run, *zmq, "run-async", "{at}", *counts],
        ),
    ]
    ours = [
        orbit_contender(f"orbit {what}, {loop}", serve, run, flags, [*counted, *bare])
        for what, bare in (("link", ["--bare"]), ("messenger", []))
        for loop, flags in (("asyncio", []), ("uvloop", ["--uvloop"]))
    ]
    table([(c.name, _with(c)) for c in (*plain, *ours)], args.sizes, args.repeats)


def _with(contender: Contender) -> Callable[[int], Figures]:
    return lambda size: measure(contender, {"size": str(size)})


def send_lat(rounds: int) -> Callable[[int], Figures]:
    """Twice the one-way latency that perftest reports."""

    def one(size: int) -> Figures:
        common = ["-s", str(size), "-n", str(rounds), "-F", "-p", str(PORT), "-x", "1"]
        server = subprocess.Popen(
            ["orbit-host", "A", "ib_send_lat", "-d", "rxa1", *common],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(20):
                time.sleep(0.3)
                client = subprocess.run(
                    ["orbit-host", "B", "ib_send_lat", "-d", "rxb1", *common, "10.9.0.1"],
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                for line in client.stdout.splitlines():
                    words = line.split()
                    if words and words[0] == str(size):
                        return {"p50_us": 2 * float(words[4]), "p99_us": 2 * float(words[7])}
            raise SystemExit(f"ib_send_lat: no result\n{client.stdout}\n{client.stderr}")
        finally:
            server.kill()
            server.wait()

    return one


def rdma(args: argparse.Namespace) -> None:
    a, b = ["orbit-host", "A"], ["orbit-host", "B"]
    verbs = [sys.executable, str(HERE / "verbs_peer.py")]
    counted = ["--size", "{size}", "--rounds", str(args.rounds), "--messages", str(args.messages)]
    contenders: list[tuple[str, Callable[[int], Figures]]] = [
        ("2 x ib_send_lat", send_lat(args.rounds))
    ]
    for mode in ("spin", "event"):
        bare = Contender(
            f"bare pyverbs, {mode}",
            [*a, *verbs, "serve", "rxa1", "10.9.0.1", "{size}", mode],
            [*b, *verbs, "run", "rxb1", "10.9.0.1", "{size}", mode, "{at}", str(args.rounds)],
        )
        contenders.append((bare.name, _with(bare)))
    for mode in ("spin", "event", "polling"):
        for what, bare_link in (("link", ["--bare"]), ("messenger", [])):
            flags = ["--transport", "rdma", "--progress", mode]
            contender = orbit_contender(
                f"orbit {what}, {mode}",
                [*a],
                [*b],
                flags,
                [*counted, *bare_link, "--listen", "10.9.0.2:0"],
            )
            contender = Contender(
                contender.name, [*contender.serve, "--listen", "10.9.0.1:0"], contender.run
            )
            contenders.append((contender.name, _with(contender)))
    table(contenders, args.sizes, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=("tcp", "rdma"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--messages", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    defaults = (3000, 30_000) if args.network == "tcp" else (200, 2000)
    args.rounds, args.messages = args.rounds or defaults[0], args.messages or defaults[1]
    if args.network == "rdma":
        rdma(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        tcp(args, Path(folder))


if __name__ == "__main__":
    main()
