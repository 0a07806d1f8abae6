"""What RDMA devices this host lists, and for each whether this process can use it, or why not.

Reads sysfs for devices, ports and GIDs, and looks for the device nodes; each device gets its own
verdict, so that one unusable device never hides another. It opens no device, picks nothing (that is
`rail_choice`), and takes its roots and its view of the network as arguments, so fake trees work.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ..errors import DeviceError
from ..model import PathReason
from .gid_ranking import GidEntry, GidKind, Netdev, gid_bytes, gid_text
from .netdevs import read_netdevs
from .topology import UNKNOWN_NODE, numa_node_of, pci_bridges_of

_SYSFS = Path("/sys")
_NODES = Path("/dev/infiniband")
_ATTRIBUTE_BYTES_MAX = 4096  # sysfs shows at most a page
_STATE_ACTIVE = 4  # ibv_port_state
_EMPTY_GID = bytes(16)
_EMPTY_GID_TEXT = ":".join(["0000"] * 8)  # as the kernel writes it
# An InfiniBand port that was given no address yet: the default subnet prefix and nothing behind it.
_PREFIX_ONLY_GID = b"\xfe\x80" + bytes(14)

NetdevReader = Callable[[], Mapping[str, Netdev]]


class Verdict(StrEnum):
    """Whether a device can be used. The order is that of the checks: a later one got further."""

    NO_NODE = "no_node"  # listed, but there is no device node: another container's device
    PERMISSION = "permission"
    NO_PROVIDER = "no_provider"  # the verbs library has no driver for it
    PORT_DOWN = "port_down"
    NO_GID = "no_gid"
    USABLE = "usable"

    @property
    def reason(self) -> PathReason:
        return _REASONS[self]


_REASONS = {
    Verdict.NO_NODE: PathReason.NO_DEVICE,
    Verdict.PERMISSION: PathReason.PERMISSION,
    Verdict.NO_PROVIDER: PathReason.DEVICE_FAILED,
    Verdict.PORT_DOWN: PathReason.PORT_DOWN,
    Verdict.NO_GID: PathReason.NO_GID,
    Verdict.USABLE: PathReason.OK,
}


@dataclass(frozen=True, slots=True)
class PortReport:
    """One port as sysfs shows it. `gids` has the non-empty rows."""

    number: int
    state: str  # "ACTIVE", "DOWN" ...
    active: bool
    link_layer: str  # "ethernet" or "infiniband"
    lid: int
    pkeys: tuple[int, ...]
    gids: tuple[GidEntry, ...]
    nic: int = 0  # its place among all ports of all devices that are listed, whatever their state

    @property
    def verdict(self) -> Verdict:
        if not self.active:
            return Verdict.PORT_DOWN
        return Verdict.USABLE if self.gids else Verdict.NO_GID


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device. `detail` is one line for people, empty when it is usable."""

    name: str
    node: str  # path of its device node; empty when sysfs names none
    verdict: Verdict
    detail: str
    ports: tuple[PortReport, ...]
    numa_node: int = UNKNOWN_NODE
    pci_bridges: int = 0  # between it and the processor

    @property
    def within_reach(self) -> bool:
        """It can be opened, whatever its ports are like now."""
        return self.verdict in (Verdict.USABLE, Verdict.NO_GID, Verdict.PORT_DOWN)


@dataclass(frozen=True, slots=True)
class Discovery:
    """Every device that the host lists, by name, and the interfaces of this network namespace."""

    devices: tuple[DeviceReport, ...]
    netdevs: Mapping[str, Netdev]

    @property
    def usable(self) -> tuple[DeviceReport, ...]:
        return tuple(d for d in self.devices if d.verdict is Verdict.USABLE)

    @property
    def reason(self) -> PathReason:
        """OK, or the reason of the device that got furthest."""
        if not self.devices:
            return PathReason.NO_DEVICE
        order = list(Verdict)
        return max((d.verdict for d in self.devices), key=order.index).reason

    @property
    def detail(self) -> str:
        """Why each unusable device is not used, in one line."""
        if not self.devices:
            return "this host lists no RDMA device"
        return "; ".join(f"{d.name}: {d.detail}" for d in self.devices if d.detail)


def discover(
    *,
    sysfs: Path = _SYSFS,
    nodes: Path | None = _NODES,
    netdevs: NetdevReader = read_netdevs,
) -> Discovery:
    """Look once, now. No device and no permission is an answer, never an exception. `nodes` None:
    the device nodes are not known, and are taken to be good.
    """
    try:
        interfaces = dict(netdevs())
    except DeviceError:
        interfaces = {}  # a sandbox may forbid the question; the ranking then says "not here"
    node_names = _uverbs_by_device(sysfs)
    names = sorted(_entries(sysfs / "class/infiniband"), key=_natural)
    devices: list[DeviceReport] = []
    nics = itertools.count()
    for name in names:
        folder = sysfs / "class/infiniband" / name
        ports = tuple(replace(port, nic=next(nics)) for port in _read_ports(folder))
        node = nodes / node_names[name] if nodes and name in node_names else None
        verdict, detail = (_judge_node(node) if nodes else None) or _judge_ports(ports)
        report = DeviceReport(name, str(node or ""), verdict, detail, ports)
        place = numa_node_of(folder, sysfs=sysfs), pci_bridges_of(folder, sysfs=sysfs)
        devices.append(replace(report, numa_node=place[0], pci_bridges=place[1]))
    return Discovery(tuple(devices), interfaces)


