"""The software device of Linux: its module, and the interfaces that its devices stand on.

Only where something says that it is wanted: a device of its kind, a pinned name of one.
"""

from __future__ import annotations

from os import readlink

from ..verbs.discovery import DeviceReport
from .container import kind_of_container
from .finding import Area, Finding
from .host import Host
from .seen import Seen, netdevs_of

_AREA = Area("softroce")
_NAMES = ("rxe", "rxa", "rxb")  # as people and the lab call them


def softroce_findings(seen: Seen) -> list[Finding]:
    host = seen.host
    found = [
        f for device in seen.devices if _is_software(host, device) for f in _netdev(seen, device)
    ]
    wanted = [*seen.pins.devices, *seen.pins.whitelist]
    named = any(name.startswith(_NAMES) for name in wanted)
    if named and not any(_is_software(host, device) for device in seen.discovery.devices):
        found.append(_module(host))
    return found


def _is_software(host: Host, device: DeviceReport) -> bool:
    return bool(host.read(host.sysfs / "class/infiniband" / device.name / "parent"))


def _netdev(seen: Seen, device: DeviceReport) -> list[Finding]:
    found = []
    for name in netdevs_of(seen.host, device.name):
        netdev = seen.discovery.netdevs.get(name)
        if netdev is None:
            text = f"{device.name} stands on {name}, which this network namespace does not have;"
            text += " whether its packets leave is shown by a transfer alone"
            found.append(_AREA.skip("rxe_netdev_elsewhere", text))
        elif not netdev.up:
            text = f"{device.name} stands on {name}, which is down"
            fix = f"ip link set dev {name} up"
            found.append(_AREA.at(seen.level_of(device), "rxe_netdev_down", text, fix))
        elif (first := _in_first_namespace(seen.host)) is None:
            text = f"{device.name} stands on {name}, which is up; whether that is the first network"
            text += " namespace, the only one that older kernels send from, is not known here"
            found.append(_AREA.skip("rxe_namespace_unknown", text))
        elif not first:
            text = f"{device.name} stands on {name} in a network namespace of its own: rdma_rxe of"
            text += " older kernels (Linux 6.1) sends from the first one only, and looks fine"
            fix = f"keep {name} in the first namespace, or use a guest for each host: orbit"
            fix += " softroce --vms 2"
            found.append(_AREA.warn("rxe_namespace", text, fix))
        else:
            found.append(_AREA.ok("rxe_netdev", f"{device.name} stands on {name}, which is up"))
    return found


def _in_first_namespace(host: Host) -> bool | None:
    """None where it does not show: in a container the first process is the container's, and of
    other users' processes nothing is told.
    """
    try:
        own, first = (readlink(host.proc / who / "ns/net") for who in ("self", "1"))
    except OSError:
        return None
    return own == first and (None if kind_of_container(host) else True)


def _module(host: Host) -> Finding:
    release = host.read(host.proc / "sys/kernel/osrelease")
    add = "rdma link add rxe0 type rxe netdev INTERFACE"
    if (host.sysfs / "module/rdma_rxe").is_dir():
        text = "rdma_rxe is loaded, and no device is made on it"
        return _AREA.fail("rxe_no_device", text, add)
    folder = host.modules / release
    listed = host.read(folder / "modules.dep") + host.read(folder / "modules.builtin")
    if "/rdma_rxe.ko" in listed:
        text = f"rdma_rxe is installed for {release} and not loaded"
        return _AREA.fail("rxe_not_loaded", text, f"modprobe rdma_rxe && {add}")
    text = f"the kernel {release or '(unknown)'} has no rdma_rxe module"
    fix = "Debian: apt-get install linux-image-amd64 (or -arm64), and boot it: the cloud kernel has"
    fix += f" none; Ubuntu: apt-get install linux-modules-extra-{release or 'RELEASE'}; in a VM:"
    fix += " orbit softroce -- COMMAND"
    return _AREA.fail("rxe_module_missing", text, fix)
