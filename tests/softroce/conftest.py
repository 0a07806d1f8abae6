"""What tests inside the SoftRoCE lab share: the lab's hosts, its counters, and a clean kernel log.

Outside the lab every test here is skipped: `make softroce` boots the machine that runs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from orbit.softroce.kernel_log import KernelLog
from tests.soak import IN_LAB

if TYPE_CHECKING:
    from tests.softroce.engine_pairs import SharedPair
    from tests.softroce.message_hosts import Hosts
    from tests.softroce.node_hosts import Hosts as NodeHosts
    from tests.softroce.nursery import Nursery

HERE = Path(__file__).parent
OUTSIDE_CHECK = "test_rdma_core_suite"
_END_TIMEOUT_S = 10.0

HostName = Literal["A", "B"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip outside the lab. Inside, rdma-core's own suite comes first: when that fails, the device
    is to blame and not orbit."""
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    if not IN_LAB:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="runs inside the SoftRoCE VM: make softroce"))
        return
    items.sort(key=lambda item: item.path.stem != OUTSIDE_CHECK)


class Lab:
    """The two hosts of the lab in this guest, as `orbit-host` shows them."""

    addresses: dict[HostName, str] = {"A": "10.9.0.1", "B": "10.9.0.2"}  # noqa: RUF012

    def __init__(self) -> None:
        self.rails = int(os.environ["ORBIT_LAB_RAILS"])
        self.hosts: tuple[HostName, ...] = ("A", "B")
        self._processes: list[subprocess.Popen[str]] = []

    def devices(self, host: HostName) -> tuple[str, ...]:
        """Names of the host's RDMA devices, by rail."""
        return tuple(f"rx{host.lower()}{rail}" for rail in range(1, self.rails + 1))

    def net_devices(self, host: HostName) -> tuple[str, ...]:
        """Names of the host's ends of the links, by rail. They stay in the first namespace."""
        return tuple(f"{host.lower()}{rail}" for rail in range(1, self.rails + 1))

    def run_on(self, host: HostName, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command as a host, output piped as text. What still runs at the test's end is
        killed."""
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        }
        process = subprocess.Popen(["orbit-host", host, *argv], **options)
        self._processes.append(process)
        return process

    def call_on(
        self, host: HostName, argv: Sequence[str], timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a host to its end."""
        process = self.run_on(host, argv)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def sent_pkts(self, device: str) -> int:
        """Packets that an rxe device has sent: the proof that bytes went by RDMA."""
        counter = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts")
        return int(counter.read_text())

    def end_processes(self) -> None:
        """Kill what the test left running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(_END_TIMEOUT_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def lab() -> Iterator[Lab]:
    """The lab of two hosts. Skips in a lab of one."""
    if shutil.which("orbit-host") is None or os.environ.get("ORBIT_LAB_HOSTS") != "2":
        pytest.skip("this lab has one host: orbit softroce --hosts 2")
    two_hosts = Lab()
    yield two_hosts
    two_hosts.end_processes()


@pytest.fixture(scope="session", autouse=True)
def rails_are_looked_for_once() -> None:
    """By the nodes of this process; see rails."""
    if IN_LAB:
        from tests.softroce import rails

        rails.look_once()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where all workers of all modules come from: starting Python costs seconds here."""
    from tests.softroce.nursery import Nursery

    started = Nursery(Lab())
    yield started
    started.close()


@pytest.fixture(scope="session")
def message_hosts(nursery: Nursery) -> Hosts:
    """Workers that serve messages, for all modules."""
    from tests.softroce.message_hosts import Hosts

    return Hosts(nursery)


@pytest.fixture(scope="session")
def node_hosts(nursery: Nursery) -> NodeHosts:
    """Workers that serve and fetch payloads, for all modules."""
    from tests.softroce.node_hosts import Hosts

    return Hosts(nursery)


@pytest.fixture(scope="module")
def engine_pair() -> Iterator[SharedPair]:
    """Two transfer engines with two rails each. No longer than for one module: their queue pairs
    keep rows of the GID tables.
    """
    from tests.softroce.engine_pairs import shared_pair

    yield from shared_pair()


@pytest.fixture(scope="session", autouse=True)
def kernel_log_is_clean() -> Iterator[None]:
    """No Oops, BUG, lockup or WARN in rdma code may appear while the tests run."""
    if not IN_LAB:
        yield
        return
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        yield
        log = KernelLog()
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the oldest records were overwritten
                continue
            log.feed(record.partition(b";")[2].partition(b"\n")[0] + b"\n")
        log.finish()
        assert log.faults == [], "\n".join(log.excerpt())
    finally:
        os.close(descriptor)