def judged_by(discovery: Discovery, offered: Collection[str]) -> Discovery:
    """The same for who has a verbs library that offers those devices, by name."""
    detail = "the verbs library has no driver for it"
    devices = [
        replace(device, verdict=Verdict.NO_PROVIDER, detail=detail)
        if device.within_reach and device.name not in offered
        else device
        for device in discovery.devices
    ]
    return replace(discovery, devices=tuple(devices))


def read_gids(device: str, port: int, *, sysfs: Path = _SYSFS) -> tuple[GidEntry, ...]:
    """The non-empty rows of one port's GID table, as of now."""
    folder = sysfs / "class/infiniband" / device / "ports" / str(port)
    return _read_gids(folder, _link_layer(folder))


def _read_ports(folder: Path) -> Iterator[PortReport]:
    for number in sorted(_entries(folder / "ports"), key=_natural):
        if number.isdigit():
            yield _read_port(folder / "ports" / number, int(number))


def _judge_node(node: Path | None) -> tuple[Verdict, str] | None:
    """What keeps this process from opening it, or None."""
    if node is None:
        return Verdict.NO_NODE, "the ib_uverbs module made no device node for it"
    if not node.exists():
        return Verdict.NO_NODE, f"{node} does not exist here"
    if not os.access(node, os.R_OK | os.W_OK):
        return Verdict.PERMISSION, f"{node} may not be opened by this user"
    return None


def _judge_ports(ports: tuple[PortReport, ...]) -> tuple[Verdict, str]:
    order = list(Verdict)
    best = max((port.verdict for port in ports), key=order.index, default=Verdict.PORT_DOWN)
    if best is Verdict.PORT_DOWN:
        states = ", ".join(f"port {p.number} {p.state}" for p in ports) or "it has no port"
        return best, f"no port is ACTIVE ({states})"
    if best is Verdict.NO_GID:
        return best, "its active port has no GID (has the interface an address?)"
    return best, ""


def _read_port(folder: Path, number: int) -> PortReport:
    state, _, state_name = _read(folder / "state").partition(":")
    link_layer = _link_layer(folder)
    return PortReport(
        number=number,
        state=state_name.strip() or state or "unknown",
        active=_integer(state, 0) == _STATE_ACTIVE,
        link_layer=link_layer,
        lid=_integer(_read(folder / "lid"), 0),
        pkeys=tuple(_integer(_read(folder / "pkeys" / i), 0) for i in _indices(folder / "pkeys")),
        gids=_read_gids(folder, link_layer),
    )


def _link_layer(port: Path) -> str:
    return (_read(port / "link_layer") or "Ethernet").lower()


def _read_gids(port: Path, link_layer: str) -> tuple[GidEntry, ...]:
    gids = (_read_gid(port, int(i), link_layer) for i in _indices(port / "gids"))
    return tuple(gid for gid in gids if gid is not None)


def _read_gid(port: Path, index: int, link_layer: str) -> GidEntry | None:
    text = _read(f"{port}/gids/{index}")
    if text == _EMPTY_GID_TEXT:  # nearly all rows of a table: not worth parsing
        return None
    try:
        raw = gid_bytes(text)
    except ValueError:
        return None
    if raw in (_EMPTY_GID, _PREFIX_ONLY_GID):
        return None
    # The kernel answers EINVAL for the attributes of a row that vanished meanwhile.
    kind = _read(port / "gid_attrs/types" / str(index))
    netdev = _read(port / "gid_attrs/ndevs" / str(index))
    if link_layer == "infiniband":
        return GidEntry(index, gid_text(raw), GidKind.INFINIBAND, netdev)
    roce = GidKind.ROCE_V2 if kind == "RoCE v2" else GidKind.ROCE_V1
    return GidEntry(index, gid_text(raw), roce, netdev)


def _uverbs_by_device(sysfs: Path) -> dict[str, str]:
    folder = sysfs / "class/infiniband_verbs"
    return {
        device: name
        for name in _entries(folder)
        if name.startswith("uverbs") and (device := _read(folder / name / "ibdev"))
    }


def _indices(folder: Path) -> list[str]:
    return sorted(filter(str.isdigit, _entries(folder)), key=int)


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(file: Path | str) -> str:
    # Plain system calls: a GID table can have a thousand rows, and a text file object for each
    # would make opening a node noticeably slow.
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _ATTRIBUTE_BYTES_MAX).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _integer(text: str, default: int) -> int:
    try:
        return int(text.strip(), 0)
    except ValueError:
        return default


def _natural(name: str) -> tuple[str, int]:
    """mlx5_10 after mlx5_9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1)
