"""Each port of each device: state, speed, MTU, LID and partition keys."""

from __future__ import annotations

from pathlib import Path

from ..verbs.discovery import DeviceReport, PortReport
from ..verbs.gid_ranking import Netdev
from ..verbs.rail_choice import roce_path_mtu
from .finding import Area, Finding, Level
from .seen import Seen, netdevs_of

_FULL_MEMBER = 0x8000
_PATH_MTU_MAX = 4096
_INIT = "INIT"


def port_findings(seen: Seen) -> list[Finding]:
    found: list[Finding] = []
    for device in seen.devices:
        found += _bus(seen, device)
        for port in device.ports:
            found += _port(seen, device, port)
    return found


def _port(seen: Seen, device: DeviceReport, port: PortReport) -> list[Finding]:
    area = Area(f"port {device.name}/{port.number}")
    folder = seen.host.sysfs / "class/infiniband" / device.name / "ports" / str(port.number)
    rate = seen.host.read(folder / "rate")
    physical = seen.host.read(folder / "phys_state").partition(":")[2].strip()
    infiniband = port.link_layer == "infiniband"
    if not port.active:
        if infiniband and port.state == _INIT:
            text = "the link is up, but no subnet manager has configured the port (INIT)"
            fix = "start one in the fabric: opensm, or the switch's own; then: sminfo"
            return [area.at(seen.level_of(device), "port_init", text, fix)]
        text = f"{port.state}{f', {physical}' if physical else ''}: it carries nothing now"
        return [area.skip("port_down", text, state=port.state, physical=physical)]
    words = [port.state, physical, port.link_layer, rate]
    level = seen.level_of(device)
    if infiniband:
        found = _infiniband(seen, area, level, port, folder)
    else:
        found = _roce(seen, area, device, port)
    found += _partitions(area, level, port)
    if infiniband and "(1X" in rate:
        text = f"the link runs at {rate}, one lane of four"
        found.append(area.warn("port_narrow", text, "reseat or change the cable: iblinkinfo"))
    if all(not finding.fix for finding in found):
        text = ", ".join(word for word in words if word)
        found.insert(0, area.ok("port_active", text, rate=rate, link_layer=port.link_layer))
    return found


def _infiniband(
    seen: Seen, area: Area, level: Level, port: PortReport, folder: Path
) -> list[Finding]:
    manager = seen.host.read(folder / "sm_lid") or "0x0"
    if not port.lid:
        text = "the port is ACTIVE with LID 0: no other port of the fabric can address it"
        fix = "restart the subnet manager, then look at: ibstat"
        return [area.at(level, "lid_zero", text, fix)]
    if int(manager, 0) == 0:
        text = f"LID {port.lid}, but no subnet manager is known (SM LID 0)"
        return [area.warn("sm_missing", text, "start a subnet manager: opensm; then: sminfo")]
    text = "the active MTU of InfiniBand is not in sysfs; it is read when the device is opened"
    return [
        area.ok("lid", f"LID {port.lid}, subnet manager at LID {int(manager, 0)}"),
        area.skip("mtu_not_in_sysfs", text),
    ]


def _roce(seen: Seen, area: Area, device: DeviceReport, port: PortReport) -> list[Finding]:
    # The chosen GID's own interface, which may be a VLAN with an MTU of its own.
    rail = next(
        (r for r in seen.rails if (r.rail.device, r.rail.port) == (device.name, port.number)), None
    )
    name = rail.chosen.entry.netdev if rail else ""
    name = name or next(iter(netdevs_of(seen.host, device.name)), "")
    netdev = seen.discovery.netdevs.get(name)
    if netdev is None or not netdev.mtu:
        shown = name or "no interface is named"
        return [area.skip("mtu_unknown", f"MTU unknown: {shown} is not in this namespace")]
    return [_mtu(area, name, netdev)]


def _mtu(area: Area, name: str, netdev: Netdev) -> Finding:
    path = roce_path_mtu(netdev.mtu)
    text = f"{name} has MTU {netdev.mtu}: RDMA packets of {path} bytes"
    data = {"netdev_mtu": netdev.mtu, "path_mtu": path}
    if path >= _PATH_MTU_MAX:
        return area.ok("mtu_ok", text, **data)
    fix = f"at both ends, and on the switches between: ip link set dev {name} mtu 9000"
    return area.warn("mtu_small", f"{text}, where 4096 are possible", fix, **data)


def _partitions(area: Area, level: Level, port: PortReport) -> list[Finding]:
    keys = [key for key in port.pkeys if key]
    shown = ", ".join(f"{key:#06x}" for key in keys)
    if not keys:
        if not port.pkeys:
            return []
        text = "the table of partition keys is empty: no queue pair can be used"
        fix = "give the port a partition in the subnet manager"
        return [area.at(level, "pkey_none", text, fix)]
    if not port.pkeys[0] & _FULL_MEMBER:
        text = f"the first partition key {port.pkeys[0]:#06x} is a limited membership ({shown}):"
        text += " two limited members cannot talk to each other"
        full = [key for key in keys if key & _FULL_MEMBER]
        fix = "make the node a full member in the subnet manager's partitions"
        if full:
            fix = f"ORBIT_PKEY={full[0]:#06x}; or {fix}"
        return [area.warn("pkey_limited", text, fix, pkeys=keys)]
    return [area.ok("pkeys", f"partition keys {shown}", pkeys=keys)]


def _bus(seen: Seen, device: DeviceReport) -> list[Finding]:
    """The PCI link of a card: narrower or slower than what both ends could do."""
    folder = seen.host.sysfs / "class/infiniband" / device.name / "device"
    area = Area(f"port {device.name}")
    facts = [
        (what, seen.host.read(folder / f"current_{what}"), seen.host.read(folder / f"max_{what}"))
        for what in ("link_width", "link_speed")
    ]
    slow = [
        f"{what.replace('_', ' ')} {now} of {most}"
        for what, now, most in facts
        if now and most and _leading(now) < _leading(most)
    ]
    if not slow:
        return []
    fix = "another slot, or a BIOS setting: lspci -vv, LnkCap against LnkSta"
    return [area.warn("pci_link_slow", f"PCI: {', '.join(slow)}", fix)]


def _leading(text: str) -> float:
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0
