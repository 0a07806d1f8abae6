"""Packet counters of software devices, read from a made-up tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orbit.cli import counters
from orbit.cli.failures import LocalFileError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(counters, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(counters, "_NET", tmp_path / "net")
    for device, sent, mtu in (("rxa1", 10, 4200), ("rxa2", 5, 1500), ("rxb1", 99, 4200)):
        folder = tmp_path / "infiniband" / device
        (folder / "ports/1/hw_counters").mkdir(parents=True)
        (folder / "ports/1/hw_counters/sent_pkts").write_text(f"{sent}\n")
        (folder / "parent").write_text(f"net-{device}\n")
        (tmp_path / "net" / f"net-{device}").mkdir(parents=True)
        (tmp_path / "net" / f"net-{device}" / "mtu").write_text(f"{mtu}\n")
    return tmp_path


def test_devices_of_one_host(tree: Path) -> None:
    assert counters.rxe_devices("rxa") == ("rxa1", "rxa2")
    assert counters.rxe_devices("rxc") == ()


def test_no_devices_without_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_INFINIBAND", tmp_path / "absent")
    assert counters.rxe_devices("rxa") == ()
    assert counters.packets_sent(()) == counters.packets_needed(1 << 20, ()) == 0


def test_packets_add_up(tree: Path) -> None:
    assert counters.packets_sent(("rxa1", "rxa2")) == 15


@pytest.mark.parametrize(
    ("devices", "nbytes", "packets"),
    [
        (("rxa1",), 1 << 20, 256),
        (("rxa1",), (1 << 20) + 1, 257),
        (("rxa2",), 1 << 20, 1024),
        (("rxa1", "rxa2"), 1 << 20, 256),
        (("rxa1",), 0, 0),
    ],
)
def test_packets_needed(tree: Path, devices: tuple[str, ...], nbytes: int, packets: int) -> None:
    assert counters.packets_needed(nbytes, devices) == packets


def test_the_rdma_tool_serves_where_sysfs_does_not(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "infiniband/rxa1/ports/1/hw_counters/sent_pkts").unlink()
    answer = "link rxa1/1 sent_pkts 41 rcvd_pkts 12 duplicate_request 0"
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, answer, "")
    )
    assert counters.packets_sent(("rxa1",)) == 41


def test_an_unreadable_counter_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("rdma")

    (tree / "infiniband/rxa1/ports/1/hw_counters/sent_pkts").unlink()
    monkeypatch.setattr(subprocess, "run", absent)
    with pytest.raises(LocalFileError, match="rxa1"):
        counters.packets_sent(("rxa1",))
