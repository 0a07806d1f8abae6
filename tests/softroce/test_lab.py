"""The lab keeps its promises: two hosts that see only their own, over a link that carries
traffic."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.softroce.conftest import Lab

USER = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]


def prove(*devices: str) -> subprocess.CompletedProcess[str]:
    """The lab's own proof: 4 KiB RC WRITE and READ and an MTU + 1 WRITE."""
    return subprocess.run(
        ["/usr/bin/python3", "-I", "/run/orbit/bin/orbit-prove", "pair", *devices],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def packets(net_device: str) -> int:
    return int(Path(f"/sys/class/net/{net_device}/statistics/tx_packets").read_text())


def test_each_host_lists_only_its_own_devices(lab: Lab) -> None:
    for host in lab.hosts:
        listing = lab.call_on(host, ["ibv_devices"]).stdout
        assert re.findall(r"\brx\w\d\b", listing) == list(lab.devices(host))


def test_a_host_cannot_open_the_others_device(lab: Lab) -> None:
    assert lab.call_on("A", ["ibv_devinfo", "-d", "rxa1"]).returncode == 0
    assert lab.call_on("A", ["ibv_devinfo", "-d", "rxb1"]).returncode != 0


def test_hosts_have_their_own_loopback_and_one_link(lab: Lab) -> None:
    serve = (
        "import socket, sys\n"
        "s = socket.create_server((sys.argv[1], 7000)); print('up', flush=True)\n"
        "s.accept()[0].sendall(b'hello')\n"
    )
    dial = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 5).recv(9))"
    server = lab.run_on("A", ["/usr/bin/python3", "-IS", "-c", serve, lab.addresses["A"]])
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    refused = lab.call_on("B", ["/usr/bin/python3", "-IS", "-c", dial, "127.0.0.1"])
    assert "ConnectionRefusedError" in refused.stderr
    reached = lab.call_on("B", ["/usr/bin/python3", "-IS", "-c", dial, lab.addresses["A"]])
    assert reached.stdout == "b'hello'\n"


def test_a_signal_reaches_the_hosts_command_itself(lab: Lab) -> None:
    process = lab.run_on("B", ["/bin/bash", "-c", "echo $$; exec sleep 60"])
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.kill()
    assert process.wait(10) == -signal.SIGKILL


def test_rdma_traffic_crosses_the_link(lab: Lab) -> None:
    for near, far, net in zip(
        lab.devices("A"), lab.devices("B"), lab.net_devices("A"), strict=True
    ):
        before = lab.sent_pkts(near), lab.sent_pkts(far), packets(net)
        done = prove(near, far)
        assert done.returncode == 0, done.stdout + done.stderr
        after = lab.sent_pkts(near), lab.sent_pkts(far), packets(net)
        assert all(new > old for old, new in zip(before, after, strict=True))


def test_the_rdma_packet_size_follows_the_links_mtu(lab: Lab) -> None:
    link = int(Path("/sys/class/net/a1/mtu").read_text())
    # The largest RDMA packet that fits with its headers (measured: 1500 gives 1024, 4200 4096).
    expected = max(size for size in (256, 512, 1024, 2048, 4096) if size + 80 <= link)
    information = lab.call_on("A", ["ibv_devinfo", "-d", "rxa1"]).stdout
    assert re.search(r"active_mtu:\s+(\d+)", information).group(1) == str(expected)  # type: ignore[union-attr]


def test_a_link_that_was_down_carries_traffic_again(lab: Lab) -> None:
    try:
        subprocess.run(["orbit-link", "b1", "down"], check=True)
        broken = prove("rxa1", "rxb1")
        assert broken.returncode != 0
        assert "fail device port 1 is not ACTIVE" in broken.stdout
    finally:
        subprocess.run(["orbit-link", "b1", "up"], check=True)
    again = prove("rxa1", "rxb1")
    assert again.returncode == 0, again.stdout


def test_a_plain_user_may_open_devices_and_memory_is_not_limited(lab: Lab) -> None:
    assert lab.call_on("A", [*USER, "ibv_devinfo", "-d", "rxa1"]).returncode == 0
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("folder", ["/tmp", "/run", "/dev/shm", "/var/tmp", "."])
def test_the_guests_folders_can_be_written(folder: str) -> None:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()


def test_the_results_folder_can_be_written() -> None:
    file = Path(os.environ["ORBIT_RESULTS"]) / "test_lab.txt"
    file.write_text("seen")
    assert file.read_text() == "seen"
    file.unlink()


def test_wrong_use_of_the_guests_commands_is_explained() -> None:
    for argv in (["orbit-host", "C", "true"], ["orbit-link", "a1"], ["orbit-kill-peer"]):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert argv[0] in done.stderr
