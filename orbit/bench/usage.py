"""What an end spent: processor time, calls into the helper, bytes that were copied on their way.

Counts are taken from the node's own statistics before and after; what cannot be told is None.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final, Self

from ..config import RendezvousConfig
from ..errors import PeerProtocolError
from ..events import FETCHED_BYTES_TOTAL
from ..model import PathName
from ..node import Node
from .plan import Verb
from .report import EndUsage

SAMPLES_MAX: Final = 1_000_000  # latencies of one row that are kept
_INLINE_MAX: Final = RendezvousConfig().inline_max_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process so far. `crossings` None: it has no RDMA. `targets_copied`: pieces of local
    memory that went through the pool, with one copy. `fetched`: payload bytes of handles and of
    large messages that arrived here.
    """

    cpu_s: float
    crossings: int | None
    targets_copied: int
    fetched_rdma: int
    fetched_tcp: int

    @classmethod
    def of(cls, node: Node, aside_s: float = 0.0) -> Self:
        """`aside_s`: processor time of making and comparing payloads, which is not counted."""
        cpu_s = time.process_time() - aside_s
        found = node.statistics()
        rdma, counters = found.rdma, found.counters
        rdma_bytes, tcp_bytes = (
            counters.get(f'{FETCHED_BYTES_TOTAL}{{path="{path}"}}', 0)
            for path in (PathName.RDMA, PathName.TCP)
        )
        crossings = None if rdma is None else rdma.crossings
        copied = 0 if rdma is None else rdma.counts["targets_copied"]
        return cls(cpu_s, crossings, copied, rdma_bytes, tcp_bytes)

    def to_wire(self) -> dict[str, float | int | None]:
        return asdict(self)

    @classmethod
    def from_wire(cls, found: Mapping[str, object]) -> Self:
        """Raises PeerProtocolError."""
        names = [entry.name for entry in fields(cls)]
        values = [found.get(name) for name in names]
        if not all(type(value) in (int, float, type(None)) for value in values):
            raise PeerProtocolError("the server's usage is not in numbers")
        return cls(*values)  # type: ignore[arg-type]

    def since(self, before: Usage) -> Usage:
        """What was spent from `before` to this."""
        crossings = None
        if self.crossings is not None and before.crossings is not None:
            crossings = self.crossings - before.crossings
        return Usage(
            self.cpu_s - before.cpu_s,
            crossings,
            self.targets_copied - before.targets_copied,
            self.fetched_rdma - before.fetched_rdma,
            self.fetched_tcp - before.fetched_tcp,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What was done meanwhile: `items` of `size` bytes, all by `path` (None: by several)."""

    verb: Verb
    size: int
    items: int
    path: PathName | None

    def copied(self, spent: Usage, *, staged: bool) -> int | None:
        """Bytes that orbit copied at an end that spent this. `staged`: the engine there gives no
        device access to the payload itself.
        """
        if self.path is PathName.TCP and not self.verb.of_messages:
            # Larger ones move between socket and memory; smaller ones ride on control frames.
            return 0 if self.size > _INLINE_MAX else None
        if self.path is not PathName.RDMA or self.verb.of_messages:
            return None
        if self.verb.of_engine and staged:
            return self.items * self.size
        return spent.targets_copied * self.size  # every piece of local memory is one item

    def end_usage(self, spent: Usage, *, staged: bool) -> EndUsage:
        return EndUsage(
            cpu_s=spent.cpu_s,
            crossings=spent.crossings,
            copied_bytes=self.copied(spent, staged=staged),
        )


class Samples:
    """Numbers of a run of any length: all of them up to `limit`, then as many drawn at random, each
    with the same chance, and the largest of all.
    """

    def __init__(self, limit: int = SAMPLES_MAX) -> None:
        self._limit = limit
        self._kept: list[float] = []
        self._largest = 0.0
        self._random = random.Random(0)
        self.count = 0

    def __iter__(self) -> Iterator[float]:
        yield from self._kept
        if self.count > self._limit:
            yield self._largest

    def add(self, value: float) -> None:
        self.count += 1
        self._largest = max(self._largest, value)
        if len(self._kept) < self._limit:
            self._kept.append(value)
            return
        place = self._random.randrange(self.count)
        if place < self._limit:
            self._kept[place] = value
