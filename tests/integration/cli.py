"""Runs the `orbit` command as a user does: real processes, their output, their end.

A `Relay` stands between two of them and can stall, so that a test is in the middle of a transfer
for sure and not by luck.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orbit.protocol.endpoint import Endpoint
from orbit.protocol.ticket import Ticket

ORBIT = (sys.executable, "-W", "error", "-m", "orbit")
TIMEOUT_S = 60.0


def environment(**extra: str) -> dict[str, str]:
    """Ours without orbit's own settings, so that a developer's pins do not change a test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORBIT_")}
    # Off, so that a test sees the same with and without RDMA hardware.
    return kept | {"ORBIT_RDMA_RENDEZVOUS_DISABLE": "1"} | extra


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    @property
    def error(self) -> dict[str, str]:
        """Its one-line error, as JSON was asked for."""
        (line,) = self.err.splitlines()
        return dict(json.loads(line)["error"])


def orbit(*words: str | Path, stdin: str = "", **options: Any) -> Done:
    """Run one command to its end."""
    with start(*words, stdin=subprocess.PIPE, **options) as process:
        out, err = process.communicate(stdin, timeout=TIMEOUT_S)
    assert "Traceback" not in err, err
    return Done(process.returncode, out, err)


@contextlib.contextmanager
def start(*words: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running command, killed on the way out if it still runs."""
    settings = {"stdin": subprocess.DEVNULL, "env": environment(), **options}
    process = subprocess.Popen(
        [*ORBIT, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Server:
    """A running `orbit serve` and its tickets, in the order of its files."""

    process: subprocess.Popen[str]
    offers: Sequence[dict[str, Any]]

    @property
    def ticket(self) -> str:
        return str(self.offers[0]["ticket"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Done:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return Done(self.process.returncode, out, err)


@contextlib.contextmanager
def serving(*words: str | Path, files: int = 1, **options: Any) -> Iterator[Server]:
    with start("serve", "--json", *words, **options) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(files)]
        if not all(lines):
            raise AssertionError(process.communicate(timeout=TIMEOUT_S)[1])
        yield Server(process, [json.loads(line) for line in lines])


class Relay:
    """Forwards connections to an owner, and stalls after so many bytes from it."""

    def __init__(self, ticket: str, stall_after: int) -> None:
        parsed = Ticket.parse(ticket)
        upstream = parsed.address.endpoints[0]
        self._upstream = (upstream.host, upstream.port)
        self._left = stall_after
        self.stalled = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        here = (Endpoint("127.0.0.1", self._listener.getsockname()[1]),)
        self.ticket = str(replace(parsed, address=replace(parsed.address, endpoints=here)))
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut every connection."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._upstream)
                self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
                self._left -= len(piece) if counted else 0
                if counted and self._left <= 0:
                    self.stalled.set()
                    return
            sink.shutdown(socket.SHUT_WR)
