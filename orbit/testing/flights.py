"""Which bytes of memory transfers have in use at this moment, and each conflict that was seen.

A naive list of intervals of addresses: what a correct lock makes impossible is written down here,
never prevented. It knows nothing of leases, engines or locks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..memory.buffer import address_of


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One user of some intervals. `shared`: it only reads them."""

    intervals: tuple[tuple[int, int], ...]  # begin and end addresses
    shared: bool
    what: str

    def meets(self, other: Flight) -> bool:
        """Both are there at once, and one of them writes what the other uses."""
        if self.shared and other.shared:
            return False
        return any(a < d and c < b for a, b in self.intervals for c, d in other.intervals)


class Flights:
    """`conflicts` is what a test asserts to be empty."""

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self._live: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, views: Iterable[memoryview], what: str, *, shared: bool) -> Flight:
        """From now until `end`. Conflicts are noted, and both go on."""
        found = ((int(address_of(view)), view.nbytes) for view in views if view.nbytes)
        intervals = tuple((address, address + nbytes) for address, nbytes in found)
        flight = Flight(intervals, shared, what)
        for other in self._live:
            if flight.meets(other):
                self.conflicts.append(f"{what} while {other.what}")
        self._live.add(flight)
        return flight

    def end(self, flight: Flight) -> None:
        """Once."""
        self._live.remove(flight)


@dataclass(frozen=True, slots=True)
class LostReceipt:
    """All bytes of a grant were moved, and its source was never told. `address`: of the first byte
    that was written.
    """

    at_s: float
    address: int

    def lies_in(self, views: Iterable[memoryview]) -> bool:
        """Whether that byte does."""
        found = ((int(address_of(view)), view.nbytes) for view in views if view.nbytes)
        return any(begin <= self.address < begin + nbytes for begin, nbytes in found)
