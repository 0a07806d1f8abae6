"""Where devices, memory and this process are: NUMA nodes, relaxed ordering, the IOMMU."""

from __future__ import annotations

import struct
from pathlib import Path

from ..verbs.discovery import DeviceReport
from .finding import Area, Finding
from .host import Host
from .seen import Seen

_AREA = Area("numa")
_CAPABILITIES = 0x34  # of PCI configuration space: where the list begins
_PCI_EXPRESS = 0x10
_DEVICE_CONTROL = 8  # from the PCI Express capability on
_RELAXED_ORDERING = 1 << 4


def numa_findings(seen: Seen) -> list[Finding]:
    host = seen.host
    nodes = _nodes(host)
    found = [_affinity(host, nodes, device) for device in seen.devices if len(nodes) > 1]
    if len(nodes) == 1:
        found.append(_AREA.ok("numa_single", "one NUMA node"))
    elif not nodes:
        found.append(_AREA.skip("numa_unknown", "the kernel shows no NUMA nodes"))
    cards = [device for device in seen.devices if (_pci(host, device) / "vendor").exists()]
    found += [_ordering(host, device) for device in cards]
    return found + [_iommu(host, device) for device in cards]


def _nodes(host: Host) -> dict[int, frozenset[int]]:
    """The processors of each node."""
    folder = host.sysfs / "devices/system/node"
    return {
        int(name[4:]): _processors(host.read(folder / name / "cpulist"))
        for name in host.names(folder)
        if name.startswith("node") and name[4:].isdigit()
    }


def _affinity(host: Host, nodes: dict[int, frozenset[int]], device: DeviceReport) -> Finding:
    node = device.numa_node
    if node not in nodes:
        return _AREA.skip("numa_node_unknown", f"{device.name}: its NUMA node is not known")
    allowed = _processors(host.status("Cpus_allowed_list"))
    data = {"device": device.name, "node": node, "allowed": sorted(allowed)}
    if not allowed:
        text = f"{device.name} is on node {node}; where this process may run cannot be read"
        return _AREA.skip("affinity_unknown", text, **data)
    if not allowed & nodes[node]:
        text = f"{device.name} is on node {node}, and this process may run on none of its"
        text += " processors"
        fix = f"numactl --cpunodebind={node} --membind={node} COMMAND"
        return _AREA.warn("numa_far", text, fix, **data)
    return _AREA.ok("numa_near", f"{device.name} is on node {node}, where we may run", **data)


def _ordering(host: Host, device: DeviceReport) -> Finding:
    control = _device_control(_pci(host, device) / "config")
    if control is None:
        text = f"{device.name}: relaxed ordering is read from PCI configuration space, as root"
        return _AREA.skip("relaxed_ordering_unknown", text)
    if control & _RELAXED_ORDERING:
        return _AREA.ok("relaxed_ordering", f"{device.name}: PCI relaxed ordering is enabled")
    text = f"{device.name}: PCI relaxed ordering is disabled, which costs bandwidth on some hosts"
    address = _pci(host, device).resolve().name
    fix = f"enable it in the BIOS, or: setpci -s {address} CAP_EXP+8.w=0010:0010"
    return _AREA.warn("relaxed_ordering_off", text, fix)


def _device_control(config: Path) -> int | None:
    """The Device Control register, or None: an ordinary user reads the first 64 bytes alone."""
    try:
        space = config.read_bytes()
    except OSError:
        return None
    at, seen = (space[_CAPABILITIES] if len(space) > _CAPABILITIES else 0), 0
    while 64 <= at < len(space) - 10 and seen < 48:
        if space[at] == _PCI_EXPRESS:
            return int(struct.unpack_from("<H", space, at + _DEVICE_CONTROL)[0])
        at, seen = space[at + 1], seen + 1
    return None


def _iommu(host: Host, device: DeviceReport) -> Finding:
    """By the kind of the card's domain: kernels differ in what they take by default."""
    group = _pci(host, device) / "iommu_group"
    kind = host.read(group / "type")
    if kind.startswith("DMA"):
        text = f"{device.name}: the IOMMU translates each access of the card ({kind}), which costs"
        text += " bandwidth when many pages are in use"
        fix = "add iommu=pt to the kernel's command line, and boot"
        return _AREA.warn("iommu_translates", text, fix)
    if kind == "identity":
        return _AREA.ok("iommu_ok", f"{device.name}: the IOMMU passes addresses through")
    if group.exists() or not (host.sysfs / "kernel").is_dir():
        return _AREA.skip("iommu_unknown", f"{device.name}: what the IOMMU does cannot be read")
    return _AREA.ok("iommu_ok", f"{device.name}: no IOMMU stands before the card")


def _pci(host: Host, device: DeviceReport) -> Path:
    return host.sysfs / "class/infiniband" / device.name / "device"


def _processors(text: str) -> frozenset[int]:
    """0-3,8 as numbers."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
