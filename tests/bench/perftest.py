"""Runs perftest between the two hosts of the SoftRoCE lab, on one rail or on several at once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

OWNER, CONSUMER = ("orbit-host", "A"), ("orbit-host", "B")
PORT = 18_515  # perftest's own; ephemeral ports would collide with it


def perftest(tool: str, size: int, iterations: int, rail: int = 1) -> list[str]:
    """The words of the result line of one run, the server on A, the client on B."""
    common = ["-s", str(size), "-n", str(iterations), "-F", "-p", str(PORT + rail), "-x", "1"]
    server = subprocess.Popen(
        [*OWNER, tool, "-d", f"rxa{rail}", *common],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(20):
            time.sleep(0.2)
            client = subprocess.run(
                [*CONSUMER, tool, "-d", f"rxb{rail}", *common, "10.9.0.1"],
                check=False,
                capture_output=True,
                text=True,
                timeout=300,
            )
            if words := result_words(client.stdout, size):
                return words
        raise SystemExit(f"{tool}: no result\n{client.stdout}\n{client.stderr}")
    finally:
        server.kill()
        server.wait()


def bandwidth(tool: str, size: int, iterations: int, rails: int = 1) -> float:
    """Average bytes per second of ib_read_bw or ib_write_bw, of that many rails together."""
    with ThreadPoolExecutor(rails) as pool:
        runs: Sequence[list[str]] = list(
            pool.map(lambda rail: perftest(tool, size, iterations, rail + 1), range(rails))
        )
    return sum(float(words[3]) * (1 << 20) for words in runs)


def result_words(text: str, size: int) -> list[str]:
    """Of the line that begins with the size; empty when there is none."""
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == str(size):
            return words
    return []
