"""NUMA nodes, distances and PCI paths from fake trees, also when nothing can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit.verbs.topology import numa_distances, numa_node_of, pci_bridges_of

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


def test_what_has_no_node_itself_has_that_of_the_card_it_hangs_on(sysfs: Path) -> None:
    virtio = sysfs / "devices/pci0000:40" / ROOT / BRIDGE / "virtio3"
    virtio.mkdir(parents=True)
    write(virtio.parent / "numa_node", "1")
    write(virtio.parent.parent / "numa_node", "0")
    write(sysfs.parent / "numa_node", "3")  # no device
    folder = sysfs / "class/infiniband/rxe0"
    write(folder / "parent", "eth0")
    (sysfs / "class/net/eth0").mkdir(parents=True)
    (sysfs / "class/net/eth0/device").symlink_to(virtio)
    assert numa_node_of(folder, sysfs=sysfs) == 1
    (virtio.parent / "numa_node").unlink()
    (virtio.parent.parent / "numa_node").unlink()
    assert numa_node_of(folder, sysfs=sysfs) == -1


def test_without_sysfs_nothing_is_known(sysfs: Path) -> None:
    folder = sysfs / "class/infiniband/rxe0"
    assert numa_node_of(folder, sysfs=sysfs) == -1
    assert pci_bridges_of(folder, sysfs=sysfs) == 0
    assert numa_distances(0, sysfs=sysfs) == {}


def test_bridges_between_a_device_and_the_processor(sysfs: Path) -> None:
    for name, path, bridges in (
        ("a", (ROOT, BRIDGE, "0000:3c:00.0"), 2),
        ("b", (ROOT, "0000:3d:00.0"), 1),
        ("c", ("0000:80:00.0",), 0),
    ):
        assert pci_bridges_of(hardware(sysfs, name, *path), sysfs=sysfs) == bridges


def test_a_circle_of_links_is_no_path(sysfs: Path) -> None:
    folder = sysfs / "class/infiniband/odd"
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(folder / "device")
    assert pci_bridges_of(folder, sysfs=sysfs) == 0
    assert numa_node_of(folder, sysfs=sysfs) == -1


def test_distances_are_those_of_the_nodes_that_are_online(sysfs: Path) -> None:
    nodes = sysfs / "devices/system/node"
    for node, text in ((0, "10 21 31"), (2, "21 10 31"), (10, "31 31 10")):
        write(nodes / f"node{node}" / "distance", text)
    assert numa_distances(2, sysfs=sysfs) == {0: 21, 2: 10, 10: 31}
    write(nodes / "node0/distance", "10 21")  # a node came between the two looks
    assert numa_distances(0, sysfs=sysfs) == {}
    assert numa_distances(5, sysfs=sysfs) == {}
