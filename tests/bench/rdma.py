"""get_into and its READ phase over RDMA against perftest, in one boot of the SoftRoCE lab.

Run inside the lab: `orbit softroce --hosts 2 --mtu 4200 -- python tests/bench/rdma.py`. Rounds of
ib_read_lat, ib_read_bw and orbit alternate; figures are ratios within a round, with their spread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Sequence

from ends import End, size_name, spread, table_head, two_ends

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
OWNER, CONSUMER = ("orbit-host", "A"), ("orbit-host", "B")
COLUMNS = (
    "size",
    "ib_read_lat us",
    "READ phase us",
    "READ / ib_read_lat",
    "whole get us",
    "get / ib_read_lat",
    "get / ib_read_bw",
    "owner CPU us/get",
    "consumer CPU us/get",
)
PORT = 18_515  # perftest's own; ephemeral ports would collide with it


def perftest(tool: str, size: int, iterations: int) -> list[str]:
    """The words of the result line of one perftest run, the server on A, the client on B."""
    common = ["-s", str(size), "-n", str(iterations), "-F", "-p", str(PORT), "-x", "1"]
    server = subprocess.Popen(
        [*OWNER, tool, "-d", "rxa1", *common],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(20):
            time.sleep(0.2)
            client = subprocess.run(
                [*CONSUMER, tool, "-d", "rxb1", *common, "10.9.0.1"],
                check=False,
                capture_output=True,
                text=True,
                timeout=300,
            )
            for line in client.stdout.splitlines():
                words = line.split()
                if words and words[0] == str(size):
                    return words
        raise SystemExit(f"{tool}: no result\n{client.stdout}\n{client.stderr}")
    finally:
        server.kill()
        server.wait()


def sent_packets() -> int:
    command = ["rdma", "-j", "statistic", "show", "link", "rxa1/1"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(text.split('"sent_pkts":')[1].split(",")[0].strip(" }]"))


def orbit_round(owner: End, consumer: End, size: int, rounds: int) -> dict[str, float]:
    before, packets = owner.ask({}), sent_packets()
    result = consumer.ask({"size": size, "rounds": rounds})
    after, sent = owner.ask({}), sent_packets() - packets
    if not result["same"] or result["path"] != "rdma" or sent < size * rounds // 4096:
        raise SystemExit(f"not RDMA, or wrong bytes: {result['path']} {result['reason']} {sent}")
    figures = {
        "get": statistics.median(result["seconds"]),
        "consumer_cpu": result["cpu_s"] / rounds,
        "owner_cpu": (after["cpu_s"] - before["cpu_s"]) / (rounds + 1),
    }
    for phase in result["phases"][0]:
        figures[f"phase {phase}"] = statistics.median(p.get(phase, 0.0) for p in result["phases"])
    return figures


def run(sizes: Sequence[int], repeats: int) -> None:
    names = ", ".join(map(size_name, sizes))
    print(f"RDMA in one boot: {names}; {repeats} interleaved rounds; median (lowest to highest)\n")
    print(table_head(COLUMNS))
    texts = [str(size) for size in sizes]
    owner_args = ["--listen", "10.9.0.1:0", "--pinned", "--arena-mib", "128", "--sizes", *texts]
    phases: dict[int, dict[str, float]] = {}
    with two_ends(owner_args, ["--listen", "10.9.0.2:0"], OWNER, CONSUMER) as (owner, consumer):
        for size in sizes:
            count = max(5, min(100, (32 << 20) // size))
            latency, bandwidth, ours = [], [], []
            for _ in range(repeats):
                latency.append(float(perftest("ib_read_lat", size, count)[4]) / 1e6)
                ours.append(orbit_round(owner, consumer, size, count))
                bandwidth.append(float(perftest("ib_read_bw", size, max(5, count))[3]) * (1 << 20))
            phases[size] = ours[-1]
            reads = [o["phase read"] for o in ours]
            print(
                f"| {size_name(size)} | {spread([x * 1e6 for x in latency])}"
                f" | {spread([x * 1e6 for x in reads])}"
                f" | {spread([p / r for p, r in zip(latency, reads, strict=True)])}"
                f" | {spread([o['get'] * 1e6 for o in ours])}"
                f" | {spread([p / o['get'] for p, o in zip(latency, ours, strict=True)])}"
                f" | {spread([size / o['get'] / b for b, o in zip(bandwidth, ours, strict=True)])}"
                f" | {spread([o['owner_cpu'] * 1e6 for o in ours])}"
                f" | {spread([o['consumer_cpu'] * 1e6 for o in ours])} |",
                flush=True,
            )
        print(f"\nidle consumer: {consumer.ask({'idle_s': 5})['idle_core']:.4f} core")
    for size, figures in phases.items():
        parts = (f"{k} {v * 1e6:.0f} us" for k, v in figures.items() if k.startswith("phase "))
        print(f"{size_name(size)}: {', '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    run(args.sizes, args.repeats)


if __name__ == "__main__":
    main()
