"""perftest's command lines and what it prints: which tool does the work of a verb, and how its
figures become ours. Starts nothing.

Two unlike units are turned round here: its MB is 2**20 bytes, and its send latency is half of a
round trip. Its bandwidth tests print no latencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ...errors import UsageError
from ...protocol.messages import RailHint
from ..figures import latency_of
from ..report import NO_LATENCY, EndUsage
from .asking import Measured, Work

READ_BW, WRITE_BW, SEND_LAT = "ib_read_bw", "ib_write_bw", "ib_send_lat"
TOOLS: Final = (READ_BW, WRITE_BW, SEND_LAT)
ITERATIONS_MIN: Final = 5  # its own
LATENCY_ITERATIONS_MAX: Final = 20_000  # every one of them is a line of its output
SIZE_MAX: Final = 1 << 30
DEPTH_MAX: Final = 512
ITERATIONS_MAX: Final = 10_000_000
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one tool, the same at both ends."""

    tool: str
    size: int
    iterations: int
    depth: int  # operations in flight

    def __post_init__(self) -> None:
        """Raises UsageError: these numbers end up in a command line."""
        if self.tool not in TOOLS:
            raise UsageError(f"{self.tool!r} is no tool of perftest that is used here")
        bounds = (
            ("size", 1, SIZE_MAX),
            ("iterations", ITERATIONS_MIN, ITERATIONS_MAX),
            ("depth", 1, DEPTH_MAX),
        )
        for name, low, high in bounds:
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise UsageError(f"perftest: {name}={value!r} is not between {low} and {high}")

    @classmethod
    def of(cls, work: Work) -> Run:
        """Raises UsageError: perftest has no such size."""
        if work.verb.of_messages:
            # It prints the times between them, one fewer.
            iterations = min(max(work.ops + 1, ITERATIONS_MIN), LATENCY_ITERATIONS_MAX)
            return cls(SEND_LAT, work.size, iterations, 1)
        depth = min(work.inflight * work.batch, DEPTH_MAX)
        iterations = min(max(work.ops * work.batch, depth, ITERATIONS_MIN), ITERATIONS_MAX)
        return cls(WRITE_BW if work.to_server else READ_BW, work.size, iterations, depth)

    def command(self, rail: RailHint, port: int, host: str = "") -> list[str]:
        """`host`: of the server, for the client's end. `rail` is one of this end's own."""
        depth = ["-t", str(self.depth)] if self.tool != SEND_LAT else ["-U"]
        words = [
            *(self.tool, "-F", "-d", rail.device, "-i", str(rail.port), "-x", str(rail.gid_index)),
            *("-s", str(self.size), "-n", str(self.iterations), "-p", str(port), *depth),
        ]
        return [*words, host] if host else words

    def measured(self, work: Work, printed: str) -> Measured | None:
        """None: there is no result in it."""
        if self.tool == SEND_LAT:
            samples = [2e-6 * us for us in _latencies(printed)]
            if not samples:
                return None
            return Measured(sum(samples), latency_of(samples), len(samples), EndUsage(), EndUsage())
        rate = _average_rate(printed, self.size)
        if not rate:
            return None
        ops = self.iterations // work.batch
        return Measured(ops * work.nbytes / rate, NO_LATENCY, ops, EndUsage(), EndUsage())


def _average_rate(printed: str, size: int) -> float:
    """Bytes a second: the fourth word of the line that begins with the size. 0: none."""
    for line in printed.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == str(size):
            return float(words[3]) * _MIB
    return 0.0


def _latencies(printed: str) -> Iterator[float]:
    """Microseconds, of the lines `12, 3.45` that -U makes."""
    for line in printed.splitlines():
        number, comma, us = line.partition(",")
        if comma and number.strip().isdigit():
            yield float(us)
