"""What callers of the handle API pass and get, beside the values that every layer shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import UsageError
from ..model import Handle, PathName, PathReason, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterOptions:
    """`retain`: consumers cannot drop the owner's own reference, so a release, or a consumer that
    dies, never frees the slot; `withdraw` does. `ttl`: seconds from now after which the slot goes
    with every lease on it, whoever still reads; None: never.
    """

    retain: bool = False
    ttl: float | None = None

    def __post_init__(self) -> None:
        if self.ttl is not None and not 0 < self.ttl < float("inf"):
            raise UsageError(f"ttl={self.ttl!r} is not a number of seconds above 0")


NO_OPTIONS = RegisterOptions()


@dataclass(frozen=True, slots=True)
class Put:
    """One completed put, as its caller and as the destination's owner see it. `peer` is the other
    side. `phases` maps a phase name (reach, acquire, write, finish, total ...) to seconds. `rails`:
    the caller's devices that moved the bytes, as the caller knows them.
    """

    handle: Handle
    peer: WorkerId
    path: PathName
    reason: PathReason
    offset: int
    nbytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    rails: tuple[str, ...] = ()
