"""The workers of all tests on both hosts, each host's from one process that has imported everything
(`lives`): starting Python costs seconds on an emulated processor.

A worker takes one JSON command per line and gives one JSON answer per line. What the commands are
is its user's business.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

from tests.softroce.conftest import HostName, Lab

Kind = Literal["messages", "node"]
_START_S = 600.0  # a bound for hangs alone
# name -> its host, its kind, and the number that a message worker is known by
SLOTS: dict[str, tuple[HostName, Kind, int]] = {
    "a": ("A", "messages", 1),
    "b": ("B", "messages", 2),
    "c": ("B", "messages", 3),
    "owner": ("A", "node", 0),
    "consumer": ("B", "node", 0),
    "other": ("B", "node", 0),
}


class Worker:
    """One worker in its current life; `hang_s` is how long an answer may take."""

    def __init__(self, name: str, commands: int, answers: int, hang_s: float) -> None:
        self.name = name
        self.pid = 0
        self._commands, self._answers, self._hang_s = commands, answers, hang_s
        self._unread = b""

    def await_ready(self) -> None:
        while "ready" not in (answer := self.heard(_START_S)):
            pass  # the answer of the life before to a question that nobody waits for any more
        self.pid = int(answer["ready"])

    def tell(self, op: str, **arguments: Any) -> None:
        os.write(self._commands, json.dumps({"op": op, **arguments}).encode() + b"\n")

    def heard(self, within_s: float = 0.0) -> dict[str, Any]:
        within_s = within_s or self._hang_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._answers], [], [], within_s)
            assert readable, f"no answer from the worker {self.name} within {within_s:g} s"
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, f"the worker {self.name} ended"
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.tell(op, **arguments)
        answer = self.heard()
        assert "exited" not in answer, f"the worker {self.name} ended by itself: {answer}"
        return answer

    def do(self, op: str, **arguments: Any) -> dict[str, Any]:
        """As `ask`, for what must succeed."""
        found = self.ask(op, **arguments)
        assert "error" not in found, found
        return found

    def kill(self) -> None:
        """SIGKILL. The next life is ready at once, and has no node yet."""
        os.kill(self.pid, signal.SIGKILL)
        self.await_ready()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


class Nursery:
    """Starts both hosts' processes; each worker's first life is ready some time later."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._ends: dict[str, tuple[int, int]] = {}  # of ours: commands, answers
        for host in lab.hosts:
            self._start(host)

    def _start(self, host: HostName) -> None:
        words, theirs = [], []
        for name, (where, kind, worker_id) in SLOTS.items():
            if where != host:
                continue
            (commands, ours_out), (ours_in, answers) = os.pipe(), os.pipe()
            self._ends[name] = ours_out, ours_in
            theirs += [commands, answers]
            slot = {
                "kind": kind,
                "listen": f"{self.lab.addresses[host]}:{7000 + worker_id if worker_id else 0}",
                "worker_id": worker_id,
                "commands": commands,
                "answers": answers,
            }
            words.append(json.dumps(slot))
        argv = [sys.executable, "-m", "tests.softroce.lives", *words]
        self.lab.run_on(host, argv, stdout=subprocess.DEVNULL, stderr=None, pass_fds=theirs)
        for end in theirs:
            os.close(end)

    def ends(self, name: str) -> tuple[int, int]:
        """Where a worker of SLOTS takes commands, and gives answers."""
        return self._ends[name]

    def close(self) -> None:
        """No worker outlives its commands."""
        for ends in self._ends.values():
            for end in ends:
                os.close(end)
        self._ends.clear()
        self.lab.end_processes()
