"""The memory of one size: a piece for each item of each operation that runs at once.

An operation is named by its worker, 0 to `inflight` - 1, and its turn among that worker's. Both
ends number payloads alike.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from ..errors import UsageError
from ..runtime.fresh_memory import fresh_memory
from .aside import Aside
from .pattern import Pattern
from .plan import Plan, Verify

_PAGE_BYTES: Final = 4096
VARIANTS: Final = 2  # payloads that are only read: whoever reads takes them in turn


def stride_of(size: int) -> int:
    """Bytes from one piece to the next: whole pages."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def bytes_needed(plan: Plan) -> int:
    """The most payload memory that either end uses at once for any size of `plan`."""
    return max(VARIANTS, plan.items) * stride_of(max(plan.sizes))


def check_memory(plan: Plan, ends: int = 1, *, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raises UsageError: so many ends of `plan` need more memory than this host has left, and to
    fill it would end processes.
    """
    needed, left = ends * bytes_needed(plan), _memory_left(meminfo)
    if left is not None and needed > left:
        raise UsageError(
            f"the plan needs {needed} bytes of memory here, and {left} are left",
            hint="give fewer bytes at once: a smaller --size, --batch or --inflight",
        )


def _memory_left(meminfo: Path) -> int | None:
    """Bytes. None: this host does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text("ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) << 10
    return None


class Slots:
    """`workers` times `batch` pieces of `size` bytes, each from a page's first byte on, untouched
    until `fill_all`. Raises BudgetExceeded: this process has no memory left.
    """

    def __init__(self, workers: int, batch: int, size: int, pattern: Pattern) -> None:
        self.batch = batch
        self.size = size
        self._workers = workers
        self._stride = stride_of(size)
        self._pattern = pattern
        self.memory = fresh_memory(workers * batch * self._stride)

    async def fill_all(self) -> None:
        """Every byte of every piece, as of turn 0. The event loop runs on meanwhile."""
        for worker in range(self._workers):
            await Aside().run(self.batch * self.size, self.fill, worker, 0, Verify.FULL)

    @property
    def places(self) -> list[int]:
        """Of all pieces, as offsets into `memory`: those of a worker together."""
        return [number * self._stride for number in range(self._workers * self.batch)]

    def places_of(self, worker: int) -> list[int]:
        """Of one worker's pieces."""
        first = worker * self.batch
        return [(first + item) * self._stride for item in range(self.batch)]

    def pieces(self, worker: int) -> list[memoryview]:
        return [self.memory[at : at + self.size] for at in self.places_of(worker)]

    def number(self, worker: int, turn: int, item: int) -> int:
        """Of the payload that this operation moves out of that piece."""
        return number_of(self._workers, self.batch, worker, turn, item)

    def fill(self, worker: int, turn: int, verify: Verify) -> None:
        """Make the pieces of `worker` the payloads of that turn, as far as they are compared."""
        for item, piece in enumerate(self.pieces(worker)):
            self._pattern.fill(piece, self.number(worker, turn, item), verify)


def number_of(workers: int, batch: int, worker: int, turn: int, item: int) -> int:
    """Of the payload that an operation moves away from its client: no other has it."""
    return (turn * workers + worker) * batch + item


def variant(turn: int, item: int) -> int:
    """Which of the payloads that are only read: never the one that the piece has from before."""
    return (turn + item) % VARIANTS
