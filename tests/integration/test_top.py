"""`orbit serve --metrics` and `orbit top` between real processes, also on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orbit.cli.failures import ExitStatus
from tests.integration.cli import ORBIT, TIMEOUT_S, environment, orbit, serving

QUICK = ("--interval", "0.1")


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    path = tmp_path / "payload"
    path.write_bytes(b"x" * 300_000)
    return path


def test_a_node_that_serves_is_seen_and_then_it_is_gone(payload: Path, tmp_path: Path) -> None:
    with serving(payload, "--metrics", "127.0.0.1:0") as server:
        url = str(server.offers[0]["metrics"])
        assert orbit("get", server.ticket, "-o", tmp_path / "got").status == ExitStatus.OK
        done = orbit("top", url, "--once", "--json", *QUICK)
        assert (done.status, done.err) == (ExitStatus.OK, "")
        facts = done.report
        assert (facts["gauges"]["slots"], facts["rates"]["grants"]) == (1, 0)
        assert [row["path"] for row in facts["decisions"]] == ["tcp"]
        assert facts["uptime_s"] > 0
        text = orbit("top", url, "--once", *QUICK).out
        assert facts["node"] in text
        assert "slots             1, 293.0 KiB" in text
        taken = orbit("serve", payload, "--metrics", url.split("/")[2], "--json")
        assert (taken.status, taken.error["code"]) == (ExitStatus.USAGE, "config")
        assert "already in use" in taken.error["message"]
        assert server.stop().status == ExitStatus.OK
    done = orbit("top", url, "--once", "--json", *QUICK)
    assert (done.status, done.error["code"]) == (ExitStatus.PEER, "peer_unreachable")
    assert orbit("top", "no port", "--once").status == ExitStatus.USAGE


@pytest.mark.parametrize("leave", [b"q", b"\x03"])
def test_it_takes_a_terminal_and_gives_it_back(payload: Path, leave: bytes) -> None:
    """Through the end of the node, too, which it says and lives with."""
    with serving(payload, "--metrics", "127.0.0.1:0") as server:
        near, far = pty.openpty()
        url = str(server.offers[0]["metrics"])
        environ = environment(TERM="xterm-256color", COLUMNS="100", LINES="40")
        process = subprocess.Popen(
            ["setsid", "--ctty", *ORBIT, "top", url, *QUICK],  # so that Ctrl-C is a signal there
            stdin=far,
            stdout=far,
            stderr=far,
            env=environ,
        )
        os.close(far)
        try:
            assert b"slots" in _until(near, b"retained")
            server.process.send_signal(signal.SIGTERM)
            _until(near, b"connection refused; trying again")
            os.write(near, leave)
            shown = _until(near, b"\x1b[?1049l")  # the screen from before
            assert b"Traceback" not in shown
            assert process.wait(TIMEOUT_S) == ExitStatus.OK
        finally:
            process.kill()
            process.wait()
            os.close(near)


def _until(terminal: int, wanted: bytes) -> bytes:
    """All that was written up to `wanted`."""
    found, deadline = b"", time.monotonic() + TIMEOUT_S
    while wanted not in found:
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 1.0)[0]:
            found += os.read(terminal, 1 << 16)
    return found


def test_the_log_of_a_command_is_what_was_asked_for(payload: Path) -> None:
    words = ("--log-level", "warning", "--log-json", "serve", payload, "--metrics", "0.0.0.0:0")
    with subprocess.Popen(
        [*ORBIT, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    (line,) = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert (line["level"], line["logger"]) == ("warning", "orbit.metrics")
    assert "to everybody" in line["message"]
