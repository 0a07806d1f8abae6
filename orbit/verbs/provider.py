"""The creation side of the verbs seam: what a device offers, by contract.

Two providers implement it: `_pyverbs` over the distribution's pyverbs, and `scripted` over the
fake device. Both come with the helper (`turn`) that posts and polls on the objects' native
addresses. Close order is the caller's duty and belongs to one object (`device.py`): windows,
queue pairs, shared receive queues, completion queues, channels, regions, domain, context. Errors
are DeviceError; foreign exceptions never leave a provider. Nothing here blocks except where said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .async_events import AsyncEvent
from .gid_ranking import GidEntry
from .turn import QueuePairAttributes, Turn


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the device says it can do; granted values may differ and are read back at creation."""

    max_qp_wr: int
    max_cqe: int
    max_sge: int
    max_rd_atomic: int  # as a responder (max_qp_rd_atom)
    max_init_rd_atomic: int  # as an initiator (max_qp_init_rd_atom)
    max_windows: int
    max_region_bytes: int
    window_type_2b: bool  # the capability flag only; a real bind is the proof
    vendor_id: int = 0  # chooses the row of `quirks.py`
    max_shared_receives: int = 0  # depth of one shared receive queue (max_srq_wr)


@dataclass(frozen=True, slots=True)
class PortFacts:
    """One port as queried now."""

    active: bool
    state: str  # "ACTIVE", "DOWN" ...
    mtu: int  # active path MTU in bytes
    lid: int
    link_layer: str  # "ethernet" or "infiniband"
    gid_count: int
    max_message_bytes: int
    pkey_count: int = 1


@dataclass(frozen=True, slots=True)
class QueuePairCaps:
    """Asked for at creation; the queue pair holds what was granted. On a shared receive queue
    `recv_depth` counts for nothing and comes back as 0."""

    send_depth: int
    recv_depth: int
    inline_bytes: int = 0


class NativeObject(Protocol):
    @property
    def native(self) -> int:
        """Address for the helper; 0 after close."""

    def close(self) -> None:
        """Destroy it. Idempotent. Raises DeviceError and keeps the object when the device
        refuses.
        """


class NativeChannel(NativeObject, Protocol):
    @property
    def fd(self) -> int:
        """Non-blocking completion channel file descriptor."""


class NativeRegion(NativeObject, Protocol):
    @property
    def lkey(self) -> int: ...

    @property
    def rkey(self) -> int: ...


class NativeWindow(NativeObject, Protocol):
    @property
    def key(self) -> int:
        """The current key: index << 8 | tag. A fresh window already has one."""


class NativeQueuePair(NativeObject, Protocol):
    @property
    def qp_num(self) -> int: ...

    @property
    def caps(self) -> QueuePairCaps: ...

    def modify(self, attributes: QueuePairAttributes) -> None:
        """Blocks for up to a second (RTR towards an absent neighbour) without the GIL: call it
        off the loop.
        """


class NativeSharedReceive(NativeObject, Protocol):
    """Receives that several queue pairs take from (SRQ). Post with `Turn.post_shared_receive`. A
    queue pair's error flushes none of them. Destroy it after its queue pairs."""

    @property
    def depth(self) -> int:
        """Receives it holds, as granted: at least what was asked for."""

    def arm_limit(self, limit: int) -> None:
        """One SRQ_LIMIT_REACHED event once fewer than `limit` receives are left; then arm again. 0
        disarms. When fewer are left already, the device says so now or at the next receive. A
        system call, made without the GIL: microseconds on software devices, a command of the
        firmware on others. Raises DeviceError (EINVAL: more than it holds).
        """


class NativeDomain(NativeObject, Protocol):
    """A protection domain."""

    def register(self, address: int, length: int, access: int) -> NativeRegion:
        """ibv_reg_mr with ibv_access_flags (LOCAL_WRITE 1, REMOTE_WRITE 2, REMOTE_READ 4, MW_BIND
        16). The memory should have been prefaulted (`turn.prefault`): page faults here would be
        served under the GIL.
        """

    def allocate_window(self) -> NativeWindow:
        """Type 2. Allocate it after the queue pair that it will be bound on."""

    def create_shared_receive(self, depth: int) -> NativeSharedReceive: ...

    def create_queue_pair(
        self,
        send_cq: NativeObject,
        recv_cq: NativeObject,
        caps: QueuePairCaps,
        shared_receive: NativeSharedReceive | None = None,
    ) -> NativeQueuePair:
        """With `shared_receive` the queue pair has no receives of its own."""


class NativeContext(NativeObject, Protocol):
    @property
    def device(self) -> str: ...

    @property
    def async_fd(self) -> int:
        """Non-blocking; readable while an asynchronous event waits. One reader."""

    def next_async_event(self) -> AsyncEvent | None:
        """Get the oldest event and acknowledge it; None when there is none. Call until None: a
        descriptor that was ready stands for any number of them. Raises DeviceError.
        """

    def limits(self) -> DeviceLimits: ...

    def port(self, number: int) -> PortFacts: ...

    def gid(self, port: int, index: int) -> str:
        """Canonical IPv6 text; "::" for an empty entry."""

    def gid_entries(self, port: int) -> Sequence[GidEntry]:
        """The non-empty rows with what the system says of each. Some system calls for each row."""

    def pkey(self, port: int, index: int) -> int:
        """A row of the partition key table; 0 for an empty one."""

    def allocate_domain(self) -> NativeDomain: ...

    def create_channel(self) -> NativeChannel: ...

    def create_cq(self, depth: int, channel: NativeChannel) -> NativeObject: ...


class Provider(Protocol):
    @property
    def turn(self) -> Turn: ...

    def devices(self) -> Sequence[str]:
        """Names of the devices that the verbs library lists. Empty when there is none. No
        exception for none.
        """

    def open(self, device: str) -> NativeContext:
        """Raises DeviceError (errno EACCES, ENODEV, ENOENT ... kept)."""
