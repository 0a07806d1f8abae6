"""What this process could use for RDMA, found out without loading or opening anything.

`available()` looks for the pieces one by one and says what is missing. Only opening a Node proves
that a device works.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from .errors import DeviceError
from .model import PathReason


@dataclass(frozen=True, slots=True)
class Availability:
    """TCP is always there. `rdma` is OK, or the first reason against it; `missing` has a line for
    each thing that is not there; `devices` are the usable ones. True when RDMA can be tried.
    """

    rdma: PathReason
    missing: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.rdma is PathReason.OK

    def __str__(self) -> str:
        if self:
            return f"tcp, rdma ({', '.join(self.devices)})"
        return "tcp; no rdma: " + "; ".join(self.missing)


def available() -> Availability:
    """Look now. Never raises, never loads pyverbs or the helper, opens no device."""
    if sys.platform != "linux":
        return Availability(PathReason.NO_DEVICE, ("RDMA needs Linux",))
    from .verbs.discovery import discover
    from .verbs.turn import library_path

    found: list[tuple[PathReason, str]] = []
    if find_spec("pyverbs") is None:
        found.append((PathReason.NO_PYVERBS, "pyverbs (package python3-pyverbs) is not installed"))
    try:
        library_path("native")
    except DeviceError as error:
        found.append((PathReason.NO_HELPER, f"the verbs helper is not built: {error}"))
    discovery = discover()
    if not discovery.usable:
        found.append((discovery.reason, discovery.detail))
    reason = found[0][0] if found else PathReason.OK
    devices = tuple(device.name for device in discovery.usable)
    return Availability(reason, tuple(text for _, text in found), devices)
