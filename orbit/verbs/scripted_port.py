"""What a scripted device says of itself and of its port, as a test sets it: the half of
ScriptedDevice that has nothing to do with work requests.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import UsageError
from .provider import DeviceLimits

if TYPE_CHECKING:
    from .scripted_fabric import ScriptedFabric

GID_ENTRIES = 16


@dataclass(slots=True)
class Facts:
    """What the device says of itself; a test replaces what it needs."""

    limits: DeviceLimits = field(
        default_factory=lambda: DeviceLimits(
            max_qp_wr=16384,
            max_cqe=1 << 20,
            max_sge=32,
            max_rd_atomic=16,
            max_init_rd_atomic=16,
            max_windows=65535,
            max_region_bytes=1 << 40,
            window_type_2b=True,
            max_shared_receives=16384,
        )
    )
    mtu: int = 4096
    active: bool = True
    lid: int = 0  # else an InfiniBand port
    pkeys: tuple[int, ...] = (0xFFFF,)
    message_bytes_max: int = 1 << 30
    inline_max: int = 512


class ScriptedPort:
    """Changes are told to every open context, as a device does, unless it is quiet."""

    def __init__(self, fabric: ScriptedFabric, name: str) -> None:
        self.fabric = fabric
        self.name = name
        self.native = fabric.library.make(name, "new", "fake_device_new", fabric.native)
        self.gids = ["::"] * GID_ENTRIES
        self.facts = Facts()

    def set_port(self, *, active: bool) -> None:
        self.facts.active = active
        self._call("fake_device_set_port", int(active))

    def set_quiet(self, *, quiet: bool) -> None:
        """What happens to the port is told to nobody while quiet: events that were missed."""
        self._call("fake_device_set_quiet", int(quiet))

    def set_lid(self, lid: int) -> None:
        """An InfiniBand port from now on; another LID than before raises LID_CHANGE."""
        self.facts.lid = lid
        self._call("fake_device_set_lid", lid)

    def set_pkeys(self, *pkeys: int) -> None:
        """The partition key table; 0 leaves an entry empty."""
        self.facts.pkeys = pkeys
        self._call("fake_device_set_pkeys", len(pkeys))

    def set_windows(self, *, supported: bool, capability: bool | None = None) -> None:
        """`capability` is what the device says; by default the truth."""
        says = supported if capability is None else capability
        self.facts.limits = replace(self.facts.limits, window_type_2b=says)
        self._call("fake_device_set_windows", int(supported))

    def set_limit_event_at_arm(self, *, at_arm: bool) -> None:
        """Whether a limit that is armed while fewer receives are left raises its event at once,
        which devices may do; else the next receive does."""
        self._call("fake_device_set_limit_at_arm", int(at_arm))

    def set_message_bytes_max(self, nbytes: int) -> None:
        """The longest message, as the port says it; set it before the device is opened."""
        self.facts.message_bytes_max = nbytes
        self._call("fake_device_set_message_max", nbytes)

    def set_gid(self, index: int, gid: str) -> None:
        packed = ipaddress.IPv6Address(gid).packed
        rc = self.fabric.library.call("fake_device_set_gid", self.native, index, packed)
        if rc:
            raise UsageError(f"GID index {index} is not below {GID_ENTRIES}")
        self.gids[index] = gid

    def set_rtr_delay(self, delay_s: float) -> None:
        """The transition to RTR blocks this long, without the GIL."""
        self._call("fake_device_set_rtr_delay", int(delay_s * 1e6))

    def _call(self, name: str, *arguments: int) -> int:
        return self.fabric.library.call(name, self.native, *arguments)
