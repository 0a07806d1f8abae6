"""ScriptedProvider: the provider contract over the fake fabric, so that `verbs/` runs for real
without a device.

Owns nothing but the Python objects of the contract; the fake's behaviour is in C and its script in
`scripted_fabric`. Destroying in the wrong order is refused (EBUSY), as a device does it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

from ..errors import ClosedError, DeviceError
from .async_events import AsyncEvent, event_of
from .gid_ranking import GidEntry, GidKind
from .provider import (
    DeviceLimits,
    NativeChannel,
    NativeObject,
    NativeSharedReceive,
    PortFacts,
    QueuePairCaps,
)
from .records import ATTR, STATE_RTR, STATE_RTS
from .scripted_fabric import (
    ANY_OPCODE,
    FOREVER,
    RECEIVE,
    FakeCounters,
    ScriptedDevice,
    ScriptedFabric,
    Step,
)
from .scripted_port import GID_ENTRIES
from .turn import QueuePairAttributes, Turn

_ENODEV, _EINVAL = 19, 22
_CAPS = struct.Struct("=3I")
_EVENT = struct.Struct("=IIQ")


class ScriptedObject:
    """A live object of the fake."""

    def __init__(self, device: ScriptedDevice, native: int, destroy_verb: str) -> None:
        self._device = device
        self._native = native
        self._destroy_verb = destroy_verb

    @property
    def native(self) -> int:
        return self._native

    def close(self) -> None:
        if not self._native:
            return
        self._device.check_verb(self._destroy_verb)
        rc = self._device.fabric.library.call("fake_destroy", self._native)
        if rc:
            raise DeviceError(self._device.name, self._destroy_verb, -rc)
        self._native = 0

    def _make(self, verb: str, maker: str, *arguments: int) -> int:
        """The address of a new object made from this one."""
        if not self._native:
            raise ClosedError(f"{self._device.name}: the parent object")
        self._device.check_verb(verb)
        library = self._device.fabric.library
        return library.make(self._device.name, verb, maker, self._native, *arguments)


class ScriptedChannel(ScriptedObject):
    @property
    def fd(self) -> int:
        return self._device.fabric.turn.channel_fd(self._native)


class ScriptedRegion(ScriptedObject):
    @property
    def lkey(self) -> int:
        return self._device.fabric.library.call("fake_mr_lkey", self._native) & 0xFFFFFFFF

    @property
    def rkey(self) -> int:
        return self._device.fabric.library.call("fake_mr_rkey", self._native) & 0xFFFFFFFF


class ScriptedWindow(ScriptedObject):
    @property
    def key(self) -> int:
        return self._device.fabric.turn.window_key(self._native)


class ScriptedQueuePair(ScriptedObject):
    def __init__(self, device: ScriptedDevice, native: int, caps: QueuePairCaps) -> None:
        super().__init__(device, native, "destroy_qp")
        self._caps = caps

    @property
    def qp_num(self) -> int:
        return self._device.fabric.library.call("fake_qp_num", self._native) & 0xFFFFFFFF

    @property
    def state(self) -> int:
        """For tests; the contract has none, since asking a device costs a system call."""
        return self._device.fabric.library.call("fake_qp_state", self._native)

    @property
    def attributes(self) -> QueuePairAttributes:
        """For tests: what the transitions up to now have set on the device."""
        buffer = ctypes.create_string_buffer(ATTR.size)
        address = ctypes.addressof(buffer)
        self._device.fabric.library.call("fake_qp_attributes", self._native, address)
        return QueuePairAttributes.unpack(buffer.raw)

    @property
    def caps(self) -> QueuePairCaps:
        return self._caps

    def modify(self, attributes: QueuePairAttributes) -> None:
        self._device.check_verb("modify_qp")
        limits = self._device.facts.limits
        if attributes.state == STATE_RTR:
            self._device.check_limit(
                "modify_qp", attributes.max_dest_rd_atomic, limits.max_rd_atomic
            )
        elif attributes.state == STATE_RTS:
            self._device.check_limit("modify_qp", attributes.rd_atomic, limits.max_init_rd_atomic)
        self._device.fabric.turn.modify(self._native, attributes, self._device.name)


class ScriptedSharedReceive(ScriptedObject):
    @property
    def depth(self) -> int:
        return self._device.fabric.library.call("fake_srq_depth", self._native)

    def arm_limit(self, limit: int) -> None:
        self._device.check_verb("modify_srq")
        rc = self._device.fabric.library.call("fake_srq_arm", self._native, limit)
        if rc:
            raise DeviceError(self._device.name, "modify_srq", -rc)


class ScriptedDomain(ScriptedObject):
    def register(self, address: int, length: int, access: int) -> ScriptedRegion:
        if length > self._device.facts.limits.max_region_bytes:
            raise DeviceError(self._device.name, "reg_mr", _EINVAL, "longer than max_mr_size")
        native = self._make("reg_mr", "fake_mr_new", address, length, access)
        return ScriptedRegion(self._device, native, "dereg_mr")

    def allocate_window(self) -> ScriptedWindow:
        return ScriptedWindow(self._device, self._make("alloc_mw", "fake_mw_new"), "dealloc_mw")

    def create_shared_receive(self, depth: int) -> ScriptedSharedReceive:
        self._device.check_limit("create_srq", depth, self._device.facts.limits.max_shared_receives)
        native = self._make("create_srq", "fake_srq_new", depth)
        return ScriptedSharedReceive(self._device, native, "destroy_srq")

    def create_queue_pair(
        self,
        send_cq: NativeObject,
        recv_cq: NativeObject,
        caps: QueuePairCaps,
        shared_receive: NativeSharedReceive | None = None,
    ) -> ScriptedQueuePair:
        facts = self._device.facts
        depth = max(caps.send_depth, caps.recv_depth)
        self._device.check_limit("create_qp", depth, facts.limits.max_qp_wr)
        self._device.check_limit("create_qp", caps.inline_bytes, facts.inline_max)
        asked = _CAPS.pack(caps.send_depth, caps.recv_depth, caps.inline_bytes)
        buffer = ctypes.create_string_buffer(asked, len(asked))
        shared = shared_receive.native if shared_receive is not None else 0
        queues = (send_cq.native, recv_cq.native, shared)
        native = self._make("create_qp", "fake_qp_new", *queues, ctypes.addressof(buffer))
        return ScriptedQueuePair(self._device, native, QueuePairCaps(*_CAPS.unpack(buffer.raw)))


class ScriptedContext(ScriptedObject):
    """An open device."""

    def __init__(self, device: ScriptedDevice) -> None:
        library = device.fabric.library
        native = library.make(device.name, "open_device", "fake_context_new", device.native)
        super().__init__(device, native, "close_device")

    @property
    def device(self) -> str:
        return self._device.name

    @property
    def async_fd(self) -> int:
        return self._device.fabric.turn.async_fd(self._native)

    def next_async_event(self) -> AsyncEvent | None:
        self._check("get_async_event")
        buffer = ctypes.create_string_buffer(_EVENT.size)
        address = ctypes.addressof(buffer)
        if not self._device.fabric.library.call("fake_next_event", self._native, address):
            return None
        number, qp_num, element = _EVENT.unpack(buffer.raw)
        return event_of(number, element, qp_num)

    def limits(self) -> DeviceLimits:
        self._check("query_device")
        return self._device.facts.limits

    def port(self, number: int) -> PortFacts:
        self._check("query_port")
        if number != 1:
            raise DeviceError(self._device.name, "query_port", _ENODEV)
        facts = self._device.facts
        return PortFacts(
            active=facts.active,
            state="ACTIVE" if facts.active else "DOWN",
            mtu=facts.mtu,
            lid=facts.lid,
            link_layer="infiniband" if facts.lid else "ethernet",
            gid_count=GID_ENTRIES,
            max_message_bytes=facts.message_bytes_max,
            pkey_count=len(facts.pkeys),
        )

    def gid(self, port: int, index: int) -> str:
        self._check("query_gid")
        if port != 1 or not 0 <= index < GID_ENTRIES:
            raise DeviceError(self._device.name, "query_gid", _ENODEV)
        packed = socket.inet_pton(socket.AF_INET6, self._device.gids[index])
        return socket.inet_ntop(socket.AF_INET6, packed)

    def gid_entries(self, port: int) -> Sequence[GidEntry]:
        kind = GidKind.INFINIBAND if self._device.facts.lid else GidKind.ROCE_V2
        rows = [(index, self.gid(port, index)) for index in range(GID_ENTRIES)]
        return [GidEntry(index, gid, kind) for index, gid in rows if gid != "::"]

    def pkey(self, port: int, index: int) -> int:
        self._check("query_pkey")
        pkeys = self._device.facts.pkeys
        if port != 1 or not 0 <= index < len(pkeys):
            raise DeviceError(self._device.name, "query_pkey", _EINVAL)
        return pkeys[index]

    def allocate_domain(self) -> ScriptedDomain:
        return ScriptedDomain(self._device, self._make("alloc_pd", "fake_pd_new"), "dealloc_pd")

    def create_channel(self) -> ScriptedChannel:
        native = self._make("create_comp_channel", "fake_channel_new")
        return ScriptedChannel(self._device, native, "destroy_comp_channel")

    def create_cq(self, depth: int, channel: NativeChannel) -> ScriptedObject:
        self._device.check_limit("create_cq", depth, self._device.facts.limits.max_cqe)
        native = self._make("create_cq", "fake_cq_new", depth, channel.native)
        return ScriptedObject(self._device, native, "destroy_cq")

    def _check(self, verb: str) -> None:
        if not self._native:
            raise ClosedError(f"{self._device.name}: the context")
        self._device.check_verb(verb)


class ScriptedProvider:
    """What one host sees of a fabric: all of its devices, or the named ones."""

    def __init__(self, fabric: ScriptedFabric, devices: Sequence[str] | None = None) -> None:
        self.fabric = fabric
        self._seen = devices

    @property
    def turn(self) -> Turn:
        return self.fabric.turn

    def devices(self) -> Sequence[str]:
        names = self.fabric.devices
        return [name for name in names if self._seen is None or name in self._seen]

    def open(self, device: str) -> ScriptedContext:
        if device not in self.devices():
            raise DeviceError(device, "open_device", _ENODEV)
        found = self.fabric.devices[device]
        found.check_verb("open_device")
        return ScriptedContext(found)


__all__ = [
    "ANY_OPCODE",
    "FOREVER",
    "RECEIVE",
    "FakeCounters",
    "ScriptedContext",
    "ScriptedDevice",
    "ScriptedDomain",
    "ScriptedFabric",
    "ScriptedObject",
    "ScriptedProvider",
    "ScriptedQueuePair",
    "ScriptedSharedReceive",
    "Step",
]
