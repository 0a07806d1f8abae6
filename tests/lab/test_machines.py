"""The lab from outside: machines are booted, broken on purpose, interrupted and killed.

Each test boots a machine of its own, which takes 10 to 30 s of software emulation; a stage that
fails must be named within a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit.softroce.packages import find_tool

QEMU = "qemu-system-x86_64"
RUN_TIMEOUT_S = 300.0
GONE_WITHIN_S = 10.0

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("ORBIT_LAB") == "1", reason="boots machines, and this is one already"
    ),
    pytest.mark.skipif(find_tool(QEMU) is None, reason=f"{QEMU} is not installed"),
]


@pytest.fixture(autouse=True)
def no_machine_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs have their folders below this test's own: by these their machines are found."""
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setenv("TMPDIR", str(runs))
    yield
    limit = time.monotonic() + GONE_WITHIN_S
    while machines(runs) and time.monotonic() < limit:
        time.sleep(0.05)
    assert machines(runs) == []
    assert [path.name for path in runs.iterdir()] == []


def machines(runs: Path) -> list[int]:
    """Ids of QEMU processes whose folders are below `runs`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if QEMU in words and str(runs) in words:
            found.append(int(entry.parent.name))
    return found


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orbit.cli.softroce", "--memory", "1024", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    process = start(*words)
    try:
        stdout, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("sabotage", "stage", "words"),
    [
        ("no-rxe", "kernel-module", "rdma_rxe is not loaded"),
        ("no-crc32", "kernel-module", "crc32"),
        ("namespaces", "layout", "is in a network namespace"),
        ("netdev-down", "device", "net device b1 is down"),
        ("udp-drop", "rc-write-read", "is UDP port 4791 dropped?"),
    ],
)
def test_a_broken_lab_names_the_stage(sabotage: str, stage: str, words: str) -> None:
    done = run("--sabotage", sabotage, "--", "echo", "the command ran")
    assert done.returncode == 125, done.stderr
    assert f"lab stage {stage} failed: " in done.stderr
    assert words in done.stderr
    assert "verified" not in done.stderr
    assert done.stdout == ""


def test_a_good_lab_runs_the_command_where_the_caller_is(tmp_path: Path) -> None:
    results = tmp_path / "results"
    script = (
        'pwd; echo "$VIRTUAL_ENV"; echo err >&2; echo kept >"$ORBIT_RESULTS/file";'
        ' touch "$0"; (sleep 300 &) ; exit 42'
    )
    not_kept = tmp_path / "not-kept"
    done = run("--results", str(results), "--", "bash", "-c", script, str(not_kept))
    assert done.returncode == 42, done.stderr
    assert done.stdout.splitlines() == [os.getcwd(), os.environ.get("VIRTUAL_ENV", "")]
    assert done.stderr.splitlines()[-1] == "err"
    assert "verified" in done.stderr
    assert (results / "file").read_text() == "kept\n"
    assert (results / "console-A.log").exists()
    assert not not_kept.exists()


def test_output_is_live_and_a_signal_ends_the_machine() -> None:
    process = start("--", "bash", "-c", "echo started; exec sleep 300")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=GONE_WITHIN_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in stderr


def test_ctrl_c_during_the_boot_ends_the_machine(tmp_path: Path) -> None:
    process = start("--", "true")
    try:
        limit = time.monotonic() + 60
        while not machines(tmp_path / "runs") and time.monotonic() < limit:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=GONE_WITHIN_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT


def test_a_killed_supervisor_leaves_no_machine(tmp_path: Path) -> None:
    process = start("--", "true")
    runs = tmp_path / "runs"
    limit = time.monotonic() + 60
    while not machines(runs) and time.monotonic() < limit:
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=GONE_WITHIN_S)
    while machines(runs) and time.monotonic() < limit:
        time.sleep(0.05)
    assert machines(runs) == []
    for folder in runs.iterdir():  # nobody was left to remove it
        subprocess.run(["rm", "-r", str(folder)], check=True)


def test_the_timeout_ends_the_machine() -> None:
    done = run("--timeout", "3", "--", "true")
    assert done.returncode == 124
    assert "ended by --timeout 3" in done.stderr


def test_a_panic_makes_the_run_invalid_with_the_log() -> None:
    script = "echo before; echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger; sleep 60"
    done = run("--hosts", "1", "--", "bash", "-c", script)
    assert done.returncode == 97, done.stderr
    assert done.stdout == "before\n"
    assert "INVALID RUN, kernel fault" in done.stderr
    assert "sysrq" in done.stderr


def test_two_machines_and_the_death_of_one() -> None:
    script = (
        "until echo >/dev/tcp/10.9.0.2/7000; do sleep 0.1; done; orbit-kill-peer && echo killed;"
        " timeout 2 bash -c 'echo >/dev/tcp/10.9.0.2/7000' || echo silent; exit 5"
    )
    serve = "import socket, time; s = socket.create_server(('10.9.0.2', 7000)); time.sleep(300)"
    done = run(
        *("--vms", "2", "--cpus", "1", "--mtu", "4200"),
        *("--peer-command", f'/usr/bin/python3 -c "{serve}"', "--", "bash", "-c", script),
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout == "killed\nsilent\n"
    assert "machine B was killed" in done.stderr
    assert "stage" not in done.stderr or "failed" not in done.stderr
