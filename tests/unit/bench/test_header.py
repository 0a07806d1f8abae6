"""The circumstances of an end, read from made-up trees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit.bench.header import circumstances, revision, spans
from orbit.protocol.messages import RailHint


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    card = sysfs / "devices/pci0000:00/0000:00:01.0"
    write(card / "numa_node", "1")
    (sysfs / "drivers/mlx5_core").mkdir(parents=True)
    (card / "driver").symlink_to(sysfs / "drivers/mlx5_core")
    device = sysfs / "class/infiniband/mlx5_0"
    write(device / "fw_ver", "22.39.1002")
    write(device / "ports/1/rate", "100 Gb/sec (4X EDR)")
    (device / "device").symlink_to(card)
    write(sysfs / "class/infiniband/rxe0/parent", "eth0")
    write(sysfs / "class/net/eth0/mtu", "4200")
    for cpu in (0, 1):
        write(sysfs / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance")
    write(sysfs / "devices/system/node/online", "0-1")
    write(proc / "sys/kernel/random/boot_id", "a-boot")
    write(proc / "sys/net/ipv4/tcp_congestion_control", "cubic")
    write(proc / "cpuinfo", "processor : 0\nmodel name\t: Some Processor: fast")
    write(proc / "self/maps", "7f00-7f01 r-xp 0 08:01 1  /usr/lib/libibverbs.so.1.14.44.0")
    return tmp_path


def test_what_a_host_says(host: Path) -> None:
    rails = [
        RailHint("mlx5_0", 1, "::ffff:10.0.0.1", 3, 4096),
        RailHint("rxe0", 1, "fe80::1", 1, 1024),
    ]
    found = circumstances(rails, rdma="ok", sysfs=host / "sys", proc=host / "proc")
    assert json.loads(json.dumps(found)) == found
    assert found["governor"] == "performance"
    assert found["numa_nodes"] == "0-1"
    assert found["netdev_mtus"] == {"eth0": 4200}
    assert found["cpu"] == "Some Processor: fast"
    assert found["versions"]["libibverbs"] == "1.14.44.0"
    assert (found["boot_id"], found["congestion"], found["rdma"]) == ("a-boot", "cubic", "ok")
    card, software = found["rails"]
    assert (card["provider"], card["firmware"]) == ("mlx5_core", "22.39.1002")
    assert (card["rate"], card["mtu"], card["numa_node"]) == ("100 Gb/sec (4X EDR)", 4096, 1)
    assert software["provider"] == "software"
    assert "rate" not in software


def test_a_host_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    found = circumstances(sysfs=tmp_path, proc=tmp_path)
    assert {"python", "kernel", "memlock", "affinity"} <= set(found)
    assert not {"governor", "boot_id", "cpu", "rails"} & set(found)


@pytest.mark.parametrize(
    ("numbers", "text"), [({0, 1, 2, 3, 8}, "0-3,8"), ({5}, "5"), (set(), ""), ({2, 0}, "0,2")]
)
def test_spans(numbers: set[int], text: str) -> None:
    assert spans(numbers) == text


def test_the_revision_of_a_checkout(tmp_path: Path) -> None:
    assert revision(tmp_path) == ""
    write(tmp_path / ".git/HEAD", "0123456789abcdef")
    assert revision(tmp_path) == "0123456789ab"
    write(tmp_path / ".git/HEAD", "ref: refs/heads/main")
    write(tmp_path / ".git/packed-refs", "# pack-refs\nfedcba9876543210 refs/heads/main")
    assert revision(tmp_path) == "fedcba987654"
    write(tmp_path / ".git/refs/heads/main", "1111111111111111")
    assert revision(tmp_path) == "111111111111"
