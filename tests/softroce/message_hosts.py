"""Messaging nodes on the lab's hosts, and what the tests do to the network between them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.soak import SOAK
from tests.softroce.conftest import HostName
from tests.softroce.nursery import SLOTS, Nursery, Worker

# An emulated processor may stand still for a while: this bound is for hangs alone.
HANG_S = 3600.0 if SOAK else 60.0
_RNR_COUNTERS = ("rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err")
_RESOURCES = ("qp", "cq", "pd", "mr")
# A processor that is emulated may take its time with a connection.
PATIENT = {"ready_timeout_s": 20.0, "ping_timeout_s": 20.0}


class Host(Worker):
    """One worker on one host of the lab, in its current life."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        super().__init__(name, *nursery.ends(name), HANG_S)
        self.worker_id = SLOTS[name][2]
        self.address = ""

    def begin(self, job: str, what: str, **arguments: Any) -> None:
        self.do("begin", job=job, what=what, **arguments)

    def finish(self, job: str) -> dict[str, Any]:
        return self.ask("finish", job=job)

    def statistics(self) -> dict[str, Any]:
        return self.do("statistics")

    def events(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        found = self.statistics()["events"]
        return [
            event
            for event in found
            if event["event"] == kind and all(event[k] == v for k, v in wanted.items())
        ]


class Hosts:
    """`a` on host A; `b` and `c` on host B. The names are what they call each other."""

    def __init__(self, nursery: Nursery) -> None:
        self.lab = nursery.lab
        self.a, self.b, self.c = self._all = [Host(nursery, name) for name in ("a", "b", "c")]
        for host in self._all:
            host.await_ready()

    def open(self, *hosts: Host, **config: Any) -> None:
        """A fresh node on each; all know each other."""
        self.open_each(dict.fromkeys(hosts, config))

    def open_each(self, configs: Mapping[Host, dict[str, Any]]) -> None:
        """As `open`, with a configuration of its own for each."""
        hosts = list(configs)
        for host, config in configs.items():
            host.tell("open", **patient(config))
        for host in hosts:
            host.address = host.heard()["address"]
        for host in hosts:
            for other in hosts:
                if other is not host:
                    host.do("meet", name=other.name, address=other.address)

    def close(self) -> None:
        for host in self._all:
            host.do("close")

    def sent_pkts(self) -> int:
        return sum(self.lab.sent_pkts(device) for device in self.devices)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for host in self.lab.hosts for device in self.lab.devices(host))

    @property
    def net_devices(self) -> tuple[str, ...]:
        return tuple(device for host in self.lab.hosts for device in self.lab.net_devices(host))

    # --- the network ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def netem(self, *words: str) -> Iterator[None]:
        """On both ends of every rail: RDMA alone, since TCP has a link of its own."""
        for device in self.net_devices:
            _run("tc", "qdisc", "add", "dev", device, "root", "netem", *words)
        try:
            yield
        finally:
            for device in self.net_devices:
                _run("tc", "qdisc", "del", "dev", device, "root")

    def dropped_packets(self) -> int:
        """By netem, so far."""
        argv = ["tc", "-s", "qdisc", "show"]
        text = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        parts = re.findall(r"qdisc netem .*?dropped (\d+)", text, re.DOTALL)
        return sum(int(count) for count in parts)

    @contextlib.contextmanager
    def tcp_silent(self) -> Iterator[None]:
        """No TCP between the hosts; RDMA goes on."""
        shape = ("dev", "m0", "root")
        for host in self.lab.hosts:
            _run("tc", "-n", host, "qdisc", "add", *shape, "netem", "loss", "100%")
        try:
            yield
        finally:
            for host in self.lab.hosts:
                _run("tc", "-n", host, "qdisc", "del", *shape)

    @contextlib.contextmanager
    def port_down(self, *devices: str) -> Iterator[None]:
        for device in devices:
            _run("orbit-link", device, "down")
        try:
            yield
        finally:
            for device in devices:
                _run("orbit-link", device, "up")

    @contextlib.contextmanager
    def no_permission(self, host: HostName) -> Iterator[None]:
        """A plain user cannot open the host's devices."""
        program = subprocess.run(
            ["which", "orbit-host"], check=True, capture_output=True, text=True
        ).stdout.strip()
        nodes = list((Path(program).resolve().parent.parent / "hosts" / host).iterdir())
        for node in nodes:
            node.chmod(0o600)
        try:
            yield
        finally:
            for node in nodes:
                node.chmod(0o666)

    # --- what the kernel counts -------------------------------------------------------------------

    def receiver_not_ready(self) -> int:
        found = 0
        for device in self.devices:
            counters = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters")
            found += sum(int((counters / name).read_text()) for name in _RNR_COUNTERS)
        return found

    def resources(self) -> dict[str, int]:
        """Queue pairs, completion queues and so on of all processes, over all devices."""
        text = subprocess.run(
            ["rdma", "resource", "show"], check=True, capture_output=True, text=True
        ).stdout
        return {
            name: sum(int(count) for count in re.findall(rf"\b{name} (\d+)", text))
            for name in _RESOURCES
        }

    def rails_with_links(self) -> list[int]:
        """The rails between which queue pairs of message links stand."""
        return [
            rail
            for rail in range(1, self.lab.rails + 1)
            if _connected(f"rxa{rail}") and _connected(f"rxb{rail}")
        ]


def patient(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "messaging": {**PATIENT, **config.get("messaging", {})}}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def _connected(device: str) -> bool:
    """A queue pair of that device is ready to send."""
    argv = ["rdma", "resource", "show", "qp", "link", f"{device}/1"]
    text = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return any("type RC" in line and "state RTS" in line for line in text.splitlines())


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)
