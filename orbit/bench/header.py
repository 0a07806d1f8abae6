"""The circumstances of one end: what a figure depends on and does not show.

Reads /sys and /proc below roots that can be given. What cannot be read is left out; nothing here
raises, and everything in the answer is plain data for json and msgpack.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from ..protocol.messages import RailHint
from ..verbs.topology import numa_node_of

_PACKAGES: Final = ("orbit", "pyverbs", "msgpack", "uvloop")
_CHECKOUT: Final = Path(__file__).parents[2]


def circumstances(
    rails: Sequence[RailHint] = (),
    *,
    rdma: str = "",
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> dict[str, Any]:
    """Of this process now. `rails`: of its node's address; `rdma`: why it has none, or "ok"."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "boot_id": _read(proc / "sys/kernel/random/boot_id"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": _versions() | _libibverbs(proc),
        "revision": revision(_CHECKOUT),
        "cpu": _cpu(proc),
        "cpus": os.cpu_count() or 0,
        "affinity": spans(os.sched_getaffinity(0)),
        "governor": _governor(sysfs),
        "numa_nodes": _read(sysfs / "devices/system/node/online"),
        "memlock": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "rdma": rdma,
        "rails": [_rail(rail, sysfs) for rail in rails],
        "netdev_mtus": _netdev_mtus(sysfs),
        "congestion": _read(proc / "sys/net/ipv4/tcp_congestion_control"),
    }
    return {name: value for name, value in found.items() if value not in ("", [], {})}


def spans(numbers: Iterable[int]) -> str:
    """0-3,8 for 0, 1, 2, 3 and 8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def revision(checkout: Path) -> str:
    """The commit that a checkout is at; empty for an installed package."""
    git = checkout / ".git"
    head = _read(git / "HEAD")
    if not head.startswith("ref: "):
        return head[:12]
    name = head.removeprefix("ref: ")
    packed = (line.split() for line in _read(git / "packed-refs").splitlines())
    found = _read(git / name) or next((w[0] for w in packed if w[1:] == [name]), "")
    return found[:12]


def _rail(rail: RailHint, sysfs: Path) -> dict[str, Any]:
    device = sysfs / "class/infiniband" / rail.device
    port = device / "ports" / str(rail.port)
    found = {
        "device": rail.device,
        "port": rail.port,
        "gid_index": rail.gid_index,
        "gid": rail.gid,
        "mtu": rail.mtu,
        "link_layer": rail.link_layer,
        "provider": _provider(device),
        "firmware": _read(device / "fw_ver"),
        "rate": _read(port / "rate"),
        "numa_node": numa_node_of(device, sysfs=sysfs),
    }
    return {name: value for name, value in found.items() if value != ""}


def _provider(device: Path) -> str:
    """Name of the kernel driver. A software device has none, but names the interface below it."""
    try:
        return (device / "device/driver").resolve(strict=True).name
    except (OSError, RuntimeError):  # RuntimeError: a circle of links
        return "software" if _read(device / "parent") else ""


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _libibverbs(proc: Path) -> dict[str, str]:
    """The one that this process has loaded, by its file. pyverbs is built from the same source."""
    for line in _read(proc / "self/maps").splitlines():
        _, found, version = line.rpartition("/libibverbs.so.")
        if found:
            return {"libibverbs": version}
    return {}


def _cpu(proc: Path) -> str:
    for line in _read(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return ""


def _governor(sysfs: Path) -> str:
    files = _glob(sysfs / "devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({text for text in map(_read, files) if text}))


def _netdev_mtus(sysfs: Path) -> dict[str, int]:
    found = {}
    for file in _glob(sysfs / "class/net", "*/mtu"):
        text = _read(file)
        if text.isdigit():
            found[file.parent.name] = int(text)
    return dict(sorted(found.items()))


def _limit(nbytes: int) -> int | str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else nbytes


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
