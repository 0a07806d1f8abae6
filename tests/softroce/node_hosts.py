"""Nodes on the lab's hosts, each in a worker process, and what tests do to the network between
them.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.soak import SOAK
from tests.softroce.conftest import HostName
from tests.softroce.nursery import Nursery, Worker

# An emulated processor may stand still for a while; this bound is for hangs alone.
HANG_S = 3600.0 if SOAK else 120.0
# About 3 MB/s, so that something can happen in the middle of a transfer.
_SLOW = ("tbf", "rate", "25mbit", "burst", "64kb", "limit", "16mb")
_LOST = ("netem", "loss", "100%")
_ENDING = ("open", "close", "limit_memory", "exit")  # afterwards there is no node, or another
_TCP_LINK = "m0"  # in each host's own namespace


class Host(Worker):
    """One worker on one host of the lab, in its current life."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        super().__init__(name, *nursery.ends(name), HANG_S)
        self._opened: tuple[dict[str, Any], str] | None = None

    def tell(self, op: str, **arguments: Any) -> None:
        if op in _ENDING:
            self._opened = None
        super().tell(op, **arguments)

    def open(self, **config: Any) -> tuple[str, bool]:
        """A node with that configuration: its address, and whether it is the one from before."""
        if self._opened is not None and self._opened[0] == config:
            return self._opened[1], True
        address = str(self.do("open", **config)["address"])
        self._opened = config, address
        return address, False

    def kill(self) -> None:
        self._opened = None
        super().kill()


class Hosts:
    """Owner on A, consumer on B; on B another consumer as well, where a test wants it."""

    def __init__(self, nursery: Nursery) -> None:
        self.lab = nursery.lab
        self.owner, self.consumer, self.other = self._all = [
            Host(nursery, name) for name in ("owner", "consumer", "other")
        ]
        self._served = ""
        for host in self._all:
            host.await_ready()

    def serve(self, nbytes: int, **config: Any) -> dict[str, Any]:
        """The owner's one payload from now on."""
        address, same = self.owner.open(**config)
        if same and self._served:
            self.owner.do("withdraw", handle=self._served)
        self._served = handle = str(self.owner.do("register", nbytes=nbytes)["handle"])
        return {"address": address, "handle": handle, "nbytes": nbytes}

    def wait_for_no_lease(self) -> None:
        wait_until(lambda: not self.owner.ask("statistics")["leases"])

    def sent_pkts(self) -> int:
        return sum(self.lab.sent_pkts(device) for device in self.lab.devices("A"))

    def close(self) -> None:
        for host in self._all:
            host.ask("close")

    # --- the network ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def slow(self, *senders: HostName) -> Iterator[None]:
        """What these hosts send by RDMA."""
        with contextlib.ExitStack() as stack:
            for sender in senders:
                for device in self.lab.net_devices(sender):
                    stack.enter_context(_shaped((), device, _SLOW))
            yield

    @contextlib.contextmanager
    def tcp_silent(self) -> Iterator[None]:
        """No TCP between the hosts, not even its end; RDMA goes on."""
        with contextlib.ExitStack() as stack:
            for host in self.lab.hosts:
                stack.enter_context(_shaped(("-n", host), _TCP_LINK, _LOST))
            yield


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


@contextlib.contextmanager
def _shaped(where: Sequence[str], device: str, shape: Sequence[str]) -> Iterator[None]:
    command = ["tc", *where, "qdisc"]
    subprocess.run([*command, "add", "dev", device, "root", *shape], check=True)
    try:
        yield
    finally:
        subprocess.run([*command, "del", "dev", device, "root"], check=True)
