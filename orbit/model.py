"""Frozen values that every layer shares: identities, handles, paths, reasons, results.

Nothing here does I/O or knows a wire format beyond the two integers of a handle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType

from .errors import UsageError

WorkerId = NewType("WorkerId", int)  # u64, never 0
Incarnation = NewType("Incarnation", int)  # u64, random per process start
SlotId = NewType("SlotId", int)  # u64, from 1, never reused
LeaseId = NewType("LeaseId", int)  # u64, from 1, never reused
Address = NewType("Address", int)  # a virtual address of the process that owns the memory
LocalKey = NewType("LocalKey", int)  # lkey
RemoteKey = NewType("RemoteKey", int)  # rkey of a bound memory window

_U64_MAX = (1 << 64) - 1
_HANDLE = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})\Z")


@dataclass(frozen=True, slots=True, order=True)
class Handle:
    """Names one staged payload: owner's worker id above, local slot id below (a u128). Plain
    data: picklable.
    """

    worker_id: WorkerId
    slot_id: SlotId

    def __post_init__(self) -> None:
        if not (0 < self.worker_id <= _U64_MAX and 0 < self.slot_id <= _U64_MAX):
            raise UsageError(f"not a handle: ({self.worker_id}, {self.slot_id})")

    def __str__(self) -> str:
        return f"{self.worker_id:016x}-{self.slot_id:x}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Inverse of `str`. Raises UsageError."""
        match = _HANDLE.match(text)
        if match is None:
            raise UsageError(
                f"not a handle: {text[:64]!r}", hint="a handle looks like 0123456789abcdef-1"
            )
        return cls(WorkerId(int(match[1], 16)), SlotId(int(match[2], 16)))


class PathName(StrEnum):
    """How the bytes moved. LOCAL: owner and consumer are one node."""

    RDMA = "rdma"
    TCP = "tcp"
    LOCAL = "local"


class Direction(IntEnum):
    """What a consumer does with an owner's memory under a lease, and a requester with a source's
    under a grant. The numbers are those of the wire.
    """

    READ = 1
    WRITE = 2


class RegionAccess(StrEnum):
    """What peers may do with an engine's region. Without a grant of that right none can."""

    LOCAL = "local"  # nothing: the local end of transfers
    READ = "read"
    WRITE = "write"
    READ_WRITE = "readwrite"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """What peers may do, as directions."""
        return _DIRECTIONS[self]


_DIRECTIONS: Mapping[RegionAccess, tuple[Direction, ...]] = {
    RegionAccess.LOCAL: (),
    RegionAccess.READ: (Direction.READ,),
    RegionAccess.WRITE: (Direction.WRITE,),
    RegionAccess.READ_WRITE: (Direction.READ, Direction.WRITE),
}


class Deregistered(StrEnum):
    """How a region's registration ended. Either way the memory is the caller's again."""

    DRAINED = "drained"  # what was in flight had ended
    DRAIN_TIMED_OUT = "drain_timed_out"  # what was in flight was ended by force


class Transport(StrEnum):
    """What a caller asks for. AUTO may fall back to TCP once; RDMA and TCP are demands."""

    AUTO = "auto"
    RDMA = "rdma"
    TCP = "tcp"


class PathReason(StrEnum):
    """Why a path was taken or not. First the owner's and the consumer's decisions about an acquire
    (D12), then what a device or a peer lacks.
    """

    OK = "ok"
    NO_OFFER = "no_offer"
    NOT_CONFIGURED = "not_configured"
    KILL_SWITCH = "kill_switch"
    NOT_PINNED = "not_pinned"
    BELOW_MIN = "below_min"
    DRAINING = "draining"
    DECODE_ERROR = "decode_error"
    POOL_EXHAUSTED = "pool_exhausted"
    GET_FAILED = "get_failed"
    BUDGET = "budget"

    ASKED = "asked"  # the caller demanded this path
    NO_DEVICE = "no_device"  # no RDMA device is present
    NO_PYVERBS = "no_pyverbs"  # pyverbs or libibverbs cannot be imported
    NO_HELPER = "no_helper"  # built without the verbs helper
    PERMISSION = "permission"  # the device node exists but may not be opened
    PORT_DOWN = "port_down"  # no port is ACTIVE
    NO_GID = "no_gid"  # no usable GID
    NO_WINDOWS = "no_windows"  # the device cannot bind a type-2B memory window
    RANGE_NOT_ENFORCED = (
        "range_not_enforced"  # the device ignores window ranges and require_range is set
    )
    DEVICE_FAILED = "device_failed"  # the device is there but its start probe failed
    PEER_WITHOUT = "peer_without"  # the peer announced no RDMA rail
    CONNECT_FAILED = "connect_failed"  # the bulk queue pairs to this peer could not be connected
    WINDOW_KEYS = "window_keys"  # no fresh window key is left in the protection domain
    WINDOWS_BUSY = "windows_busy"  # every grant slot to this peer is in use
    NOT_READY = "not_ready"  # a message link was connected, but nothing arrived over it in time
    NO_SLABS = "no_slabs"  # the receive queue has no room for another peer


class LeaseEnd(StrEnum):
    """How a lease ended. REAPED and PEER_LOST are forced releases: they drop the lock and one
    reference.
    """

    DETACHED = "detached"
    RELEASED = "released"
    REAPED = "reaped"
    PEER_LOST = "peer_lost"
    EXPIRED = "expired"  # the slot went (time-to-live or withdrawal) with its leases
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Metadata:
    """What `metadata(handle)` answers. Takes no lock, so it can be stale on arrival."""

    total_bytes: int
    refcount: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """A held read lock on a slot, and the record of how its bytes arrived.

    Give it back with `release` (drops lock and one reference) or `detach` (drops the lock).
    `phases` maps a phase name (prepare, acquire, read, pull, copy, total ...) to seconds. `rails`:
    the devices here that moved the bytes.
    """

    handle: Handle
    lease_id: LeaseId
    path: PathName
    reason: PathReason
    nbytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    rails: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who is at the other end of one epoch."""

    worker_id: WorkerId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.worker_id:016x}"
