"""Two real processes on loopback: the bytes, and what each side sees when the other one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SEEN_WITHIN_S = 10.0  # generous for a busy machine: what is tested is that it ends by itself


class Process:
    """One node process and the JSON lines that it says."""

    def __init__(self, role: str, **arguments: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.node_process", role, json.dumps(arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def heard(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            _, errors = self.popen.communicate(timeout=SEEN_WITHIN_S)
            raise AssertionError(f"the process ended: {errors}")
        return dict(json.loads(line))

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self.heard()

    def tell(self, command: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(command + "\n")
        self.popen.stdin.flush()

    def ends(self) -> int:
        _, errors = self.popen.communicate(timeout=SEEN_WITHIN_S)
        assert "Traceback" not in errors, errors
        return self.popen.returncode


@contextmanager
def process(role: str, **arguments: Any) -> Iterator[Process]:
    started = Process(role, **arguments)
    watchdog = threading.Timer(3 * SEEN_WITHIN_S, started.popen.kill)
    watchdog.start()
    try:
        yield started
    finally:
        watchdog.cancel()
        started.popen.kill()
        started.popen.communicate()


def wait_for_no_lease(owner: Process) -> None:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while (found := owner.ask("statistics"))["leases"] or found["sessions"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.parametrize("nbytes", [0, 1, MIB, 40 * MIB + 7])
def test_bytes_from_process_to_process(nbytes: int) -> None:
    with process("owner", nbytes=nbytes) as owner:
        ticket = owner.heard()
        with process("consumer", nbytes=max(nbytes, 1), **ticket) as consumer:
            said = consumer.heard()
            while "begun" in said:
                said = consumer.heard()
            if nbytes:
                assert said == {"path": "tcp", "reason": "asked", "same": True}
            assert consumer.ends() == 0
        wait_for_no_lease(owner)
        assert owner.ask("close") == {"closed": True}
        assert owner.ends() == 0


def test_a_killed_owner_ends_the_get() -> None:
    with process("owner", nbytes=256 * MIB) as owner:
        ticket = owner.heard()
        with process("consumer", nbytes=256 * MIB, **ticket) as consumer:
            assert consumer.heard()["begun"] > 0
            owner.popen.kill()
            said = consumer.heard()
            assert said["error"] in ("PeerLost", "PathFailed", "PeerUnreachable")
            assert consumer.ends() == 0


def test_a_killed_consumer_ends_its_lease() -> None:
    with process("owner", nbytes=256 * MIB) as owner:
        ticket = owner.heard()
        with process("consumer", nbytes=256 * MIB, **ticket) as consumer:
            assert consumer.heard()["begun"] > 0
            assert owner.ask("statistics")["leases"] == 1
            consumer.popen.kill()
            wait_for_no_lease(owner)
        with process("consumer", nbytes=256 * MIB, **ticket) as second:
            assert second.heard()["begun"] > 0
            assert second.heard()["same"] is True


def test_a_child_that_forks_and_exits_takes_nothing_along() -> None:
    with process("owner", nbytes=40 * MIB) as owner:
        ticket = owner.heard()
        for _ in range(2):
            with process("consumer", nbytes=40 * MIB, **ticket) as consumer:
                assert consumer.heard()["begun"] > 0
                assert consumer.heard()["same"] is True
            assert owner.ask("fork") == {"child": 0}


def test_an_interpreter_that_exits_with_everything_open_is_quiet() -> None:
    with process("owner", nbytes=256 * MIB) as owner:
        ticket = owner.heard()
        with process("consumer", nbytes=256 * MIB, **ticket) as consumer:
            assert consumer.heard()["begun"] > 0
            owner.tell("exit")
            assert owner.ends() == 0
            said = consumer.heard()
            assert "error" in said
            assert consumer.ends() == 0


def test_ctrl_c_in_a_consumer_gives_its_lease_back() -> None:
    with process("owner", nbytes=256 * MIB) as owner:
        ticket = owner.heard()
        with process("consumer", nbytes=256 * MIB, **ticket) as consumer:
            assert consumer.heard()["begun"] > 0
            os.kill(consumer.popen.pid, signal.SIGINT)
            consumer.popen.communicate(timeout=SEEN_WITHIN_S)
        wait_for_no_lease(owner)
