"""What a caller asks an engine for, and what it is told: requests and their results.

Requests are checked when they are made, as far as that needs nobody else. Nothing moves here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ...config import parse_transport
from ...errors import OrbitError, UsageError
from ...model import Direction, PathName, Transport
from ...protocol.remote_region import RemoteRange, RemoteRegion
from ..live import Live
from ..usage import checked_timeout
from .region import EngineRegion, RegionRange


class Op(StrEnum):
    """READ fills the local range from the remote one, WRITE the remote one from the local one."""

    READ = "read"
    WRITE = "write"

    @property
    def direction(self) -> Direction:
        return Direction.READ if self is Op.READ else Direction.WRITE


class TransferState(StrEnum):
    """How a request ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNQUIESCED = "unquiesced"  # that nothing reaches its memory any more is not proven


@dataclass(frozen=True, slots=True, eq=False)
class TransferRequest(Live):
    """Move bytes between a range here and one of the same size there. A region stands for all of
    it. `transport` ("rdma" or "tcp") is a demand; `timeout` in seconds, None: no deadline.
    """

    _instead = "make it where the local region is"

    op: Op | str
    local: RegionRange | EngineRegion
    remote: RemoteRange | RemoteRegion
    transport: Transport | str = "rdma"
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError, ConfigError (no such transport)."""
        object.__setattr__(self, "op", _checked_op(self.op))
        object.__setattr__(self, "transport", _checked_transport(self.transport))
        object.__setattr__(self, "local", local_range(self.local))
        object.__setattr__(self, "remote", remote_range(self.remote))
        checked_timeout(self.timeout)
        if self.here.nbytes != self.there.nbytes:
            raise UsageError(
                f"{self.here.nbytes} bytes here and {self.there.nbytes} there: not one size"
            )

    @property
    def here(self) -> RegionRange:
        return local_range(self.local)

    @property
    def there(self) -> RemoteRange:
        return remote_range(self.remote)

    @property
    def direction(self) -> Direction:
        return Op(self.op).direction

    @property
    def nbytes(self) -> int:
        return self.here.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class RangeRequest(Live):
    """Many ranges between one region here and one there: number i moves `lengths[i]` bytes between
    byte `local_offsets[i]` and byte `remote_offsets[i]`. The three are sequences of whole numbers,
    at best numpy arrays. What is written must not overlap.
    """

    _instead = "make it where the local region is"

    op: Op | str
    local: EngineRegion
    remote: RemoteRegion
    local_offsets: object
    remote_offsets: object
    lengths: object
    transport: Transport | str = "rdma"
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError, ConfigError. The ranges are looked at when they are submitted."""
        object.__setattr__(self, "op", _checked_op(self.op))
        object.__setattr__(self, "transport", _checked_transport(self.transport))
        checked_timeout(self.timeout)
        if not isinstance(self.local, EngineRegion) or not isinstance(self.remote, RemoteRegion):
            raise UsageError(
                "the ranges of a RangeRequest lie in an EngineRegion and a RemoteRegion"
            )

    @property
    def direction(self) -> Direction:
        return Op(self.op).direction


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How one request ended. `nbytes` is 0 unless it succeeded, which says nothing about bytes that
    a failed one has moved. `locally_drained`: nothing of it reaches memory of this process any
    more. `phases`: seconds by name; `rails`: those that it was spread over, by device.
    """

    op: Op
    nbytes: int
    path: PathName
    state: TransferState
    error: OrbitError | None
    locally_drained: bool
    phases: Mapping[str, float] = field(default_factory=dict)
    rails: tuple[str, ...] = ()


def local_range(local: object) -> RegionRange:
    """Raises UsageError."""
    if isinstance(local, EngineRegion):
        return RegionRange(local, 0, local.nbytes)
    if not isinstance(local, RegionRange):
        raise UsageError(f"the local range is of an engine's region, not {type(local).__name__}")
    return local


def remote_range(remote: object) -> RemoteRange:
    """Raises UsageError."""
    if isinstance(remote, RemoteRegion):
        return RemoteRange(remote, 0, remote.nbytes)
    if not isinstance(remote, RemoteRange):
        raise UsageError(f"the remote range is of a RemoteRegion, not {type(remote).__name__}")
    return remote


def _checked_op(op: object) -> Op:
    try:
        return Op(op)  # type: ignore[arg-type]  # what is none raises
    except ValueError:
        raise UsageError(f"op={op!r} is neither read nor write") from None


def _checked_transport(transport: Transport | str) -> Transport:
    chosen = parse_transport("transport", transport)
    if chosen is Transport.AUTO:
        raise UsageError("a transfer names its transport, rdma or tcp: it never falls back")
    return chosen
