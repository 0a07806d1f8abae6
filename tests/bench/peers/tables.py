"""From samples to Markdown: medians and spread, ratios within a repetition, and who is ahead.

A sample is one contender at one size in one repetition. Nothing is divided across repetitions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import neighbours  # noqa: F401
from ends import percentile, size_name, spread, table_head

GIB = 1 << 30
ROUND_TRIP = 0  # the size under which 64 B there and back are kept
NOTHING = "-"


@dataclass(frozen=True)
class Sample:
    """Seconds until the bytes were there, and of what had to be done afterwards; one each for every
    pull. CPU seconds are of all of them together, idle and first pull of this repetition.
    """

    who: str
    repetition: int
    size: int
    seconds: Sequence[float]
    release_s: Sequence[float] = ()
    consumer_cpu_s: float = 0.0
    owner_cpu_s: float = 0.0
    first_s: float = 0.0
    packets: int = 0  # that the owner's RDMA device sent meanwhile
    path: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def whole(self) -> float:
        """Median with what has to be done afterwards."""
        if not self.release_s:
            return self.median
        pairs = zip(self.seconds, self.release_s, strict=True)
        return statistics.median(pull + release for pull, release in pairs)

    @property
    def cpu_s_gib(self) -> tuple[float, float]:
        """Of consumer and owner, for a GiB."""
        gib = self.size * len(self.seconds) / GIB
        return self.consumer_cpu_s / gib, self.owner_cpu_s / gib


@dataclass
class Ends:
    """What is said once in a repetition about the two processes of a contender."""

    who: str
    repetition: int
    idle_core: tuple[float, float]  # consumer, owner
    beyond_payload: int  # bytes of the consumer, at its largest, beyond its one buffer
    largest: int
    version: str = ""


@dataclass
class Found:
    samples: list[Sample] = field(default_factory=list)
    ends: list[Ends] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def of(self, who: str, size: int) -> dict[int, Sample]:
        return {s.repetition: s for s in self.samples if (s.who, s.size) == (who, size)}

    def names(self) -> list[str]:
        return list(dict.fromkeys(sample.who for sample in self.samples))


def ratios(
    mine: dict[int, Sample], theirs: dict[int, Sample], of: Callable[[Sample], float]
) -> list[float]:
    """How many times as fast as the other one, in each repetition that has both."""
    return [theirs[n].median / of(mine[n]) for n in sorted(mine.keys() & theirs.keys())]


def cell(values: Sequence[float], digits: int = 2) -> str:
    return spread(values, digits) if values else NOTHING


def rate_table(
    found: Found, names: Mapping[str, str], limit: str, sizes: Sequence[int]
) -> list[str]:
    """Round trips in us, then the rate of the limit and everybody's ratio to it. `names` has what
    each one's 64 B are moved by.
    """
    columns = ["", "64 B by", "p50 us", "p99 us", *(size_name(size) for size in sizes)]
    lines = [table_head(columns)]
    for who, means in names.items():
        trips = list(found.of(who, ROUND_TRIP).values())
        row = [who, means, cell([one.median * 1e6 for one in trips], 0)]
        row.append(cell([percentile(one.seconds, 99) * 1e6 for one in trips], 0))
        after = [f"{who}, and giving the lease back", "", "", ""]
        for size in sizes:
            mine, theirs = found.of(who, size), found.of(limit, size)
            if who == limit:
                row.append(cell([size / one.median / 1e9 for one in mine.values()], 3) + " GB/s")
                continue
            row.append(cell(ratios(mine, theirs, lambda one: one.median)))
            after.append(cell(ratios(mine, theirs, lambda one: one.whole)))
        lines.append(f"| {' | '.join(row)} |")
        if any(one.release_s for size in sizes for one in found.of(who, size).values()):
            lines.append(f"| {' | '.join(after)} |")
    return lines


def ahead_table(
    found: Found, ours: str, names: Iterable[str], sizes: Sequence[int], *, whole: bool
) -> list[str]:
    """How many times as fast ours is as each other one; above 1, ours is ahead."""
    lines = [table_head(["", "64 B", *(size_name(size) for size in sizes)])]
    for who in names:
        row = [who]
        for size in (ROUND_TRIP, *sizes):
            mine, theirs = found.of(ours, size), found.of(who, size)
            row.append(cell(ratios(mine, theirs, lambda s: s.whole if whole else s.median)))
        lines.append(f"| {' | '.join(row)} |")
    return lines


def cost_table(found: Found, names: Iterable[str], sizes: Sequence[int]) -> list[str]:
    """CPU of consumer + owner, memory, idle load, and the first pull after connecting."""
    cpu = [f"CPU s/GiB at {size_name(size)}" for size in sizes]
    columns = ["", *cpu, "beyond the payload, MiB", "idle cores", "first pull ms", "path"]
    lines = [table_head(columns)]
    for who in names:
        ends = [one for one in found.ends if one.who == who]
        samples = [one for one in found.samples if one.who == who and one.size]
        if not ends or not samples:
            continue
        row = [who]
        for size in sizes:
            pairs = [one.cpu_s_gib for one in found.of(who, size).values()]
            row.append(both(pairs, 2))
        row.append(f"{max(one.beyond_payload for one in ends) / (1 << 20):.0f}")
        row.append(both([one.idle_core for one in ends], 3))
        smallest = min(one.size for one in samples)
        row.append(cell([one.first_s * 1e3 for one in samples if one.size == smallest], 1))
        row.append(proven(samples))
        lines.append(f"| {' | '.join(row)} |")
    return lines


def both(pairs: Sequence[tuple[float, float]], digits: int) -> str:
    """Medians of consumer + owner."""
    if not pairs:
        return NOTHING
    consumer, owner = (statistics.median(side) for side in zip(*pairs, strict=True))
    return f"{consumer:.{digits}f} + {owner:.{digits}f}"


def proven(samples: Sequence[Sample], packet: int = 4096) -> str:
    """What the peer said about its path, and what the owner's device counted."""
    said = samples[-1].path
    large = [one for one in samples if one.size >= packet]
    sent = sum(one.packets for one in large)
    needed = sum(one.size * len(one.seconds) // packet for one in large)
    if not sent:
        return said
    return f"{said}; {'RDMA proven' if sent >= needed else f'{sent} of {needed} packets'}"
