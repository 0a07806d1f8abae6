"""Two nodes on two hosts: a payload by handle over SoftRoCE, and every way in which that can end.

What killed the RDMA path is always visible as path and reason, the bytes are always the same, and
the fallback happens once.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.softroce.node_hosts import HANG_S, Hosts

MIB = 1 << 20
PATH_MTU_BYTES = 4096


@pytest.fixture(scope="module")
def hosts(node_hosts: Hosts) -> Iterator[Hosts]:
    yield node_hosts
    node_hosts.close()


@pytest.fixture
def slow_rails(hosts: Hosts) -> Iterator[None]:
    """From A to B."""
    with hosts.slow("A"):
        yield


def consumer_decision(path: str, reason: str) -> str:
    return f'orbit_rendezvous_rdma_path_total{{path="{path}",reason="{reason}",side="consumer"}}'


@pytest.mark.parametrize("nbytes", [65_536, 65_537, MIB - 1, MIB + 4097, 20 * MIB + 7])
def test_a_payload_moves_by_rdma(hosts: Hosts, nbytes: int) -> None:
    ticket = hosts.serve(nbytes)
    hosts.consumer.open()
    before = hosts.sent_pkts()
    got = hosts.consumer.ask("get", **ticket)
    assert (got["path"], got["reason"], got["same"]) == ("rdma", "ok", True)
    assert got["decisions"] == {consumer_decision("rdma", "ok"): 1}
    assert hosts.sent_pkts() - before >= nbytes // PATH_MTU_BYTES
    hosts.wait_for_no_lease()


@pytest.mark.parametrize("nbytes", [0, 1, 65_535])
def test_small_payloads_go_by_tcp_unless_demanded(hosts: Hosts, nbytes: int) -> None:
    ticket = hosts.serve(nbytes)
    hosts.consumer.open()
    got = hosts.consumer.ask("get", **ticket)
    assert (got["path"], got["reason"], got["same"]) == (
        "tcp",
        "below_min" if nbytes else "not_pinned",
        True,
    )
    demanded = hosts.consumer.ask("get", transport="rdma", **ticket)
    assert (demanded["path"], demanded["same"]) == ("rdma", True)


OFF = {"rendezvous": {"enabled": False}}
NO_DEVICE = {"rdma": {"enabled": False}}


@pytest.mark.parametrize(
    ("owner", "consumer", "reason"),
    [
        pytest.param(OFF, {}, "kill_switch", id="owner's kill switch"),
        pytest.param({}, OFF, "kill_switch", id="consumer's kill switch"),
        pytest.param(NO_DEVICE, {}, "peer_without", id="owner without RDMA"),
        pytest.param({}, NO_DEVICE, "not_configured", id="consumer without RDMA"),
        pytest.param(
            {"rdma": {"pool": {"registered_bytes_budget": 0}}},
            {},
            "not_pinned",
            id="no arena at the owner",
        ),
        pytest.param({"transport": "tcp"}, {}, "peer_without", id="owner asked for TCP"),
        pytest.param({}, {"transport": "tcp"}, "asked", id="consumer asked for TCP"),
        pytest.param(
            {}, {"rdma": {"require_range": True}}, "range_not_enforced", id="range required"
        ),
    ],
)
def test_without_rdma_the_bytes_come_by_tcp_with_the_reason(
    hosts: Hosts, owner: dict[str, Any], consumer: dict[str, Any], reason: str
) -> None:
    ticket = hosts.serve(MIB + 1, **owner)
    hosts.consumer.open(**consumer)
    before = hosts.sent_pkts()
    got = hosts.consumer.ask("get", **ticket)
    assert (got["path"], got["reason"], got["same"]) == ("tcp", reason, True)
    assert sum(got["decisions"].values()) <= 1  # none where the owner decided
    assert hosts.sent_pkts() - before < 100  # nothing of it went by RDMA
    demanded = hosts.consumer.ask("get", transport="rdma", **ticket)
    assert demanded["code"] == "path_unavailable"
    hosts.wait_for_no_lease()


def test_no_memory_to_register_at_the_consumer_is_pool_exhausted(hosts: Hosts) -> None:
    ticket = hosts.serve(4 * MIB)
    hosts.consumer.do("limit_memory", memlock_bytes=MIB)
    hosts.consumer.open()
    got = hosts.consumer.ask("get", **ticket)
    hosts.consumer.kill()
    assert (got["path"], got["reason"], got["same"]) == ("tcp", "pool_exhausted", True)
    assert got["decisions"] == {consumer_decision("tcp", "pool_exhausted"): 1}
    hosts.wait_for_no_lease()


@pytest.mark.usefixtures("slow_rails")
def test_a_failed_read_falls_back_once_and_the_path_recovers(hosts: Hosts) -> None:
    ticket = hosts.serve(16 * MIB)
    hosts.consumer.open()
    hosts.consumer.tell("get", announce_at=1, **ticket)
    assert hosts.consumer.heard()["begun"] > 0
    ends = hosts.lab.net_devices("A")
    try:
        # All at once: a busy emulated processor takes its time with each command.
        downs = [subprocess.Popen(["orbit-link", end, "down"]) for end in ends]
        assert [down.wait() for down in downs] == [0] * len(ends)
        got = hosts.consumer.heard()
    finally:
        for end in ends:
            subprocess.run(["orbit-link", end, "up"], check=True)
    assert (got["path"], got["reason"], got["same"]) == ("tcp", "get_failed", True)
    assert got["decisions"] == {consumer_decision("tcp", "get_failed"): 1}
    hosts.wait_for_no_lease()
    short = hosts.serve(MIB)
    deadline = time.monotonic() + HANG_S
    while hosts.consumer.ask("get", **short)["path"] != "rdma":
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.usefixtures("slow_rails")
def test_a_killed_consumer_leaves_nothing_at_the_owner(hosts: Hosts) -> None:
    ticket = hosts.serve(8 * MIB)
    hosts.consumer.open()
    hosts.consumer.tell("get", announce_at=1, **ticket)
    assert hosts.consumer.heard()["begun"] > 0
    hosts.consumer.kill()
    hosts.wait_for_no_lease()
    assert hosts.owner.ask("statistics")["retained"] == 0
    hosts.consumer.open()
    assert hosts.consumer.ask("get", **ticket)["path"] == "rdma"


@pytest.mark.usefixtures("slow_rails")
def test_a_killed_owner_is_an_error_and_not_a_hang(hosts: Hosts) -> None:
    ticket = hosts.serve(8 * MIB)
    hosts.consumer.open()
    hosts.consumer.tell("get", announce_at=1, **ticket)
    assert hosts.consumer.heard()["begun"] > 0
    hosts.owner.kill()
    got = hosts.consumer.heard()
    assert got["error"] in ("PeerLost", "PeerUnreachable", "TransferFailed", "PathFailed")
    assert hosts.consumer.ask("statistics")["retained"] == 0
    ticket = hosts.serve(MIB)
    assert hosts.consumer.ask("get", **ticket)["path"] == "rdma"


def test_a_child_that_forks_and_exits_takes_nothing_along(hosts: Hosts) -> None:
    ticket = hosts.serve(MIB)
    hosts.consumer.open()
    assert hosts.consumer.ask("get", **ticket)["path"] == "rdma"
    for host in (hosts.owner, hosts.consumer):
        assert host.ask("fork") == {"child": 0}
        got = hosts.consumer.ask("get", **ticket)
        assert (got["path"], got["same"]) == ("rdma", True)


@pytest.mark.usefixtures("slow_rails")
def test_an_interpreter_that_exits_with_everything_open_is_gone_at_once(hosts: Hosts) -> None:
    ticket = hosts.serve(8 * MIB)
    hosts.consumer.open()
    hosts.consumer.tell("get", announce_at=1, **ticket)
    assert hosts.consumer.heard()["begun"] > 0
    told_at = time.monotonic()
    hosts.owner.tell("exit")
    assert hosts.owner.heard() == {"exited": 0}
    # A queue pair destroyed under a bound window would hold the process for 50 s.
    assert time.monotonic() - told_at < 30
    assert "error" in hosts.consumer.heard()
    hosts.owner.await_ready()
