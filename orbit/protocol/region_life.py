"""The life of one region's registration: registered, used, gated, drained, deregistered.

What must hold: no device is told to let go of memory while a use of it lives, nothing new begins
once the end was asked for, and `Released` comes only after every device has confirmed. A use whose
end could not be proven keeps the region for ever. The machine knows no memory, device or clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..errors import InternalError
from ..model import Deregistered
from .transitions import Table, TableMachine


class RegionState(StrEnum):
    REGISTERING = "registering"
    LIVE = "live"
    GATED = "gated"  # nothing new begins; what uses it is waited for
    DRAINING = "draining"  # waiting took too long: what uses it was told to stop
    UNMAPPING = "unmapping"
    RELEASED = "released"
    UNCONFIRMED = "unconfirmed"  # the memory is kept


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """Every device has it (or this node has none)."""


@dataclass(frozen=True, slots=True)
class RegistrationFailed:
    """No device has it."""


@dataclass(frozen=True, slots=True)
class UseBegan:
    use: int


@dataclass(frozen=True, slots=True)
class UseEnded:
    """Nothing accesses the memory for this use any more."""

    use: int


@dataclass(frozen=True, slots=True)
class UseUnproven:
    """The use is over, but something may still access the memory."""

    use: int
    cause: str


@dataclass(frozen=True, slots=True)
class Unregister:
    """Somebody wants the end. From `deadline` on uses are ended by force; None: never. Asked again,
    the earliest counts; after a failure it is another attempt.
    """

    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The machine's deadline has come."""


@dataclass(frozen=True, slots=True)
class Unmapped:
    """Every device has confirmed."""


@dataclass(frozen=True, slots=True)
class UnmapFailed:
    cause: str


RegionInput = (
    Registered
    | RegistrationFailed
    | UseBegan
    | UseEnded
    | UseUnproven
    | Unregister
    | TimedOut
    | Unmapped
    | UnmapFailed
)


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopUses:
    """Tell these to end soon, by force."""

    uses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmap:
    """Deregister on every device, and say Unmapped or UnmapFailed."""


@dataclass(frozen=True, slots=True)
class Released:
    """The memory is the caller's. For whoever asked again afterwards, too."""

    how: Deregistered


@dataclass(frozen=True, slots=True)
class KeepMemory:
    """The end could not be proven, and whoever waits for it is told so."""

    cause: str


RegionEffect = StopUses | Unmap | Released | KeepMemory

_S = RegionState
_END_OF_USES: Final = frozenset({_S.UNMAPPING, _S.UNCONFIRMED})

REGION_TABLE: Final[Table[RegionState]] = {
    _S.REGISTERING: {
        Registered: frozenset({_S.LIVE}),
        RegistrationFailed: frozenset({_S.RELEASED}),
    },
    _S.LIVE: {
        UseBegan: frozenset({_S.LIVE}),
        UseEnded: frozenset({_S.LIVE}),
        UseUnproven: frozenset({_S.LIVE}),
        Unregister: _END_OF_USES | {_S.GATED, _S.DRAINING},
    },
    _S.GATED: {
        UseEnded: _END_OF_USES | {_S.GATED},
        UseUnproven: _END_OF_USES | {_S.GATED},
        Unregister: frozenset({_S.GATED, _S.DRAINING}),
        TimedOut: frozenset({_S.DRAINING}),
    },
    _S.DRAINING: {
        UseEnded: _END_OF_USES | {_S.DRAINING},
        UseUnproven: _END_OF_USES | {_S.DRAINING},
        Unregister: frozenset({_S.DRAINING}),
    },
    _S.UNMAPPING: {
        Unregister: frozenset({_S.UNMAPPING}),
        Unmapped: frozenset({_S.RELEASED}),
        UnmapFailed: frozenset({_S.UNCONFIRMED}),
    },
    _S.UNCONFIRMED: {
        UseEnded: frozenset({_S.UNCONFIRMED}),
        Unregister: _END_OF_USES,
    },
    _S.RELEASED: {Unregister: frozenset({_S.RELEASED})},
}


class RegionLife(TableMachine[RegionState, RegionInput, RegionEffect]):
    """Uses are numbers that the shell chooses, each used once."""

    def __init__(self) -> None:
        super().__init__(REGION_TABLE, RegionState.REGISTERING)
        self._uses: dict[int, None] = {}
        self._unproven: dict[int, str] = {}  # use -> cause
        self._due: float | None = None
        self._how = Deregistered.DRAINED

    @property
    def in_use(self) -> bool:
        """Whether a use has not ended yet."""
        return bool(self._uses)

    @property
    def uses(self) -> tuple[int, ...]:
        """Those that have not ended, oldest first."""
        return tuple(self._uses)

    @property
    def unproven(self) -> Mapping[int, str]:
        """Uses that are over without a proof, and why."""
        return self._unproven

    def _react(self, event: RegionInput, now: float) -> tuple[RegionState, list[RegionEffect]]:
        match event:
            case Registered():
                return _S.LIVE, []
            case RegistrationFailed():
                return _S.RELEASED, [Released(self._how)]
            case UseBegan(use):
                self._uses[use] = None
                return self.state, []
            case UseEnded(use):
                self._forget(use)
                return self._after_use()
            case UseUnproven(use, cause):
                self._forget(use)
                self._unproven[use] = cause
                return self._after_use()
            case Unregister(deadline):
                return self._unregister(deadline, now)
            case TimedOut():
                return self._force()
            case Unmapped():
                return _S.RELEASED, [Released(self._how)]
            case UnmapFailed(cause):
                return _S.UNCONFIRMED, [KeepMemory(cause)]

    def _entered(self, now: float) -> None:
        self.deadline = self._due if self.state is _S.GATED else None

    def _forget(self, use: int) -> None:
        if use in self._uses:
            del self._uses[use]
        elif use in self._unproven:  # a late proof
            del self._unproven[use]
        else:
            raise InternalError(f"use {use} of a region ended twice, or never began")

    def _after_use(self) -> tuple[RegionState, list[RegionEffect]]:
        if self._uses or self.state not in (_S.GATED, _S.DRAINING):
            return self.state, []
        return self._end()

    def _unregister(
        self, deadline: float | None, now: float
    ) -> tuple[RegionState, list[RegionEffect]]:
        match self.state:
            case _S.RELEASED:
                return self.state, [Released(self._how)]
            case _S.UNMAPPING | _S.DRAINING:
                return self.state, []
            case _ if not self._uses:
                return self._end()
        if deadline is not None and (self._due is None or deadline < self._due):
            self._due = self.deadline = deadline
        if self._due is not None and self._due <= now:
            return self._force()
        return _S.GATED, []

    def _force(self) -> tuple[RegionState, list[RegionEffect]]:
        self._how = Deregistered.DRAIN_TIMED_OUT
        return _S.DRAINING, [StopUses(tuple(self._uses))]

    def _end(self) -> tuple[RegionState, list[RegionEffect]]:
        if self._unproven:
            return _S.UNCONFIRMED, [KeepMemory("; ".join(dict.fromkeys(self._unproven.values())))]
        return _S.UNMAPPING, [Unmap()]
