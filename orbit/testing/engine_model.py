"""What the regions of several transfer engines must hold, from nothing but what was asked for and
how it ended.

It knows no engine: bytes are copied here by the plainest means, and compared with the memory that
the engines work on. Where a transfer is under way, or its end was never proven, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..memory.buffer import address_of

GUARD_BYTES = 64
_GUARD = b"\xa5"

Interval = tuple[int, int]  # begin and end within a region
Part = tuple[int, int, int]  # local offset, remote offset, bytes


class ModelRegion:
    """Memory between guards, and what it must hold. `view` is what an engine registers."""

    def __init__(self, content: bytes, name: str) -> None:
        self.name = name
        self.nbytes = len(content)
        self.content = bytearray(content)
        self.whole = bytearray(_GUARD * GUARD_BYTES + content + _GUARD * GUARD_BYTES)
        self.unsettled: list[Interval] = []  # written, and perhaps being written again
        self.haunted: list[Interval] = []  # what nobody proved to be over may write there

    @property
    def view(self) -> memoryview:
        return memoryview(self.whole)[GUARD_BYTES : GUARD_BYTES + self.nbytes]

    def actual(self, begin: int, end: int) -> bytes:
        return bytes(self.whole[GUARD_BYTES + begin : GUARD_BYTES + end])

    def haunt(self, part: memoryview) -> None:
        """That part of its memory may be written for ever; memory of others says nothing here."""
        begin = address_of(part) - address_of(self.view)
        if 0 <= begin < self.nbytes:
            self.haunted.append((begin, begin + part.nbytes))

    def settle(self, in_flux: Iterable[Interval]) -> None:
        """Where something has written and nothing does now, it must hold from now on what it holds
        now.
        """
        settled = without(self.unsettled, in_flux)
        for begin, end in settled:
            self.content[begin:end] = self.actual(begin, end)
        self.unsettled = without(self.unsettled, settled)

    def check(self, but: Iterable[Interval]) -> None:
        """Everything except `but` is as it must be, guards included."""
        guard = _GUARD * GUARD_BYTES
        assert self.whole[:GUARD_BYTES] == guard, f"written before {self.name}"
        assert self.whole[GUARD_BYTES + self.nbytes :] == guard, f"written behind {self.name}"
        for begin, end in without([(0, self.nbytes)], [*but, *self.haunted]):
            if self.actual(begin, end) != self.content[begin:end]:
                raise AssertionError(f"{self.name}: wrong within [{begin}, {end})")


@dataclass(eq=False)
class Attempt:
    """One transfer from its submission to its result."""

    reads: bool  # into the local region
    local: ModelRegion
    remote: ModelRegion
    parts: Sequence[Part]
    begun: float
    rivals: list[Attempt] = field(default_factory=list)
    over: bool = False
    harmless: bool = False  # it never touched a byte
    disturbed: bool = False  # a CPU wrote what it uses while it was under way

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.parts)

    @property
    def source(self) -> tuple[ModelRegion, list[Interval]]:
        return self._end(remote=self.reads)

    @property
    def target(self) -> tuple[ModelRegion, list[Interval]]:
        return self._end(remote=not self.reads)

    @property
    def alone(self) -> bool:
        """Nobody else has touched what it uses since it began."""
        rivals = not all(rival.over and rival.harmless for rival in self.rivals)
        return not (rivals or self.disturbed)

    def disturbs(self, other: Attempt) -> bool:
        """It writes what the other one uses."""
        return any(_meet(self.target, used) for used in (other.source, other.target))

    def _end(self, *, remote: bool) -> tuple[ModelRegion, list[Interval]]:
        region = self.remote if remote else self.local
        begins = ((part[1] if remote else part[0], part[2]) for part in self.parts)
        return region, [(begin, begin + nbytes) for begin, nbytes in begins if nbytes]


class EngineModel:
    """All regions of all engines. `in_use` tells whether some of a region's bytes are locked: who
    was told that its write failed need not know when the other side has done with it.
    """

    def __init__(self, in_use: Callable[[ModelRegion, Sequence[Interval]], bool]) -> None:
        self._in_use = in_use
        self._open: set[Attempt] = set()
        self._lingering: list[tuple[ModelRegion, list[Interval]]] = []

    @property
    def open_count(self) -> int:
        return len(self._open)

    def begin(self, attempt: Attempt) -> Attempt:
        """Before it is submitted."""
        for other in self._open:
            if attempt.disturbs(other) or other.disturbs(attempt):
                attempt.rivals.append(other)
                other.rivals.append(attempt)
        self._open.add(attempt)
        return attempt

    def succeeded(self, attempt: Attempt) -> None:
        """Its bytes are where they belong, and nothing else has changed."""
        if attempt.alone:
            self._check_bytes(attempt)
        self._close(attempt)

    def failed(self, attempt: Attempt, *, harmless: bool) -> None:
        """Whatever it has written stays as it is now; in a peer's region, as it is when that is
        unlocked. `harmless`: it was refused before the first byte, so it has written nothing.
        """
        attempt.harmless = harmless
        if not (harmless or attempt.reads):
            self._lingering.append(attempt.target)
        self._close(attempt, changed=not (harmless and attempt.alone))

    def unproven(self, attempt: Attempt) -> None:
        """Both ends may be reached for ever."""
        for region, intervals in (attempt.source, attempt.target):
            region.haunted += intervals
        self._close(attempt)

    def written(self, region: ModelRegion, begin: int, data: bytes) -> None:
        """A CPU did that, under the region's lock."""
        end = begin + len(data)
        region.content[begin:end] = data
        for attempt in self._open:
            if any(_meet((region, [(begin, end)]), e) for e in (attempt.source, attempt.target)):
                attempt.disturbed = True

    def check(self, region: ModelRegion) -> None:
        """All of it but what transfers may be writing at this moment."""
        in_flux = self._in_flux(region)
        region.settle(in_flux)
        region.check(in_flux)

    def _check_bytes(self, attempt: Attempt) -> None:
        """From what the source must hold, part by part."""
        (source, begins), (target, places) = attempt.source, attempt.target
        unknown = [*source.haunted, *self._lingers(source)]
        for (begin, end), (place, stop) in zip(begins, places, strict=True):
            for low, high in without([(begin, end)], unknown):
                expected = source.content[low:high]
                at = place + low - begin
                if target.actual(at, at + high - low) != expected:
                    raise AssertionError(
                        f"wrong bytes: [{place}, {stop}) of {target.name} from {source.name}"
                    )

    def _close(self, attempt: Attempt, *, changed: bool = True) -> None:
        attempt.over = True
        self._open.remove(attempt)
        region, intervals = attempt.target
        if changed:
            region.unsettled += intervals
        region.settle(self._in_flux(region))
        for touched in (attempt.local, attempt.remote):
            self.check(touched)

    def _in_flux(self, region: ModelRegion) -> list[Interval]:
        ends = (attempt.target for attempt in self._open)
        found = [interval for of, intervals in ends if of is region for interval in intervals]
        return found + self._lingers(region)

    def _lingers(self, region: ModelRegion) -> list[Interval]:
        found: list[Interval] = []
        for entry in [entry for entry in self._lingering if entry[0] is region]:
            if self._in_use(*entry):
                found += entry[1]
            else:
                self._lingering.remove(entry)
                region.unsettled += entry[1]
        return found


def without(intervals: Iterable[Interval], but: Iterable[Interval]) -> list[Interval]:
    """What is left of them, in order."""
    left = [interval for interval in intervals if interval[0] < interval[1]]
    for begin, end in but:
        cut = []
        for low, high in left:
            if end <= low or high <= begin:
                cut.append((low, high))
                continue
            if low < begin:
                cut.append((low, begin))
            if end < high:
                cut.append((end, high))
        left = cut
    return left


def _meet(
    one: tuple[ModelRegion, list[Interval]], other: tuple[ModelRegion, list[Interval]]
) -> bool:
    if one[0] is not other[0]:
        return False
    return any(a < d and c < b for a, b in one[1] for c, d in other[1])
