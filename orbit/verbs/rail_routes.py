"""The rails of a path as its callers see them: facts of each local one, and the routes that pair
them with what a peer announced.

It reads device contexts and opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PathUnavailable
from ..model import PathName, PathReason
from ..protocol.messages import RailHint
from ..transport.rails import RailFacts, RailRoute
from .device import DeviceContext
from .rail_pairs import choose_pair, pair_rails


@dataclass(frozen=True, slots=True)
class RailPair:
    """A local device and the peer's rail that it is used with."""

    device: DeviceContext
    remote: RailHint


def facts_of(devices: Sequence[DeviceContext]) -> tuple[RailFacts, ...]:
    """By `nic`."""
    return tuple(sorted(map(_facts, devices), key=lambda facts: facts.nic))


def routes_of(
    devices: Sequence[DeviceContext], remote: Sequence[RailHint]
) -> tuple[RailRoute, ...]:
    """One for each active device that has a remote rail. A route's number is its rail's `nic`."""
    active = sorted((device for device in devices if device.active), key=lambda d: d.nic)
    pairs = pair_rails([device.rail for device in active], remote)
    return tuple(
        RailRoute(active[i].nic, _facts(active[i]), remote[j].device, remote[j].gid)
        for i, j in pairs
    )


def pair_of(
    devices: Sequence[DeviceContext], remote: Sequence[RailHint], route: RailRoute
) -> RailPair:
    """What the route names, as it is now. Raises PathUnavailable (port_down, peer_without)."""
    device = _device(devices, route.rail.nic)
    if not device.active:
        raise _unavailable(PathReason.PORT_DOWN, f"{device.name}: {device.paused}")
    for hint in remote:
        if (hint.device, hint.gid) == (route.remote_device, route.remote_gid):
            return RailPair(device, hint)
    raise _unavailable(PathReason.PEER_WITHOUT, f"the peer has no rail {route.remote_gid}")


def nearest_pair(
    devices: Sequence[DeviceContext], remote: Sequence[RailHint], avoid: RailPair | None = None
) -> RailPair:
    """What is used where nobody chooses. `avoid`: it did not work the last time, and is taken where
    there is nothing else. Raises PathUnavailable (not_configured, port_down, peer_without).
    """
    active = [device for device in devices if device.active]
    if not active:
        paused = PathReason.PORT_DOWN if devices else PathReason.NOT_CONFIGURED
        raise _unavailable(paused, "no rail is active")
    nearest = _nearest(active, remote)
    if nearest is None:
        raise _unavailable(PathReason.PEER_WITHOUT, "the peer announced no rail that fits")
    if nearest != avoid:
        return nearest
    other = _nearest(active, [hint for hint in remote if hint != avoid.remote])
    return other or _nearest([d for d in active if d is not avoid.device], remote) or nearest


def _nearest(devices: Sequence[DeviceContext], remote: Sequence[RailHint]) -> RailPair | None:
    chosen = choose_pair([device.rail for device in devices], remote)
    return None if chosen is None else RailPair(devices[chosen[0]], remote[chosen[1]])


def _facts(device: DeviceContext) -> RailFacts:
    return RailFacts(
        nic=device.nic,
        device=device.rail.device,
        port=device.rail.port,
        gid=device.rail.gid,
        active=device.active,
        numa_node=device.numa_node,
        link_layer=device.rail.link_layer,
        detail=device.paused,
        numa_distances=device.state.place.numa_distances,
        pci_bridges=device.state.place.pci_bridges,
        reason=device.state.reason,
    )


def _device(devices: Sequence[DeviceContext], nic: int) -> DeviceContext:
    """Raises PathUnavailable."""
    for device in devices:
        if device.nic == nic:
            return device
    raise _unavailable(PathReason.NO_DEVICE, f"there is no local rail {nic}")


def _unavailable(reason: PathReason, detail: str) -> PathUnavailable:
    return PathUnavailable(PathName.RDMA, reason, detail)
