"""The local end of one parent: a range lock and a use of the region, until nothing reaches it.

It knows no path. Whether the bytes move from here or through a private copy is staging.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import ClosedError, OrbitError
from ...memory.range_locks import LOCKS
from ...model import Direction
from ...transport.interface import Span, Target
from ...transport.pieces import cut_span, cut_target, join_spans, join_targets
from .region import EngineRegion, region_of

Stop = Callable[[OrbitError], None]


class LocalMemory:
    """Some ranges of a region, in payload order. A READ fills them, so it excludes every other use;
    WRITEs of the same bytes may go on beside each other.
    """

    def __init__(
        self, region: EngineRegion, ranges: Sequence[tuple[int, int]], direction: Direction
    ) -> None:
        """`ranges`: offset and size of each. Raises RangeBusy, ClosedError (the region is being
        unregistered); then nothing is held.
        """
        self.nbytes = sum(nbytes for _, nbytes in ranges)
        self._stop: Stop | None = None
        self._wanted: OrbitError | None = None
        behind = region_of(region)
        first = behind.memory.address
        reads = direction is Direction.READ
        self._lock = LOCKS.lock_many(
            [(first + offset, nbytes) for offset, nbytes in ranges],
            shared=not reads,
            owner="a transfer that reads into it" if reads else "a transfer that writes from it",
        )
        try:
            use = self._use = behind.use(0, region.nbytes, self._want, own=True)
        except BaseException:
            self._lock.release()
            raise
        self.target: Target = join_targets([cut_target(use.target, *part) for part in ranges])
        self.span: Span = join_spans([cut_span(use.span, *part) for part in ranges])

    def watch(self, stop: Stop | None) -> None:
        """`stop` is called, from the event loop, when the region is unregistered by force."""
        self._stop = stop
        if stop is not None and self._wanted is not None:
            stop(self._wanted)

    def keep(self, cause: str) -> None:
        """That nothing reaches it any more could not be proven: region and lock stay as they are.
        Whoever calls this keeps this object, too.
        """
        self._use.keep(cause)

    def discard(self) -> None:
        """It is given back when the parent has drained, and not before."""

    def give_back(self) -> None:
        """Nothing of the parent reaches it any more. Idempotent."""
        self.target, self.span = Target(memoryview(b"")), Span(memoryview(b""))
        self._use.end()
        if self._lock.live:
            self._lock.release()

    def _want(self) -> None:
        self._wanted = ClosedError("the region")
        if self._stop is not None:
            self._stop(self._wanted)
