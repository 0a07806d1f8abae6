"""What could not be proven to be out of the device's reach, kept alive and listed.

Owns the list. An entry holds a reference to whatever must not be freed; it goes when the proof
comes late. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetainedItem:
    """One entry as statistics show it."""

    what: str
    nbytes: int
    cause: str
    since: float  # the event loop's clock


class Retained:
    """Entries by an arbitrary key object, which is kept alive as well."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[object, RetainedItem]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for _, item in self._entries.values())

    def add(self, keep: object, what: str, nbytes: int, cause: str, now: float) -> None:
        self._entries.setdefault(id(keep), (keep, RetainedItem(what, nbytes, cause, now)))

    def remove(self, keep: object) -> None:
        """The proof has come. Unknown objects are ignored."""
        self._entries.pop(id(keep), None)

    def kept(self) -> tuple[object, ...]:
        """What is kept alive."""
        return tuple(keep for keep, _ in self._entries.values())

    def items(self) -> tuple[RetainedItem, ...]:
        return tuple(item for _, item in self._entries.values())
