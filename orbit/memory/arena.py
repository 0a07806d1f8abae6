"""An offset allocator for one arena: granules of 4 KiB, size-class bins, exact frees, immediate
coalescing.

It hands out offsets and never touches memory. The bins are those of a small float (8 per power of
two), so that a fit is found from a bit mask in constant time. When no larger class has a run, the
one class that may still hold a fit is searched, so an allocation fails only if no free run is long
enough: a fragmented arena never reports full too early.
"""

from __future__ import annotations

from ..errors import InternalError, UsageError

GRANULE_BYTES = 4096  # a page: what registration pins in any case
_MANTISSA_BITS = 3  # 8 bins per power of two: a fit from a larger bin wastes at most 1/8
_MANTISSA = 1 << _MANTISSA_BITS


class Allocation:
    """The token of one live piece. Only who holds it can free the piece; an offset alone cannot."""

    __slots__ = ("granules", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, granules: int) -> None:
        self.offset = offset  # bytes from the arena's start
        self.nbytes = nbytes  # as asked for
        self.granules = granules  # as taken


class OffsetAllocator:
    """Offsets within `capacity_bytes`, which is cut down to whole granules."""

    def __init__(self, capacity_bytes: int, granule_bytes: int = GRANULE_BYTES) -> None:
        if granule_bytes < 1 or capacity_bytes < granule_bytes:
            raise UsageError(
                f"an arena of {capacity_bytes} bytes holds no granule of {granule_bytes}"
            )
        self._granule_bytes = granule_bytes
        self._granules = capacity_bytes // granule_bytes
        self._free_granules = 0
        self._live: dict[int, Allocation] = {}  # first granule -> token
        self._size_at: dict[int, int] = {}  # free runs: first granule -> granules
        self._start_before: dict[int, int] = {}  # free runs: granule after the last -> first
        self._bins: dict[int, dict[int, None]] = {}  # bin -> first granules, in order of arrival
        self._bin_mask = 0
        self._insert(0, self._granules)

    @property
    def capacity_bytes(self) -> int:
        return self._granules * self._granule_bytes

    @property
    def free_bytes(self) -> int:
        return self._free_granules * self._granule_bytes

    @property
    def allocated_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def largest_free_bytes(self) -> int:
        """The longest free run. Looks at one bin only: the highest that is not empty."""
        if not self._bin_mask:
            return 0
        longest = max(self._size_at[start] for start in self._bins[self._bin_mask.bit_length() - 1])
        return longest * self._granule_bytes

    def allocate(self, nbytes: int) -> Allocation | None:
        """A piece of at least `nbytes` (> 0), or None when no free run is long enough."""
        if nbytes < 1:
            raise UsageError(f"an allocation of {nbytes} bytes")
        granules = -(-nbytes // self._granule_bytes)
        start = self._find(granules)
        if start is None:
            return None
        size = self._remove(start)
        if size > granules:
            self._insert(start + granules, size - granules)
        token = Allocation(start * self._granule_bytes, nbytes, granules)
        self._live[start] = token
        return token

    def free(self, token: Allocation) -> None:
        """Return a piece. Raises InternalError for anything but a live token of this arena."""
        start = token.offset // self._granule_bytes
        if self._live.get(start) is not token:
            raise InternalError(f"offset {token.offset} is not a live allocation of this arena")
        del self._live[start]
        first, granules = start, token.granules
        before = self._start_before.get(first)
        if before is not None:
            granules += self._remove(before)
            first = before
        if start + token.granules in self._size_at:
            granules += self._remove(start + token.granules)
        self._insert(first, granules)

    def _find(self, granules: int) -> int | None:
        # From `upper` on every run is long enough. Only the bin below it can hold both fits and
        # misfits.
        upper = _bin_at_least(granules)
        larger = self._bin_mask >> upper
        if larger:
            lowest = upper + (larger & -larger).bit_length() - 1
            return next(iter(self._bins[lowest]))
        if upper == (lower := _bin_of(granules)):
            return None
        fits = (start for start in self._bins.get(lower, ()) if self._size_at[start] >= granules)
        return next(fits, None)

    def _insert(self, start: int, granules: int) -> None:
        index = _bin_of(granules)
        self._bins.setdefault(index, {})[start] = None
        self._bin_mask |= 1 << index
        self._size_at[start] = granules
        self._start_before[start + granules] = start
        self._free_granules += granules

    def _remove(self, start: int) -> int:
        granules = self._size_at.pop(start)
        del self._start_before[start + granules]
        index = _bin_of(granules)
        starts = self._bins[index]
        del starts[start]
        if not starts:
            self._bin_mask &= ~(1 << index)
        self._free_granules -= granules
        return granules


def _bin_of(granules: int) -> int:
    """The bin whose runs are at most as long as this one at their shortest: rounds down."""
    if granules < _MANTISSA:
        return granules
    exponent = granules.bit_length() - 1 - _MANTISSA_BITS
    return ((exponent + 1) << _MANTISSA_BITS) | ((granules >> exponent) & (_MANTISSA - 1))


def _bin_at_least(granules: int) -> int:
    """The lowest bin in which every run holds `granules`: rounds up."""
    index = _bin_of(granules)
    if granules < _MANTISSA:
        return index
    exponent = granules.bit_length() - 1 - _MANTISSA_BITS
    return index if granules & ((1 << exponent) - 1) == 0 else index + 1
