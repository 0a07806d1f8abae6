"""NUMA nodes, distances and PCI paths from fake trees, also when nothing can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit.verbs.topology import numa_distances, numa_node_of, pci_distance, pci_path_of

ROOT, BRIDGE = "0000:3a:00.0", "0000:3b:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return tmp_path / "sys"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def hardware(sysfs: Path, name: str, *addresses: str) -> Path:
    """A device on the PCI bus; its folder in class/infiniband."""
    place = sysfs.joinpath("devices/pci0000:3a", *addresses)
    place.mkdir(parents=True, exist_ok=True)
    folder = sysfs / "class/infiniband" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(place)
    return folder


@pytest.mark.parametrize(("text", "node"), [("0", 0), ("1", 1), ("-1", -1), ("?", -1)])
def test_the_node_of_a_device(sysfs: Path, text: str, node: int) -> None:
    folder = hardware(sysfs, "mlx5_0", ROOT)
    write(folder / "device/numa_node", text)
    assert numa_node_of(folder, sysfs=sysfs) == node


def test_a_software_device_has_the_node_of_its_interface(sysfs: Path) -> None:
    folder = sysfs / "class/infiniband/rxe0"
    write(folder / "parent", "eth0")
    write(sysfs / "class/net/eth0/device/numa_node", "1")
    assert numa_node_of(folder, sysfs=sysfs) == 1
    write(folder / "parent", "../eth0")  # no name of an interface
    assert numa_node_of(folder, sysfs=sysfs) == -1


def test_without_sysfs_nothing_is_known(sysfs: Path) -> None:
    folder = sysfs / "class/infiniband/rxe0"
    assert numa_node_of(folder, sysfs=sysfs) == -1
    assert pci_path_of(folder, sysfs=sysfs) == ()
    assert numa_distances(0, sysfs=sysfs) == {}


def test_pci_paths_tell_how_far_two_devices_are_apart(sysfs: Path) -> None:
    a = pci_path_of(hardware(sysfs, "a", ROOT, BRIDGE, "0000:3c:00.0"), sysfs=sysfs)
    b = pci_path_of(hardware(sysfs, "b", ROOT, BRIDGE, "0000:3c:00.1"), sysfs=sysfs)
    c = pci_path_of(hardware(sysfs, "c", ROOT, "0000:3d:00.0"), sysfs=sysfs)
    far = pci_path_of(hardware(sysfs, "far", "0000:80:00.0"), sysfs=sysfs)
    assert a == (ROOT, BRIDGE, "0000:3c:00.0")
    assert pci_distance(a, a) == 0
    assert pci_distance(a, b) == pci_distance(b, a) == 2
    assert pci_distance(a, c) == 3
    assert pci_distance(a, far) is None
    assert pci_distance(a, ()) is None


def test_a_circle_of_links_is_no_path(sysfs: Path) -> None:
    folder = sysfs / "class/infiniband/odd"
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(folder / "device")
    assert pci_path_of(folder, sysfs=sysfs) == ()
    assert numa_node_of(folder, sysfs=sysfs) == -1


def test_distances_are_those_of_the_nodes_that_are_online(sysfs: Path) -> None:
    nodes = sysfs / "devices/system/node"
    for node, text in ((0, "10 21 31"), (2, "21 10 31"), (10, "31 31 10")):
        write(nodes / f"node{node}" / "distance", text)
    assert numa_distances(2, sysfs=sysfs) == {0: 21, 2: 10, 10: 31}
    write(nodes / "node0/distance", "10 21")  # a node came between the two looks
    assert numa_distances(0, sysfs=sysfs) == {}
    assert numa_distances(5, sysfs=sysfs) == {}
