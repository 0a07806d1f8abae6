"""Every GID of each port by rank: which one a node takes, and why the others come after it."""

from __future__ import annotations

from ..verbs.gid_ranking import AddressClass, GidKind, Netdev, Presence, RankedGid
from ..verbs.rail_choice import RailChoice
from .finding import Area, Finding
from .seen import Seen

# The criteria of the ranking in their order.
_LOSES = (
    "it is no unicast address",
    "RoCE v2 comes first",
    "routable addresses come first",
    "the peer has no such family",
    "the other's interface fits better",
    "IPv4 comes first",
    "the lower index comes first",
)


def gid_findings(seen: Seen) -> list[Finding]:
    found: list[Finding] = []
    for rail in seen.rails:
        if not rail.active:  # said of the device; its table changes when the link comes up
            continue
        area = Area(f"gids {rail.rail.device}/{rail.rail.port}")
        found.append(_chosen(area, rail, seen.discovery.netdevs.get(rail.chosen.entry.netdev)))
        for other in rail.runners_up:
            text = f"{other}: {_why_not(rail.chosen, other)}"
            found.append(area.ok("gid_other", text, index=other.entry.index, gid=other.entry.gid))
    return found + _without(seen)


def _chosen(area: Area, rail: RailChoice, netdev: Netdev | None) -> Finding:
    chosen, name = rail.chosen, rail.chosen.entry.netdev
    data: dict[str, object] = {"index": chosen.entry.index, "gid": chosen.entry.gid, "netdev": name}
    if chosen.entry.kind is GidKind.ROCE_V1:
        v2 = [o.entry.index for o in rail.runners_up if o.entry.kind is GidKind.ROCE_V2]
        fix = "keep both hosts in one Ethernet segment, or use a device that speaks RoCE v2"
        if v2:
            fix = f"take back the pin, or pin one of RoCE v2: ORBIT_GID_INDEX={v2[0]}"
        return area.warn("gid_roce_v1", f"{chosen}; {chosen.warning}", fix, **data)
    if chosen.address_class is AddressClass.LINK_LOCAL:
        fix = f"ip address add ADDRESS/PREFIX dev {name or 'INTERFACE'}"
        return area.warn("gid_link_local", f"{chosen}; {chosen.warning}", fix, **data)
    if chosen.address_class is AddressClass.UNUSABLE:
        fix = f"ip address add ADDRESS/PREFIX dev {name or 'INTERFACE'}; take back the pin"
        return area.fail("gid_unusable", f"{chosen}: no peer can reach it", fix, **data)
    if chosen.address_class is not AddressClass.FABRIC:
        trouble = _presence(area, chosen, netdev, data)
        if trouble is not None:
            return trouble
    return area.ok("gid_chosen", f"{chosen}: taken", **data)


def _presence(
    area: Area, chosen: RankedGid, netdev: Netdev | None, data: dict[str, object]
) -> Finding | None:
    name = chosen.entry.netdev
    match chosen.presence:
        case Presence.ELSEWHERE:
            fix = "run with the host's network: docker run --network=host ...;"
            fix += f" in Kubernetes: hostNetwork: true; or move {name} here, from where it is:"
            fix += f" ip link set dev {name} netns PID"
            return area.warn("gid_elsewhere", str(chosen), fix, **data)
        case Presence.DOWN:
            return area.warn("gid_netdev_down", str(chosen), f"ip link set dev {name} up", **data)
        case Presence.OVERLAY:
            fix = "pin the physical interface's GID: ORBIT_GID_INDEX=N"
            return area.warn("gid_overlay", str(chosen), fix, **data)
        case Presence.UP if netdev is not None and netdev.addresses:
            fix = f"ip address show dev {name}; give it the address, or pin another GID"
            return area.warn("gid_not_held", str(chosen), fix, **data)
        case Presence.UP | Presence.UNKNOWN:
            text = f"{chosen}: taken; whether the interface holds the address is not known"
            return area.skip("gid_unproved", text, **data)
    return None


def _why_not(chosen: RankedGid, other: RankedGid) -> str:
    pairs = zip(chosen.key, other.key, _LOSES, strict=True)
    return next((why for a, b, why in pairs if a < b), "another one is pinned")


def _without(seen: Seen) -> list[Finding]:
    """Active ports with GIDs none of which a node would take."""
    taken = {(rail.rail.device, rail.rail.port) for rail in seen.rails}
    found = []
    for device in seen.devices:
        for port in device.ports:
            alone = device.within_reach and port.active and port.gids
            if alone and (device.name, port.number) not in taken and not seen.pins.any:
                area = Area(f"gids {device.name}/{port.number}")
                text = "none of its GIDs can be used: " + ", ".join(g.gid for g in port.gids)
                fix = "give the port's interface a routable address"
                found.append(area.at(seen.level_of(device), "gid_none_usable", text, fix))
    return found
