"""One end of a peer as a child process that may hang, die, or lack what it needs."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

END = Path(__file__).with_name("end.py")


class PeerFailed(Exception):
    """What it said last, in one line."""


class Child:
    """JSON lines there and back; an answer that takes longer than `timeout_s` ends the child."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True
        )

    def ask(self, command: dict[str, object]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self.reason()) from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self.process.kill()

        watch = threading.Timer(self.timeout_s, end)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        if not line:
            in_time = not late.is_set()
            raise PeerFailed(self.reason() if in_time else f"no answer in {self.timeout_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def reason(self) -> str:
        status = self.process.wait(10)
        self.said.seek(0)
        return last_words(self.said.read()) or f"ended with status {status}"

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.said.close()


def last_words(text: str) -> str:
    """The last line that says something, without indentation and not endless."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~|")]
    return lines[-1][:200].replace("|", "/") if lines else ""
