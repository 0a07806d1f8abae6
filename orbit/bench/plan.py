"""What is to be measured: one verb, its sizes, how much at once, for how long. Pure values.

A *plan* is the same at both ends and travels from the client to the server; how each end's node is
set up (devices, lanes, progress) is each end's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

from ..errors import UsageError
from ..model import Transport

SIZE_MAX: Final = 1 << 40
ITEMS_MAX: Final = 4096  # of all operations that run at once
_COUNT_MAX: Final = 1 << 40
_SEED_MAX: Final = (1 << 63) - 1
SAMPLE_BYTES: Final = 4096  # what "sample" compares at each end of every item


class Verb(StrEnum):
    """What one operation is. The bytes move towards the client, except for MSG, PUT and WRITE; a
    UNARY's go both ways and count once.
    """

    MSG = "msg"  # one-way messages, done when the server's handler has run
    UNARY = "unary"  # a call whose answer is its payload
    GET = "get"  # by handle, into memory that the call makes
    GET_INTO = "get_into"  # by handle, into memory that is there
    PUT = "put"  # by handle, out of memory that is there
    READ = "read"  # of a transfer engine, between registered regions
    WRITE = "write"

    @property
    def of_engine(self) -> bool:
        return self in (Verb.READ, Verb.WRITE)

    @property
    def of_messages(self) -> bool:
        return self in (Verb.MSG, Verb.UNARY)


class Verify(StrEnum):
    """Which bytes are compared with what the seed says they are."""

    FULL = "full"  # every byte of every item, after the clock has stopped for it
    SAMPLE = "sample"  # the first and last SAMPLE_BYTES of every item
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`batch` items of `size` bytes are one operation, and `inflight` operations run at once. Of
    `iterations` and `duration` (seconds) one is given; either is for each size. A plan that a peer
    sent is checked in full: whoever has one may compute with its numbers.
    """

    verb: Verb
    sizes: tuple[int, ...]
    transport: Transport = Transport.AUTO
    batch: int = 1
    inflight: int = 1
    iterations: int | None = None
    duration: float | None = None
    warmup: int = 3  # operations of each size that are not counted; if any, one of each worker
    verify: Verify = Verify.SAMPLE
    seed: int = 0
    baseline: bool = True

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if not self.sizes or not all(_whole(size, 1, SIZE_MAX) for size in self.sizes):
            raise UsageError(f"sizes {self.sizes}: give at least one, of 1 to {SIZE_MAX} bytes")
        bounds = {
            "batch": (1, ITEMS_MAX),
            "inflight": (1, ITEMS_MAX),
            "warmup": (0, _COUNT_MAX),
            "seed": (0, _SEED_MAX),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not _whole(value, low, high):
                raise UsageError(f"{name}={value!r} is no number from {low} to {high}")
        if self.items > ITEMS_MAX:
            raise UsageError(f"inflight times batch is {self.items}, above {ITEMS_MAX}")
        self._check_end()
        if self.verb.of_engine and self.transport is Transport.AUTO:
            raise UsageError(
                f"{self.verb} has no automatic transport", hint="give --transport rdma or tcp"
            )

    def _check_end(self) -> None:
        iterations, duration = self.iterations, self.duration
        if (iterations is None) == (duration is None):
            raise UsageError("give either iterations or a duration")
        if iterations is not None and not _whole(iterations, 1, _COUNT_MAX):
            raise UsageError(f"iterations={iterations!r} is no number from 1 to {_COUNT_MAX}")
        if duration is not None and not (
            isinstance(duration, int | float) and 0 < duration < float("inf")
        ):
            raise UsageError(f"duration={duration!r} is no number of seconds above 0")

    @property
    def items(self) -> int:
        """That are under way at once."""
        return self.inflight * self.batch

    def to_json(self) -> dict[str, Any]:
        """What json and msgpack can write."""
        return {**asdict(self), "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`. Raises UsageError, also for keys that it does not know."""
        try:
            values = dict(found)
            values["verb"] = Verb(values["verb"])
            values["sizes"] = tuple(values["sizes"])
            values["transport"] = Transport(values["transport"])
            values["verify"] = Verify(values["verify"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a plan of this version of orbit bench: {error}") from error


def _whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
