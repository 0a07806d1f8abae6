"""The command between the lab's two hosts: a file moves by real verbs, and the proof is checked.

The command runs in this process, what it starts on the hosts does not: starting Python costs
seconds on an emulated processor.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from orbit.cli.failures import ExitStatus
from orbit.cli.main import main

BYTES = 2 << 20


def demo(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["demo", "--hosts", "lab", "--json", *words]) == ExitStatus.OK
    return dict(json.loads(capsys.readouterr().out))


def test_a_file_moves_over_rdma(capsys: pytest.CaptureFixture[str]) -> None:
    report = demo(capsys, "--transport", "rdma", "--size", str(BYTES))
    assert (report["path"], report["reason"]) == ("rdma", "ok")
    assert report["sha256_owner"] == report["sha256_consumer"]
    # At a path MTU of at most 4096: right bytes alone would not show that a device sent them.
    assert report["owner_packets"] >= report["owner_packets_min"] >= BYTES // 4096


@pytest.mark.skipif(
    os.environ.get("ORBIT_SOAK") != "1",
    reason="in `make soak`: 40 s on an emulated processor for what test_node.py has of the switch",
)
def test_the_kill_switch_takes_tcp_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORBIT_RDMA_RENDEZVOUS_DISABLE", "1")
    report = demo(capsys, "--size", str(BYTES))
    assert (report["path"], report["reason"]) == ("tcp", "kill_switch")
    assert report["sha256_owner"] == report["sha256_consumer"]
