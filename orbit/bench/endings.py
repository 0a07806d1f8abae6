"""How the operations of one size ended: when, by which path, with what error or wrong byte.

It counts; it decides nothing but which error says that no further operation can succeed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import (
    ClosedError,
    OrbitError,
    PathUnavailable,
    PeerError,
    RequestFailed,
    Unquiesced,
    UsageError,
)
from ..model import PathName, PathReason
from .paths import both_words
from .usage import Samples

ERRORS_IN_A_ROW_MAX: Final = 100
_PHASE_SAMPLES: Final = 10_000

_FINAL: Final = (ClosedError, PathUnavailable, PeerError, UsageError)

PathText = Callable[[PathName, Iterable[str]], str]


@dataclass(frozen=True, slots=True)
class Moved:
    """How one item went: by which devices of this end, and seconds by phase."""

    path: PathName
    rails: tuple[str, ...] = ()
    reason: PathReason | str = PathReason.OK
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A byte that is not what seed and number say. `byte` counts within the item."""

    item: int
    byte: int


class Clock:
    """Seconds in which at least one operation was under way."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float) -> None:
        self._running -= 1
        if not self._running:
            self._seconds += now - self._since

    def seconds(self, now: float) -> float:
        """So far."""
        return self._seconds + (now - self._since if self._running else 0.0)


class Tally:
    """`problem`: why the run ended before its end. `path_text`: a path and its rails for people."""

    def __init__(self, path_text: PathText) -> None:
        self._path_text = path_text
        self.clock = Clock()
        self.latencies = Samples()
        self.paths: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.ops = 0
        self.verified = 0
        self.errors = 0
        self.error = ""  # the first one
        self.problem = ""
        self._in_a_row = 0
        self._phases: dict[str, Samples] = {}

    def succeeded(self, seconds: float, items: Sequence[Moved]) -> None:
        self.ops += 1
        self._in_a_row = 0
        self.latencies.add(seconds)
        self.paths[self._path_of(items)] += 1
        for item in items:
            self.reasons[str(item.reason)] += 1
            for name, spent in item.phases.items():
                self._phases.setdefault(name, Samples(_PHASE_SAMPLES)).add(spent)

    def failed(self, error: OrbitError) -> None:
        """Raises it when further operations would fail alike."""
        if is_final(error):
            raise error
        self.errors += 1
        self.error = self.error or f"{error.code}: {error}"
        self._in_a_row += 1
        if isinstance(error, Unquiesced):
            self.problem = self.problem or f"unquiesced: {error}"
        elif self._in_a_row >= ERRORS_IN_A_ROW_MAX and not self.problem:
            self.problem = f"{self._in_a_row} operations failed in a row: {self.error}"

    @property
    def path(self) -> str:
        """Of most operations."""
        return self.paths.most_common(1)[0][0] if self.paths else "none"

    @property
    def reason(self) -> str:
        """What went wrong, else why another path than the first was taken, else "ok"."""
        others = [reason for reason, _ in self.reasons.most_common() if reason != "ok"]
        return self.error or (others[0] if others else "ok")

    def _path_of(self, items: Sequence[Moved]) -> str:
        """All rails of an operation together; what is no RDMA, first."""
        paths = sorted({item.path for item in items}, reverse=True)
        rails = {rail for item in items for rail in item.rails}
        return both_words(self._path_text(path, rails) for path in paths)

    def phases(self) -> dict[str, float]:
        """Median seconds of an item, by phase."""
        return {name: statistics.median(spent) for name, spent in self._phases.items()}


def is_final(error: OrbitError) -> bool:
    """Whether the next operation would fare alike."""
    return isinstance(error, _FINAL) and not isinstance(error, RequestFailed)
