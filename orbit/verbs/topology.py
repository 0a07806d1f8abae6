"""Where a device sits in the machine: its NUMA node and PCI address, and how far nodes are apart.

Reads sysfs below a root that is given, so that fake trees work; nothing found is an answer. Which
rail is better for which memory is decided elsewhere (`protocol/rail_selection.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
UNKNOWN_NODE: Final = -1

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def numa_node_of(device: Path, *, sysfs: Path = SYSFS) -> int:
    """Of an RDMA device by its folder in class/infiniband. A software device has the node of the
    network interface that it was made on. -1: unknown.
    """
    for hardware in _hardware(device, sysfs):
        node = _integer(hardware / "numa_node")
        if node is not None and node >= 0:
            return node
    return UNKNOWN_NODE


def pci_path_of(device: Path, *, sysfs: Path = SYSFS) -> tuple[str, ...]:
    """The PCI addresses from the root port down to the device. Empty: it is on no PCI bus."""
    for hardware in _hardware(device, sysfs):
        try:
            parts = hardware.resolve(strict=True).parts
        except (OSError, RuntimeError):  # RuntimeError: a circle of links
            continue
        if found := tuple(part for part in parts if _PCI_ADDRESS.fullmatch(part)):
            return found
    return ()


def pci_distance(a: tuple[str, ...], b: tuple[str, ...]) -> int | None:
    """Bridges between two devices by their paths: 0 for one and the same, None where they share no
    root port or one of them is on no PCI bus.
    """
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        shared += 1
    return len(a) + len(b) - 2 * shared if shared else None


def numa_distances(node: int, *, sysfs: Path = SYSFS) -> dict[int, int]:
    """From that node to each node, itself included, in the firmware's units (10 is local). Empty:
    the kernel has no such node.
    """
    nodes = sysfs / "devices/system/node"
    try:
        texts = (nodes / f"node{node}" / "distance").read_text("ascii").split()
        names = [entry.name[4:] for entry in nodes.glob("node[0-9]*")]
        found = sorted(int(name) for name in names if name.isdigit())
        distances = [int(text) for text in texts]
    except (OSError, ValueError):
        return {}
    # One column for each node that is online, in order.
    return dict(zip(found, distances, strict=True)) if len(found) == len(distances) else {}


def _hardware(device: Path, sysfs: Path) -> tuple[Path, ...]:
    try:
        netdev = (device / "parent").read_text("ascii").strip()  # of rdma_rxe and siw
    except (OSError, ValueError):
        netdev = ""
    below = (sysfs / "class/net" / netdev / "device",) if netdev and "/" not in netdev else ()
    return device / "device", *below


def _integer(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None
