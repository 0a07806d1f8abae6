"""Programs that end, by themselves or by a signal, as seen from the outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]
_WORKER = "tests.integration.cases.exit_worker"
# For hangs alone; what an exit may take is in docs/design/shutdown.md.
_HANG_S = 60.0
# What the interpreter says of what went wrong so late that nobody could catch it.
_BAD = (
    "Exception ignored",
    "Fatal",
    "Segmentation",
    "never retrieved",
    "never awaited",
    "InternalE",
)
DEBUG = ("-X", "dev", "-X", "faulthandler")


@dataclass(frozen=True)
class Exit:
    """`said`: the JSON lines that were not heard before."""

    status: int
    said: list[dict[str, Any]]
    errors: str

    def check(self, *statuses: int) -> None:
        """It ended as it had to, and in order."""
        assert self.status in statuses, f"{self.status}: {self.errors}"
        assert not [bad for bad in _BAD if bad in self.errors], self.errors


class Program:
    """One running program, in a process group of its own."""

    def __init__(self, name: str, seed: int, path: str, debug: bool) -> None:
        kept = {key: text for key, text in os.environ.items() if not key.startswith("ORBIT_")}
        malloc = {"PYTHONMALLOC": "debug"} if debug else {}
        flags = DEBUG if debug else ()
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-m", _WORKER, name, str(seed), path],
            cwd=_ROOT,
            env=kept | malloc,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **facts: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(facts).encode() + b"\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, self._process.communicate()[1].decode()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> Exit:
        """Wait for it; nothing of its group may be left."""
        try:
            out, errors = self._process.communicate(timeout=_HANG_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # faulthandler shows where it stands
            out, errors = self._process.communicate()
            raise AssertionError(f"it does not end: {errors.decode()}") from None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            said = [*map(json.loads, (self._unread + out).splitlines())]
            return Exit(self._process.returncode, said, errors.decode())
        raise AssertionError("it left a process behind")


def program(name: str, seed: int, path: str, *, debug: bool = True) -> Program:
    """`name`: one of exit_worker's; `debug`: with the checks of CPython's developers on."""
    return Program(name, seed, path, debug)
