"""Each listed device: can this process use it, and if not, which of the causes it is."""

from __future__ import annotations

import stat
from pathlib import Path

from ..model import PathReason
from ..verbs.discovery import DeviceReport, Verdict
from .advice import INSTALL_DRIVERS, fix_for
from .finding import Area, Finding
from .seen import Seen, netdevs_of

_AREA = Area("devices")
_CODES = {
    Verdict.NO_NODE: "device_no_node",
    Verdict.PERMISSION: "device_permission",
    Verdict.NO_PROVIDER: "device_no_provider",
    Verdict.PORT_DOWN: "device_port_down",
    Verdict.NO_GID: "device_no_gid",
}


def device_findings(seen: Seen) -> list[Finding]:
    found = _named(seen)
    if not seen.discovery.devices:
        text, fix = "this host lists no RDMA device", fix_for(PathReason.NO_DEVICE)
        return [*found, _AREA.at(seen.missing, "no_device", text, fix)]
    found += [_judge(seen, device) for device in seen.discovery.devices]
    return found + _rdma_cm(seen)


def _named(seen: Seen) -> list[Finding]:
    """Names and pins of the configuration against what there is."""
    names = {device.name for device in seen.discovery.devices}
    valid = ", ".join(sorted(names)) or "none is listed"
    fix = f"name one of: {valid}"
    found = []
    for name in seen.pins.devices:
        if name not in names:
            text = f"{name} is asked for, and there is no such device; valid: {valid}"
            found.append(_AREA.fail("device_unknown", text, fix, valid=sorted(names)))
    for name in seen.pins.whitelist:
        if name not in names:
            text = f"the whitelist names {name}, and there is no such device; valid: {valid}"
            found.append(_AREA.warn("whitelist_unknown", text, fix, valid=sorted(names)))
    unusable = {d.name for d in seen.discovery.devices if d.verdict is not Verdict.USABLE}
    explained = found or unusable & set(seen.pins.devices)
    if seen.refused is not None and not explained:
        text = f"a pin cannot be met: {seen.refused}"
        found.append(_AREA.fail("pin_refused", text, "correct the pin, or leave it out"))
    return found


def _judge(seen: Seen, device: DeviceReport) -> Finding:
    data = {"device": device.name, "verdict": device.verdict.value}
    if not seen.pins.allows(device.name):
        text = f"{device.name}: left out by whitelist or blacklist"
        return _AREA.skip("device_left_out", text, **data)
    if device.verdict is not Verdict.USABLE:
        text = f"{device.name}: {device.detail}"
        if device.verdict is Verdict.PERMISSION:
            text += f" ({_owner(Path(device.node))})"
        level, code = seen.level_of(device), _CODES[device.verdict]
        return _AREA.at(level, code, text, _fix(seen, device), **data)
    if seen.verbs is None or not seen.verbs.usable:
        why = "no process was asked" if seen.verbs is None else "the verbs libraries do not load"
        return _AREA.skip("device_untried", f"{device.name}: looks usable, but {why}", **data)
    return _AREA.ok("device_usable", f"{device.name}: {device.node} can be opened", **data)


def _fix(seen: Seen, device: DeviceReport) -> str:
    ethernet = any(port.link_layer == "ethernet" for port in device.ports)
    netdev = next(iter(netdevs_of(seen.host, device.name)), "INTERFACE")
    match device.verdict:
        case Verdict.NO_NODE if not device.node:
            return "modprobe ib_uverbs"
        case Verdict.NO_NODE:
            return "if it is meant for this container: docker run --device=/dev/infiniband ..."
        case Verdict.PERMISSION:
            return fix_for(PathReason.PERMISSION)
        case Verdict.NO_PROVIDER:
            return INSTALL_DRIVERS
        case Verdict.PORT_DOWN if ethernet:
            return f"ip link set dev {netdev} up; if it stays down, look at cable and switch"
        case Verdict.NO_GID if ethernet:
            return f"ip address add ADDRESS/PREFIX dev {netdev}"
    return "look at cable, switch port and subnet manager: ibstat, sminfo"


def _owner(node: Path) -> str:
    try:
        status = node.stat()
    except OSError as error:
        return error.strerror or str(error)
    return f"{stat.filemode(status.st_mode)} uid {status.st_uid} gid {status.st_gid}"


def _rdma_cm(seen: Seen) -> list[Finding]:
    if seen.host.nodes is None:
        return []
    node = seen.host.nodes / "rdma_cm"
    if node.exists():
        return [_AREA.ok("rdma_cm", f"{node} is there (orbit itself does without)")]
    text = f"{node} is not there: orbit does without; perftest -R and rping need it"
    return [_AREA.skip("rdma_cm_absent", text)]
