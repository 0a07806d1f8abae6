"""C40 on 32 outgoing ports: connections are few, kept and used again, the idle ones go away, and
running out is told as this host's trouble. ORBIT_SOAK (`make soak`) makes the count the case's own.

Real processes in a network namespace of their own; the pool itself is
tests/unit/transport/test_tcp_path.py's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.integration.cases.few_ports_worker import PEERS
from tests.integration.cases.namespaces import unshared
from tests.soak import SOAK

WORKER = "tests.integration.cases.few_ports_worker"
TRANSFERS = 5000 if SOAK else 600
OF_A_PEER = 3  # one connection for control, two for payloads


def facts(*words: object) -> dict[str, Any]:
    program = [sys.executable, "-W", "error", "-m", WORKER, *map(str, words)]
    return dict(json.loads(unshared("-rn", program)))


@pytest.mark.parametrize("kind", ["many", "reads"])
def test_many_transfers_take_the_ports_of_one_pool(kind: str) -> None:
    found = facts(kind, TRANSFERS)
    assert found["moved"] >= TRANSFERS
    assert 2 <= found["ports"] <= OF_A_PEER


def test_many_peers_and_what_is_left_when_idle() -> None:
    found = facts("peers")
    assert 2 * PEERS <= found["most"] <= OF_A_PEER * PEERS
    assert found["floor"] == PEERS
    assert found["again"] == 1


def test_ports_that_another_process_holds() -> None:
    found = facts("without_ports")
    assert found["held"] > 20
    for what, causes in {
        "transfer": [["PeerUnreachable", "local"]],
        "call": [["NotAdmitted", ""], ["PeerUnreachable", "local"]],
        "connected": [["PathFailed", ""], ["PeerUnreachable", "local"]],
    }.items():
        assert found[what]["causes"] == causes
        assert "this host cannot open a connection (Cannot assign" in found[what]["text"]
        assert "ip_local_port_range" in found[what]["hint"]
