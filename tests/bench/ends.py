"""Starts the two ends of a benchmark as processes and speaks JSON lines with them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orbit.bench import figures

HERE = Path(__file__).parent


class End:
    """One child process: commands in, answers out, one line each."""

    def __init__(self, script: str, args: Sequence[str], prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / script), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hello = self.answer()

    def ask(self, command: dict[str, object]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def two_ends(
    owner_args: Sequence[str],
    consumer_args: Sequence[str],
    owner_prefix: Sequence[str] = (),
    consumer_prefix: Sequence[str] = (),
) -> Iterator[tuple[End, End]]:
    owner = End("owner.py", owner_args, owner_prefix)
    try:
        consumer = End(
            "consumer.py", [*consumer_args, "--owner", json.dumps(owner.hello)], consumer_prefix
        )
        try:
            yield owner, consumer
        finally:
            consumer.close()
    finally:
        owner.close()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median with the lowest and the highest, as figures are given everywhere."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least that many percent of them do not exceed."""
    return figures.percentile(sorted(values), percent)


def size_name(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def table_head(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"
