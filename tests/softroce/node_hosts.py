"""Nodes on the lab's hosts, each in a worker process, and what tests do to the network between
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.softroce.conftest import HostName, Lab

# An emulated processor may stand still for a while; this bound is for hangs alone.
HANG_S = 600.0 if os.environ.get("ORBIT_SOAK") == "1" else 120.0
# About 3 MB/s, so that something can happen in the middle of a transfer.
_SLOW = ("tbf", "rate", "25mbit", "burst", "64kb", "limit", "16mb")
_LOST = ("netem", "loss", "100%")
_TCP_LINK = "m0"  # in each host's own namespace


class Host:
    """One worker process on one host of the lab, in its current life."""

    def __init__(self, lab: Lab, name: HostName) -> None:
        self._lab, self._name = lab, name
        self.pid = 0
        self._start()

    def _start(self) -> None:
        listen = f"{self._lab.addresses[self._name]}:0"
        argv = [sys.executable, "-m", "tests.softroce.node_worker", listen]
        self._unread = b""
        self.process = self._lab.run_on(self._name, argv, stdin=subprocess.PIPE, stderr=None)

    def await_ready(self) -> None:
        while "ready" not in (answer := self.heard()):
            pass  # the answer of the life before to a question that nobody waits for any more
        self.pid = int(answer["ready"])

    def tell(self, op: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answers = (
            self.process.stdout.fileno()
        )  # read here: what a file buffers, select does not see
        while b"\n" not in self._unread:
            readable, _, _ = select.select([answers], [], [], HANG_S)
            assert readable, f"no answer from the worker on {self._name} within {HANG_S:g} s"
            chunk = os.read(answers, 1 << 16)
            assert chunk, f"the worker on {self._name} ended: {self.process.wait(HANG_S)}"
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.tell(op, **arguments)
        return self.heard()

    def do(self, op: str, **arguments: Any) -> dict[str, Any]:
        """As `ask`, for what must succeed."""
        found = self.ask(op, **arguments)
        assert "error" not in found, found
        return found

    def kill(self) -> None:
        """SIGKILL. The next life is ready at once, and has no node yet."""
        os.kill(self.pid, signal.SIGKILL)
        self.await_ready()

    def restart(self) -> None:
        """A life without a node, however the one before ended."""
        if self.process.poll() is None:
            self.kill()
        else:
            self._start()
            self.await_ready()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


class Hosts:
    """Owner on A, consumer on B; on B another consumer as well, where a test wants it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.owner, self.consumer = Host(lab, "A"), Host(lab, "B")
        self._other: Host | None = None
        for host in (self.owner, self.consumer):  # started together
            host.await_ready()

    @property
    def other(self) -> Host:
        if self._other is None:
            self._other = Host(self.lab, "B")
            self._other.await_ready()
        return self._other

    def serve(self, nbytes: int, pinned: bool = True, **config: Any) -> dict[str, Any]:
        address = self.owner.ask("open", **config)["address"]
        handle = self.owner.ask("register", nbytes=nbytes, pinned=pinned)["handle"]
        return {"address": address, "handle": handle, "nbytes": nbytes}

    def wait_for_no_lease(self) -> None:
        wait_until(lambda: not self.owner.ask("statistics")["leases"])

    def sent_pkts(self) -> int:
        return sum(self.lab.sent_pkts(device) for device in self.lab.devices("A"))

    def close(self) -> None:
        for host in (self.owner, self.consumer, self._other):
            if host is not None:
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
