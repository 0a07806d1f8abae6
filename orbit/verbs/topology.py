"""Where a device sits in the machine: its NUMA node and PCI address, and how far nodes are apart.

Reads sysfs below a root that is given, so that fake trees work; nothing found is an answer. Which
rail is better for which memory is decided elsewhere (`protocol/rail_selection.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
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
        # A virtio device, or a function of a card, has none itself; what it hangs on has one.
        places = (hardware, *_above(hardware, sysfs))
        nodes = (_integer(place / "numa_node") for place in places)
        found = next((node for node in nodes if node is not None), UNKNOWN_NODE)
        if found >= 0:
            return found
    return UNKNOWN_NODE


def pci_bridges_of(device: Path, *, sysfs: Path = SYSFS) -> int:
    """PCI bridges between it and the processor, its root port included. 0: it is on no PCI bus."""
    for hardware in _hardware(device, sysfs):
        try:
            parts = hardware.resolve(strict=True).parts
        except (OSError, RuntimeError):  # RuntimeError: a circle of links
            continue
        if found := tuple(part for part in parts if _PCI_ADDRESS.fullmatch(part)):
            return len(found) - 1
    return 0


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


def _above(hardware: Path, sysfs: Path) -> Iterator[Path]:
    """The devices that it hangs on, the nearest first."""
    try:
        devices = (sysfs / "devices").resolve()
        parents = hardware.resolve(strict=True).parents
    except (OSError, RuntimeError):
        return
    yield from takewhile(lambda parent: parent.is_relative_to(devices), parents)


def _integer(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None
